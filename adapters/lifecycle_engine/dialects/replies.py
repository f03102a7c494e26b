"""Writing one response: JSON, or server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lifecycle_engine.api_errors import ApiError

from .dialect import Dialect, Document, dump

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Reply:
    """The one response to a request.

    Args:
        send: The ASGI ``send``.
        dialect: In whose form it is written.

    Attributes:
        request_id: Comes back as a header once it is known.
        started: The status has been sent; from here on there is only the stream.
        failure: Makes the last events of a stream that fails, where the dialect's
            error would not be enough.
    """

    __slots__ = ("_dialect", "_owed", "_send", "failure", "request_id", "started")

    failure: Callable[[ApiError], Sequence[Document]] | None

    def __init__(self, send: Any, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        # The body of a document whose head is out.
        self._owed: bytes | None = None
        self.request_id: str | None = None
        self.failure = None
        self.started = False

    async def json(self, status: int, document: Any) -> None:
        """Answer with *document*.

        Cancellation:
            The response may be cut; call nothing else afterwards.
        """
        await self._whole(status, dump(document), [])

    async def error(self, error: ApiError) -> None:
        """Tell the client of *error*: as the response, or as the stream's last event.

        Where a document was cut behind its head, the rest of it is sent instead: the
        head has said how long it is.

        Cancellation:
            As for `json`.
        """
        if self._owed is not None:
            await self._pay()
            return
        status, document = self._dialect.error(error, self.request_id)
        if not self.started:
            await self._whole(status, dump(document), error.headers)
            return
        last = [document] if self.failure is None else self.failure(error)
        await self._part(b"".join(map(self._dialect.frame, last)), more=False)

    async def event(self, *documents: Document) -> None:
        """Stream *documents*, an event each, beginning the stream if need be.

        Cancellation:
            As for `json`.
        """
        await self._part(b"".join(map(self._dialect.frame, documents)), more=True)

    async def done(self, *documents: Document) -> None:
        """End the stream, with *documents* as its last events, if any.

        Cancellation:
            As for `json`.
        """
        last = b"".join(map(self._dialect.frame, documents))
        await self._part(last + self._dialect.end, more=False)

    async def _part(self, body: bytes, *, more: bool) -> None:
        if not self.started:
            kind = (b"content-type", self._dialect.stream_type)
            await self._start(200, [kind, *_EVENTS])
        await self._send(
            {"type": "http.response.body", "body": body, "more_body": more}
        )

    async def _whole(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        self._owed = body
        await self._pay()

    async def _pay(self) -> None:
        await self._send({"type": "http.response.body", "body": self._owed})
        self._owed = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.request_id is not None:
            headers.append((self._dialect.id_header, self.request_id.encode()))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )
        # Not before: servers wait until a head may be sent, and one whose sending is
        # cancelled there is not sent.
        self.started = True
