"""The middleware: detects disconnects and cancels the application."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
import anyio.lowlevel
from anyio.lowlevel import RunVar

from lifecycle.events import Observer, guarded
from lifecycle.lowlevel import Waiter, call_soon, check_int, new_waiter, owner
from lifecycle_asgi.asgi_types import App, Message, Receive, Scope, Send
from lifecycle_asgi.disconnects import (
    DisconnectWatcher,
    Watch,
    begin_response,
    transport_of,
)
from lifecycle_asgi.events import (
    LIVE_KEY,
    Claims,
    LiveRequest,
    LiveRequests,
    RequestRecorder,
)
from lifecycle_asgi.request import (
    CURRENT,
    SCOPE_KEY,
    RequestScope,
    ResponseState,
    allowed_read_ahead,
    declared_length,
    is_bodiless,
    is_handled,
    keep_head,
)
from lifecycle_asgi.websocket import serve_websocket

DISCONNECT: Final = "http.disconnect"
CLIENT_CLOSED_REQUEST: Final = 499

WatchBody: TypeAlias = Callable[..., Watch | None]
"""Watches for a disconnect while the body is not read; returns what ends that.

Given the bytes that were read, what to call, and what tells if the response has begun.
"""

# More messages than a source has ready when its client disconnects, and more time than
# sending those takes. A source that works for each message must not go on for long.
_MAX_LATE_MESSAGES: Final = 100
_MAX_LATE_SECONDS: Final = 0.005
# A server has nothing to wait for when its client is gone; one that does is left.
_LATE_SEND_SECONDS: Final = 1.0
# For an application that has not asked for its body yet: when it does, it learns of the
# disconnect itself. None that waits at a gate of ours needs it.
_FIRST_LOOK_SECONDS: Final = 0.5
# What a server's ``receive`` does not raise itself.
_NOT_OF_RECEIVE: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)
# More often than an application that handles the disconnect receives it.
_MAX_DISCONNECTS: Final = 100
# Limits on what is sent within one turn of the event loop, before it is forced to turn:
# at that point, the frames above the body are suspended in a send.
_YIELD_EVERY_MESSAGES: Final = 16
_YIELD_EVERY_SECONDS: Final = 0.002


def _operation_http(_: Scope) -> str:
    return "http"


class LifecycleMiddleware:
    """Cancels the application when its client disconnects during the request.

    Pure ASGI, so it works above and below any other middleware. Per request:

    * One task reads ``receive`` and replays it; the application runs in the task
      that the server called, so context variables and native cancellation keep
      working.
    * The application finds a `RequestScope` in ``scope["lifecycle"]``.
    * If the client disconnects before the response is complete, all sessions attached
      to the request are marked, and the application receives ``http.disconnect`` from
      ``receive``, as it does without this class.
    * An application that has not called ``receive`` since it had the whole body is
      then cancelled. If it has not asked for the body yet, it has half a second for
      that, unless it waits at a `Gate`, where it holds nothing.
    * An application that has, or that waits there for more of the body, handles
      disconnects itself: it reacts as it does without this class, background tasks
      included, and is cancelled only if it has not ended after *disconnect_grace*.
    * ``send`` raises no cancellation of its own, so a response that an application has
      ready is given to the server, and what the application does after a complete
      response is not cancelled. If a cancelled application has sent nothing, 499 is
      sent on its behalf, as outer middleware may rely on a response.
    * A cancellation from outside always propagates, and an exception of the
      application propagates as it was raised.
    * The application finds the headers of the head: trailers that a server appends to
      them while the body arrives are no headers.
    * When the response is complete, reading ends.
    * What the request owns, such as the generator of its body, is closed in the task
      that the server called.

    A WebSocket is cancelled only where it waits at a `Gate` and does not receive. Other
    scopes pass through, and what another `LifecycleMiddleware` handles already.

    Args:
        app: The application to wrap.
        read_ahead: Bytes of the request body to read before the application asks. A
            disconnect behind an unread body is only reported after the body. With 0, a
            body is read when the application asks, so that no more of it is read than
            a limit inside the application allows. A body that its client announced
            with ``Expect: 100-continue`` is never read ahead.
        room: Bytes of the kernel's memory for bodies that wait unread, of all requests
            together. A client that leaves behind such a body is noticed if it fits
            there; see the table of servers. With 0, only those that reset their
            connection are.
        grace: Seconds that each stream owned by a request may take to close.
        disconnect_grace: Seconds that an application that handles disconnects itself
            may continue after one; ``math.inf`` for no limit.
        cancel_delay: Seconds by which all others are cancelled later: for one that
            only looks for a disconnect now and then, a little more than the time
            between two looks.
        observer: Called with the events of requests; see `RequestEvent`.
        operation: Returns the kind of request of a scope, as a fixed word; ``None``
            for a request without events. Default: ``"http"`` for all.
        live: Notes all requests, for the live view of a server that serves its pages
            itself. All others wrap the application in a `LiveView`.

    Raises:
        TypeError: *read_ahead* or *room* is no whole number.
        ValueError: *read_ahead*, *room*, *disconnect_grace* or *cancel_delay* is
            negative.
    """

    def __init__(
        self,
        app: App,
        *,
        read_ahead: int = 65536,
        room: int = 64 << 20,
        grace: float = 5.0,
        disconnect_grace: float = 30.0,
        cancel_delay: float = 0.0,
        observer: Observer | None = None,
        operation: Callable[[Scope], str | None] = _operation_http,
        live: LiveRequests | None = None,
    ) -> None:
        check_int(0, read_ahead=read_ahead, room=room)
        delays = {"disconnect_grace": disconnect_grace, "cancel_delay": cancel_delay}
        for name, seconds in delays.items():
            if not seconds >= 0:  # false for NaN, too
                raise ValueError(f"{name} must be 0 s or more, not {seconds}")
        self._app = app
        self._read_ahead = read_ahead
        self._room = room
        self._watchers: RunVar[DisconnectWatcher] = RunVar("lifecycle_disconnects")
        self._grace = grace
        self._disconnect_grace = disconnect_grace
        self._cancel_delay = cancel_delay
        self._emit = guarded(observer)
        self._operation = operation
        self._live = live

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection.

        Cancellation:
            A cancellation from outside reaches the application and then the caller;
            one by a disconnect reaches the application only.
        """
        if scope["type"] == "websocket":
            ahead = self._read_ahead
            await serve_websocket(self._app, scope, receive, send, read_ahead=ahead)
            return
        if scope["type"] != "http" or is_handled(scope):
            await self._app(scope, receive, send)
            return
        keep_head(scope)
        channel = self._channel(scope, receive, send)
        # The scope does not declare that ``send`` raises after a disconnect
        # (spec_version 2.4). If it did, Starlette would no longer listen and so take no
        # body from a stream that reads it; but a stream in a task of the application's
        # own would continue without a client.
        scope[SCOPE_KEY] = channel.request
        if scope.get("http_version", "")[:2] == "1.":
            channel.request.transport = partial(transport_of, receive, send)
        self._begin(scope, channel)
        claims, current = owner.set(channel.claims.note), CURRENT.set(channel.request)
        error: BaseException | None = None
        try:
            await self._run(scope, channel)
        except BaseException as raised:
            error = raised
            raise
        finally:
            response = channel.response
            channel.request.end(response.status, error, named=response.id)
            del error  # a frame that refers to its own exception is a cycle
            owner.reset(claims)
            CURRENT.reset(current)
            if self._live is not None and channel.shown is not None:
                self._live.end(channel.shown)
        if channel.application.cancel_called and not channel.response.started:
            # No client reads this; a server may raise for it. An application that has
            # ended by itself has sent what it wanted.
            with suppress(OSError):
                await _send_client_closed(send)

    def _channel(self, scope: Scope, receive: Receive, send: Send) -> RequestChannel:
        return RequestChannel(
            receive,
            send,
            read_ahead=allowed_read_ahead(scope, self._read_ahead),
            disconnect_grace=self._disconnect_grace,
            cancel_delay=self._cancel_delay,
            watch=self._watch(scope, receive, send),
        )

    def _watch(self, scope: Scope, receive: Receive, send: Send) -> WatchBody | None:
        """Return what watches the connection while its body is not read."""
        # A connection of HTTP/2 is always read, and has other requests.
        if is_bodiless(scope) or scope.get("http_version", "")[:2] != "1.":
            return None
        declared = declared_length(scope)

        def watch(
            read: int, on_gone: Callable[[], object], answers: Callable[[], bool]
        ) -> Watch | None:
            transport = transport_of(receive, send)
            if transport is None:
                return None
            watcher = self._watchers.get(None)
            if watcher is None:
                watcher = DisconnectWatcher(self._room)
                self._watchers.set(watcher)
            return watcher.watch(
                transport,
                on_gone,
                unread=None if declared is None else max(0, declared - read),
                begin=partial(begin_response, receive),
                answers=answers,
            )

        return watch

    def _probe(self) -> int:
        watcher = self._watchers.get(None)
        return 0 if watcher is None else watcher.probe()

    def _begin(self, scope: Scope, channel: RequestChannel) -> None:
        """Note the request for the observer and the live view, where there are some."""
        request = channel.request
        request.probe_waiting = self._probe
        shown = scope.get(LIVE_KEY)  # a `LiveView` notes the messages itself
        if self._emit is not None and (operation := self._operation(scope)) is not None:
            request.set_recorder(RequestRecorder(self._emit, operation, scope))
        if self._live is not None:
            shown = channel.shown = self._live.begin(scope)
            channel.claims.show = shown.claim
        if shown is not None:
            request.show(shown, channel.application.cancel)

    async def _run(self, scope: Scope, channel: RequestChannel) -> None:
        failure: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            channel.reading = tasks.start_soon(channel.read)
            try:
                with channel.application, channel.finishing:
                    await self._app(scope, channel.receive, channel.send)
            except BaseException as error:  # noqa: ASYNC103, BLE001
                # Raised below, outside the task group: the group would wrap an error in
                # an exception group and, being shielded, take a cancellation from
                # outside for its own and swallow it.
                failure = error
            channel.stop_reading()
            # Only the reader is left to wait for, and it is about to end. A
            # cancellation of this wait would lose the application's own error.
            tasks.cancel_scope.shield = True
            try:
                await channel.request.close(self._grace)
                await channel.drop_rest()
            except Exception as error:  # noqa: BLE001 - raised below, as above
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            # A frame in a traceback that refers to the exception is a cycle, and would
            # keep the application's locals alive until the garbage collector runs.
            channel.forget()
            del failure


async def _send_client_closed(send: Send) -> None:
    headers = [(b"content-length", b"0")]
    status = CLIENT_CLOSED_REQUEST
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class RequestChannel:
    """One request and its response, between a server and an application.

    A disconnect is only reported to a task that waits in ``receive``, and two readers
    of one ``receive`` take messages from each other. So one task owns it (`read`), and
    the application is given `receive` and `send` of this object.

    The object holds no bound method of its own: such a cycle would keep request bodies
    alive until the garbage collector runs.

    Args:
        receive: The server's.
        send: The server's.
        read_ahead: Bytes of the body to read before the application asks. A disconnect
            behind an unread body is only reported after the body; no server in use
            reports it earlier.
        disconnect_grace: Seconds between a disconnect and the cancellation of an
            application that listens for it.
        cancel_delay: The same for an application that does not.
        watch: Watches for a disconnect while no body is read, where that is possible.

    Attributes:
        request: State of the request.
        response: State of the response.
        application: Cancels the application.
        finishing: Inside of it; protects what follows a complete response.
        first_look: Seconds for an application that has not asked for its body yet.
        reading: The task of `read`, until that is cancelled.
        shown: Notes the messages for the live view, if it is this object's to do.
        claims: Notes the leases of the application.
    """

    __slots__ = (
        "_buffer",
        "_call_soon",
        "_cancel_delay",
        "_disconnect_grace",
        "_gone",
        "_late",
        "_receive",
        "_send",
        "_sent",
        "_since",
        "_watch",
        "application",
        "claims",
        "finishing",
        "first_look",
        "reading",
        "request",
        "response",
        "shown",
    )

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        read_ahead: int,
        disconnect_grace: float,
        cancel_delay: float,
        watch: WatchBody | None = None,
    ) -> None:
        self._receive = receive
        self._send = send
        self._buffer = ReceiveBuffer(read_ahead)
        self._disconnect_grace = disconnect_grace
        self._cancel_delay = cancel_delay
        self._watch = watch
        self.first_look = _FIRST_LOOK_SECONDS
        self._gone = False
        self._late = self._sent = 0
        # Time of the first message in this turn of the event loop, if there was one, or
        # of the first late message.
        self._since: float | None = None
        self._call_soon = call_soon()
        self.request = RequestScope()
        self.response = ResponseState()
        self.application = anyio.CancelScope()
        self.finishing = anyio.CancelScope()
        self.reading: anyio.TaskHandle[None] | None = None
        self.shown: LiveRequest | None = None
        self.claims = Claims(owner.get())

    async def read(self) -> None:
        """Read until a disconnect, an error of ``receive``, or `stop_reading`.

        Cancellation:
            Ends the reading. Messages that were read stay available.
        """
        try:
            await self._read_messages()
            self._buffer.close()
        except BaseException as failure:  # noqa: ASYNC103 - of `receive`
            stopped = isinstance(failure, anyio.get_cancelled_exc_class())
            # The task keeps what is raised, and on trio the frames of a cancellation
            # lead to `stop_reading`, and so to the task: a cycle.
            if isinstance(failure, _NOT_OF_RECEIVE) or (stopped and self.reading):
                raise
            # For the application, if it asks: without us, nothing else would call.
            self._buffer.close(None if stopped else failure)

    async def _read_messages(self) -> None:
        while await self._wait_space():
            if self.shown is not None:
                self.shown.receiving(None)
            message = await self._receive()
            if self.shown is not None:
                self.shown.receiving(message)
            if message["type"] == DISCONNECT:
                break
            self._buffer.put(message)
            del message  # the next wait may last as long as the response
        await self._on_disconnect()

    async def _wait_space(self) -> bool:
        """Wait until the next message may be read; false if the client has left."""
        buffer, response, watch = self._buffer, self.response, None
        if self._watch is not None and not buffer.has_space:
            watch = self._watch(buffer.read, buffer.leave, lambda: response.started)
        try:
            await buffer.wait_space()
        finally:
            if watch is not None:
                watch.cancel()
        return not buffer.left

    async def _on_disconnect(self) -> None:
        if self.response.complete:
            return
        self._gone = True
        self.request.mark_client_gone()
        self._buffer.close()
        delay = self._cancel_delay
        if not self._buffer.body_taken:
            delay = max(delay, self.first_look)
        if delay and not self._buffer.listens:
            with anyio.move_on_after(delay):
                await self.claims.wait_at_gate()
        if self._buffer.listens:
            await anyio.sleep(self._disconnect_grace)
        self.application.cancel(reason="the client disconnected")
        try:
            await anyio.sleep_forever()
        finally:  # the application has ended, or a cancellation from outside is due
            self.finishing.shield = False

    async def receive(self) -> Message:
        """The application's ``receive``; see `ReceiveBuffer.get`.

        Cancellation:
            No message is lost.
        """
        return await self._buffer.get()

    async def send(self, message: Message) -> None:
        """The application's ``send``.

        Cancellation:
            None but that of the server's ``send``, so that a response that is ready is
            sent. A cancellation by a disconnect is delivered where the application
            waits next, for example in the generator of a body, whose ``finally`` then
            runs; in here it would be suspended at its ``yield``, where no framework
            closes it. So forced yields to the event loop, which a stream that never
            suspends needs, are shielded, and only after many messages or some
            milliseconds is this a checkpoint.
        """
        if self.application.cancel_called:
            await self._send_late(message)
            return
        shown, response = self.shown, self.response
        if not message.get("more_body", False):
            response.update(message)
        if shown is not None:
            shown.sending = time.monotonic()
        await self._send(message)
        if shown is not None:
            shown.sent_message(message)
        if self._gone:
            self._late += 1
            if self._late > _MAX_LATE_MESSAGES:
                await self._end_stream()
        if response.complete:
            self.stop_reading()
        elif self._since is None:
            self._since, self._sent = time.monotonic(), 1
            self._call_soon(self._turn)
        else:
            self._sent += 1
            late = time.monotonic() - self._since > _YIELD_EVERY_SECONDS
            if late or self._sent >= _YIELD_EVERY_MESSAGES:
                await anyio.lowlevel.cancel_shielded_checkpoint()

    def _turn(self) -> None:
        """The event loop turns: other tasks run between two messages."""
        if not self.application.cancel_called:
            self._since = None

    async def _end_stream(self) -> None:
        """End a stream that never suspends, and so does not see the disconnect."""
        if not self._buffer.listens:  # it will not look any more
            self.application.cancel(reason="the client disconnected")
        else:  # its own cancellation, if it has one, finds no other place
            await anyio.lowlevel.checkpoint()

    async def _send_late(self, message: Message) -> None:
        now = time.monotonic()
        if not self._late or self._since is None:
            self._since = now
        self._late += 1
        if self._late > _MAX_LATE_MESSAGES or now - self._since > _MAX_LATE_SECONDS:
            await anyio.lowlevel.checkpoint()
        self.response.update(message)
        until = anyio.current_time() + _LATE_SEND_SECONDS
        with anyio.CancelScope(shield=True, deadline=until):
            await self._send(message)
        # A cancellation cannot be taken back, but what follows can be kept from it.
        self.finishing.shield = self.response.complete

    async def drop_rest(self) -> None:
        """Read what a client has sent that left behind it.

        hypercorn waits until somebody does, and keeps the connection as long.

        Cancellation:
            Shielded for a second at most.
        """
        if not self._buffer.left:
            return
        with (
            suppress(Exception),  # the application has ended, and asks no more
            anyio.move_on_after(_LATE_SEND_SECONDS, shield=True),
        ):
            while (await self._receive())["type"] != DISCONNECT:
                pass

    def forget(self) -> None:
        """Drop an error of ``receive``: the application has ended, and asks no more."""
        self._buffer.error = None

    def stop_reading(self) -> None:
        """End `read`: the response is complete, or the application has ended."""
        self._buffer.close()
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()


class ReceiveBuffer:
    """Bounded buffer between the one reader of ``receive`` and the application.

    Args:
        max_bytes: Bytes of the body to buffer before the reader has to wait.

    Attributes:
        body_taken: Whether the application has got the last part of the body.
        error: What the server's ``receive`` raised.
        left: Whether the client left while the body was not read.
        read: Bytes of the body that were read.
        listens: Whether the application waits for a message, or has asked for one since
            it had the whole body: it handles disconnects itself.
    """

    __slots__ = (
        "_body_read",
        "_bytes",
        "_closed",
        "_disconnects",
        "_max_bytes",
        "_messages",
        "_waiters",
        "_waiting",
        "_wanted",
        "body_taken",
        "error",
        "left",
        "listens",
        "read",
    )

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._bytes = 0
        self._waiting = 0  # tasks of the application
        self._wanted = False  # the application has asked since the last message
        self._closed = False
        self._body_read = False  # only a disconnect can follow
        self._disconnects = self.read = 0
        self.error: BaseException | None = None
        self.body_taken = self.left = self.listens = False
        self._waiters: dict[Waiter, None] = {}  # in the order in which they came

    def put(self, message: Message) -> None:
        """Append *message*."""
        self._messages.append(message)
        size = len(message.get("body", b""))
        self._bytes, self.read = self._bytes + size, self.read + size
        if self._body_read:  # a server that repeats itself must not be read for ever
            self._max_bytes = 0
        self._body_read = not (message.get("more_body", False) or self._body_read)
        self._wanted = False
        self._notify()

    @property
    def has_space(self) -> bool:
        """Whether the next message may be read.

        That is when fewer bytes than the limit are buffered, when the application asks,
        or when only the disconnect is left to read.
        """
        return self._body_read or self._wanted or self._bytes < self._max_bytes

    async def wait_space(self) -> None:
        """Wait until the next message may be read, or the client has left.

        Cancellation:
            Changes nothing.
        """
        while not (self.has_space or self.left):
            await self._wait_changed()

    def leave(self) -> None:
        """Note that the client has left, though its body is not read. Idempotent."""
        self.left = True
        self._notify()

    async def get(self) -> Message:
        """Return the next message; after the last one always ``http.disconnect``.

        Raises:
            Exception: What the server's ``receive`` raised, after all messages that it
                returned before.

        Cancellation:
            As in the servers, only a call that has to wait is cancelled, and no message
            is lost. Starlette's ``is_disconnected`` asks in a cancelled scope, and does
            see a disconnect. Only an application that asks for it all the time is
            cancelled here.
        """
        # A deadline in the past is a cancelled scope: it looks for a disconnect.
        looks = anyio.current_effective_deadline() == -math.inf
        self.listens |= looks or self.body_taken
        waited = False
        while not self._messages:
            if self.error is not None:
                raise self.error
            if self._closed:
                await self._yield_before_disconnect(waited=waited)
                return {"type": DISCONNECT}
            await self._wait_message()
            waited = True
        message = self._messages.pop(0)
        self.body_taken = not message.get("more_body", False)
        self._bytes -= len(message.get("body", b""))
        self._notify()
        return message

    async def _yield_before_disconnect(self, *, waited: bool) -> None:
        self._disconnects += 1
        if self._disconnects > _MAX_DISCONNECTS:
            await anyio.lowlevel.checkpoint()
        elif not waited:
            await anyio.lowlevel.cancel_shielded_checkpoint()

    def close(self, error: BaseException | None = None) -> None:
        """Accept no more messages, because of *error* if there is one."""
        self._closed = True
        self.listens |= self._waiting > 0
        self.error = self.error or error
        self._notify()

    async def _wait_message(self) -> None:
        if not self._wanted:  # or two waiting tasks would wake each other for ever
            self._wanted = True
            self._notify()
        self._waiting += 1
        try:
            await self._wait_changed()
        finally:
            self._waiting -= 1

    async def _wait_changed(self) -> None:
        waiter = new_waiter()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def _notify(self) -> None:
        for waiter in self._waiters:
            waiter.wake()
        self._waiters.clear()
