"""The memory that the media of a request will need, estimated before decoding.

`estimate` reads the sizes of images from their headers, with Pillow, whatever the
format of the request. A `MediaProfile` says what a server needs for each pixel, and a
`Correction` learns from what was used.
"""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any, Final

from lifecycle_asgi.image_structure import structure_error
from lifecycle_asgi.json_body import LongText, beginning_of, pieces_of
from lifecycle_asgi.media import Media, find_media

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are opened; Pillow knows many more, and not all are safe to open."""

TENSOR_BYTES_PER_PIXEL: Final = 24
"""Bytes of ``pixel_values``: three channels of float32, twice (temporal patches)."""

WORK_BYTES_PER_PIXEL: Final = 15
"""Bytes during preprocessing: one RGB copy and one of float32."""

# While a WebP is decoded: libwebp's canvases of two frames, and what is copied of one.
_WEBP_BYTES_PER_PIXEL: Final = 9
# Audio samples are float32; features are 100 frames of 128 mels per second.
_SAMPLES_PER_SECOND: Final = 16_000
_FEATURE_BYTES_PER_SECOND: Final = 100 * 128 * 4
# The headers of these formats are at the beginning, whatever follows. In characters of
# base64; metadata in front of the size may take as much.
_PREFIX: Final = 2**18
_PREFIX_FORMATS: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
# The first bytes of all formats.
_FORMATS: Final = (*_PREFIX_FORMATS, b"RIFF", b"GIF8", b"BM", b"II", b"MM")
# Characters of a data URL before its data.
_MAX_HEAD: Final = 2**12
_NOT_BASE64: Final = bytes(
    set(range(256)) - {*(ascii_letters + digits + "+/=").encode("ascii")}
)
# Processors scale thinner images up, to as many pixels as they have length.
_MIN_SIDE: Final = 2
# A sample below the ratio moves it by this fraction of the difference.
_DECAY: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaProfile:
    """What the media of a request cost a server, from its body to the engine.

    Attributes:
        work_bytes_per_pixel: Bytes for each pixel while an image is decoded and
            prepared: all copies that exist at the same time.
        tensor_bytes_per_pixel: Bytes of tensors for each pixel.
        tensor_pixels: Maximum pixels of one image in the tensors, if the model scales
            images down; ``None`` if it does not, or is unknown.
        min_tensor_pixels: Minimum pixels of one image there, if it scales them up.
        image_pixels: Maximum pixels of one image; larger ones count as this, since the
            server refuses them.
        assumed_pixels: Pixels of an image whose size cannot be read from the request,
            as it is given by URL.
        all_frames: Whether all frames of an animation are decoded, or the first one.
        video_frames: Frames assumed for a video.
        frame_pixels: Pixels assumed for each of them.
        audio_seconds: Seconds assumed for a piece of audio.
    """

    work_bytes_per_pixel: int = WORK_BYTES_PER_PIXEL
    tensor_bytes_per_pixel: int = TENSOR_BYTES_PER_PIXEL
    tensor_pixels: int | None = None
    min_tensor_pixels: int = 0
    image_pixels: int = 40_000_000
    assumed_pixels: int = 40_000_000
    all_frames: bool = True
    video_frames: int = 64
    frame_pixels: int = 1_003_520
    audio_seconds: int = 600


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size of one image, read from its header.

    Attributes:
        encoded: Bytes of the file.
        pixels: Pixels of all frames together.
        frames: 1 unless the file is an animation or has several pages.
        decoder: Bytes that the decoder of its format has beside the pixels.
    """

    encoded: int
    pixels: int
    frames: int
    decoder: int = 0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that the media of a request need in this process until hand-off.

    Attributes:
        work: Bytes of the files, and of their pixels during preprocessing.
        tensors: Bytes of the tensors, for each choice.
        assumed: How many of these bytes are a guess, as the media are elsewhere or do
            not state their size.
        uncertain: How many may not be needed, as they are an upper bound; those that
            are assumed count in any case.
    """

    work: int = 0
    tensors: int = 0
    assumed: int = 0
    uncertain: int = 0

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(
            self.work + other.work,
            self.tensors + other.tensors,
            self.assumed + other.assumed,
            self.uncertain + other.uncertain,
        )

    def __mul__(self, count: int) -> MemoryEstimate:
        return MemoryEstimate(
            self.work * count,
            self.tensors * count,
            self.assumed * count,
            self.uncertain * count,
        )

    @property
    def total(self) -> int:
        """Bytes in total, for one choice."""
        return self.work + self.tensors

    @property
    def certain(self) -> int:
        """Bytes without which the request cannot be served, for one choice."""
        return self.total - max(self.assumed, self.uncertain)


class UnreadableImage(ValueError):
    """The size of an image cannot be read from its header."""


class ImageTooLarge(UnreadableImage):
    """Pillow refuses an image for its number of pixels."""


def read_image_header(encoded: bytes) -> tuple[int, int, int]:
    """Return width, height and number of frames of an image.

    Args:
        encoded: The file, in one of `IMAGE_FORMATS`.

    Raises:
        ImageTooLarge: Pillow refuses it for its number of pixels.
        UnreadableImage: It is no image, damaged, or of a structure that makes opening
            it expensive.
        ImportError: Pillow is not installed.
    """
    problem = structure_error(encoded)
    if problem is not None:
        raise UnreadableImage(f"The image {problem}")
    Image = _pillow()  # noqa: N806 - the name of the module
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS) as image:
            return *image.size, getattr(image, "n_frames", 1)
    except bombs:
        failure: UnreadableImage = ImageTooLarge(
            "The image has too many pixels; scale it down"
        )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow raises many kinds
        known = type(error).__name__ != "UnidentifiedImageError"
        failure = UnreadableImage(
            "The image is damaged or truncated; encode it again"
            if known
            else "The file is not an image in a known format; use "
            + ", ".join(IMAGE_FORMATS)
        )
    # Outside of the handler: otherwise the error's context would hold the file.
    raise failure


def decoder_bytes(encoded: bytes, pixels: int) -> int:
    """Return the bytes that Pillow's decoder has beside an image of *pixels*."""
    is_webp = encoded[:4] == b"RIFF"
    return _WEBP_BYTES_PER_PIXEL * pixels if is_webp else 0


def estimate_memory(
    sizes: Sequence[ImageSize], profile: MediaProfile | None = None
) -> MemoryEstimate:
    """Estimate the memory that images need in this process until hand-off.

    An upper bound: files, decoded pixels and tensors at the same time. The lease is
    settled to the real size once the tensors exist.

    Args:
        sizes: Sizes of the images.
        profile: Of the server. Default: the bundled one.
    """
    profile = profile or MediaProfile()
    total = MemoryEstimate()
    for size in sizes:
        cap = profile.tensor_pixels
        least = profile.min_tensor_pixels * (size.frames if profile.all_frames else 1)
        in_tensors = max(size.pixels, least)
        if cap is not None:
            in_tensors = min(in_tensors, cap * size.frames)
        tensors = profile.tensor_bytes_per_pixel * in_tensors
        total += MemoryEstimate(
            size.encoded + size.decoder + profile.work_bytes_per_pixel * size.pixels,
            tensors,
            uncertain=tensors,  # most models scale images down first
        )
    return total


def estimate(request: object, profile: MediaProfile | None = None) -> MemoryEstimate:
    """Estimate the memory that the media of *request* need in this process at most.

    An image counts by the size in its header, and as the largest one of the profile if
    it is larger or cannot be read. An image given by URL counts as the profile assumes,
    and so do video and audio. Text counts nothing.

    Args:
        request: Request in any format that `find_media` knows.
        profile: What media cost the server. Default: the bundled server.

    Raises:
        TooDeep: As from `find_media`.
        ImportError: There is an image, and Pillow is not installed.
    """
    profile = profile or MediaProfile()
    total = MemoryEstimate()
    for media in find_media(request):
        total += estimate_media(media, profile)
    return total


def estimate_media(media: Media, profile: MediaProfile) -> MemoryEstimate:
    """Estimate one part of a request. See `estimate`."""
    encoded = _encoded_size(media)
    if media.kind == "audio":
        samples = profile.audio_seconds * _SAMPLES_PER_SECOND
        features = profile.audio_seconds * _FEATURE_BYTES_PER_SECOND
        return _assumed(MemoryEstimate(encoded + 4 * samples, features))
    if media.kind == "video":
        frames = profile.video_frames
        size = ImageSize(encoded, frames * profile.frame_pixels, frames)
        return _assumed(estimate_memory([size], profile))
    size = ImageSize(encoded, profile.assumed_pixels, 1)
    if not profile.work_bytes_per_pixel and not profile.tensor_bytes_per_pixel:
        return MemoryEstimate(encoded)  # needs no Pillow either
    found = _read_size(media, profile) if media.kind == "image" else None
    if found is None:
        return _assumed(estimate_memory([size], profile))
    return estimate_memory([found], profile)


def _assumed(found: MemoryEstimate) -> MemoryEstimate:
    return MemoryEstimate(found.work, found.tensors, found.total, found.total)


def _read_size(media: Media, profile: MediaProfile) -> ImageSize | None:
    """The size of an image in the request; ``None`` if it is elsewhere."""
    encoded = _encoded_size(media)
    largest = ImageSize(encoded, profile.image_pixels, 1)
    for content in _contents(media):
        try:
            width, height, frames = read_image_header(content)
        except ImageTooLarge:
            return largest
        except UnreadableImage:
            continue  # of a prefix; the whole file may be readable
        if min(width, height) < _MIN_SIDE:
            return largest
        frames = frames if profile.all_frames else 1
        pixels = min(width * height * frames, profile.image_pixels)
        decodes = profile.work_bytes_per_pixel > 0
        decoder = decoder_bytes(content, pixels // frames) if decodes else 0
        return ImageSize(encoded, pixels, frames, decoder)
    return None


def _encoded_size(media: Media) -> int:
    if media.data is None:
        return 0
    return media.data.nbytes if isinstance(media.data, memoryview) else len(media.data)


def _contents(media: Media) -> Iterator[bytes]:
    """Yield the beginning of the file, and the file, if the request contains it."""
    data = media.data
    if not isinstance(data, str | LongText):
        if data is not None:
            yield bytes(data)
        return
    start = beginning_of(data, _PREFIX + _MAX_HEAD)
    head, comma, text = start.partition(",")
    if not head.startswith("data:"):
        head, text = "", "" if ":" in start[:16] else start  # a URL: not here
    elif not comma or not head.endswith(";base64"):
        return
    if len(text) > _PREFIX:
        beginning = _decode_beginning(text[:_PREFIX])
        if beginning.startswith(_PREFIX_FORMATS):
            yield beginning
        if not beginning.startswith(_FORMATS):
            return
    if text:
        at = len(head) + len(comma) if head else 0
        yield _decode_base64(pieces_of(data, at), len(data))


def _decode_beginning(text: str) -> bytes:
    plain = text.encode("ascii", "ignore").translate(None, _NOT_BASE64 + b"=")
    return binascii.a2b_base64(plain[: len(plain) // 4 * 4])


def _decode_base64(pieces: Iterator[str], length: int) -> bytes:
    """Decode as `base64.b64decode` does, with pauses; nothing if that is an error.

    Args:
        pieces: The text.
        length: Its length, or more.
    """
    # Never moved, and the memory of these zeros is not touched before it is written.
    decoded, left = io.BytesIO(bytes(length // 4 * 3 + 3)), b""
    try:
        for piece in pieces:
            left += piece.encode("ascii").translate(None, _NOT_BASE64)
            if b"=" in left:  # the decoder knows whether this is the end
                left += "".join(pieces).encode("ascii")
                break
            whole = len(left) // 4 * 4
            decoded.write(binascii.a2b_base64(left[:whole]))
            left = left[whole:]
        decoded.write(binascii.a2b_base64(left))
    except ValueError:  # binascii.Error, or a character that is not ASCII
        return b""
    decoded.truncate()
    return decoded.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        message = 'estimates need PIL; pip install "anyio-lifecycle[media]"'
        raise ImportError(message) from error
    return Image


class Correction:
    """Corrects estimated tensor sizes by those of recent requests.

    Models scale large images down, so their tensors are smaller than their pixels
    suggest. A ratio is learned for each size class, a factor of four wide. It starts
    at 1, rises at once to the largest sample and falls slowly. It never exceeds
    *ceiling* and never falls below *floor*, so even if all requests change at once,
    memory in use is at most ``1 / floor`` of what was admitted.

    Args:
        floor: Minimum ratio, above 0 and at most 1.
        ceiling: Maximum ratio, at least 1.

    Raises:
        ValueError: *floor* or *ceiling* is out of range.
    """

    def __init__(self, *, floor: float = 0.25, ceiling: float = 1.0) -> None:
        if not 0 < floor <= 1:
            raise ValueError(f"floor must be above 0 and at most 1, not {floor}")
        if not 1 <= ceiling < math.inf:
            raise ValueError(f"ceiling must be at least 1 and finite, not {ceiling}")
        self._floor = floor
        self._ceiling = ceiling
        self._ratios: dict[int, float] = {}

    def bytes(self, estimate: MemoryEstimate) -> int:
        """Return the bytes to admit, for an estimate from the headers of the images."""
        ratio = self._ratios.get(_size_class(estimate), 1.0)
        return estimate.work + math.ceil(estimate.tensors * ratio)

    def learn(self, estimate: MemoryEstimate, tensors: int) -> None:
        """Record that the tensors of an estimate had *tensors* bytes."""
        if not estimate.tensors:
            return
        sample = tensors / estimate.tensors
        ratio = self._ratios.get(_size_class(estimate), 1.0)
        ratio = sample if sample > ratio else ratio + _DECAY * (sample - ratio)
        self._ratios[_size_class(estimate)] = min(
            max(ratio, self._floor), self._ceiling
        )

    @property
    def ratios(self) -> Mapping[int, float]:
        """The learned ratios, by the upper limit of their size class in bytes."""
        return {4**size: ratio for size, ratio in sorted(self._ratios.items())}


def _size_class(estimate: MemoryEstimate) -> int:
    return (estimate.tensors.bit_length() + 1) // 2
