"""What all APIs share: the API format, the response writer, text with stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Protocol

from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.processing.processor import Detokenizer
from lifecycle_zmq import EngineFailed

if TYPE_CHECKING:
    from lifecycle_engine.api.chat_request import ChatRequest
    from lifecycle_engine.api.request_body import ParsedRequest

Document = dict[str, Any]

_JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiFormat:
    """One HTTP API: how its requests are parsed and its responses are written.

    Attributes:
        parse: Validates a body and returns the request.
        answer: Returns the receiver of the pieces of an answer, given the response
            writer, the request, the model name, and the usage, which is counted
            meanwhile.
        frame: Encodes a document as one event of a stream.
        error: Returns status and document of an error, given the request id.
        end: Bytes after the last event of a stream.
        id_header: Response header that carries the request id.
        stream_type: Content type of a stream.
    """

    parse: Callable[[bytes], ChatRequest]
    answer: Callable[[ResponseWriter, ParsedRequest, str, Usage], Answer]
    frame: Callable[[Document], bytes]
    error: Callable[[ApiError, str | None], tuple[int, Document]]
    end: bytes = b""
    id_header: bytes = b"x-request-id"
    stream_type: bytes = b"text/event-stream; charset=utf-8"


# Made once: `json.dumps` makes an encoder for each document.
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def dump(document: Document | str) -> bytes:
    """Encode a document as JSON."""
    return _encode(document).encode()


class EventTemplate:
    """Events that differ in one text only, as those of nearly all tokens do."""

    __slots__ = ("_after", "_before")

    def __init__(
        self, frame: Callable[[Document], bytes], document: Callable[[str], Document]
    ) -> None:
        # No other value of a document is this one character.
        self._before, _, self._after = frame(document("\0")).partition(dump("\0"))

    def event(self, text: str) -> bytes:
        """Return the event with *text*."""
        return self._before + encode_basestring(text).encode() + self._after


def named_event(document: Document) -> bytes:
    """Encode a document as a server-sent event named after its ``type``."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), dump(document))


@dataclass(slots=True)
class Usage:
    """Token counts of one request so far.

    Attributes:
        cached_tokens: Prompt tokens that the engine had cached from an earlier turn of
            the conversation, and did not process again.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """Return the usage in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a text.

    Attributes:
        text: Empty while a character or a stop string is undecided.
        logprobs: Log probabilities of its tokens in OpenAI's format; ``None`` if the
            request did not ask for them.
    """

    text: str = field(repr=False)
    logprobs: list[dict[str, Any]] | None = field(default=None, repr=False)

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """Return the whole text of *pieces*."""
        text = "".join(piece.text for piece in pieces)
        if all(piece.logprobs is None for piece in pieces):
            return cls(text)
        return cls(text, [each for piece in pieces for each in piece.logprobs or ()])


class Answer(Protocol):
    """Receives the choices of one request piece by piece, each from its own task.

    If one of its coroutines is cancelled, the response may be cut.
    """

    async def piece(self, index: int, piece: Piece) -> None:
        """Receive a piece of a choice."""

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Receive the end of a choice, and the stop string that ended it, if any."""

    async def done(self) -> None:
        """All choices have ended."""


class ResponseWriter:
    """Writes the one response to a request: JSON, or a stream of events.

    A coroutine that is cancelled may have cut the response: call only `error` then.

    Attributes:
        request_id: Sent in a response header once it is known.
        started: The status has been sent; only the stream can follow.
        failure: Makes the last events of a stream that fails, if the API needs more
            than its error document.
    """

    failure: Callable[[ApiError], Sequence[Document]] | None

    def __init__(self, send: Any, api: ApiFormat) -> None:
        self._send = send
        self._api = api
        # Body of a JSON response whose head has been sent.
        self._pending_body: bytes | None = None
        self._complete = False
        self.request_id: str | None = None
        self.failure = None
        self.started = False

    async def json(self, status: int, document: Any) -> None:
        """Send *document* as the response."""
        await self._send_whole(status, dump(document), [])

    async def error(self, error: ApiError) -> None:
        """Send *error* as the response, or as the last event of a stream.

        If a JSON response was cut after its head, its body is sent instead, since the
        head has declared a length. Nothing is sent after a complete response: a
        request can still fail then, for example if the server closes its session.
        """
        if self._complete:
            return
        if self._pending_body is not None:
            await self._send_body()
            return
        status, document = self._api.error(error, self.request_id)
        if not self.started:
            await self._send_whole(status, dump(document), error.headers)
            return
        last = [document] if self.failure is None else self.failure(error)
        await self.part(b"".join(map(self._api.frame, last)), more=False)

    async def event(self, *documents: Document) -> None:
        """Stream *documents*, one event each; the first one starts the stream."""
        await self.part(b"".join(map(self._api.frame, documents)))

    async def done(self, *documents: Document) -> None:
        """End the stream, with *documents* as its last events."""
        last = b"".join(map(self._api.frame, documents))
        await self.part(last + self._api.end, more=False)

    async def part(self, body: bytes, *, more: bool = True) -> None:
        """Stream events that are encoded already; the first ones start the stream."""
        if not self.started:
            content_type = (b"content-type", self._api.stream_type)
            await self._start(200, [content_type, *_STREAM_HEADERS])
        await self._send(
            {"type": "http.response.body", "body": body, "more_body": more}
        )
        self._complete = not more

    async def _send_whole(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        self._pending_body = body
        await self._send_body()

    async def _send_body(self) -> None:
        await self._send({"type": "http.response.body", "body": self._pending_body})
        self._pending_body = None
        self._complete = True

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.request_id is not None:
            headers.append((self._api.id_header, self.request_id.encode()))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )
        # Only now: servers wait until a head may be sent, and a head whose sending is
        # cancelled there is not sent.
        self.started = True


class StopStrings:
    """Cuts a text at the first stop string, however the text is split into pieces."""

    __slots__ = ("_strings", "_undecided", "hit")

    hit: str | None

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._undecided = ""
        self.hit = None

    def push(self, text: str) -> str:
        """Add text; return what certainly comes before any stop string."""
        if not self._strings:
            return text
        undecided = self._undecided + text
        # The one that is complete first, which does not depend on the pieces; then the
        # longest.
        matches = [
            (at + len(each), at, each)
            for each in self._strings
            if (at := undecided.find(each)) >= 0
        ]
        if matches:
            self._undecided = ""
            _, at, self.hit = min(matches)
            return undecided[:at]
        keep = max(_overlap(undecided, each) for each in self._strings)
        self._undecided = undecided[len(undecided) - keep :]
        return undecided[: len(undecided) - keep]

    def flush(self) -> str:
        """Return the undecided text, when no more text will follow."""
        undecided, self._undecided = self._undecided, ""
        return undecided


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of *text* that is a prefix of *stop*."""
    longest = min(len(text), len(stop) - 1)
    return next(size for size in range(longest, -1, -1) if text.endswith(stop[:size]))


class TextDecoder:
    """The text of a stream of tokens, up to a stop string, and why it ended.

    Attributes:
        finish_reason: Why the text ended; empty until it has.
        stop: The stop string that ended it, if one did.
    """

    __slots__ = ("_detokenizer", "_stops", "_usage", "finish_reason", "stop")

    def __init__(
        self, detokenizer: Detokenizer, usage: Usage, stop: Sequence[str] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._usage = usage
        self._stops = StopStrings(stop) if stop else None
        self.finish_reason = ""
        self.stop: str | None = None

    def push(self, item: Any) -> Piece | None:
        """Add an item of the engine; return the text that it completes, if it has any.

        After a stop string no more may follow: `stop` is set.
        """
        if not isinstance(item, dict):
            return Piece(self._text_of(item))
        if "finish_reason" in item:
            self.finish_reason = str(item["finish_reason"])
        elif "cached_tokens" in item:
            self._count_cached(int(item["cached_tokens"]))
        else:
            return Piece(self._text_of([item["token"]]), self._logprobs(item))
        return None

    def flush(self) -> Piece:
        """Return the rest of the text, when the engine has sent all items.

        Raises:
            EngineFailed: The engine did not say why they ended.
        """
        if not self.finish_reason:
            message = "the stream ended without a finish_reason"
            raise EngineFailed("stream_cut", message)
        text, stops = self._detokenizer.flush(), self._stops
        if stops is None:
            return Piece(text)
        text = stops.push(text)
        self._take_stop(stops)
        return Piece(text + stops.flush())

    def _text_of(self, tokens: Sequence[int]) -> str:
        """The text of further tokens, up to the one that completes a stop string."""
        stops = self._stops
        if stops is None:
            self._usage.completion_tokens += len(tokens)
            return self._detokenizer.push(tokens)
        parts = []
        for token in tokens:  # several, if they queued up for a slow reader
            self._usage.completion_tokens += 1
            parts.append(stops.push(self._detokenizer.push([token])))
            if stops.hit is not None:
                # The reader leaves the stream now, which ends it in the engine.
                self._take_stop(stops)
                break
        return "".join(parts)

    def _take_stop(self, stops: StopStrings) -> None:
        if stops.hit is not None:
            self.finish_reason, self.stop = "stop", stops.hit

    def _count_cached(self, tokens: int) -> None:
        usage = self._usage
        # Of several choices, the one that reused the slot. Bounded, since engines of
        # users may report anything and some APIs subtract it.
        usage.cached_tokens = min(max(usage.cached_tokens, tokens), usage.prompt_tokens)

    def _logprobs(self, item: Document) -> list[dict[str, Any]]:
        top = [self._logprob(token, logprob) for token, logprob in item["top"]]
        chosen = self._logprob(item["token"], item["logprob"])
        return [{**chosen, "top_logprobs": top}]

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._detokenizer.spell(token)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}
