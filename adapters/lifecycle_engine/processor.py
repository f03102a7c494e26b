"""What the API process does before the engine: chats in, engine requests out.

A processor is synchronous and is meant to run in a worker thread. It holds no
state per request; whatever it makes is in the returned `Prepared`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lifecycle import CostTooLarge

if TYPE_CHECKING:
    import numpy as np

    from lifecycle_zmq import ZmqEngine


_LOOK_SECONDS = 0.005
_ROOM = 2 * 2**30


class BadChat(ValueError):
    """A chat that cannot become a prompt; the message says why, never what."""


class BadImage(ValueError):
    """An image that cannot be used; the message says why, never what.

    Raised with a bare traceback: neither it nor its context holds on to the
    image's bytes.
    """


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: Text (`str`) and encoded images (`bytes`) in order.
    """

    role: str
    content: Sequence[str | bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Chat:
    """A validated request of an endpoint, whichever API it came by.

    Attributes:
        messages: The conversation; never empty.
        max_tokens: At most this many tokens are generated.
        temperature: 0 is greedy.
        seed: Makes sampling reproducible.
        ignore_eos: Generate ``max_tokens`` tokens whatever the model says.
        top_p: Share of the probability to draw from; 1 is all of it.
        logprobs: How many of the likeliest tokens to tell with each; ``None``
            tells nothing, not even the token's own.
        share: Whose request it is; the engine's slots go to shares in turn.
        session: Which of its share's conversations it is a turn of: the engine may
            go on from what it holds of the turn before.
        top_k: How many of the likeliest tokens to draw from; 0 is all.
        min_p: Least share of the likeliest token's probability to be drawn with.
    """

    messages: Sequence[Message] = field(repr=False)
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    top_p: float = 1.0
    logprobs: int | None = None
    share: str = field(default="", repr=False)
    session: str | None = field(default=None, repr=False)
    top_k: int = 0
    min_p: float = 0.0

    def request(self, input_ids: list[int], stop_ids: Sequence[int]) -> dict[str, Any]:
        """Return the engine's request map of this chat as tokens."""
        return {
            "input_ids": input_ids,
            "max_tokens": self.max_tokens,
            "stop_ids": list(stop_ids),
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": self.top_k,
            "min_p": float(self.min_p),
            "seed": self.seed,
            "logprobs": self.logprobs,
            "share": self.share,
            "session": self.session,
        }


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine is sent.

    Attributes:
        request: The request map; see `Chat.request`.
        tensors: Arrays by name; the payload to be handed off.
        prompt_tokens: ``len(request["input_ids"])``.
    """

    request: dict[str, Any] = field(repr=False)
    tensors: dict[str, np.ndarray] = field(repr=False)
    prompt_tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors together."""
        return sum(int(tensor.nbytes) for tensor in self.tensors.values())


# Makes an array of a shape and a dtype to write into: `numpy.empty`, for one.
Empty = Callable[[Any, Any], Any]


class Detokenizer(Protocol):
    """Token ids of one stream in, text out, never half a character."""

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids and return the text that they complete."""
        ...

    def spell(self, token: int) -> bytes:
        """Return the bytes of one token, whatever was pushed."""
        ...

    def flush(self) -> str:
        """Return what is left when no id will follow; U+FFFD for half a character."""
        ...


class Processor(Protocol):
    """Turns chats into engine requests for one model.

    Attributes:
        copies: How many times the bytes of its tensors it needs beside them at most,
            while it makes them: a gate is asked for that, too.
    """

    copies: int

    def prepare(self, chat: Chat) -> Prepared:
        """Build the prompt and the payload of a chat; runs in a worker thread.

        Raises:
            BadChat: The conversation cannot become a prompt.
            BadImage: An image cannot be decoded, or is too large or too thin.
        """
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer for one stream."""
        ...


def room(payload_bytes: int | None, arena_bytes: int) -> int:
    """Return the bytes of a gate over payloads: never more than the arena has.

    Args:
        payload_bytes: As wanted; ``None``: all that there is.
        arena_bytes: Of the arena; 0 if there is none.
    """
    if not arena_bytes:
        return payload_bytes or _ROOM
    from lifecycle_zmq import Arena  # a processor alone needs no link

    arena_bytes = Arena.cost(arena_bytes)
    return min(payload_bytes or arena_bytes, arena_bytes)


def in_arena(engine: ZmqEngine, *, patience: float = 2.0) -> Empty:
    """Return what makes arrays in the arena of an engine, while there is room.

    Args:
        engine: With an arena, which is there once the engine was entered.
        patience: Seconds to wait, in the worker thread, for a hole that is long
            enough; then the array is made elsewhere, and copied at hand-off.
    """
    from lifecycle_zmq import ArenaFull

    def empty(shape: Any, dtype: Any) -> Any:
        import numpy as np

        until = time.monotonic() + patience
        while True:
            try:
                return engine.arena.empty(shape, dtype)
            except ArenaFull:
                # The gate sees to it that the sum fits; it may be in pieces.
                if time.monotonic() >= until:
                    return np.empty(shape, dtype)
            except CostTooLarge:
                return np.empty(shape, dtype)
            time.sleep(_LOOK_SECONDS)

    return empty


S = TypeVar("S")


def bare(
    method: Callable[[S, Chat], Prepared],
) -> Callable[[S, Chat], Prepared]:
    """Let a processor's refusals leave it without their traceback.

    The frames on it hold the chat, and so every encoded image, for as long as
    somebody looks at the error.
    """

    @functools.wraps(method)
    def prepare(self: S, chat: Chat) -> Prepared:
        try:
            return method(self, chat)
        except (BadChat, BadImage) as error:
            refusal = error.with_traceback(None)
        del chat
        try:
            raise refusal
        finally:
            # The frame and the error would hold each other.
            del refusal

    return prepare
