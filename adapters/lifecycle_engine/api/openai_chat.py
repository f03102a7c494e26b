"""OpenAI's chat completions: the response, complete or streamed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.api.base import (
    Answer,
    ApiFormat,
    Document,
    EventTemplate,
    Piece,
    ResponseWriter,
    Usage,
    dump,
)
from lifecycle_engine.api.chat_request import parse_request
from lifecycle_engine.api.request_body import ParsedRequest


@dataclass(frozen=True, slots=True)
class Completion:
    """Builds the documents of one chat completion."""

    id: str
    created: int
    model: str
    include_usage: bool = False

    def whole(
        self, choices: Iterable[tuple[Piece, str]], usage: Usage
    ) -> dict[str, Any]:
        """Return the complete response, given each text and why it ended."""
        documents = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": whole.text,
                    "refusal": None,
                },
                "logprobs": _logprobs(whole.logprobs),
                "finish_reason": reason,
            }
            for index, (whole, reason) in enumerate(choices)
        ]
        head = self._head("chat.completion")
        return {**head, "choices": documents, "usage": usage.document()}

    def first(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a choice: the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(index, delta)

    def text(
        self, index: int, text: str, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return a chunk of text."""
        return self._chunk(index, {"content": text}, logprobs=logprobs)

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Return the last chunk of a choice."""
        return self._chunk(index, {}, finish_reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the final chunk with the usage, sent if requested."""
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": usage.document()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def _logprobs(content: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if content is None else {"content": content, "refusal": None}


class CompleteAnswer:
    """Collects the choices and sends one response."""

    def __init__(
        self, completion: Completion, writer: ResponseWriter, usage: Usage, choices: int
    ) -> None:
        self._completion, self._writer, self._usage = completion, writer, usage
        self._pieces: list[list[Piece]] = [[] for _ in range(choices)]
        self._reasons = [""] * choices

    async def piece(self, index: int, piece: Piece) -> None:
        """Store a piece."""
        self._pieces[index].append(piece)

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Store the finish reason."""
        del stop  # not part of OpenAI's API
        self._reasons[index] = finish_reason

    async def done(self) -> None:
        """Send the response."""
        texts = map(Piece.joined, self._pieces)
        choices = zip(texts, self._reasons, strict=True)
        await self._writer.json(200, self._completion.whole(choices, self._usage))


class StreamedAnswer:
    """Sends each piece as an event.

    The status is sent with the first token: until then a failure can still become an
    error response that clients retry.
    """

    def __init__(
        self, completion: Completion, writer: ResponseWriter, usage: Usage, choices: int
    ) -> None:
        self._completion, self._writer, self._usage = completion, writer, usage
        self._templates: list[EventTemplate | None] = [None] * choices

    async def piece(self, index: int, piece: Piece) -> None:
        """Send a piece, unless it is empty."""
        template, events = self._templates[index], b""
        if template is None:
            template, events = self._begin(index)
        if piece.logprobs:
            events += _frame(self._completion.text(index, piece.text, piece.logprobs))
        elif piece.text:
            events += template.event(piece.text)
        if events:
            await self._writer.part(events)

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Send the last chunk of a choice."""
        del stop
        events = b"" if self._templates[index] else self._begin(index)[1]
        events += _frame(self._completion.last(index, finish_reason))
        await self._writer.part(events)

    async def done(self) -> None:
        """End the stream, with the usage if requested."""
        usage = [self._completion.usage(self._usage)]
        await self._writer.done(*(usage if self._completion.include_usage else ()))

    def _begin(self, index: int) -> tuple[EventTemplate, bytes]:
        """Return what encodes the events of a choice, and the first of them."""
        template = EventTemplate(_frame, partial(self._completion.text, index))
        self._templates[index] = template
        return template, _frame(self._completion.first(index))


def _answer(
    writer: ResponseWriter, parsed: ParsedRequest, model: str, usage: Usage
) -> Answer:
    completion = Completion(
        id=f"chatcmpl-{writer.request_id}",
        created=int(time.time()),
        model=model,
        include_usage=parsed.include_usage,
    )
    kind = StreamedAnswer if parsed.stream else CompleteAnswer
    return kind(completion, writer, usage, parsed.choices)


def _frame(document: Document) -> bytes:
    return b"data: " + dump(document) + b"\n\n"


def _error(error: ApiError, request_id: str | None) -> tuple[int, Document]:
    del request_id  # sent in a header
    return error.status, {"error": error.fields}


OPENAI = ApiFormat(
    parse=parse_request,
    answer=_answer,
    frame=_frame,
    end=b"data: [DONE]\n\n",
    error=_error,
)
