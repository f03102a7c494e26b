"""Decoding images; every failure becomes a `BadImage`.

Before Pillow opens a file, its structure is checked: see `structure_error`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import TypeVar

from PIL import Image, ImageOps, UnidentifiedImageError

from lifecycle_asgi.image_structure import structure_error
from lifecycle_asgi.media_memory import IMAGE_FORMATS as FORMATS
from lifecycle_engine.errors import BadImage, discard_error

_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
T = TypeVar("T")

# At debug level Pillow logs the text in image files.
logging.getLogger("PIL").setLevel(logging.INFO)


def convert_errors(position: int, step: Callable[[], T]) -> T:
    """Run one step on an image; its errors become `BadImage` without a traceback.

    Args:
        position: Position of the image in the request, from 1, for the message.
        step: May raise any exception. `MemoryError` is not the image's fault and
            passes unchanged.
    """
    try:
        return step()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # decoders raise many types
        message = _reason(error)
        discard_error(error)
    raise BadImage(f"image {position} {message}")


def decode(encoded: bytes, position: int, *, max_pixels: int) -> Image.Image:
    """Decode an image to RGB, rotated as its Exif says; only the first frame.

    Raises:
        BadImage: Not an image, damaged, truncated or too large.
    """
    return convert_errors(position, lambda: _decode(encoded, max_pixels))


def size(encoded: bytes, position: int, *, max_pixels: int) -> tuple[int, int]:
    """Read width and height from an image's header; nothing is decoded.

    Raises:
        BadImage: Not an image, or too large.
    """

    def read() -> tuple[int, int]:
        with _open(encoded, max_pixels) as image:
            return image.size

    return convert_errors(position, read)


def _open(encoded: bytes, max_pixels: int) -> Image.Image:
    problem = structure_error(encoded)
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
        if image.mode.startswith("I;16"):  # convert() would clip it to white
            return image.point(lambda value: value * (1 / 256)).convert("RGB")
        # convert() would copy an image that is RGB already.
        return image if image.mode == "RGB" else image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, BadImage):
        return str(error)
    if isinstance(error, _BOMBS):
        return "decodes to far more pixels than any photo; scale it down"
    if isinstance(error, UnidentifiedImageError):
        return f"is not an image in a known format; use {', '.join(FORMATS)}"
    return f"is damaged or truncated ({type(error).__name__}); encode it again"
