"""The client's socket, read by descriptor so that asyncio and trio both work.

The descriptor of a ZMQ socket tells that *something* changed, once: every send and
every receive may swallow the news of a waiting message. So messages are taken until
there are none before anybody sleeps, and looked for after every send.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import anyio
import anyio.lowlevel
import zmq

from lifecycle_zmq._slot import running_asyncio_loop
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.transport import HUNG_UP_SECONDS, Handle

# Messages handled before other tasks get a turn.
_BURST = 256
# What a context with one thread and one connection takes, and some more.
_DESCRIPTORS = 16
# As enumerations, they take longer than the socket does.
_IN = int(zmq.POLLIN)
_OUT = int(zmq.POLLOUT)
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.RCVMORE)


class Link:
    """A DEALER that never blocks and never queues for an engine that is not there.

    Args:
        endpoint: The ``ipc://`` address of one incarnation.
        handle: Called with each message that came.

    Raises:
        OSError: The system has too few descriptors left.
    """

    __slots__ = (
        "_context",
        "_descriptor",
        "_greet",
        "_greeted",
        "_handle",
        "_over",
        "_reading",
        "_socket",
    )

    def __init__(self, endpoint: str, handle: Handle) -> None:
        self._handle = handle
        self._greet: Callable[[], bool] | None = None
        self._greeted = self._over = False
        self._reading = anyio.CancelScope()
        _ask_for_descriptors()
        # A context of its own: closing the link ends its I/O thread, and no other.
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

    def send(self, parts: Sequence[wire.Buffer]) -> bool:
        """Copy `parts` into the socket; False while there is no connection yet.

        What cannot be sent later is lost, as what was not read yet: `pump` tells.
        """
        if self._over:
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
        # What came meanwhile may not be told of again.
        self.drain()
        return True

    def receive(self) -> list[bytes] | None:
        """Return the parts of the next message, or None when none is there yet."""
        # Asked first: an attempt that fails costs three times as much.
        events = cast("int", self._socket.get(zmq.EVENTS))
        if not events & _IN:
            # Nothing can be sent only where nobody is connected: no queue is full.
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
        """Greet the engine as soon as it is there, handle what it says until it is not.

        Cancellation: no message is lost, none is taken while this waits.
        """
        self._greet = greet
        with self._reading:
            await self._read()
        await anyio.sleep(HUNG_UP_SECONDS)

    async def _read(self) -> None:
        loop = running_asyncio_loop()
        if loop is not None:
            with suppress(NotImplementedError):
                await self._pump_by_callback(loop)
        while True:
            if self._handle_some():
                await anyio.lowlevel.checkpoint()
            else:
                await anyio.wait_readable(self._descriptor)

    async def _pump_by_callback(self, loop: asyncio.AbstractEventLoop) -> None:
        # A reader that stays spares two system calls a message, a future, and the
        # turn of the loop in which a task would wake up to read.
        failed: asyncio.Future[None] = loop.create_future()

        def handle() -> None:
            if failed.done():
                return
            try:
                if self._handle_some():
                    loop.call_soon(handle)
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                failed.set_exception(error)

        loop.add_reader(self._descriptor, handle)
        try:
            # What came before the reader was there may not be told again.
            handle()
            await failed
        finally:
            failed.cancel()
            loop.remove_reader(self._descriptor)

    def _handle_some(self) -> bool:
        """Handle what is there; True when there may be more, of which others wait."""
        for _ in range(_BURST):
            if not self._handle_next():
                break
        else:
            return True
        # The first message, refused until the connection stands. Tried after the
        # receive, so that no news of the connection is left unseen.
        if self._greet is None or not self._greet():
            return False
        self._greet = None
        self._greeted = True
        return True

    def _hang_up(self) -> None:
        # Messages were lost. Another connection, which libzmq tries to make, would be
        # of no use to those who wait for what they said.
        self._over = True
        self._reading.cancel()

    def close(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._context.destroy(linger=0)

    def _handle_next(self) -> bool:
        parts = self.receive()
        return parts is not None and self._handle(parts)


def _ask_for_descriptors() -> None:
    """Raise `OSError` where there are too few: libzmq would end the process."""
    taken: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            taken += [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    finally:
        for descriptor in taken:
            os.close(descriptor)


_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    # Without a live connection a send is refused, not kept for the next engine.
    zmq.IMMEDIATE: 1,
    zmq.RECONNECT_IVL: 20,
    # Connected before the engine exists, which may take minutes to answer.
    zmq.HANDSHAKE_IVL: 0,
    # Bounded by the streams in flight. A full queue here would lose an END.
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: wire.largest_head(wire.FROM_ENGINE),
}
