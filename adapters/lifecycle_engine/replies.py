"""Writing one response: JSON, or server-sent events."""

from __future__ import annotations

import json
from typing import Any

from .api_errors import ApiError

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Reply:
    """The one response to a request.

    Args:
        send: The ASGI ``send``.

    Attributes:
        request_id: Comes back as ``x-request-id`` once it is known.
        started: The status has been sent; from here on there is only the stream.
    """

    __slots__ = ("_send", "request_id", "started")

    def __init__(self, send: Any) -> None:
        self._send = send
        self.request_id: str | None = None
        self.started = False

    async def json(self, status: int, document: Any) -> None:
        """Answer with *document*.

        Cancellation:
            The response may be cut; call nothing else afterwards.
        """
        await self._whole(status, _dump(document), [])

    async def error(self, error: ApiError) -> None:
        """Tell the client of *error*: as the response, or as the stream's last event.

        Cancellation:
            As for `json`.
        """
        if self.started:
            await self._event(error.body, more=False)
        else:
            await self._whole(error.status, error.body, error.headers)

    async def event(self, document: Any) -> None:
        """Stream *document* as one event, beginning the stream if need be.

        Cancellation:
            As for `json`.
        """
        await self._event(_dump(document), more=True)

    async def done(self) -> None:
        """End the stream as OpenAI does.

        Cancellation:
            As for `json`.
        """
        await self._event(b"[DONE]", more=False)

    async def _event(self, data: bytes, *, more: bool) -> None:
        if not self.started:
            await self._start(200, list(_EVENTS))
        body = b"data: " + data + b"\n\n"
        await self._send(
            {"type": "http.response.body", "body": body, "more_body": more}
        )

    async def _whole(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        if self.request_id is not None:
            headers.append((b"x-request-id", self.request_id.encode()))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )


def _dump(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
