"""One answer or several, as one document or as events, in the form of the API."""

from __future__ import annotations

from typing import Any, Protocol

import anyio

from .openai_wire import Completion, Usage
from .replies import Reply
from .texts import Piece


class Answer(Protocol):
    """Takes the choices of one request piece by piece, from a task each."""

    async def piece(self, index: int, piece: Piece) -> None:
        """Take a piece of a choice."""
        ...

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Take the end of a choice, and the stop string that ended it, if one did."""
        ...

    async def done(self) -> None:
        """All choices have ended."""
        ...


class Whole:
    """Collects the choices and answers once."""

    def __init__(
        self, completion: Completion, reply: Reply, usage: Usage, choices: int
    ) -> None:
        self._completion, self._reply, self._usage = completion, reply, usage
        self._pieces: list[list[Piece]] = [[] for _ in range(choices)]
        self._reasons = [""] * choices

    async def piece(self, index: int, piece: Piece) -> None:
        """Keep it."""
        self._pieces[index].append(piece)

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Keep why."""
        del stop  # OpenAI's API does not tell which
        self._reasons[index] = finish_reason

    async def done(self) -> None:
        """Answer.

        Cancellation:
            The response may be cut.
        """
        choices = []
        for pieces, reason in zip(self._pieces, self._reasons, strict=True):
            told = [each for piece in pieces for each in piece.logprobs or ()]
            asked = any(piece.logprobs is not None for piece in pieces)
            text = "".join(piece.text for piece in pieces)
            choices.append((text, reason, told if asked else None))
        await self._reply.json(200, self._completion.whole(choices, self._usage))


class Streamed:
    """Sends each piece as an event.

    The status is not sent before the first token: until then a failure can still
    be an answer that clients retry.
    """

    def __init__(
        self, completion: Completion, reply: Reply, usage: Usage, choices: int
    ) -> None:
        self._completion, self._reply, self._usage = completion, reply, usage
        self._begun = [False] * choices
        # Choices are read by tasks of their own; events go out one by one.
        self._turn = anyio.Lock(fast_acquire=True)

    async def piece(self, index: int, piece: Piece) -> None:
        """Send it, unless it says nothing.

        Cancellation:
            The response may be cut.
        """
        async with self._turn:
            await self._begin(index)
            if piece.text or piece.logprobs:
                await self._event(
                    self._completion.text(index, piece.text, piece.logprobs)
                )

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Send the last chunk of a choice.

        Cancellation:
            As for `piece`.
        """
        del stop
        async with self._turn:
            await self._begin(index)
            await self._event(self._completion.last(index, finish_reason))

    async def done(self) -> None:
        """End the stream, with the usage if it was asked for.

        Cancellation:
            As for `piece`.
        """
        if self._completion.include_usage:
            await self._event(self._completion.usage(self._usage))
        await self._reply.done()

    async def _begin(self, index: int) -> None:
        if not self._begun[index]:
            self._begun[index] = True
            await self._event(self._completion.first(index))

    async def _event(self, document: dict[str, Any]) -> None:
        await self._reply.event(document)
