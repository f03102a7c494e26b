"""What a request's images weigh, known from their headers.

Nothing is decoded here: a 70 KiB file can be 12 million pixels, and the gate has
to be asked before they exist.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from lifecycle_engine.api_errors import ApiError, bad_request

from .images import FORMATS
from .structure import objection

TENSOR_BYTES_PER_PIXEL = 24
"""Of ``pixel_values``: three channels of float32, twice (temporal patches)."""

WORK_BYTES_PER_PIXEL = 15
"""While they are made: RGB once, and once more as float32."""

# Characters of base64 that are decoded at a stretch: nothing else runs meanwhile.
_SLICE = 4 * 2**20

_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The most that one request may bring.

    Attributes:
        image_pixels: Of one image, all its frames together.
        request_pixels: Of all images of a request together.
        images: Of a request, whatever they show.
        frames: Of all images of a request together.
        min_side: Pixels of the shorter side; models fail on thinner ones.
        video_frames: Frames that are taken of a video; see `estimate`.
        frame_pixels: Of each of them.
        audio_seconds: Of one piece of audio.
    """

    image_pixels: int = 40_000_000
    request_pixels: int = 160_000_000
    images: int = 64
    frames: int = 64
    min_side: int = 2
    video_frames: int = 64
    frame_pixels: int = 1_003_520
    audio_seconds: int = 600


@dataclass(frozen=True, slots=True)
class Measure:
    """One image by its header.

    Attributes:
        encoded: Bytes of the file.
        pixels: Of all frames together.
        frames: 1 unless it is an animation or has pages.
    """

    encoded: int
    pixels: int
    frames: int


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes that the media of a request need in this process until hand-off.

    Attributes:
        work: Of the files, and of their pixels while they are worked on.
        tensors: Of what is made of them; for each answer, if there are several.
    """

    work: int = 0
    tensors: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(self.work + other.work, self.tensors + other.tensors)

    @property
    def total(self) -> int:
        """All of it, for one answer."""
        return self.work + self.tensors


def decode_data_url(url: str, *, param: str) -> bytes:
    """The bytes of a ``data:image/…;base64,`` URL.

    Args:
        url: As the client sent it.
        param: Path of the field, for the error.

    Raises:
        ApiError: 400 for any other URL, and for base64 that is not strict.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:"):
        scheme = head.partition(":")[0] if ":" in head[:16] else ""
        if scheme.lower() in ("http", "https", "file", "ftp"):
            message = (
                f"Images by {scheme.lower()} URL are not fetched by this server; "
                "send a data:image/…;base64, URL"
            )
            raise bad_request(message, param=param, code="remote_image_unsupported")
        raise _not_a_data_url(param)
    kind, _, encoding = head.removeprefix("data:").rpartition(";")
    if not comma or encoding != "base64" or not kind.lower().startswith("image/"):
        raise _not_a_data_url(param)
    try:
        # Strict mode lets padding pass that pads nothing; no encoder writes it.
        if len(data) % 4 == 0 and not data.endswith("==="):
            return _decode(data)
    except ValueError:  # binascii.Error, or a character that is not ASCII
        pass
    message = "The image is not valid base64; send strict base64 without line breaks"
    raise bad_request(message, param=param, code="invalid_base64")


def _decode(data: str) -> bytes:
    if len(data) <= _SLICE:
        return binascii.a2b_base64(data, strict_mode=True)
    slices: list[bytes] = []
    for at in range(0, len(data), _SLICE):
        if at and len(slices[-1]) < _SLICE // 4 * 3:
            raise ValueError("there is padding within")
        slices.append(binascii.a2b_base64(data[at : at + _SLICE], strict_mode=True))
    return b"".join(slices)


def _not_a_data_url(param: str) -> ApiError:
    message = "An image URL must be of the form data:image/png;base64,…"
    return bad_request(message, param=param, code="invalid_image_url")


def measure(encoded: bytes, limits: MediaLimits, *, param: str) -> Measure:
    """Read an image's size from its header.

    Args:
        encoded: The file.
        limits: What it may be.
        param: Path of the field, for the error.

    Raises:
        ApiError: 400 if it is no image of a known format or too thin; 413 if it
            has too many pixels or frames.
    """
    problem = objection(encoded)
    if problem is not None:
        raise bad_request(f"The image {problem}", param=param, code="invalid_image")
    width, height, frames = _read_header(encoded, limits, param)
    if min(width, height) < limits.min_side:
        message = (
            f"The image is {width} x {height} pixels; the shorter side must be at "
            f"least {limits.min_side}"
        )
        raise bad_request(message, param=param, code="image_too_small")
    pixels = width * height * frames
    if pixels > limits.image_pixels:
        raise _too_large(f"An image has more than {limits.image_pixels} pixels", param)
    return Measure(len(encoded), pixels, frames)


def _read_header(
    encoded: bytes, limits: MediaLimits, param: str
) -> tuple[int, int, int]:
    """Width, height and frames."""
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            return *image.size, getattr(image, "n_frames", 1)
    except _BOMBS:
        return limits.image_pixels, limits.image_pixels, 1
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow raises many kinds
        known = not isinstance(error, UnidentifiedImageError)
    # Outside of the handler, or the refusal's context would hold the file.
    raise _broken(param, known=known)


def _broken(param: str, *, known: bool) -> ApiError:
    message = (
        "The image is damaged or truncated; encode it again"
        if known
        else f"The file is not an image in a known format; use {', '.join(FORMATS)}"
    )
    return bad_request(message, param=param, code="invalid_image")


def _too_large(message: str, param: str) -> ApiError:
    message = f"{message}; scale it down or send less"
    return ApiError(413, message, code="image_too_large", param=param)


def check_count(images: int, limits: MediaLimits, *, param: str) -> None:
    """Refuse a request of too many images, before any is looked at.

    Args:
        images: How many it has.
        limits: How many it may have.
        param: The field that they are in, for the error.

    Raises:
        ApiError: 413.
    """
    if images > limits.images:
        message = f"The request has {images} images; the limit is {limits.images}"
        raise _too_large(message, param)


def check_total(
    measures: Sequence[Measure], limits: MediaLimits, *, param: str
) -> None:
    """Refuse a request whose images are too much together.

    Args:
        measures: Of all its images.
        limits: What they may be together.
        param: The field that they are in, for the error.

    Raises:
        ApiError: 413.
    """
    frames = sum(one.frames for one in measures)
    if frames > limits.frames:
        message = f"The images have {frames} frames; the limit is {limits.frames}"
        raise _too_large(message, param)
    pixels = sum(one.pixels for one in measures)
    if pixels > limits.request_pixels:
        message = (
            f"The images have {pixels} pixels; the limit is {limits.request_pixels}"
        )
        raise _too_large(message, param)


def weigh(measures: Sequence[Measure]) -> Weight:
    """What a request's images need in this process until hand-off.

    The files themselves, the decoded pixels and the tensors made of them, all at
    a time: an upper bound, to be settled when the tensors exist.
    """
    encoded = sum(one.encoded for one in measures)
    pixels = sum(one.pixels for one in measures)
    work = encoded + WORK_BYTES_PER_PIXEL * pixels
    return Weight(work, TENSOR_BYTES_PER_PIXEL * pixels)


def estimate_bytes(measures: Sequence[Measure]) -> int:
    """All that `weigh` says, for one answer."""
    return weigh(measures).total
