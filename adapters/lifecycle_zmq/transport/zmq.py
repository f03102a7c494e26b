"""The ZeroMQ transport: the client's and the server's sockets.

The descriptor of a ZMQ socket signals *changes*, once: every send and every receive may
consume the signal of a waiting message. So messages are received until there are none
before a task sleeps, and after every send.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self, cast

import anyio
import anyio.lowlevel
import zmq

from lifecycle.lowlevel import LoopWaiter
from lifecycle_zmq import protocol
from lifecycle_zmq.shared_memory.tensors import MAX_TENSOR_BYTES, Buffer
from lifecycle_zmq.transport.base import HUNG_UP_SECONDS, MessageHandler

# Messages handled before other tasks get a turn.
_BURST = 256
# Descriptors of a context with one thread and one connection, and some more.
_DESCRIPTORS = 16
# As int: enumerations take longer than the socket does.
_IN = int(zmq.POLLIN)
_OUT = int(zmq.POLLOUT)
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.RCVMORE)


class ZmqClientTransport:
    """A DEALER that never blocks and never queues for an engine that is not there.

    The event loop waits for its descriptor, so asyncio and trio both work.

    Args:
        endpoint: The ``ipc://`` address of one incarnation.
        handle: Called with each message that arrived.

    Raises:
        OSError: The system has too few descriptors left.
    """

    def __init__(self, endpoint: str, handle: MessageHandler) -> None:
        self._handle = handle
        self._greet: Callable[[], bool] | None = None
        self._greeted = self._hung_up = False
        self._reading = anyio.CancelScope()
        _ask_for_descriptors()
        # A context of its own: closing the transport ends its I/O thread only.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            for option, value in _OPTIONS.items():
                self._socket.setsockopt(option, value)
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise
        self._descriptor = cast("int", self._socket.get(zmq.FD))

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Copy *parts* into the socket; False while there is no connection yet.

        After a hang-up messages are dropped, and `pump` ends.
        """
        if self._hung_up:
            return True
        try:
            if len(parts) == 1:
                self._socket.send(parts[0], _NOW, copy=True)
            else:
                self._socket.send_multipart(parts, _NOW, copy=True)
        except zmq.ZMQError:
            if self._greeted:
                self._hang_up()
            return self._greeted
        # A message that arrived meanwhile may not be signalled again.
        self.drain()
        return True

    def receive(self) -> list[bytes] | None:
        """Return the parts of the next message, or None if there is none yet."""
        # Checked first: an attempt that fails costs three times as much.
        events = cast("int", self._socket.get(zmq.EVENTS))
        if not events & _IN:
            # Queues are unbounded, so a socket not writable has no connection.
            if self._greeted and not events & _OUT:
                self._hang_up()
            return None
        parts = [self._socket.recv(_NOW)]
        while self._socket.get(_MORE):
            parts.append(self._socket.recv(_NOW))
        return parts

    def drain(self) -> None:
        """Handle every message that has arrived."""
        while self._handle_next():
            pass

    async def pump(self, greet: Callable[[], bool]) -> None:
        """Send the first message once connected, then handle messages until a hang-up.

        Cancellation: no message is lost, none is taken while this waits.
        """
        self._greet = greet
        with self._reading:
            await self._read()
        await anyio.sleep(HUNG_UP_SECONDS)

    async def _read(self) -> None:
        loop = LoopWaiter().loop
        if loop is not None:
            with suppress(NotImplementedError):
                await self._pump_by_callback(loop)
        while True:
            if self._handle_some():
                await anyio.lowlevel.checkpoint()
            else:
                await anyio.wait_readable(self._descriptor)

    async def _pump_by_callback(self, loop: asyncio.AbstractEventLoop) -> None:
        # A permanent reader saves two system calls a message, a future, and the loop
        # iteration in which a task would wake up to read.
        failed: asyncio.Future[None] = loop.create_future()

        def handle() -> None:
            if failed.done():
                return
            try:
                if self._handle_some():
                    loop.call_soon(handle)
            except Exception as error:  # noqa: BLE001 - raised by the future
                failed.set_exception(error)

        loop.add_reader(self._descriptor, handle)
        try:
            # Messages that arrived before the reader may not be signalled again.
            handle()
            await failed
        finally:
            failed.cancel()
            loop.remove_reader(self._descriptor)

    def _handle_some(self) -> bool:
        """Handle messages; True if there may be more after other tasks ran."""
        for _ in range(_BURST):
            if not self._handle_next():
                break
        else:
            return True
        # The first message, refused until there is a connection. Tried after the
        # receive, so that the signal of the connection is not missed.
        if self._greet is None or not self._greet():
            return False
        self._greet = None
        self._greeted = True
        return True

    def _hang_up(self) -> None:
        # Messages were lost. libzmq reconnects, but the waiters for those messages
        # would wait forever.
        self._hung_up = True
        self._reading.cancel()

    def close(self) -> None:
        """Close at once; unsent data is dropped."""
        self._context.destroy(linger=0)

    def _handle_next(self) -> bool:
        parts = self.receive()
        return parts is not None and self._handle(parts)


def _ask_for_descriptors() -> None:
    """Raise `OSError` if there are too few: libzmq would abort the process."""
    taken: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            taken += [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    finally:
        for descriptor in taken:
            os.close(descriptor)


_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    # Without a connection a send fails instead of queueing for the next engine.
    zmq.IMMEDIATE: 1,
    zmq.RECONNECT_IVL: 20,
    # Connected before the engine exists, which may take minutes to answer.
    zmq.HANDSHAKE_IVL: 0,
    # Bounded by the streams in flight. A full queue here would lose an END.
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: protocol.largest_head(protocol.FROM_ENGINE),
}

# Shorter parts share a receive buffer of libzmq, which they would keep alive.
_COPIED_BYTES = 16 * 2**10
# As int: enumerations take longer than the socket does.
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ZmqServerTransport:
    """A ROUTER that listens on an endpoint and never waits for a client."""

    def __init__(self, endpoint: str, descriptor: int | None = None) -> None:
        self._context = zmq.Context()
        try:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            for option, value in _options().items():
                self._socket.setsockopt(option, value)
            if descriptor is not None:
                self._socket.setsockopt(zmq.USE_FD, descriptor)
            self._socket.bind(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> Self:
        """Return the transport; it listens already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the socket without lingering."""
        self._context.destroy(linger=0)

    def poll(self, milliseconds: int | None) -> None:
        """Wait for something to receive, at most for a time; ``None``: no limit."""
        self._socket.poll(milliseconds)

    @property
    def ahead(self) -> bool:
        """Whether there is something to receive; the descriptor shows changes only."""
        return bool(cast("int", self._socket.get(zmq.EVENTS)) & _IN)

    @property
    def full(self) -> bool:
        """Always False: a thread of libzmq takes everything."""
        return False

    async def wait(self, *, room: bool = False) -> None:
        """Wait until there may be something to receive.

        Cancellation: nothing is lost.
        """
        del room
        await anyio.wait_readable(cast("int", self._socket.get(zmq.FD)))

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """Return sender and parts of the next message; None if there is none."""
        # Checked first: an attempt that fails costs three times as much.
        if not self.ahead:
            return None
        frames = self._socket.recv_multipart(_NOW, copy=False)
        return frames[0].bytes, own(frames[1:])

    def send(self, address: bytes, head: bytes) -> bool:
        """Send a message to a client; False if that client is gone."""
        try:
            # Only the address part fails for a client that is gone.
            self._socket.send(address, _NOW_AND_MORE)
            self._socket.send(head, _NOW)
        except zmq.ZMQError as error:
            if error.errno not in {errno.EHOSTUNREACH, errno.EAGAIN}:
                raise
            return False
        return True


def own(frames: Sequence[zmq.Frame]) -> list[Buffer]:
    """Return the memory of *frames* without keeping their receive buffer alive."""
    return [
        frame.buffer if len(frame) >= _COPIED_BYTES else bytearray(frame.buffer)
        for frame in frames
    ]


def _options() -> dict[int, int]:
    options: dict[int, int] = {
        zmq.LINGER: 0,
        # A send to a client that is gone is an error instead of a lost message.
        zmq.ROUTER_MANDATORY: 1,
        # Bounded by the streams that were admitted; a full queue would lose a DONE.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: MAX_TENSOR_BYTES,
    }
    if sys.platform == "linux":
        # Beside the mode of the directory, which a user may have opened.
        options[zmq.IPC_FILTER_UID] = os.getuid()
    return options
