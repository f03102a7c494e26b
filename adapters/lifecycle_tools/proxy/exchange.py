"""One request to the upstream and its response, both as streams."""

from __future__ import annotations

import math
from typing import Final

import anyio
import h11

from lifecycle_asgi.asgi_types import Receive, Scope, Send
from lifecycle_asgi.body import ClientLeft
from lifecycle_asgi.request import declared_length
from lifecycle_tools.proxy.connection import (
    Connection,
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
)
from lifecycle_tools.proxy.headers import (
    Header,
    response_headers,
    takes_trailers,
    tokens,
)
from lifecycle_tools.proxy.upstream import ProxyTimeouts

# A body in one piece is sent in slices, so that no second copy of it exists.
_SLICE_BYTES: Final = 65536
# What RFC 9110, 9.2.2 lets a proxy send again.
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})


class RequestStream:
    """A request on its way to the upstream."""

    __slots__ = ("_body", "_receive", "_replayable", "head", "more_body")

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        *,
        target: bytes,
        headers: list[Header],
        body: bytes,
        more_body: bool,
    ) -> None:
        self._receive = receive
        self._body: bytes | None = body
        self.more_body = more_body
        self._replayable = scope["method"] in _IDEMPOTENT
        declared = declared_length(scope)
        chunked = any(each[0] == b"transfer-encoding" for each in scope["headers"])
        if declared is not None:
            headers = [*headers, (b"content-length", str(declared).encode())]
        elif chunked or body or more_body:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self.head = h11.Request(
            method=scope["method"].encode(), target=target, headers=headers
        )

    @property
    def is_short(self) -> bool:
        """Whether head and body are sent in one piece."""
        return not self.more_body and len(self._body or b"") <= _SLICE_BYTES

    @property
    def can_be_sent_again(self) -> bool:
        """Whether a second attempt is safe, and the body is still here."""
        return self._replayable and self._body is not None

    def whole(self) -> list[h11.Event]:
        """Return the events of a short request."""
        body = [h11.Data(data=self._body)] if self._body else []
        if not self._replayable:
            self._body = None
        return [self.head, *body, h11.EndOfMessage()]

    async def send(self, connection: Connection, timeout: float) -> None:
        """Send a request that is not short; each piece within *timeout* seconds.

        Raises:
            ClientLeft: The client disconnected before its body was complete.
            UpstreamLost: The connection is closed.
            TimeoutError: The upstream does not read.

        Cancellation:
            The connection can only be closed.
        """
        await connection.send(self.head)
        body, self._body = self._body or b"", None
        while True:
            view = memoryview(body)
            for start in range(0, len(body), _SLICE_BYTES):
                piece = h11.Data(data=bytes(view[start : start + _SLICE_BYTES]))
                with anyio.fail_after(timeout):
                    await connection.send(piece)
            view.release()
            del view, body  # not held while the rest or the response is waited for
            if not self.more_body:
                break
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body = message.get("body", b"")
            self.more_body = message.get("more_body", False)
        await connection.send(h11.EndOfMessage())


class Exchange:
    """Sends one request over one connection, and its response to the client.

    Attributes:
        begun: Whether the upstream has answered.
    """

    def __init__(
        self,
        scope: Scope,
        request: RequestStream,
        connection: Connection,
        send: Send,
        *,
        timeouts: ProxyTimeouts,
    ) -> None:
        self._scope = scope
        self._request = request
        self._connection = connection
        self._send = send
        self._timeouts = timeouts
        self._failure: Exception | None = None
        self.begun = False

    async def run(self) -> None:
        """Send the request and pass the response on, both at a time.

        Raises:
            ClientLeft: The client disconnected before its body was complete.
            UpstreamError: There is no response, or not all of it.
            h11.LocalProtocolError: The request is not HTTP.

        Cancellation:
            The connection can only be closed.
        """
        if self._request.is_short:
            await self._connection.send(*self._request.whole())
            await self._relay()
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._upload, tasks.cancel_scope)
            try:
                await self._relay()
            except Exception as error:  # noqa: BLE001 - raised below, not in a group
                self._failure = self._failure or error
            # An upstream that has answered does not want the rest.
            tasks.cancel_scope.cancel()
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # a frame that refers to its own exception is a cycle

    async def _upload(self, both: anyio.CancelScope) -> None:
        idle = self._timeouts.idle
        try:
            await self._request.send(self._connection, idle)
        except UpstreamLost:
            return  # it may have answered first; the reader knows
        except TimeoutError:
            self._failure = UpstreamTimeout(f"The upstream read nothing for {idle:g} s")
        except (ClientLeft, h11.LocalProtocolError) as error:
            self._failure = error
        else:
            return
        both.cancel()

    async def _relay(self) -> None:
        response = await self._read_head()
        status, headers = response.status_code, response.headers.raw_items()
        passed = [(bytes(name), bytes(value)) for name, value in headers]
        trailers = takes_trailers(self._scope) and b"chunked" in tokens(
            passed, b"transfer-encoding"
        )
        message = {
            "type": "http.response.start",
            "status": status,
            "trailers": trailers,
        }
        message["headers"] = response_headers(status, passed, trailers=trailers)
        await self._send(message)
        idle, body, end = self._timeouts.idle, b"", None
        while end is None:
            # One scope, as each costs more than the rest of a small event; another when
            # the event loop has looked late, as what has arrived meanwhile counts.
            with anyio.CancelScope() as silence:
                while end is None and not silence.cancel_called:
                    if body:
                        await self._send(_body(body, more_body=True))
                    silence.deadline = anyio.current_time() + idle
                    body, end = await self._read_body()
                    silence.deadline = math.inf
            if silence.cancelled_caught:
                raise UpstreamTimeout(f"The upstream sent nothing for {idle:g} s")
        await self._send(_body(body, more_body=False))
        if trailers:
            items = [(bytes(name), bytes(value)) for name, value in end.headers]
            await self._send({"type": "http.response.trailers", "headers": items})

    async def _read_head(self) -> h11.Response:
        seconds = self._timeouts.head
        try:
            with anyio.fail_after(seconds):
                event = await self._connection.next_event()
                while isinstance(event, h11.InformationalResponse):
                    event = await self._connection.next_event()
        except TimeoutError:
            text = f"The upstream sent no response within {seconds:g} s"
            raise UpstreamTimeout(text) from None
        assert isinstance(event, h11.Response)
        if event.status_code >= 600:  # servers send none of these
            raise UpstreamError(f"The upstream sent status {event.status_code}")
        self.begun = True
        return event

    async def _read_body(self) -> tuple[bytes, h11.EndOfMessage | None]:
        """Return all that has arrived, and the end if it is among it.

        An error behind the last piece is raised by the next call.
        """
        event = await self._connection.next_event()
        pieces: list[bytes] = []
        while isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
            found = self._connection.ready_event() if len(pieces) < 64 else None
            if found is None:
                return b"".join(pieces), None
            event = found
        assert isinstance(event, h11.EndOfMessage)
        return b"".join(pieces), event


def _body(body: bytes, *, more_body: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
