"""The processor beside `SimRunner`: byte tokens and raw pixels, no transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from lifecycle_engine.images import images
from lifecycle_engine.processor import Chat, Empty, Prepared, bare
from lifecycle_engine.sim_runner import BYTES_PER_PIXEL

from .detokenizer import ByteDetokenizer

END = 256
_BYTES = {byte: bytes([byte]) for byte in range(256)}
_FLOATS = BYTES_PER_PIXEL // 4
# Lines before the pixels of a PPM: its kind, its size, and the largest value.
_HEAD = 3


class SimProcessor:
    """Chats to UTF-8 bytes; images to 24 bytes a pixel, as a real model's are."""

    copies = 0  # of a strip at a time

    def __init__(
        self, *, max_pixels: int = 40_000_000, empty: Empty | None = None
    ) -> None:
        """Make a processor.

        Args:
            max_pixels: An image of more pixels is refused.
            empty: Makes the buffers of pixels; ``None``: in ordinary memory.
        """
        self._max_pixels = max_pixels
        self._empty = empty or np.empty

    @bare
    def prepare(self, chat: Chat) -> Prepared:
        """Build the prompt and a float32 buffer ``(pixels, 6)`` of all images.

        Raises:
            BadImage: An image cannot be decoded or is too large.
        """
        text: list[str] = []
        encoded: list[bytes] = []
        for message in chat.messages:
            text.append(f"{message.role}: ")
            for part in message.content:
                if isinstance(part, str):
                    text.append(part)
                else:
                    text.append("[image]")
                    encoded.append(part)
            text.append("\n")
        ids = list("".join(text).encode("utf-8", "replace"))
        request = chat.request(ids, [] if chat.ignore_eos else [END])
        tensors = {"pixels": self._pixels(encoded)} if encoded else {}
        return Prepared(request, tensors, len(ids))

    def detokenizer(self) -> ByteDetokenizer:
        """Return a fresh detokenizer for one stream."""
        return ByteDetokenizer(_BYTES)

    def _pixels(self, encoded: list[bytes]) -> np.ndarray:
        sizes = [
            images.size(data, at, max_pixels=self._max_pixels)
            for at, data in enumerate(encoded, 1)
        ]
        pixels = sum(w * h for w, h in sizes)
        buffer: np.ndarray = self._empty((pixels, _FLOATS), np.float32)
        row = 0
        for at, data in enumerate(encoded, 1):
            image = images.decode(data, at, max_pixels=self._max_pixels)
            count = image.width * image.height
            rows: Any = _Rows(buffer[row : row + count])
            image.save(rows, "PPM")
            row += count
        return buffer


class _Rows:
    """A file in which a picture is saved as floats, as they are and once more.

    As a whole, the picture would lie in memory as bytes, and as floats in an array
    that numpy makes when it copies within one: six times the size that it came with.
    Cut into strips, it would be many pictures, each in a block of its own; Pillow gives
    out rows without making a picture of them only where it saves one.
    """

    def __init__(self, target: np.ndarray) -> None:
        self._left = target
        self._lines = 0

    def write(self, data: bytes) -> None:
        """Take whole rows, behind a head of three lines."""
        if self._lines < _HEAD:
            self._lines += data.count(b"\n")
            return
        rgb = np.frombuffer(data, np.uint8).reshape(-1, 3)
        piece, self._left = np.split(self._left, [len(rgb)])
        floats = np.divide(rgb, np.float32(255))
        piece[:, :3] = floats
        piece[:, 3:] = floats
