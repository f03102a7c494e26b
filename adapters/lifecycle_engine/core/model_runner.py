"""The `Runner` protocol between the scheduler and a model.

A runner owns the model, the KV cache and its own state for each slot. The scheduler
owns the requests, the allocation of slots and the payloads. All calls are synchronous
and made from one thread; requests may end between any two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable


class DeviceLost(BaseException):
    """The device is in a state that no later call can recover from.

    Such a CUDA error stays for the life of the process, so the process has to end:
    the worker exits with `EXIT_DEVICE_LOST`. It is not an `Exception`, so that code
    which fails a single request on any error does not catch it.
    """


EXIT_DEVICE_LOST = 77


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 is greedy decoding.
        top_p: Sample from the most likely tokens whose probabilities add up to this
            value; 1 keeps all tokens.
        seed: Makes sampling reproducible; ``None`` uses a random seed.
        logprobs: Number of most likely tokens to return with each token, beside the
            token's own log probability; ``None`` returns no log probabilities.
        top_k: Sample from this many of the most likely tokens, and from those that
            are as likely as the last of them; 0 keeps all tokens.
        min_p: Exclude tokens less likely than this fraction of the most likely one.
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
        input_ids: Token ids with every image placeholder already expanded.
        tensors: Buffers by name (C contiguous, with format and shape) and the state
            that the runner adds between the chunks of a prefill. After the last chunk
            that needs it the scheduler strips it down to `Runner.keep`, so a runner
            must not copy references out of it.
        sampling: Sampling parameters.
        session: Whether a later prompt may resume from the slot; see `Resumes`.
    """

    input_ids: Sequence[int] = field(repr=False)
    tensors: dict[str, Any] = field(repr=False)
    sampling: Sampling = Sampling()
    session: bool = False


@dataclass(frozen=True, slots=True)
class Emitted:
    """The output of one step for one slot.

    Attributes:
        item: The streamed item: any plain value. A text model streams a list of one
            token id.
        token: The token that is compared with the request's stop ids; ``None`` if
            the model has no tokens.
        last: The model has finished this slot: no item follows.
    """

    item: Any = field(repr=False)
    token: int | None = None
    last: bool = False


class Runner(Protocol):
    """A model with a fixed number of slots.

    Attributes:
        slots: Number of allocatable slots, numbered from 0. A runner may reserve a
            further row for padding; it is never in ``range(slots)``.
        max_length: Tokens that one slot holds, prompt and output together.
        vocab_size: Token ids are in ``range(vocab_size)``.
        keep: Paths in `Prompt.tensors` that the strip leaves in place.
    """

    slots: int
    max_length: int
    vocab_size: int
    keep: Sequence[str]

    def check(self, prompt: Prompt) -> None:
        """Reject a prompt that prefill could not run.

        Raises:
            ValueError: Names the value, the limit and the remedy, never payload
                content.
        """

    def needs_tensors_until(self, prompt: Prompt) -> int:
        """Return the position in ``input_ids`` after which no tensor is needed.

        The scheduler strips the prompt after the chunk that reaches it; 0 means after
        the first chunk. Until then a prefill may restart at 0, in this slot or
        another, with all tensors in place; a prompt without tensors may restart until
        its last chunk.
        """
        ...

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        """Run ``input_ids[start:stop]`` into a slot.

        The chunks of a prompt arrive in order and without gaps; decode steps and
        chunks of other slots may run between them. A chunk that starts at 0 discards
        the slot's contents.

        Returns:
            The first output, from the last chunk of the prompt; ``None`` from the
            chunks before it.

        Raises:
            DeviceLost: The process has to end. Any other exception fails only this
                request; the scheduler then calls `free`.
        """
        ...

    def decode(
        self, slots: Sequence[int]
    ) -> Sequence[Emitted | list[Emitted] | Exception]:
        """Run one decode step for slots whose prefill is complete.

        Returns:
            One output for each slot, in order, or a list of several that follow each
            other. Those after the last one of a request are dropped. An exception in
            place of an output fails only that slot's request, as does any value that
            is not an `Emitted`.

        Raises:
            DeviceLost: The process has to end. Any other exception fails all
                requests of this step.
        """
        ...

    def free(self, slot: int) -> None:
        """Discard a slot's state; an empty slot is a no-op.

        Raises:
            DeviceLost: The process has to end. Any other exception is logged and the
                slot is reused: its next prefill starts at 0.
        """

    def status(self) -> dict[str, Any]:
        """Return the runner's own counters as plain values; may be empty."""
        ...


class PromptChunk(NamedTuple):
    """A chunk of a prompt; the arguments of `Runner.prefill`."""

    slot: int
    prompt: Prompt
    start: int
    stop: int


@runtime_checkable
class PrefillsTogether(Protocol):
    """Optional extension of `Runner`: prefill several short prompts in one pass.

    All positions of the prompts, padded to the longest of them, fit into the chunk of
    one step. So a step takes no longer, and many short prompts wait for fewer steps.
    """

    def prefill_together(
        self, chunks: Sequence[PromptChunk]
    ) -> Sequence[Emitted | Exception | None]:
        """Run the last chunks of several prompts, each in a slot of its own.

        Returns:
            For each chunk what `Runner.prefill` would return, or an exception that
            fails only its request.

        Raises:
            DeviceLost: The process has to end. After any other exception the scheduler
                runs each of the chunks by `Runner.prefill`.
        """
        ...


@runtime_checkable
class Resumes(Protocol):
    """Optional extension of `Runner`: resume a conversation from a cached slot.

    After the last output of a prompt with `Prompt.session` the scheduler caches the
    slot instead of freeing it. Later it either resumes the slot or frees it.
    """

    def resume(self, slot: int, prompt: Prompt) -> int:
        """Keep the cached prefix that a slot has in common with a new prompt.

        The rest of the slot's contents is discarded.

        Returns:
            Number of leading prompt tokens that prefill can skip, always fewer than
            all of them. The first chunk starts there; 0 means nothing was reusable.

        Raises:
            DeviceLost: The process has to end. Any other exception fails only this
                request; the scheduler then calls `free`.
        """
        ...
