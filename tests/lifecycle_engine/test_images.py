"""Images as files: their structure, their headers, data URLs, and what they decode to."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from http_kit import encoded
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from lifecycle_asgi import ImageSize
from lifecycle_engine import (
    ApiError,
    BadImage,
    MediaLimits,
    read_image_size,
)
from lifecycle_engine.multimodal import decode as images
from lifecycle_engine.multimodal.decode import structure_error
from lifecycle_engine.multimodal.limits import check_total, decode_data_url

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MANY = 2**18 + 1


def ordinary(kind: str, mode: str = "RGB", **save: Any) -> bytes:
    """An ordinary image."""
    out = io.BytesIO()
    Image.new(mode, (32, 24)).save(out, kind, **save)
    return out.getvalue()


def tiff(order: str, *entries: tuple[int, int, int, int], after: bytes = b"") -> bytes:
    """A TIFF of one directory, whose values all stand in their entries."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    body = struct.pack(order + "H", len(entries))
    for tag, type_, number, value in entries:
        short = struct.pack(order + "HH", value, 0) if type_ == 3 else b""
        value_field = short or struct.pack(order + "I", value)
        body += struct.pack(order + "HHI", tag, type_, number) + value_field
    return head + body + (after or bytes(4))


def chain(pages: int) -> bytes:
    """A TIFF of as many pages."""
    out = bytearray(b"II*\0" + struct.pack("<I", 8))
    for page in range(pages):
        following = len(out) + 18 if page < pages - 1 else 0
        out += struct.pack("<HHHIII", 1, 256, 4, 1, 4, following)
    return bytes(out)


def jpeg_with(segments: bytes) -> bytes:
    """A JPEG with more in its header."""
    whole = ordinary("JPEG")
    return whole[:2] + segments + whole[2:]


def jpeg_of_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is there as often."""
    whole = ordinary("JPEG", progressive=True)
    at = whole.rfind(b"\xff\xda")
    return whole[:at] + whole[at:-2] * count + whole[-2:]


def exif(size: int) -> bytes:
    """Exif segments of a JPEG, of so many bytes."""
    segment = b"\xff\xe1" + struct.pack(">H", 60_000) + b"Exif\0\0" + bytes(59_992)
    return segment * (size // 60_000)


def png_with(chunk: bytes) -> bytes:
    """A PNG with more behind its header."""
    whole = ordinary("PNG")
    return whole[:33] + chunk + whole[33:]


def empty_chunk(kind: bytes) -> bytes:
    """An empty chunk."""
    return struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind))


def gif_with(extensions: bytes) -> bytes:
    """A GIF with more before its image."""
    whole = ordinary("GIF")
    at = 13 + (3 << (whole[10] % 8 + 1))
    return whole[:at] + extensions + whole[at:]


def bmp(compression: int, size: int) -> bytes:
    """A BMP by its header, and so many bytes of runs."""
    head = struct.pack("<IiiHHI", 40, 6000, 6000, 1, 8, compression) + bytes(20)
    return b"BM" + struct.pack("<IHHI", 54 + size, 0, 0, 54) + head + b"\1\0" * size


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "png-pieces": (lambda: png_with(empty_chunk(b"abCd") * MANY), "chunks"),
    "png-notes": (lambda: png_with(empty_chunk(b"zTXt") * 17), "text chunks"),
    "jpeg-scans": (lambda: jpeg_of_scans(101), "scans"),
    "jpeg-segments": (lambda: jpeg_with(b"\xff\xe5\0\2" * MANY), "chunks"),
    "jpeg-junk": (lambda: jpeg_with(b"\xff\xd8" + bytes(MANY)), "chunks"),
    "jpeg-padding": (lambda: jpeg_with(b"\xff" * MANY), "chunks"),
    "jpeg-exif": (lambda: jpeg_with(exif(400_000)), "Exif"),
    "gif-extensions": (lambda: gif_with(b"!\xfe\1a\0" * MANY), "chunks"),
    "gif-comment": (lambda: gif_with(b"!\xfe" + b"\1a" * MANY + b"\0"), "chunks"),
    "gif-junk": (lambda: gif_with(bytes(MANY)), "chunks"),
    "tiff-pages": (lambda: chain(257), "pages"),
    "tiff-tile": (
        lambda: tiff("<", (322, 4, 1, 20_000), (323, 4, 1, 20_000)),
        "tiles",
    ),
    "tiff-tile-of-shorts": (
        lambda: tiff(">", (322, 3, 1, 20_000), (323, 3, 1, 20_000)),
        "tiles",
    ),
    "tiff-tile-written-oddly": (lambda: tiff("<", (322, 16, 1, 8)), "tiles"),
    "tiff-strips": (lambda: tiff("<", (273, 4, MANY, 8)), "chunks"),
    "tiff-strips-of-exif": (
        lambda: tiff(
            "<",
            (34665, 4, 1, 26),
            after=struct.pack("<IHHHIII", 0, 1, 1, 3, MANY, 8, 0),
        ),
        "chunks",
    ),
    "tiff-without-end": (lambda: tiff("<", (256, 4, 1, 1))[:-1], "damaged"),
    "bigtiff": (lambda: b"II+\0" + bytes(20), "BigTIFF"),
    "bmp-runs": (lambda: bmp(1, 2**20), "run-length"),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_refuses_file_that_costs_more_than_it_weighs(
    bomb: tuple[Callable[[], bytes], str],
) -> None:
    """Pieces, pages, scans and tiles are counted before they cost (fault-17)."""
    make, word = bomb
    problem = structure_error(make())
    assert problem is not None
    assert word in problem
    with pytest.raises(BadImage, match=word):
        images.decode(make(), 1, max_pixels=10**9)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: ordinary(kind) for kind in FORMATS),
        lambda: ordinary("JPEG", progressive=True, exif=b"Exif\0\0" + bytes(60_000)),
        lambda: ordinary("JPEG", "CMYK"),
        lambda: ordinary("JPEG") + b"\xff\xda\0\2" * 200,  # a film behind a photo
        lambda: ordinary("TIFF", compression="tiff_lzw", dpi=(300, 300)),
        lambda: ordinary("TIFF", save_all=True, append_images=[Image.new("L", (9, 9))]),
        lambda: tiff(">", (322, 3, 1, 512), (323, 3, 1, 512)),
        lambda: gif_with(b"!\xfe" + b"\1a" * 1000 + b"\0"),
        lambda: ordinary("GIF", save_all=True, append_images=[Image.new("L", (9, 9))]),
        lambda: bmp(1, 100),
        lambda: bmp(0, 2**20),
        lambda: chain(256),
        lambda: b"nothing",
        lambda: b"",
    ],
)
def test_objects_to_nothing_ordinary(make: Callable[[], bytes]) -> None:
    """What encoders write, and what is no image, is left to Pillow."""
    assert structure_error(make()) is None


@given(st.sampled_from(FORMATS), st.integers(0, 120), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_reads_anything(kind: str, at: int, junk: bytes) -> None:
    """However a file is damaged, it gets a sentence or none."""
    data = bytearray(ordinary(kind))
    data[at : at + len(junk)] = junk
    for cut in (len(data), at, at + 3):
        problem = structure_error(bytes(data[:cut]))
        assert problem is None or problem.startswith(("has ", "is "))


@pytest.mark.parametrize(
    "head", [b"\xff\xd8\xff", b"GIF89a", b"II*\0", b"MM\0*", b"BM"]
)
def test_reads_headers_alone(head: bytes) -> None:
    """A file that ends after its first bytes raises nothing."""
    for size in range(len(head), 20):
        for fill in (b"\0", b"\xff"):
            problem = structure_error(head.ljust(size, fill))
            assert problem is None or problem.startswith(("has ", "is "))


def written(image: Image.Image, kind: str) -> bytes:
    """Write an image to memory."""
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", images.FORMATS)
def test_decode_every_format(picture: Callable[..., bytes], kind: str) -> None:
    """Each accepted format decodes to RGB of its size."""
    image = images.decode(picture(31, 17, kind=kind), 1, max_pixels=1000)
    assert (image.mode, image.size) == ("RGB", (31, 17))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "I;16", "F"])
def test_decode_every_mode(mode: str) -> None:
    """Grey, palette, alpha and print colours all become RGB."""
    kind = "TIFF" if mode in ("CMYK", "F") else "PNG"
    image = images.decode(written(Image.new(mode, (5, 9)), kind), 1, max_pixels=100)
    assert (image.mode, image.size) == ("RGB", (5, 9))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_decode_keeps_grey_of_sixteen_bits(kind: str) -> None:
    """A grey of sixteen bits is scaled to eight; clipped, it would be white."""
    grey = Image.new("I;16", (5, 9), 0x8040)
    image = images.decode(written(grey, kind), 1, max_pixels=100)
    assert image.getpixel((0, 0)) == (0x80, 0x80, 0x80)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_decode_turns_a_photo_the_right_side_up(kind: str) -> None:
    """What a camera notes of its orientation is what the model sees."""
    photo = Image.new("RGB", (16, 8), "red")
    photo.paste("blue", (0, 0, 8, 8))  # its left half, which becomes the top
    tags = Image.Exif()
    tags[0x0112] = 6
    out = io.BytesIO()
    photo.save(out, kind, exif=tags)
    image = images.decode(out.getvalue(), 1, max_pixels=1000)
    assert image.size == (8, 16)
    red, _green, blue = image.getpixel((4, 2))
    assert blue > 200
    assert red < 50


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of the tags
@pytest.mark.parametrize("tags", [b"MM\0*\xff\xff\xff\xff", b"junk", b"II*\0\x08"])
def test_decode_takes_a_photo_with_junk_tags(tags: bytes) -> None:
    """Tags that cannot be read turn nothing, and are no reason to refuse."""
    out = io.BytesIO()
    Image.new("RGB", (16, 8)).save(out, "JPEG", exif=b"Exif\0\0" + tags)
    assert images.decode(out.getvalue(), 1, max_pixels=1000).size == (16, 8)


def test_image_over_the_limit_is_not_decoded(picture: Callable[..., bytes]) -> None:
    """The size is taken from the header; the message has value and limit."""
    with pytest.raises(BadImage, match=r"20 x 10 pixels; the limit is 199"):
        images.decode(picture(20, 10), 1, max_pixels=199)
    assert images.decode(picture(20, 10), 1, max_pixels=200).size == (20, 10)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(images.FORMATS))
def test_mangled_image_decodes_or_is_bad(
    picture: Callable[..., bytes], seed: int, kind: str
) -> None:
    """Random damage to a real picture never raises anything but `BadImage`."""
    rng = random.Random(seed)
    data = bytearray(picture(24, 24, kind=kind))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(BadImage):
        images.decode(bytes(data), 1, max_pixels=10_000)


@given(
    st.sampled_from(FORMATS),
    st.integers(2, 40),
    st.integers(2, 40),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
)
@settings(max_examples=500, deadline=None)
def test_never_charges_less_than_is_decoded(
    kind: str, width: int, height: int, changes: list[tuple[int, int]]
) -> None:
    """Whatever a header says: what it decodes to was charged, or it was refused."""
    data = bytearray(encoded(width, height, kind))
    for at, value in changes:
        if at < len(data):
            data[at] = value
    try:
        pixels = read_image_size(bytes(data), MediaLimits(), param="x").pixels
    except ApiError as error:
        assert error.status in (400, 413)
        return
    try:
        decoded = images.decode(bytes(data), 1, max_pixels=10**6)
    except BadImage:
        return
    assert decoded.width * decoded.height <= pixels


def test_refuses_one_pixel_too_many() -> None:
    """The limit itself passes, one more does not."""
    limits = MediaLimits(image_pixels=100, request_pixels=150, frames=2)
    assert read_image_size(encoded(10, 10), limits, param="x").pixels == 100
    with pytest.raises(ApiError) as caught:
        read_image_size(encoded(10, 11), limits, param="x")
    assert caught.value.status == 413
    check_total([ImageSize(1, 100, 1), ImageSize(1, 50, 1)], limits, param="x")
    for over in ([ImageSize(1, 100, 1), ImageSize(1, 51, 1)], [ImageSize(1, 1, 1)] * 3):
        with pytest.raises(ApiError) as caught:
            check_total(over, limits, param="x")
        assert caught.value.status == 413


@given(st.binary(max_size=60))
def test_decodes_strict_base64_only(data: bytes) -> None:
    """A data URL gives its bytes back; with anything foreign in it, it is refused."""
    text = base64.b64encode(data).decode()
    assert decode_data_url(f"data:image/png;base64,{text}", param="x") == data
    for wrong in (f"{text} ", f"{text}\n", f"{text}=", f"{text}====", f"-{text}"):
        with pytest.raises(ApiError) as caught:
            decode_data_url(f"data:image/png;base64,{wrong}", param="x")
        assert caught.value.code == "invalid_base64"


@pytest.mark.parametrize("size", [3 * 2**20, 3 * 2**20 + 1, 8 * 2**20])
def test_decodes_long_base64_in_slices(size: int) -> None:
    """As strictly as short one: padding ends it, wherever a slice ends."""
    data = bytes(size)
    text = base64.b64encode(data).decode()
    assert decode_data_url(f"data:image/png;base64,{text}", param="x") == data
    whole, rest = text[: 2**18], text[2**18 :]
    for wrong in (f"{whole[:-1]}={rest}AAAA", f"{whole[:-2]}=={rest}AAAA"):
        with pytest.raises(ApiError) as caught:
            decode_data_url(f"data:image/png;base64,{wrong}", param="x")
        assert caught.value.code == "invalid_base64"
