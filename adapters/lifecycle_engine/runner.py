"""The protocol between the scheduler and a model.

A runner owns the model, the KV rows and what it must remember per slot; the
scheduler owns the requests, the slots' allocation and the payloads. Everything
here is synchronous and called from one thread, between two steps of which
requests may leave at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


class DeviceLost(BaseException):
    """The device is in a state that no later call can recover from.

    A CUDA error of this kind stays for the life of the process, so the process
    has to end: the worker leaves with `EXIT_DEVICE_LOST`. Not an `Exception`, so
    that nobody who lets a request fail alone takes it for one of those.
    """


EXIT_DEVICE_LOST = 77


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request draws its tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p: Draw from the likeliest tokens that have this much of the
            probability together; 1 is all of them.
        seed: Makes the draws reproducible; ``None`` takes one by chance.
        logprobs: How many of the likeliest tokens to tell with each token, and
            its own log probability; ``None`` tells nothing.
        top_k: Draw from so many of the likeliest tokens, and those that are as likely
            as the last of them; 0 is all of them.
        min_p: Draw no token that is less likely than this share of the likeliest.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as a runner sees it.

    Attributes:
        input_ids: Token ids with every image pad already expanded.
        tensors: Buffers by name (C contiguous, with format and shape) and what
            the runner adds between the chunks of a prefill. The scheduler strips
            it, down to `Runner.keep`, after the last chunk that needs it, so a
            runner must not copy references out of it.
        sampling: How tokens are drawn.
        session: Whether a further prompt may go on from the slot; see `Resumes`.
    """

    input_ids: Sequence[int] = field(repr=False)
    tensors: dict[str, Any] = field(repr=False)
    sampling: Sampling = Sampling()
    session: bool = False


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one step made for one slot.

    Attributes:
        item: What is streamed: any plain value. A model that writes text streams
            a list of one token id.
        token: What a request's stop ids are compared with; ``None`` if the model
            has no tokens.
        last: The model is done with this slot: nothing follows the item.
    """

    item: Any = field(repr=False)
    token: int | None = None
    last: bool = False


class Runner(Protocol):
    """A model with a fixed number of slots.

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

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return the position in ``input_ids`` from which on no tensor is needed.

        The scheduler strips the prompt after the chunk that reaches it; 0 is
        after the first one. Before that a prefill may begin again at 0, in this
        slot or another, and has all it needs; a prompt that came without tensors
        may do so until its last chunk.
        """
        ...

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Run ``input_ids[start:stop]`` into a slot.

        The chunks of a prompt come in order and without a gap, with steps and
        other slots' chunks between them; one at 0 begins anew.

        Returns:
            What the model makes of the whole prompt, from its last chunk;
            ``None`` from those before.

        Raises:
            DeviceLost: The process has to end. Any other exception fails this
                request alone; the scheduler then calls `free`.
        """
        ...

    def decode(self, slots: Sequence[int]) -> Sequence[Emitted | Exception]:
        """Run one step for each of the slots, whose prefill is done.

        Returns:
            An item for each slot, in order. An exception in its place fails that
            request alone, as does anything else that is no `Emitted`.

        Raises:
            DeviceLost: The process has to end. Any other exception fails the
                requests of this step.
        """
        ...

    def free(self, slot: int) -> None:
        """Forget what is kept for a slot; a slot without anything is a no-op.

        Raises:
            DeviceLost: The process has to end. Any other exception is logged, and the
                slot is used again: the first chunk in it begins at 0.
        """

    def status(self) -> dict[str, Any]:
        """Return counters of the runner's own, of plain values; may be empty."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """What a runner has beside `Runner` if turns of a conversation share a slot.

    After the last item of a prompt with `Prompt.session` its slot is then not freed
    until the scheduler needs it: it is either freed later, or resumed.
    """

    def resume(self, slot: int, prompt: Prompt) -> int:
        """Keep what a slot holds of a further prompt, and forget the rest.

        Returns:
            How many of the prompt's first tokens need not be read again, less than
            all: the first chunk begins there, and at 0 begins anew.

        Raises:
            DeviceLost: The process has to end. Any other exception fails this
                request alone; the scheduler then calls `free`.
        """
        ...
