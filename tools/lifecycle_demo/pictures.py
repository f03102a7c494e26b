"""Pictures that are made here, so that the demo needs no files and no network.

They are drawn, not photographed, and compress accordingly: a small file that
turns into something huge is the very request that a server has to survive.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from dataclasses import dataclass, field

from PIL import Image, ImageDraw

from lifecycle_asgi import ImageSize, estimate_memory

# name, width, height, format, how many of a hundred requests send it
SIZES = (
    ("thumbnail", 160, 120, "JPEG", 20),
    ("icon", 64, 64, "PNG", 10),
    ("web", 1280, 720, "JPEG", 25),
    ("full HD", 1920, 1080, "PNG", 20),
    ("photo", 3000, 2000, "JPEG", 15),
    ("4K", 3840, 2160, "PNG", 10),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture.

    Attributes:
        name: What kind it is.
        pixels: Width times height.
        encoded: Bytes of the file.
        url: The file as a data URL.
    """

    name: str
    pixels: int
    encoded: int
    url: str = field(repr=False)

    @property
    def payload(self) -> int:
        """Bytes that it takes from decoding to hand-off, as the gate counts them."""
        return estimate_memory([ImageSize(self.encoded, self.pixels, 1)]).total


def draw(
    name: str, width: int, height: int, kind: str, chance: random.Random
) -> Picture:
    """Draw a sky, a horizon and some random discs, and encode them."""
    sky = Image.linear_gradient("L").resize((width, height))
    image = Image.merge("RGB", (sky, sky.rotate(180), Image.new("L", sky.size, 150)))
    pen = ImageDraw.Draw(image)
    for _ in range(24):
        x, y = chance.randrange(width), chance.randrange(height)
        radius = chance.randrange(2, max(3, min(width, height) // 6))
        colour = tuple(chance.randrange(256) for _ in range(3))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    file = io.BytesIO()
    image.save(file, kind)
    return _picture(name, width * height, file.getvalue(), kind)


def album(chance: random.Random) -> tuple[list[Picture], list[int]]:
    """Return one picture of each size and their weights in the traffic."""
    pictures = [draw(*row[:4], chance) for row in SIZES]
    return pictures, [row[4] for row in SIZES]


def no_image() -> Picture:
    """Return text that claims to be a PNG."""
    return _picture("no image", 0, b"this is not a picture", "PNG")


def truncated(whole: Picture) -> Picture:
    """Return a picture whose second half is missing."""
    head, _, body = whole.url.partition(",")
    file = base64.b64decode(body)
    kind = head.partition("/")[2].partition(";")[0].upper()
    return _picture("truncated", whole.pixels, file[: len(file) // 2], kind)


def bomb() -> Picture:
    """Return a PNG of some hundred bytes whose header asks for 3.6 gigapixels."""

    def chunk(tag: bytes, data: bytes) -> bytes:
        body = tag + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    file = b"\x89PNG\r\n\x1a\n"
    file += chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return _picture("bomb", 60_000 * 60_000, file, "PNG")


def _picture(name: str, pixels: int, file: bytes, kind: str) -> Picture:
    body = base64.b64encode(file).decode()
    url = f"data:image/{kind.lower()};base64,{body}"
    return Picture(name, pixels, len(file), url)
