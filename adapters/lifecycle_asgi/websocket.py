"""WebSockets whose client leaves while the application waits at a gate."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Final
from weakref import ref

import anyio

from lifecycle.lowlevel import current_task, owner
from lifecycle_asgi.asgi_types import App, Message, Receive, Scope, Send
from lifecycle_asgi.events import Claims

_SCOPE_KEY: Final = "lifecycle.websocket"
_DISCONNECT: Final = "websocket.disconnect"
_CLOSE: Final = "websocket.close"
_REFUSAL: Final = "websocket.http.response.body"
_GOING_AWAY: Final = 1001
_POLICY: Final = 1008
# What a message takes besides its data, of which it may have none.
_MESSAGE_BYTES: Final = 512


async def serve_websocket(
    app: App, scope: Scope, receive: Receive, send: Send, *, read_ahead: int
) -> None:
    """Serve a WebSocket; cancel *app* if its client leaves while it waits at a gate.

    One that is served like this already passes through.

    Cancellation:
        One from outside reaches the application and then the caller; one by a
        disconnect reaches the application only.
    """
    if _SCOPE_KEY in scope:
        await app(scope, receive, send)
        return
    channel = WebSocketChannel(receive, send, read_ahead=read_ahead)
    scope[_SCOPE_KEY] = True
    claims = owner.set(channel.claims.note)
    try:
        await channel.run(app, scope)
    finally:
        owner.reset(claims)
        scope.pop(_SCOPE_KEY, None)
    if channel.application.cancel_called and not channel.closed:
        # No client reads this, but servers complain of a handshake without an answer.
        with suppress(OSError, RuntimeError):
            await send({"type": _CLOSE, "code": _GOING_AWAY})


def denial(scope: Scope, send: Send) -> Send:
    """Return a *send* by which an HTTP response refuses a handshake.

    Where the server cannot do that, the WebSocket is closed instead, which is a 403.
    """
    can_deny = "websocket.http.response" in (scope.get("extensions") or {})

    async def deny(message: Message) -> None:
        if can_deny:
            await send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await send({"type": _CLOSE, "code": _POLICY})

    return deny


class WebSocketChannel:
    """What a server receives on one WebSocket, for an application.

    A disconnect is behind the messages that the client has sent before, and only
    reported to a task that waits in ``receive``. So one task owns it, and reads ahead.

    An application that works goes on: it learns of the disconnect when it receives or
    sends. One that waits at a gate in its own task, and has no other task that
    receives, is cancelled: it holds nothing of what the gate admits it to. A task that
    has received counts until it ends: it may be busy with a message for a moment. One
    that has closed the WebSocket itself goes on: servers report that as a disconnect.

    Args:
        receive: The server's.
        send: The server's.
        read_ahead: Bytes of messages, of which each takes some, to read before the
            application asks. The message that exceeds them is read, and none behind it.

    Attributes:
        application: Cancels the application.
        claims: Notes the leases of the application.
        closed: The application has closed the WebSocket, or refused it.
    """

    def __init__(self, receive: Receive, send: Send, *, read_ahead: int) -> None:
        self._receive = receive
        self._send = send
        self._read_ahead = read_ahead
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._waiting = 0  # tasks of the application
        self._task = ref(current_task())  # weakly: it refers to this object
        self._receiver = self._task
        self._ended = False  # nothing is read any more
        self._informed = False  # the application has got the disconnect
        self._changed = anyio.Event()
        self.application = anyio.CancelScope()
        self.claims = Claims(owner.get())
        self.closed = False

    async def run(self, app: App, scope: Scope) -> None:
        """Call *app*.

        Cancellation:
            As for `serve_websocket`.
        """
        failure: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read)
            try:
                with self.application:
                    await app(scope, self.receive, self.send)
            except BaseException as error:  # noqa: ASYNC103, BLE001
                failure = error  # raised below: the task group would wrap it
            # Only the reader is left. A cancellation of this wait would lose the error.
            tasks.cancel_scope.shield = True
            tasks.cancel_scope.cancel()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # a frame that refers to its own exception is a cycle

    async def receive(self) -> Message:
        """The application's ``receive``: what was read, and then the server's.

        Cancellation:
            No message is lost.
        """
        self._waiting += 1
        self._notify()
        if (task := current_task()) is not self._task():
            self._receiver = ref(task)
        try:
            while not self._messages:
                if self._ended:  # by a disconnect or an error, which comes again
                    return await self._receive()
                await self._changed.wait()
        finally:
            self._waiting -= 1
        message = self._messages.popleft()
        self._bytes -= _size(message)
        self._informed |= message["type"] == _DISCONNECT
        self._notify()
        return message

    async def send(self, message: Message) -> None:
        """The application's ``send``.

        Cancellation:
            As for the server's ``send``.
        """
        kind, more = message["type"], message.get("more_body", False)
        # Before it is sent, as the server may report the disconnect meanwhile.
        self.closed |= kind == _CLOSE or (kind == _REFUSAL and not more)
        await self._send(message)

    async def _read(self) -> None:
        left = False
        try:
            await self._needed()
            await self._read_messages()
            left = not self._waiting
        except Exception:  # noqa: BLE001, S110 - for the application, if it asks
            pass
        finally:
            self._ended = True
            self._notify()
        if left:
            await self.claims.wait_at_gate()
            if not (self._informed or self.closed or self._listens()):
                self.application.cancel(reason="the client disconnected")

    def _listens(self) -> bool:
        """Whether another task of the application has received, and goes on."""
        task = self._receiver()
        if task is None or task is self._task():
            return False
        return not getattr(task, "done", bool)()  # one of trio is gone when done

    async def _needed(self) -> None:
        """Wait until the application receives, or waits at a gate.

        Until then, nothing is read that it may never ask for.
        """

        async def received() -> None:
            while not self._waiting:
                await self._changed.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(received)
            await self.claims.wait_at_gate()
            tasks.cancel_scope.cancel()

    async def _read_messages(self) -> None:
        kind = ""
        while kind != _DISCONNECT:
            while self._messages and self._bytes >= self._read_ahead:
                await self._changed.wait()
            message = await self._receive()
            kind = message["type"]
            self._messages.append(message)
            self._bytes += _size(message)
            del message  # the next wait may be long
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _size(message: Message) -> int:
    data = message.get("bytes") or message.get("text") or b""
    return _MESSAGE_BYTES + len(data)
