"""Files that are small and cost a lot are refused before Pillow opens them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from lifecycle_engine.images import images
from lifecycle_engine.images.structure import objection
from lifecycle_engine.processor import BadImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MANY = 2**18 + 1


def encoded(kind: str, mode: str = "RGB", **save: Any) -> bytes:
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
    whole = encoded("JPEG")
    return whole[:2] + segments + whole[2:]


def jpeg_of_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is there as often."""
    whole = encoded("JPEG", progressive=True)
    at = whole.rfind(b"\xff\xda")
    return whole[:at] + whole[at:-2] * count + whole[-2:]


def exif(size: int) -> bytes:
    """Exif segments of a JPEG, of so many bytes."""
    segment = b"\xff\xe1" + struct.pack(">H", 60_000) + b"Exif\0\0" + bytes(59_992)
    return segment * (size // 60_000)


def png_with(chunk: bytes) -> bytes:
    """A PNG with more behind its header."""
    whole = encoded("PNG")
    return whole[:33] + chunk + whole[33:]


def png_chunk(kind: bytes) -> bytes:
    """An empty chunk."""
    return struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind))


def gif_with(extensions: bytes) -> bytes:
    """A GIF with more before its image."""
    whole = encoded("GIF")
    at = 13 + (3 << (whole[10] % 8 + 1))
    return whole[:at] + extensions + whole[at:]


def bmp(compression: int, size: int) -> bytes:
    """A BMP by its header, and so many bytes of runs."""
    head = struct.pack("<IiiHHI", 40, 6000, 6000, 1, 8, compression) + bytes(20)
    return b"BM" + struct.pack("<IHHI", 54 + size, 0, 0, 54) + head + b"\1\0" * size


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "png-pieces": (lambda: png_with(png_chunk(b"abCd") * MANY), "pieces"),
    "png-notes": (lambda: png_with(png_chunk(b"zTXt") * 17), "notes"),
    "jpeg-scans": (lambda: jpeg_of_scans(101), "scans"),
    "jpeg-segments": (lambda: jpeg_with(b"\xff\xe5\0\2" * MANY), "pieces"),
    "jpeg-junk": (lambda: jpeg_with(b"\xff\xd8" + bytes(MANY)), "pieces"),
    "jpeg-padding": (lambda: jpeg_with(b"\xff" * MANY), "pieces"),
    "jpeg-exif": (lambda: jpeg_with(exif(400_000)), "Exif"),
    "gif-extensions": (lambda: gif_with(b"!\xfe\1a\0" * MANY), "pieces"),
    "gif-comment": (lambda: gif_with(b"!\xfe" + b"\1a" * MANY + b"\0"), "pieces"),
    "gif-junk": (lambda: gif_with(bytes(MANY)), "pieces"),
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
    "tiff-strips": (lambda: tiff("<", (273, 4, MANY, 8)), "pieces"),
    "tiff-strips-of-exif": (
        lambda: tiff(
            "<",
            (34665, 4, 1, 26),
            after=struct.pack("<IHHHIII", 0, 1, 1, 3, MANY, 8, 0),
        ),
        "pieces",
    ),
    "tiff-without-end": (lambda: tiff("<", (256, 4, 1, 1))[:-1], "damaged"),
    "bigtiff": (lambda: b"II+\0" + bytes(20), "BigTIFF"),
    "bmp-runs": (lambda: bmp(1, 2**20), "runs"),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_refuses_file_that_costs_more_than_it_weighs(
    bomb: tuple[Callable[[], bytes], str],
) -> None:
    """Pieces, pages, scans and tiles are counted before they cost (fault-17)."""
    make, word = bomb
    problem = objection(make())
    assert problem is not None
    assert word in problem
    with pytest.raises(BadImage, match=word):
        images.decode(make(), 1, max_pixels=10**9)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: encoded(kind) for kind in FORMATS),
        lambda: encoded("JPEG", progressive=True, exif=b"Exif\0\0" + bytes(60_000)),
        lambda: encoded("JPEG", "CMYK"),
        lambda: encoded("JPEG") + b"\xff\xda\0\2" * 200,  # a film behind a photo
        lambda: encoded("TIFF", compression="tiff_lzw", dpi=(300, 300)),
        lambda: encoded("TIFF", save_all=True, append_images=[Image.new("L", (9, 9))]),
        lambda: tiff(">", (322, 3, 1, 512), (323, 3, 1, 512)),
        lambda: gif_with(b"!\xfe" + b"\1a" * 1000 + b"\0"),
        lambda: encoded("GIF", save_all=True, append_images=[Image.new("L", (9, 9))]),
        lambda: bmp(1, 100),
        lambda: bmp(0, 2**20),
        lambda: chain(256),
        lambda: b"nothing",
        lambda: b"",
    ],
)
def test_objects_to_nothing_ordinary(make: Callable[[], bytes]) -> None:
    """What encoders write, and what is no image, is left to Pillow."""
    assert objection(make()) is None


@given(st.sampled_from(FORMATS), st.integers(0, 120), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_reads_anything(kind: str, at: int, junk: bytes) -> None:
    """However a file is damaged, it gets a sentence or none."""
    data = bytearray(encoded(kind))
    data[at : at + len(junk)] = junk
    for cut in (len(data), at, at + 3):
        problem = objection(bytes(data[:cut]))
        assert problem is None or problem.startswith(("has ", "is "))


@pytest.mark.parametrize(
    "head", [b"\xff\xd8\xff", b"GIF89a", b"II*\0", b"MM\0*", b"BM"]
)
def test_reads_headers_alone(head: bytes) -> None:
    """A file that ends after its first bytes raises nothing."""
    for size in range(len(head), 20):
        for fill in (b"\0", b"\xff"):
            problem = objection(head.ljust(size, fill))
            assert problem is None or problem.startswith(("has ", "is "))
