"""A runner without a model: real buffers, real time, no torch.

For the tests of everything around a model, and for load studies: it takes the
time and the memory that a model would take by a stated cost, and its tokens
depend on every byte of the payload, so that a payload which did not arrive whole
shows in the text.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .models.held import Held, Picture
from .runner import Emitted, Prompt

BYTES_PER_PIXEL = 24
_TEXT = b"the quick brown fox jumps over the lazy dog and streams every word of it. "


@dataclass(frozen=True, slots=True)
class SimCost:
    """Seconds that a simulated model takes.

    Attributes:
        prefill_token: For each prompt token.
        prefill_pixel: For each pixel.
        decode_step: For each step, whoever is in it.
        decode_lane: For each request of a step.
    """

    prefill_token: float = 2e-5
    prefill_pixel: float = 2e-8
    decode_step: float = 5e-3
    decode_lane: float = 2e-4


class SimRunner:
    """A simulated byte-level model: tokens 0-255 are bytes, 256 ends a text."""

    def __init__(
        self,
        *,
        slots: int = 8,
        max_length: int = 4096,
        kv_bytes_per_token: int = 1024,
        cost: SimCost | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make a model that has run nothing yet.

        Args:
            slots: Requests that can hold KV at a time.
            max_length: Tokens of each slot.
            kv_bytes_per_token: Memory that a running request holds per token of
                its prompt.
            cost: Seconds by tokens and pixels.
            sleep: Called with the seconds of each prefill and step; a test's own
                makes them pass at once.
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
        self._held: dict[int, Held] = {}

    @property
    def kv_bytes(self) -> int:
        """Memory that the running requests hold."""
        return sum(len(buffer) for buffer in self._kv.values())

    def check(self, prompt: Prompt) -> None:
        """Refuse tensors other than one ``pixels`` of 24 bytes a pixel."""
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
        """Copy and read a chunk as a device would; the last one begins the text."""
        if not start:
            self._begin(slot, prompt, 0)
            self._read_pixels(prompt)
        ids = prompt.input_ids[start:stop]
        self._digest[slot] = _digest(ids, self._digest[slot])
        # Touched, because pages that nobody wrote to take no memory.
        self._kv[slot] += b"\1" * (len(ids) * self._kv_bytes_per_token)
        self._sleep(len(ids) * self._cost.prefill_token)
        if stop < len(prompt.input_ids):
            return None
        self._next[slot] = self._digest.pop(slot) % len(_TEXT)
        return self._emit(slot)

    def resume(self, slot: int, prompt: Prompt) -> int:
        """Keep what is the same of a further prompt; return how much."""
        held = self._held[slot]
        # The last one drawn was never read.
        read = Held(held.ids[:-1], held.pictures)
        shared = min(read.shared(_held(prompt)), len(prompt.input_ids) - 1)
        self._begin(slot, prompt, shared)
        return shared

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        """Take a step's time; return the next byte of each text."""
        self._sleep(self._cost.decode_step + len(slots) * self._cost.decode_lane)
        return [self._emit(slot) for slot in slots]

    def free(self, slot: int) -> None:
        """Give a slot's memory back."""
        self._kv.pop(slot, None)
        self._next.pop(slot, None)
        self._digest.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._held.pop(slot, None)

    def status(self) -> dict[str, Any]:
        """Return the memory that the running requests hold."""
        return {"kv_bytes": self.kv_bytes}

    def _begin(self, slot: int, prompt: Prompt, read: int) -> None:
        self._kv[slot] = bytearray(b"\1") * (read * self._kv_bytes_per_token)
        self._logprobs[slot] = prompt.sampling.logprobs
        self._digest[slot] = _digest(prompt.input_ids[:read], _pixels(prompt))
        self._next.pop(slot, None)
        self._held.pop(slot, None)
        if prompt.session:
            self._held[slot] = _held(prompt)

    def _read_pixels(self, prompt: Prompt) -> None:
        if prompt.tensors:
            device_copy = bytearray(memoryview(prompt.tensors["pixels"]).cast("B"))
            pixels = len(device_copy) // BYTES_PER_PIXEL
            self._sleep(pixels * self._cost.prefill_pixel)

    def _emit(self, slot: int) -> Emitted:
        index = self._next[slot]
        self._next[slot] = (index + 1) % len(_TEXT)
        token = _TEXT[index]
        if slot in self._held:
            self._held[slot].ids.append(token)
        if (count := self._logprobs[slot]) is None:
            return Emitted([token], token)
        # As sure of everything as it is.
        top = [[token, 0.0]][:count]
        return Emitted({"token": token, "logprob": 0.0, "top": top}, token)


def _digest(ids: Sequence[int], so_far: int) -> int:
    return zlib.crc32(b"".join(b"%d," % token for token in ids), so_far)


def _pixels(prompt: Prompt) -> int:
    if not prompt.tensors:
        return 0
    return zlib.crc32(memoryview(prompt.tensors["pixels"]).cast("B"))


def _held(prompt: Prompt) -> Held:
    pictures = [Picture(0, b"%d" % _pixels(prompt))] if prompt.tensors else []
    return Held(list(prompt.input_ids), pictures)
