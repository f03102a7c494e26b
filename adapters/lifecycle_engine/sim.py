"""`SimRunner` and `SimProcessor`: a simulated model for tests and load studies.

The simulation takes the time and the memory of a model by a stated cost, without torch.
Its tokens depend on every byte of the payload, so an incomplete payload shows in the
text.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lifecycle_asgi import MediaProfile
from lifecycle_engine.core.model_runner import Emitted, Prompt
from lifecycle_engine.core.slots import ImageSpan, PrefixContents
from lifecycle_engine.multimodal import decode
from lifecycle_engine.processing.processor import (
    ByteDetokenizer,
    Chat,
    Empty,
    Prepared,
    without_traceback,
)

BYTES_PER_PIXEL = 24
_TEXT = b"the quick brown fox jumps over the lazy dog and streams every word of it. "


@dataclass(frozen=True, slots=True)
class SimCost:
    """Durations of a simulated model, in seconds.

    Attributes:
        prefill_token: Per prompt token.
        prefill_pixel: Per pixel.
        decode_step: Per decode step.
        decode_lane: Per request in a decode step.
    """

    prefill_token: float = 2e-5
    prefill_pixel: float = 2e-8
    decode_step: float = 5e-3
    decode_lane: float = 2e-4


class SimRunner:
    """A simulated byte-level model: tokens 0-255 are bytes, 256 ends the text."""

    def __init__(
        self,
        *,
        slots: int = 8,
        max_length: int = 4096,
        kv_bytes_per_token: int = 1024,
        cost: SimCost | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make an idle model.

        Args:
            slots: Number of requests that can hold KV at once.
            max_length: Tokens of each slot.
            kv_bytes_per_token: Memory that a running request holds per prompt token.
            cost: Durations by tokens and pixels.
            sleep: Called with the seconds of each prefill and step; tests pass one
                that returns at once.
        """
        self.slots, self.max_length = slots, max_length
        self.vocab_size = 257
        self.keep: Sequence[str] = ()
        self._kv_bytes_per_token = kv_bytes_per_token
        self._cost = cost or SimCost()
        self._sleep = sleep
        self._kv: dict[int, bytearray] = {}
        self._next: dict[int, int] = {}
        self._digest: dict[int, int] = {}
        self._logprobs: dict[int, int | None] = {}
        self._contents: dict[int, PrefixContents] = {}

    @property
    def kv_bytes(self) -> int:
        """Memory held by the running requests."""
        return sum(len(buffer) for buffer in self._kv.values())

    def check(self, prompt: Prompt) -> None:
        """Reject tensors other than one ``pixels`` of 24 bytes a pixel."""
        if not prompt.tensors:
            return
        if list(prompt.tensors) != ["pixels"]:
            names = ", ".join(sorted(prompt.tensors))
            raise ValueError(f"tensors are {names}; expected pixels")
        view = memoryview(prompt.tensors["pixels"])
        if view.format != "f" or view.nbytes % BYTES_PER_PIXEL or not view.c_contiguous:
            raise ValueError(
                f"pixels has format {view.format!r} and {view.nbytes} bytes; expected "
                f"contiguous float32, {BYTES_PER_PIXEL} bytes a pixel"
            )

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return 0: the first chunk reads all pixels."""
        del prompt
        return 0

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Copy and read a chunk as a device would; the last chunk starts the text."""
        if not start:
            self._reset(slot, prompt, 0)
            self._read_pixels(prompt)
        ids = prompt.input_ids[start:stop]
        self._digest[slot] = _digest(ids, self._digest[slot])
        # Written, because untouched pages take no memory.
        self._kv[slot] += b"\1" * (len(ids) * self._kv_bytes_per_token)
        self._sleep(len(ids) * self._cost.prefill_token)
        if stop < len(prompt.input_ids):
            return None
        self._next[slot] = self._digest.pop(slot) % len(_TEXT)
        return self._emit(slot)

    def resume(self, slot: int, prompt: Prompt) -> int:
        """Keep the prefix that a slot shares with a new prompt; return its length."""
        contents = self._contents[slot]
        # The last generated token was never fed back.
        cached = PrefixContents(contents.ids[:-1], contents.images)
        shared = cached.common_prefix(_contents(prompt))
        shared = min(shared, len(prompt.input_ids) - 1)
        self._reset(slot, prompt, shared)
        return shared

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        """Sleep for a step's duration; return the next byte of each text."""
        self._sleep(self._cost.decode_step + len(slots) * self._cost.decode_lane)
        return [self._emit(slot) for slot in slots]

    def free(self, slot: int) -> None:
        """Free a slot's memory."""
        self._kv.pop(slot, None)
        self._next.pop(slot, None)
        self._digest.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._contents.pop(slot, None)

    def status(self) -> dict[str, Any]:
        """Return the memory held by the running requests."""
        return {"kv_bytes": self.kv_bytes}

    def _reset(self, slot: int, prompt: Prompt, cached: int) -> None:
        self._kv[slot] = bytearray(b"\1") * (cached * self._kv_bytes_per_token)
        self._logprobs[slot] = prompt.sampling.logprobs
        self._digest[slot] = _digest(prompt.input_ids[:cached], _pixels(prompt))
        self._next.pop(slot, None)
        self._contents.pop(slot, None)
        if prompt.session:
            self._contents[slot] = _contents(prompt)

    def _read_pixels(self, prompt: Prompt) -> None:
        if prompt.tensors:
            device_copy = bytearray(memoryview(prompt.tensors["pixels"]).cast("B"))
            pixels = len(device_copy) // BYTES_PER_PIXEL
            self._sleep(pixels * self._cost.prefill_pixel)

    def _emit(self, slot: int) -> Emitted:
        index = self._next[slot]
        self._next[slot] = (index + 1) % len(_TEXT)
        token = _TEXT[index]
        if slot in self._contents:
            self._contents[slot].ids.append(token)
        if (count := self._logprobs[slot]) is None:
            return Emitted([token], token)
        # The simulated model gives its token a probability of 1.
        top = [[token, 0.0]][:count]
        return Emitted({"token": token, "logprob": 0.0, "top": top}, token)


def _digest(ids: Sequence[int], so_far: int) -> int:
    return zlib.crc32(b"".join(b"%d," % token for token in ids), so_far)


def _pixels(prompt: Prompt) -> int:
    if not prompt.tensors:
        return 0
    return zlib.crc32(memoryview(prompt.tensors["pixels"]).cast("B"))


def _contents(prompt: Prompt) -> PrefixContents:
    images = [ImageSpan(0, b"%d" % _pixels(prompt))] if prompt.tensors else []
    return PrefixContents(list(prompt.input_ids), images)


END = 256
_BYTES = {byte: bytes([byte]) for byte in range(256)}
_FLOATS = BYTES_PER_PIXEL // 4
# Header lines of a PPM: its format, its size and the largest value.
_HEADER_LINES = 3


class SimProcessor:
    """Converts chats to UTF-8 bytes and images to 24 bytes a pixel."""

    copies = 0  # pixels are converted strip by strip, without a copy of the image

    def __init__(
        self,
        *,
        max_pixels: int = 40_000_000,
        tensor_pixels: int | None = None,
        empty: Empty | None = None,
    ) -> None:
        """Make a processor.

        Args:
            max_pixels: Images with more pixels are rejected.
            tensor_pixels: Images with more pixels are scaled down to them, as
                vision-language models do; ``None`` scales none.
            empty: Allocates the pixel buffers; ``None`` uses ordinary memory.
        """
        self.media = MediaProfile(tensor_pixels=tensor_pixels)
        self._max_pixels = max_pixels
        self._empty = empty or np.empty

    @without_traceback
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
        """Return a new detokenizer for one stream."""
        return ByteDetokenizer(_BYTES)

    def _pixels(self, encoded: list[bytes]) -> np.ndarray:
        sizes = [
            self._scaled(decode.size(data, at, max_pixels=self._max_pixels))
            for at, data in enumerate(encoded, 1)
        ]
        pixels = sum(w * h for w, h in sizes)
        buffer: np.ndarray = self._empty((pixels, _FLOATS), np.float32)
        row = 0
        for at, data in enumerate(encoded, 1):
            image = decode.decode(data, at, max_pixels=self._max_pixels)
            if (size := self._scaled(image.size)) != image.size:
                image = image.resize(size, reducing_gap=2.0)
            count = image.width * image.height
            rows: Any = _PixelWriter(buffer[row : row + count])
            image.save(rows, "PPM")
            row += count
        return buffer

    def _scaled(self, size: tuple[int, int]) -> tuple[int, int]:
        most, (width, height) = self.media.tensor_pixels, size
        if most is None or width * height <= most:
            return size
        factor = math.sqrt(most / (width * height))
        width, height = (min(max(1, int(side * factor)), most) for side in size)
        return width, height


class _PixelWriter:
    """A file object that writes the rows of a saved image into a float array.

    Pillow exports rows without a copy of the image only when it saves one. Converting
    the whole image would need its bytes and a float copy at once, six times its size;
    cropping strips would allocate an image for each.

    Args:
        target: ``(pixels, 6)``; each pixel's RGB is written twice.
    """

    def __init__(self, target: np.ndarray) -> None:
        self._remaining = target
        self._lines = 0

    def write(self, data: bytes) -> None:
        """Write whole rows, after a header of three lines."""
        if self._lines < _HEADER_LINES:
            self._lines += data.count(b"\n")
            return
        rgb = np.frombuffer(data, np.uint8).reshape(-1, 3)
        piece, self._remaining = np.split(self._remaining, [len(rgb)])
        floats = np.divide(rgb, np.float32(255))
        piece[:, :3] = floats
        piece[:, 3:] = floats
