"""Encoded images to pixels, with every way of failing turned into `BadImage`."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import TypeVar

from PIL import Image, ImageOps, UnidentifiedImageError

from lifecycle_engine.processor import BadImage
from lifecycle_engine.scheduling.traces import release

from .structure import objection

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
T = TypeVar("T")

# At debug it tells the words in pictures, whoever asked all loggers to tell everything.
logging.getLogger("PIL").setLevel(logging.INFO)


def guarded(position: int, step: Callable[[], T]) -> T:
    """Run one step on an image; whatever it raises becomes a bare `BadImage`.

    Args:
        position: Of the image in the request, from 1, for the message.
        step: May raise anything; `MemoryError` is the server's trouble, not the
            image's, and passes.
    """
    try:
        return step()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # decoders raise anything at all
        message = _reason(error)
        release(error)
    raise BadImage(f"image {position} {message}")


def decode(encoded: bytes, position: int, *, max_pixels: int) -> Image.Image:
    """Decode an image to RGB, the right side up; of an animation, its first frame.

    Args:
        encoded: The file's bytes, in one of `FORMATS`.
        position: Of the image in the request, from 1.
        max_pixels: A larger image is refused before it is decoded.

    Raises:
        BadImage: Not an image, damaged, truncated or too large.
    """
    return guarded(position, lambda: _decode(encoded, max_pixels))


def size(encoded: bytes, position: int, *, max_pixels: int) -> tuple[int, int]:
    """Read width and height from an image's header; nothing is decoded.

    Raises:
        BadImage: Not an image, or too large.
    """

    def read() -> tuple[int, int]:
        with _open(encoded, max_pixels) as image:
            return image.size

    return guarded(position, read)


def _open(encoded: bytes, max_pixels: int) -> Image.Image:
    problem = objection(encoded)
    if problem is not None:
        raise BadImage(problem)
    image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    width, height = image.size
    if width * height > max_pixels:
        image.close()
        raise BadImage(
            f"has {width} x {height} pixels; the limit is {max_pixels}: scale it down"
        )
    return image


def _decode(encoded: bytes, max_pixels: int) -> Image.Image:
    with _open(encoded, max_pixels) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):  # whose conversion clips, to a white image
            return image.point(lambda value: value * (1 / 256)).convert("RGB")
        # Of one that is RGB already it would make a copy.
        return image if image.mode == "RGB" else image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, BadImage):
        return str(error)
    if isinstance(error, _BOMBS):
        return "decodes to far more pixels than any photo has; scale it down"
    if isinstance(error, UnidentifiedImageError):
        return f"is not an image in a known format; use {', '.join(FORMATS)}"
    return f"is damaged or truncated ({type(error).__name__}); encode it again"
