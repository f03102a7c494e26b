"""A model that is not a language model, run by the engine's scheduler.

A toy diffusion model: each step removes some noise from all pictures of the batch. The
scheduler does batching, chunked prefill, cancellation and clean-up.

Run it: pip install "anyio-lifecycle[engine]"; python examples/own_runner.py
"""

from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np

from lifecycle import Payload
from lifecycle_engine import Emitted, Prompt, Scheduler
from lifecycle_zmq import ThreadEngine

SIDE, STEPS = 16, 8


class Diffusion:
    """The methods of a `Runner`."""

    slots, max_length, vocab_size = 4, 512, 256
    keep: Sequence[str] = ()

    def __init__(self) -> None:
        self.wanted, self.pictures = np.zeros((2, self.slots, SIDE, SIDE), "f4")
        self.steps = [0] * self.slots

    def check(self, prompt: Prompt) -> None:
        """Reject a prompt that prefill could not run."""
        if np.shape(prompt.tensors.get("picture", ())) != (SIDE, SIDE):
            raise ValueError(f"picture must be {SIDE} x {SIDE} float32")

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return 0: the first chunk reads the picture, then the payload is freed."""
        return 0

    def prefill(self, slot: int, prompt: Prompt, start: int, stop: int) -> Any:
        """Read a chunk of the prompt; the last chunk starts the picture."""
        if start == 0:
            self.wanted[slot] = prompt.tensors["picture"]
        for token in prompt.input_ids[start:stop]:
            self.wanted[slot] += token / 1e4
        if stop < len(prompt.input_ids):
            return None
        chance = np.random.default_rng(prompt.sampling.seed)
        self.pictures[slot] = chance.standard_normal((SIDE, SIDE))
        self.steps[slot] = 0
        return Emitted(0)

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        """Remove some noise from all pictures; return those that are done."""
        for slot in slots:
            self.pictures[slot] += (self.wanted[slot] - self.pictures[slot]) / 2
            self.steps[slot] += 1
        return [
            Emitted(self.pictures[slot].tobytes(), last=True)
            if self.steps[slot] == STEPS
            else Emitted(self.steps[slot] / STEPS)
            for slot in slots
        ]

    def free(self, slot: int) -> None:
        """Discard the state of a request, whenever it ends."""
        self.wanted[slot] = self.pictures[slot] = 0

    def status(self) -> dict[str, Any]:
        """Return no counters of our own."""
        return {}


async def paint(engine: ThreadEngine, name: str) -> None:
    """Request a picture; the impatient client cancels when it is half done."""
    request = {"input_ids": list(name.encode()), "max_tokens": 100, "seed": 1}
    picture = Payload({"picture": np.full((SIDE, SIDE), len(name), np.float32)})
    async for item in await engine.start(name, request, picture):
        if isinstance(item, bytes):
            print(f"{name}: {len(item)} bytes of a picture")
        elif item == 0.5 and name == "impatient":
            break
    await engine.end(name)


async def main() -> None:
    """Paint three pictures in one batch, one of which is cancelled."""
    async with ThreadEngine(lambda: Scheduler(Diffusion(), chunk=8)) as engine:
        await engine.wait_ready()
        async with anyio.create_task_group() as clients:
            for name in ("cat", "impatient", "a long poem about the sea"):
                clients.start_soon(paint, engine, name)
        print("slots free:", (await engine.status())["backend"]["slots_free"], "of 4")


if __name__ == "__main__":
    anyio.run(main)
