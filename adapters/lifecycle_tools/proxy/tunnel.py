"""One WebSocket: its handshake with the upstream, and its messages both ways.

The protocol is that of `websockets` without its connection, over the stream that other
requests use, too: what is not asked for is not read, and no redirection is followed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import anyio
from anyio.abc import ByteStream, TaskGroup
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import Event, State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from lifecycle_asgi.asgi_types import Message, Receive, Scope, Send
from lifecycle_asgi.responses import send_response
from lifecycle_asgi.websocket import denial
from lifecycle_tools.proxy.connection import (
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
)
from lifecycle_tools.proxy.headers import Header, response_headers
from lifecycle_tools.proxy.upstream import ProxyTimeouts

_READ_BYTES: Final = 65536
_CLOSE_SECONDS: Final = 1.0
_OF_WEBSOCKETS: Final = b"sec-websocket-"
_NO_STATUS: Final = 1005
_LOST: Final = 1006
_INVALID_DATA: Final = 1007
_TOO_BIG: Final = 1009
_BAD_GATEWAY: Final = 1014
_LOST_ERRORS: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Tunnel:
    """Passes one WebSocket on.

    Memory is bounded by a few messages: the next one is read when the last one was
    taken, in both directions. Each piece is taken within the idle timeout. An upstream
    that is silent for so long is sent a ping, and has as long again to answer it.

    Args:
        scope: The ASGI scope, of a client that waits for the answer to its handshake.
        receive: The server's.
        send: The server's.
        stream: To the upstream. Whoever opened it closes it.
        target: Path and query for the upstream.
        headers: For the upstream.
        timeouts: How long to wait.
        max_message: Most bytes of a message of the upstream.

    Raises:
        InvalidHandshake: A header is none.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        stream: ByteStream,
        *,
        target: bytes,
        headers: list[Header],
        timeouts: ProxyTimeouts,
        max_message: int,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._stream = stream
        self._timeouts = timeouts
        offered = scope.get("subprotocols", ())
        self._http = ClientProtocol(
            parse_uri("ws://upstream"),
            subprotocols=[Subprotocol(each) for each in offered] or None,
            max_size=max_message,
        )
        request = self._http.connect()
        request.path = target.decode("ascii")
        del request.headers["Host"]  # it is among those of the client
        for name, value in _without_own(headers):
            request.headers[name.decode("ascii")] = value.decode("latin-1")
        self._http.send_request(request)
        self._sending = anyio.Lock()
        self._open = False  # the client has its answer
        self._left = False
        self._failure: UpstreamError | None = None
        self._pieces = bytearray()
        self._is_text = False

    async def run(self) -> None:
        """Pass messages on until either side closes or leaves.

        Raises:
            UpstreamError: The handshake has failed, and the client has no answer.

        Cancellation:
            The stream can only be closed.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._from_client, tasks.cancel_scope)
            try:
                await self._from_upstream(tasks)
            except UpstreamError as error:
                self._failure = self._failure or error
            if self._open:
                await self._close_client()
                # Shielded: servers report this close as a disconnect, which cancels.
                with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                    await self._flush()  # the answer to a close
            tasks.cancel_scope.cancel()
        failure, self._failure = self._failure, None
        try:
            if failure is not None and not (self._open or self._left):
                raise failure
        finally:
            del failure  # a frame that refers to its own exception is a cycle

    async def _from_client(self, both: anyio.CancelScope) -> None:
        # Before the handshake is complete, this can only be a disconnect.
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            with suppress(InvalidState):  # the upstream has closed
                if text is None:
                    self._http.send_binary(message["bytes"])
                else:
                    self._http.send_text(text.encode())
            del message, text
            await self._flush()
        self._left = True
        code, reason = message.get("code", _NO_STATUS), message.get("reason")
        # One that names no reason, not even an empty one, was no close of the client's.
        lost = code == _LOST or (code == _NO_STATUS and reason is None)
        if self._http.state is State.OPEN and not lost:
            self._http.send_close(*(() if code == _NO_STATUS else (code, reason or "")))
            with anyio.move_on_after(_CLOSE_SECONDS):
                await self._flush()
                await anyio.sleep_forever()  # until the upstream has closed, too
        both.cancel()

    async def _from_upstream(self, tasks: TaskGroup) -> None:
        await self._flush()
        try:
            with anyio.fail_after(self._timeouts.head):
                while not (events := await self._read()) and not self._ended:
                    pass
        except TimeoutError:
            text = f"The upstream sent no response within {self._timeouts.head:g} s"
            raise UpstreamTimeout(text) from None
        await self._answer(events)
        while True:
            for event in events:
                if isinstance(event, Frame):
                    await self._pass_on(event)
            if self._ended:
                return
            events = await self._next(tasks)

    @property
    def _ended(self) -> bool:
        http = self._http
        return bool(http.close_rcvd or http.parser_exc or http.handshake_exc)

    async def _answer(self, events: list[Event]) -> None:
        """Send the client what the upstream says to the handshake."""
        response = next(iter(events), None)
        headers: list[Header] = []
        if isinstance(response, Response):
            items = response.headers.raw_items()
            found = [(name.encode(), value.encode("latin-1")) for name, value in items]
            headers = _without_own(response_headers(response.status_code, found))
        error = self._http.handshake_exc
        if error is None:
            accept = {"subprotocol": self._http.subprotocol, "headers": headers}
            await self._to_client({"type": "websocket.accept", **accept})
            self._open = True
        elif isinstance(error, InvalidStatus) and error.response.status_code >= 200:
            refused = error.response
            answer = (refused.status_code, headers, bytes(refused.body))
            await send_response(denial(self._scope, self._to_client), answer)
            self._left = True
        elif isinstance(error.__cause__, EOFError):
            raise UpstreamLost("The upstream closed the connection without a response")
        else:
            raise UpstreamError(f"The upstream opens no WebSocket: {error}")

    async def _pass_on(self, frame: Frame) -> None:
        """Send the client a message when its last frame is here."""
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._is_text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return
        self._pieces += frame.data  # a list of small ones would take far more
        if not frame.fin:
            return
        data, self._pieces = self._pieces, bytearray()
        if not self._is_text:
            await self._to_client({"type": "websocket.send", "bytes": bytes(data)})
            return
        try:
            await self._to_client({"type": "websocket.send", "text": data.decode()})
        except UnicodeDecodeError as error:
            self._http.fail(_INVALID_DATA)
            raise UpstreamError("The upstream sent text that is not UTF-8") from error

    async def _to_client(self, message: Message) -> None:
        if not self._left:
            # It has left, or the server has closed it; the other task hears of it.
            with suppress(OSError, *((RuntimeError,) if self._open else ())):
                await self._send(message)

    async def _close_client(self) -> None:
        http = self._http
        code, reason = _BAD_GATEWAY, str(self._failure or "The upstream was lost")
        if http.close_rcvd is not None:
            code, reason = http.close_rcvd.code, http.close_rcvd.reason
            code = 1000 if code == _NO_STATUS else code
        elif http.close_sent is not None and http.close_sent.code == _TOO_BIG:
            code, reason = _TOO_BIG, http.close_sent.reason
        closing = {"type": "websocket.close", "code": code, "reason": reason}
        await self._to_client(closing)

    async def _next(self, tasks: TaskGroup) -> list[Event]:
        """Return what arrives next; ping an upstream that is silent for long."""
        idle = self._timeouts.idle
        for _ in range(2):
            if not self._sending.locked():  # who sends now sends this, too
                # Not here: an upstream that sends before it reads would stop for ever.
                tasks.start_soon(self._flush)
            with anyio.move_on_after(idle):
                return await self._read()
            with suppress(InvalidState):
                self._http.send_ping(b"")
        raise UpstreamTimeout(f"The upstream answered no ping within {idle:g} s")

    async def _read(self) -> list[Event]:
        try:
            data = await self._stream.receive(_READ_BYTES)
        except (anyio.EndOfStream, *_LOST_ERRORS):
            self._http.receive_eof()
        else:
            self._http.receive_data(data)
        return self._http.events_received()

    async def _flush(self) -> None:
        """Send the upstream what there is to send."""
        idle = self._timeouts.idle
        async with self._sending:
            try:
                while data := b"".join(self._http.data_to_send()):
                    with anyio.fail_after(idle):
                        await self._stream.send(data)
            except TimeoutError:
                text = f"The upstream read nothing for {idle:g} s"
                self._failure = UpstreamTimeout(text)
                await anyio.aclose_forcefully(self._stream)  # so the reader ends
            except _LOST_ERRORS:
                pass  # the reader hears of it, behind what the upstream has sent


def _without_own(headers: list[Header]) -> list[Header]:
    """Return *headers* without those that each handshake has of its own."""
    return [each for each in headers if not each[0].startswith(_OF_WEBSOCKETS)]
