"""A model that is not a language model, behind the engine's scheduler.

A toy of a diffusion model: a prompt and a small picture go in; a step takes some
noise out of all pictures of the batch; each request streams how far it is, and at
last its picture. Batching, chunked prompts, cancelling and clean-up are the
scheduler's. The scheduler is a backend: examples/engine.py gives one its process.

Install: pip install "anyio-lifecycle[engine]"
Run it:  python examples/own_runner.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lifecycle_engine.runner import Emitted, Prompt
from lifecycle_engine.scheduler import Scheduler

SIDE, STEPS = 16, 8


class Diffusion:
    """Everything that the scheduler asks of a model."""

    slots, max_length, vocab_size = 4, 512, 256
    keep: Sequence[str] = ()

    def __init__(self) -> None:
        shape = (2, self.slots, SIDE, SIDE)
        self.wanted, self.pictures = np.zeros(shape, np.float32)
        self.steps = np.zeros(self.slots, int)

    def check(self, prompt: Prompt) -> None:
        """Refuse what prefill could not run."""
        if np.shape(prompt.tensors.get("picture", ())) != (SIDE, SIDE):
            raise ValueError(f"picture must be {SIDE} x {SIDE} float32")

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """The first chunk reads the picture; after it the payload is dropped."""
        return 0

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Read a part of the prompt; the last part begins the picture."""
        if start == 0:
            self.wanted[slot] = prompt.tensors["picture"]
        for token in prompt.input_ids[start:stop]:
            self.wanted[slot] += token / 1e4
        if stop < len(prompt.input_ids):
            return None
        chance = np.random.default_rng(prompt.sampling.seed)
        self.pictures[slot] = chance.standard_normal((SIDE, SIDE))
        self.steps[slot] = 0
        return Emitted({"done": 0})

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        """Take some noise out of all pictures at once; give those that are done."""
        at = list(slots)
        self.pictures[at] += (self.wanted[at] - self.pictures[at]) / 2
        self.steps[at] += 1
        return [
            Emitted({"done": self.steps[slot] / STEPS})
            if self.steps[slot] < STEPS
            else Emitted({"picture": self.pictures[slot].tobytes()}, last=True)
            for slot in slots
        ]

    def free(self, slot: int) -> None:
        """Forget a request, whenever it ends."""
        self.wanted[slot] = self.pictures[slot] = 0

    def status(self) -> dict[str, Any]:
        """Counters of one's own."""
        return {}


def main() -> None:
    """Paint three pictures together, one of which nobody waits for."""
    scheduler = Scheduler(Diffusion(), chunk=8)
    for name in ("cat", "impatient", "a long poem about the sea"):
        request = {"input_ids": list(name.encode()), "max_tokens": 100, "seed": 1}
        picture = np.full((SIDE, SIDE), len(name), np.float32)
        scheduler.start(name, request, {"picture": picture.data})
    while scheduler.busy:
        for output in scheduler.step():
            for item in output.items:
                if "picture" in item:
                    print(f"{output.key}: {len(item['picture'])} bytes of a picture")
                elif item.get("done", 0) >= 0.5 and output.key == "impatient":
                    scheduler.cancel(output.key)
            if output.finish:
                print(f"{output.key}: {output.finish.reason}")
    print(f"slots free: {scheduler.status()['slots_free']} of {Diffusion.slots}")


if __name__ == "__main__":
    main()
