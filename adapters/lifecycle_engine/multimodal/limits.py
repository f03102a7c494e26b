"""Limits on images, checked from their headers."""

from __future__ import annotations

import binascii
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lifecycle_asgi import (
    ImageSize,
    ImageTooLarge,
    UnreadableImage,
    read_image_header,
)
from lifecycle_asgi.json_body import LongText, beginning_of, pieces_of
from lifecycle_asgi.media_memory import decoder_bytes
from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.errors import bad_request

# Characters of a data URL before its data.
_MAX_HEAD = 2**12


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits on the media of one request.

    Attributes:
        image_pixels: Maximum pixels of one image, all its frames together.
        request_pixels: Maximum pixels of all images of a request together.
        images: Maximum number of images of a request.
        frames: Maximum number of frames of all images of a request together.
        min_side: Minimum pixels of the shorter side; models fail on thinner images.
    """

    image_pixels: int = 40_000_000
    request_pixels: int = 160_000_000
    images: int = 64
    frames: int = 64
    min_side: int = 2


def decode_data_url(url: str | LongText, *, param: str) -> bytes:
    """Decode a ``data:image/…;base64,`` URL.

    Raises:
        ApiError: 400 for any other URL, and for invalid base64.
    """
    head, comma, _ = beginning_of(url, _MAX_HEAD).partition(",")
    if not head.startswith("data:"):
        scheme = head.partition(":")[0] if ":" in head[:16] else ""
        if scheme.lower() in ("http", "https", "file", "ftp"):
            message = (
                f"Images by {scheme.lower()} URL are not fetched by this server; "
                "send a data:image/…;base64, URL"
            )
            raise bad_request(message, param=param, code="remote_image_unsupported")
        raise _invalid_url(param)
    kind, _, encoding = head.removeprefix("data:").rpartition(";")
    if not comma or encoding != "base64" or not kind.lower().startswith("image/"):
        raise _invalid_url(param)
    try:
        start = len(head) + 1
        return _decode(pieces_of(url, start), len(url) - start)
    except ValueError:  # binascii.Error, or a character that is not ASCII
        pass
    message = "The image is not valid base64; send strict base64 without line breaks"
    raise bad_request(message, param=param, code="invalid_base64")


def _decode(pieces: Iterator[str], length: int) -> bytes:
    """Decode *length* characters of base64, in which nothing else is."""
    # Never moved, and the memory of these zeros is not touched before it is written.
    decoded = io.BytesIO(bytes(length // 4 * 3))
    quads = left = ""
    for piece in pieces:
        left += piece
        whole = len(left) // 4 * 4
        if not whole:
            continue
        if quads.endswith("="):
            raise ValueError("padding inside the data")
        quads, left = left[:whole], left[whole:]
        decoded.write(binascii.a2b_base64(quads, strict_mode=True))
    # Strict mode accepts padding that pads nothing; no encoder writes it.
    if left or quads.endswith("==="):
        raise ValueError("wrong padding")
    decoded.truncate()
    return decoded.getvalue()


def _invalid_url(param: str) -> ApiError:
    message = "An image URL must be of the form data:image/png;base64,…"
    return bad_request(message, param=param, code="invalid_image_url")


def read_image_size(encoded: bytes, limits: MediaLimits, *, param: str) -> ImageSize:
    """Read an image's size from its header.

    Args:
        encoded: The file.
        limits: Limits on images.
        param: Path of the field, for the error.

    Raises:
        ApiError: 400 for an unknown format or a side that is too short; 413 for too
            many pixels.
    """
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
    decoder = decoder_bytes(encoded, width * height)
    return ImageSize(len(encoded), pixels, frames, decoder)


def _read_header(
    encoded: bytes, limits: MediaLimits, param: str
) -> tuple[int, int, int]:
    """Return width, height and number of frames."""
    try:
        return read_image_header(encoded)
    except ImageTooLarge:
        return limits.image_pixels, limits.image_pixels, 1
    except UnreadableImage as error:
        message = str(error)
    # Outside of the handler: otherwise the error's context would hold the file.
    raise bad_request(message, param=param, code="invalid_image")


def _too_large(message: str, param: str) -> ApiError:
    message = f"{message}; scale it down or send less"
    return ApiError(413, message, code="image_too_large", param=param)


def check_count(images: int, limits: MediaLimits, *, param: str) -> None:
    """Refuse a request with too many images, before any is decoded.

    Raises:
        ApiError: 413.
    """
    if images > limits.images:
        message = f"The request has {images} images; the limit is {limits.images}"
        raise _too_large(message, param)


def check_total(sizes: Sequence[ImageSize], limits: MediaLimits, *, param: str) -> None:
    """Refuse a request whose images have too many frames or pixels together.

    Raises:
        ApiError: 413.
    """
    frames = sum(size.frames for size in sizes)
    if frames > limits.frames:
        message = f"The images have {frames} frames; the limit is {limits.frames}"
        raise _too_large(message, param)
    pixels = sum(size.pixels for size in sizes)
    if pixels > limits.request_pixels:
        message = (
            f"The images have {pixels} pixels; the limit is {limits.request_pixels}"
        )
        raise _too_large(message, param)
