"""The protocol between the scheduler and a model.

A runner owns the model, the KV rows and what it must remember per slot; the
scheduler owns the requests, the slots' allocation and the payloads. Everything
here is synchronous and called from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class DeviceLost(BaseException):
    """The device is in a state that no later call can recover from.

    A CUDA error of this kind stays for the life of the process, so the process
    has to end: the worker leaves with `EXIT_DEVICE_LOST`. Not an `Exception`, so
    that nobody who lets a request fail alone takes it for one of those.
    """


EXIT_DEVICE_LOST = 77


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as a runner sees it.

    Attributes:
        input_ids: Token ids with every image pad already expanded.
        tensors: Buffers by name (C contiguous, with format and shape) and, once
            prefill has run, what the runner wants to keep by the paths that its
            `Runner.keep` names. The scheduler strips it right after prefill, so
            a runner must not copy references out of it.
        temperature: 0 is greedy.
        seed: Makes sampling reproducible; ``None`` draws one.
    """

    input_ids: Sequence[int] = field(repr=False)
    tensors: dict[str, Any] = field(repr=False)
    temperature: float = 0.0
    seed: int | None = None


class Runner(Protocol):
    """A model with a fixed number of KV slots.

    Attributes:
        slots: Allocatable slots, numbered from 0. A runner may have a reserved
            row beside them for padded lanes; it is never in ``range(slots)``.
        max_length: Tokens that one slot holds, prompt and output together.
        vocab_size: Token ids are in ``range(vocab_size)``.
        keep: Paths in `Prompt.tensors` that must survive the strip.
    """

    slots: int
    max_length: int
    vocab_size: int
    keep: Sequence[str]

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt that prefill could not run.

        Raises:
            ValueError: With the value, the limit and the remedy, never with
                payload content.
        """

    def prefill(self, slot: int, prompt: Prompt) -> int:
        """Run the prompt into a slot and return its first token.

        Raises:
            DeviceLost: The process has to end. Any other exception fails this
                request alone; the scheduler then calls `free`.
        """
        ...

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Run one step: the last token of each slot in, the next one out.

        Raises:
            DeviceLost: The process has to end. Any other exception fails the
                requests of this step.
        """
        ...

    def free(self, slot: int) -> None:
        """Forget what is kept for a slot; a slot without anything is a no-op."""
