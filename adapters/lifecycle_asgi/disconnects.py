"""Disconnects behind an unread body: `DisconnectWatcher`.

A server that has enough of a body stops reading, and then hears neither of a reset nor
of an end. Three things cure that, on Linux:

1. One epoll for all such connections, which the event loop watches as one file. A
   reset, or an end that has *arrived*, is an event, whatever is unread in front of it.
2. The end queues behind the body, in the client's kernel, until the body fits into
   ours. So the watcher makes room in the receive buffer, within a budget: memory of the
   kernel and none of the process.
3. A *probe*, where there is no room, and only when another client would be refused for
   those that wait: one byte of the status line, with which every response begins. The
   kernel of a client that has closed its connection answers any byte with a reset. One
   that only waits has the beginning of its response.

Elsewhere nothing is watched, and such a disconnect is seen behind the body.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

from lifecycle.lowlevel import call_soon

# A receive buffer has room for these as it is.
_FREE_BYTES: Final = 65536
# Chunk headers, and what the kernel needs beside the data.
_SLACK_BYTES: Final = 65536
_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_LOST: Final = sum(getattr(select, f"POLL{it}", 0) for it in ("HUP", "ERR", "NVAL"))
_END: Final = getattr(select, "POLLRDHUP", 0)
_MAX_EVENTS: Final = 256
# The last of these bytes is kept for the response.
_STATUS_LINE: Final = b"HTTP/1.1"
# After the first probe of a client, and twice as many after each further one.
_SECONDS_TO_NEXT_PROBE: Final = 0.5


class DisconnectWatcher:
    """The watched connections of one event loop: of asyncio, uvloop or trio.

    Args:
        room: Bytes of the kernel's memory for unread bodies, all connections together.
            Bodies beyond are watched for a reset only.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._watches: dict[int, Watch] = {}
        self._epoll: Any = None
        self._detach: Callable[[], object] | None = None

    def watch(
        self,
        transport: Any,
        on_gone: Callable[[], object],
        *,
        unread: int | None,
        begin: Callable[[], BegunResponse | None] = lambda: None,
        answers: Callable[[], bool] = lambda: False,
    ) -> Watch | None:
        """Call *on_gone* once, a turn of the event loop after the client has left.

        The connection is aborted before, so that the server learns of it as well.

        Args:
            transport: Of asyncio or uvloop, or a socket. If it has an attribute
                ``half_closed`` that is true, an end is no leaving.
            on_gone: Called in the event loop.
            unread: Bytes of the body that the application has not read, at most;
                ``None`` if unknown.
            begin: Returns what a probe is sent through, where that is possible.
            answers: Whether the response has begun. From then on, an end is no leaving:
                the client may read, and one that is gone resets what it is sent.

        Returns:
            What ends the watch; ``None`` where the connection cannot be watched.
        """
        sock = _socket_of(transport)
        if sock is None or not hasattr(select, "epoll"):
            return None
        number = sock.fileno()
        if (stale := self._watches.get(number)) is not None:
            stale.cancel()  # its socket was closed, and this one has its number now
        watch = Watch(self, transport, number, on_gone, begin, answers)
        try:
            self._attach()
            self._arm(watch)
        except (OSError, NotImplementedError):  # no descriptor is left; such a loop
            self._detach_if_idle()
            return None
        self._watches[number] = watch
        if sock.family in _INTERNET:
            self._make_room(watch, unread)
        return watch

    def probe(self) -> int:
        """Probe the clients of which no end can arrive; return how many."""
        return sum([watch.probe() for watch in list(self._watches.values())])

    def drop(self, watch: Watch) -> None:
        """End *watch*. Idempotent."""
        if self._watches.get(watch.number) is not watch:
            return
        del self._watches[watch.number]
        self._room += watch.room
        if not is_closing(watch.transport):  # else its number may be another's by now
            with suppress(OSError):
                self._epoll.unregister(watch.number)
            if watch.room:
                _notify_of(watch.number, 1)
        self._detach_if_idle()

    def _attach(self) -> None:
        if self._epoll is None:
            epoll = select.epoll()
            self._detach = _call_when_readable(epoll, self._on_ready)
            self._epoll = epoll

    def _detach_if_idle(self) -> None:
        """Leave the event loop: a closed one must not find a closed file."""
        if self._detach is not None and not self._watches:
            detach, self._detach, self._epoll = self._detach, None, None
            detach()

    def _arm(self, watch: Watch) -> None:
        # No duplicate of the socket: it would keep the connection open. The entry goes
        # with the socket, unless a forked child has it, too; hence once.
        flags = select.EPOLLONESHOT | (0 if watch.half_closed else select.EPOLLRDHUP)
        try:
            self._epoll.register(watch.number, flags)
        except FileExistsError:
            self._epoll.modify(watch.number, flags)

    def _on_ready(self) -> None:
        if self._epoll is None:
            return
        numbers = [number for number, _ in self._epoll.poll(0, _MAX_EVENTS)]
        # A server that was still reading may have closed the socket a moment ago, and
        # its entry went with it.
        for number in numbers or list(self._watches):
            watch = self._watches.get(number)
            if watch is None:
                continue
            if watch.has_left():
                watch.on_left()
            elif numbers:
                with suppress(OSError):
                    self._arm(watch)

    def _make_room(self, watch: Watch, unread: int | None) -> None:
        """Enlarge the receive buffer, so that an end can arrive behind the body."""
        if unread is not None and unread <= _FREE_BYTES:
            return
        watch.is_deaf = True
        if unread is None or unread + _SLACK_BYTES > self._room:
            return
        # This mark enlarges the buffer, up to half of the largest in net.ipv4.tcp_rmem,
        # and the kernel still tunes it. SO_RCVBUF has a lower limit and ends that. The
        # buffer stays larger, as after any fast upload.
        nbytes = unread + _SLACK_BYTES
        mark = _notify_of(watch.number, nbytes)
        watch.is_deaf = mark < nbytes
        watch.room = min(mark, nbytes)
        self._room -= watch.room


@dataclass(slots=True, eq=False, repr=False)
class Watch:
    """One connection that is watched.

    Attributes:
        number: Of its file descriptor.
        transport: Its transport, or its socket.
        is_deaf: Whether the end of the connection may not arrive.
        room: Bytes of the kernel's memory that it may take.
    """

    _watcher: DisconnectWatcher
    transport: Any
    number: int
    _on_gone: Callable[[], object]
    _begin: Callable[[], BegunResponse | None]
    _answers: Callable[[], bool]
    _begun: BegunResponse | None = None
    _next_probe: float = -math.inf
    is_deaf: bool = False
    room: int = 0

    @property
    def half_closed(self) -> bool:
        """Whether its client may have finished sending, and read an answer."""
        return getattr(self.transport, "half_closed", False) or self._answers()

    def cancel(self) -> None:
        """End the watch. Idempotent."""
        self._watcher.drop(self)

    def probe(self) -> bool:
        """Send one byte of the response, unless an end arrives by itself.

        Returns:
            Whether a byte was sent: seven at most, at growing intervals.
        """
        now = time.monotonic()
        if not (self.is_deaf or self.half_closed) or is_closing(self.transport):
            return False
        if now < self._next_probe:
            return False
        if self._begun is None:
            self._begun = self._begin()
        if self._begun is None or not self._begun.probe():
            return False
        self._next_probe = now + _SECONDS_TO_NEXT_PROBE * 2 ** (self._begun.sent - 1)
        return True

    def has_left(self) -> bool:
        """Ask the socket itself: an entry may be that of one before it."""
        if is_closing(self.transport):
            return True
        poll = select.poll()
        poll.register(self.number, 0 if self.half_closed else _END)
        return any(flags & (_LOST | _END) for _, flags in poll.poll(0))

    def on_left(self) -> None:
        """End the watch and the connection, and tell."""
        self.cancel()
        # A server that closes it has something to send, or knows.
        if hasattr(self.transport, "abort") and not is_closing(self.transport):
            self.transport.abort()
        call_soon()(self._on_gone)  # behind the server's own `connection_lost`


class BegunResponse:
    """A transport whose response may have begun already.

    Args:
        transport: Of asyncio or uvloop.
        users: What writes to it by its attribute ``transport``, until it has written.

    Attributes:
        inner: The transport.
        sent: Bytes of the status line that were sent.
        written: Whether the rest has followed.
    """

    def __init__(self, transport: Any, *users: Any) -> None:
        self.inner = transport
        # A cycle of references would keep the bodies of clients that left.
        self._users = [ref(user) for user in users]
        self.written = False
        self.sent = 0
        for user in users:
            user.transport = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def probe(self) -> bool:
        """Send the next byte of the status line; return whether there was one."""
        if self.written or self.sent >= len(_STATUS_LINE) - 1:
            return False
        self.sent += 1
        self.inner.write(_STATUS_LINE[self.sent - 1 : self.sent])
        return True

    def write(self, data: bytes) -> None:
        """Write *data*, without what has been sent of it."""
        if not self.written:
            self.written = True
            self._leave()
            if data.startswith(_STATUS_LINE):
                data = data[self.sent :]
        self.inner.write(data)

    def _leave(self) -> None:
        for user in [each() for each in self._users]:
            if user is not None and user.transport is self:
                user.transport = self.inner


def begin_response(receive: Any) -> BegunResponse | None:
    """Have the response of a request go through a `BegunResponse`.

    Args:
        receive: uvicorn's. Elsewhere the result is ``None``.
    """
    cycle: Any = getattr(receive, "__self__", None)
    if not hasattr(cycle, "message_event"):
        return None
    transport = getattr(cycle, "transport", None)
    if not hasattr(transport, "write") or cycle.response_started:
        return None
    if isinstance(transport, BegunResponse):
        if not transport.written:
            return transport
        transport = transport.inner  # it was that of the request before
    # It refuses by itself what is no HTTP.
    protocol = getattr(getattr(cycle, "on_response", None), "__self__", None)
    direct = getattr(protocol, "transport", None) is transport
    return BegunResponse(transport, cycle, *([protocol] if direct else []))


def transport_of(receive: Any, send: Any) -> Any:
    """Return the transport, or the socket, behind a request of HTTP/1.

    For uvicorn, and servers built on it, and hypercorn, whose callables are methods of
    objects that lead there. They do not promise that: for others, and behind middleware
    that replaces the callables, the result is ``None``.
    """
    cycle = getattr(receive, "__self__", None)
    if hasattr(cycle, "message_event"):  # of uvicorn, with either parser
        return getattr(cycle, "transport", None)
    found: Any = getattr(send, "__self__", None)
    for _ in range(2):  # a stream, its protocol, and the connection
        if not type(found).__module__.startswith("hypercorn.protocol."):
            return None
        found = getattr(getattr(found, "send", None), "__self__", None)
    if hasattr(found, "writer"):
        return found.writer.transport
    stream = getattr(found, "stream", None)
    stream = getattr(stream, "transport_stream", stream)  # below TLS
    return getattr(stream, "socket", None)


def is_closing(transport: Any) -> bool:
    """Whether a transport, or a socket, is closed or about to be."""
    closing = getattr(transport, "is_closing", None)
    return bool(transport.fileno() < 0 if closing is None else closing())


def _socket_of(transport: Any) -> Any:
    get = getattr(transport, "get_extra_info", None)
    sock = transport if get is None else get("socket")
    try:
        usable = not is_closing(transport) and sock.fileno() >= 0
        return sock if usable and sock.type == socket.SOCK_STREAM else None
    except (AttributeError, OSError):
        return None


def _notify_of(number: int, nbytes: int) -> int:
    """Notify the server of so many bytes, or of an end; return how many that became.

    Below this mark the kernel acknowledges what arrives at once. Without it, a client
    whose segments nobody reads waits 40 ms for each delayed acknowledgement, and its
    end arrives behind them (``__tcp_ack_snd_check`` of Linux).
    """
    try:
        # Without a descriptor of its own, for which there may be no number left.
        same = socket.socket(fileno=number)
    except OSError:  # it was closed by other means than its transport
        return 0
    try:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        # This look tells a client that has filled the buffer of the larger one. By
        # itself it asks ever more seldom. With a default timeout, it would wait.
        same.setblocking(False)
        with suppress(BlockingIOError):
            same.recv(1, socket.MSG_PEEK)
        return same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    except OSError:
        return 0
    finally:
        same.detach()


def _call_when_readable(epoll: Any, call: Callable[[], object]) -> Callable[[], object]:
    """Have the running event loop call *call*; return what ends that, and closes."""
    trio = sys.modules.get("trio")
    if trio is None or not trio.lowlevel.in_trio_run():
        loop = asyncio.get_running_loop()
        try:
            # In a context of its own: that of this request would stay with the reader.
            Context().run(loop.add_reader, epoll.fileno(), call)
        except BaseException:
            epoll.close()
            raise

        def detach() -> None:
            loop.remove_reader(epoll.fileno())
            epoll.close()

        return detach

    scope = trio.CancelScope()

    async def wait() -> None:
        # Closed here and not before: the next one may not have its number yet.
        with scope, epoll:
            while True:
                await trio.lowlevel.wait_readable(epoll.fileno())
                call()

    trio.lowlevel.spawn_system_task(wait)
    cancel: Callable[[], object] = scope.cancel
    return cancel
