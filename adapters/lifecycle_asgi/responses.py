"""Responses that a middleware sends by itself, and so that they arrive.

A server that closes a connection while it has unread bytes resets it, and a client that
is still sending then loses the response that it was sent.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from lifecycle_asgi._types import Message, Receive, Scope, Send

Headers = list[tuple[bytes, bytes]]
Response = tuple[int, Headers, bytes]

LINGER_SECONDS = 5.0
"""Longest time that the rest of a refused body is read and dropped."""
MAX_UNACCEPTABLE = 8 * 2**20
"""Most bytes that are dropped of a body that the server would never accept."""


class RequestBody:
    """A server's ``receive``, and how far the body has come.

    Args:
        receive: The server's.
        begun: Something has been asked for.
        complete: The last part has come.
    """

    __slots__ = ("_begun", "_complete", "_receive")

    def __init__(
        self, receive: Receive, *, begun: bool = False, complete: bool = False
    ) -> None:
        self._receive = receive
        self._begun = begun
        self._complete = complete

    async def receive(self) -> Message:
        """Return the next message.

        Cancellation:
            As for the server's ``receive``.
        """
        self._begun = True
        message = await self._receive()
        if not message.get("more_body", False):  # or the client has left
            self._complete = True
        return message

    def is_expected(self, scope: Scope) -> bool:
        """Whether there is more to come on a connection of this request alone."""
        if self._complete or not scope.get("http_version", "1.1").startswith("1"):
            return False  # a stream of HTTP/2 ends without the others
        if self._begun:
            return True
        headers = {name: value.lower() for name, value in scope["headers"]}
        length = headers.get(b"content-length", b"0").strip(b"0")
        if not length and b"transfer-encoding" not in headers:
            return False
        return headers.get(b"expect") != b"100-continue"

    async def drop_rest(self, max_bytes: int, seconds: float) -> None:
        """Read the rest and keep nothing, up to *max_bytes* and for *seconds*.

        Cancellation:
            Passes through.
        """
        dropped = 0
        with anyio.move_on_after(seconds):
            while not self._complete and dropped <= max_bytes:
                dropped += len((await self.receive()).get("body", b""))


async def send_response(send: Send, response: Response) -> None:
    """Send a response of status, headers and body.

    Cancellation:
        The response may be cut off.
    """
    status, headers, body = response
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Refusing:
    """Sends one response, and ends it when the rest of the body was dropped.

    Args:
        scope: The ASGI scope of the request.
        body: Of the request.
        send: The server's.
    """

    __slots__ = ("_body", "_lingers", "_scope", "_send")

    def __init__(self, scope: Scope, body: RequestBody, send: Send) -> None:
        self._scope = scope
        self._body = body
        self._send = send
        self._lingers = False

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
            await self._body.drop_rest(max_bytes, LINGER_SECONDS)
            with suppress(OSError):  # the client may have left
                await self._send({"type": "http.response.body", "body": b""})
