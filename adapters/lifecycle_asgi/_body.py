"""Refuse a request body that is too large before it is in memory."""

from __future__ import annotations

import json
from contextlib import suppress

from lifecycle_asgi._types import App, Message, Receive, Scope, Send


class BodyTooLarge(Exception):
    """Raised by ``receive`` under `BodyLimit` when a body passes the limit.

    Attributes:
        limit: Bytes that were allowed.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class BodyLimit:
    """Answers 413 to bodies larger than a limit.

    A declared length is refused before anything is read and before the
    application is called. An undeclared one is metered while it is read: as soon
    as it passes the limit, 413 is answered unless the response has begun, and the
    application's ``receive`` raises `BodyTooLarge`. Whatever it then still sends
    is dropped, and the exception ends here.

    The connection is not closed: a client that is still sending would be reset
    and might never read the answer, so the server is left to read and drop the
    rest.

    Args:
        app: The application to wrap.
        max_bytes: The largest body to let through.
    """

    def __init__(self, app: App, *, max_bytes: int) -> None:
        if max_bytes < 0:
            message = f"max_bytes must not be negative, got {max_bytes}"
            raise ValueError(message)
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Cancellation:
            Passes through.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared(scope) > self._max_bytes:
            await _refuse(send, self._max_bytes)
        else:
            await self._metered(scope, receive, send)

    async def _metered(self, scope: Scope, receive: Receive, send: Send) -> None:
        meter = _Meter(receive, send, self._max_bytes)
        try:
            await self._app(scope, meter.receive, meter.send)
        except BodyTooLarge:
            if not meter.refused:
                raise
        except BaseExceptionGroup as group:  # of an application that reads in a task
            if not meter.refused:
                raise
            _, rest = group.split(BodyTooLarge)
            if rest is not None:
                raise rest from None


class _Meter:
    """Counts one body, and takes the response over if it is too large."""

    __slots__ = ("_left", "_limit", "_receive", "_send", "_started", "refused")

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._left = limit
        self._started = False
        self.refused = False

    async def receive(self) -> Message:
        if self._left < 0:
            raise BodyTooLarge(self._limit)
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left >= 0:
            return message
        del message
        if not self._started:
            self._started = self.refused = True
            await _refuse(self._send, self._limit)
        raise BodyTooLarge(self._limit)

    async def send(self, message: Message) -> None:
        if self.refused:
            return
        self._started = True
        await self._send(message)


def _declared(scope: Scope) -> int:
    """The declared length; 0 if there is none, or none that is a number."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            with suppress(ValueError):
                return int(value)
    return 0


async def _refuse(send: Send, limit: int) -> None:
    message = f"The request body is larger than {limit} bytes; send less"
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_large",
    }
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
