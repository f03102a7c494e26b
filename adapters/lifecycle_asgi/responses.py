"""Responses that a middleware sends by itself, and so that they arrive.

A server that closes a connection while it has unread bytes resets it, and a client that
is still sending then loses the response that it was sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import anyio

from lifecycle_asgi.asgi_types import App, Scope, Send
from lifecycle_asgi.body import RequestBody

Headers = list[tuple[bytes, bytes]]
Response = tuple[int, Headers, bytes]

LINGER_SECONDS = 5.0
"""Longest time that the rest of a refused body is read and dropped."""
_LAST_SECONDS = 0.2
"""The same once a server shuts down: what a client was sending meanwhile."""
MAX_UNACCEPTABLE = 8 * 2**20
"""Most bytes that are dropped of a body that the server would never accept."""

# Middleware that does nothing but add headers: of Starlette, of vLLM, and of
# asgi-correlation-id.
_ADDS_HEADERS: Final = frozenset(
    {"CORSMiddleware", "XRequestIdMiddleware", "CorrelationIdMiddleware"}
)
_ID: Final = "x-request-id"
_MOST_MIDDLEWARE: Final = 64


def with_headers_of(app: Any, answer: App) -> App:
    """Return *answer* with the middleware of *app* around it that adds headers.

    A response instead of that of *app* then has its CORS headers, without which no web
    page could read it, and the id of the request.
    """
    for middleware in reversed([*_adding_headers(app)]):
        with suppress(AttributeError, TypeError):  # another class of that name
            around = copy.copy(middleware)
            around.app = answer
            answer = around
    return answer


def gives_ids(app: Any) -> bool:
    """Whether *app* has middleware that gives each response an ``x-request-id``."""
    return any(
        getattr(middleware, "header_name", _ID).lower() == _ID
        for middleware in _adding_headers(app)
        if "Id" in type(middleware).__name__
    )


def _adding_headers(app: Any) -> Iterator[Any]:
    for _ in range(_MOST_MIDDLEWARE):
        if type(app).__name__ in _ADDS_HEADERS and hasattr(app, "app"):
            yield app
        # An application of Starlette makes its stack when it starts.
        app = getattr(app, "app", None) or getattr(app, "middleware_stack", None)


async def send_response(send: Send, response: Response) -> None:
    """Send a response of status, headers and body.

    Cancellation:
        The response may be cut off.
    """
    status, headers, body = response
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Refusing:
    """Sends one response, and ends it when the rest of the body was dropped."""

    __slots__ = ("_body", "_dropping", "_lingers", "_scope", "_send")

    def __init__(self, scope: Scope, body: RequestBody, send: Send) -> None:
        self._scope = scope
        self._body = body
        self._send = send
        self._lingers = False
        self._dropping = anyio.CancelScope()

    def stop(self) -> None:
        """Linger only for a moment from now on. Idempotent."""
        until = anyio.current_time() + _LAST_SECONDS
        self._dropping.deadline = min(self._dropping.deadline, until)

    async def send(self, response: Response) -> None:
        """Send all of a response whose headers have the length of its content.

        Cancellation:
            The response may be cut off.
        """
        if not self._body.is_expected(self._scope):
            await send_response(self._send, response)
            return
        status, headers, content = response
        start = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(start)
        part = {"type": "http.response.body", "body": content, "more_body": True}
        await self._send(part)
        self._lingers = True

    async def linger(self, *, max_bytes: int) -> None:
        """Drop up to *max_bytes* of the body, for a few seconds, and end the response.

        Cancellation:
            The client has the response, whose connection may be reset.
        """
        if self._lingers:
            self._lingers = False
            until = anyio.current_time() + LINGER_SECONDS
            with self._dropping as dropping:
                dropping.deadline = min(dropping.deadline, until)
                await self._body.drop_rest(max_bytes)
            with suppress(OSError):  # the client may have left
                await self._send({"type": "http.response.body", "body": b""})
