"""The plain dialect: one document, or one a line as the text comes."""

from __future__ import annotations

from typing import Any

import anyio

from lifecycle_engine.incoming import Incoming

from .dialect import Dialect, Document, dump
from .generate_schema import parse_generate
from .openai_dialect import OPENAI
from .openai_wire import Usage
from .replies import Reply
from .texts import Piece


class Outputs:
    """The answers to one request.

    Args:
        reply: The response.
        model: The served model.
        usage: Counted by whoever reads the tokens.
        incoming: How many answers, and whether they are sent as they come.
    """

    def __init__(
        self, reply: Reply, model: str, usage: Usage, incoming: Incoming
    ) -> None:
        self._reply, self._usage, self._stream = reply, usage, incoming.stream
        self._head = {"id": reply.request_id, "model": model}
        self._pieces: list[list[Piece]] = [[] for _ in range(incoming.choices)]
        self._ends: list[Document] = [{} for _ in range(incoming.choices)]
        # Answers are read by tasks of their own; lines go out one by one.
        self._turn = anyio.Lock(fast_acquire=True)

    async def piece(self, index: int, piece: Piece) -> None:
        """Keep it, or send it unless it says nothing.

        Cancellation:
            The response may be cut.
        """
        if not self._stream:
            self._pieces[index].append(piece)
        elif piece.text or piece.logprobs:
            await self._line({"index": index, **_said([piece])})

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Keep why, or send it.

        Cancellation:
            As for `piece`.
        """
        self._ends[index] = {"finish_reason": finish_reason, "stop": stop}
        if self._stream:
            await self._line({"index": index, "text": "", **self._ends[index]})

    async def done(self) -> None:
        """Answer, or end the stream.

        Cancellation:
            As for `piece`.
        """
        usage = {**self._head, "usage": self._usage.document()}
        if self._stream:
            await self._line(usage)
            await self._reply.done()
            return
        outputs = [
            {**_said(pieces), **end}
            for pieces, end in zip(self._pieces, self._ends, strict=True)
        ]
        await self._reply.json(200, {**usage, "outputs": outputs})

    async def _line(self, document: Document) -> None:
        async with self._turn:
            await self._reply.event(document)


def _said(pieces: list[Piece]) -> Document:
    said: dict[str, Any] = {"text": "".join(piece.text for piece in pieces)}
    if any(piece.logprobs is not None for piece in pieces):
        said["logprobs"] = [each for piece in pieces for each in piece.logprobs or ()]
    return said


def _answer(reply: Reply, incoming: Incoming, model: str, usage: Usage) -> Outputs:
    return Outputs(reply, model, usage, incoming)


def _line(document: Document) -> bytes:
    return dump(document) + b"\n"


PLAIN = Dialect(
    parse=parse_generate,
    answer=_answer,
    frame=_line,
    end=b"",
    error=OPENAI.error,
    id_header=b"x-request-id",
    stream_type=b"application/x-ndjson",
)
