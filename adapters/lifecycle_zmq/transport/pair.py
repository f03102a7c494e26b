"""A pair of connected sockets: made before the engine, which inherits one of them.

It has no name that anybody else could connect to, leaves nothing in the file system
whoever is killed, and no thread stands between it and the loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import anyio

from lifecycle_zmq._slot import Slot, running_asyncio_loop
from lifecycle_zmq.memory import parcels
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Buffer
from lifecycle_zmq.transport import HUNG_UP_SECONDS, Handle
from lifecycle_zmq.transport.frame_writer import FrameWriter, prepare
from lifecycle_zmq.transport.frames import FrameReader

_ADDRESS = b"pair"
# While a message is coming in, its rest is waited for so long; and so many times.
_REST_MILLISECONDS = 1
_READS = 64


class Pair:
    """Both ends, until each has its owner.

    Attributes:
        address: What the engine is told beside the descriptor.
        inherited: The descriptor of the engine's end, by name.
    """

    address = "pair:"

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._ours: socket.socket | None = ours
        prepare(ours)
        prepare(self._theirs)
        self.inherited = {"link": self._theirs.fileno()}

    def connect(self, handle: Handle) -> PairLink:
        """Make our end a link, which from then on has to be closed; once."""
        ours, self._ours = self._ours, None
        assert ours is not None
        return PairLink(ours, handle)

    def hide(self) -> None:
        """Do nothing; nobody else could find it at any time."""

    def close(self) -> None:
        """Close what is not a link."""
        self._theirs.close()
        if self._ours is not None:
            self._ours.close()


class PairLink:
    """The client's end, as a `ClientTransport`."""

    __slots__ = ("_full", "_handle", "_over", "_reader", "_socket", "_writer")
    # Copies of large tensors may be made before they are sent, by `parcels`.
    passes_memory = parcels.SUPPORTED

    def __init__(self, sock: socket.socket, handle: Handle) -> None:
        self._socket = sock
        self._handle = handle
        self._reader = FrameReader(
            sock, head=wire.largest_head(wire.FROM_ENGINE), tensors=0
        )
        self._writer = FrameWriter(sock)
        self._full = Slot()
        self._over = False

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send or keep a message; False when the engine has left too many unread.

        What cannot be sent at all is lost, as what was not read yet: `pump` tells.

        Raises:
            EncodeError: There is no room for its tensors; nothing of it was sent.
        """
        try:
            taken = self._writer.write(parts)
        except OSError:
            self._hang_up()
            return True
        if self._writer.waiting:
            self._full.wake()
        return taken

    def drain(self) -> None:
        """Handle every message that has arrived."""
        while self._read():
            pass

    async def pump(self, greet: Callable[[], bool]) -> None:
        """Greet the engine and handle what it says, in order, until it hangs up.

        Raises:
            ProtocolError: It said what is no message.

        Cancellation: no message is lost, none is taken while this waits.
        """
        greet()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._flush)
            failure = await self._read_until_over()
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        await anyio.sleep(HUNG_UP_SECONDS)

    def close(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._socket.close()
        # A reader of a stream that is over may keep the client, and so this.
        self._writer.drop()

    async def _read_until_over(self) -> Exception | None:
        # Returned: raised here, it would be told as a group.
        loop = running_asyncio_loop()
        try:
            if loop is not None:
                await self._read_by_callback(loop)
            while not self._over:
                await anyio.wait_readable(self._socket)
                self._read()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    async def _read_by_callback(self, loop: asyncio.AbstractEventLoop) -> None:
        # A reader that stays spares two system calls a message, a future, and the
        # turn of the loop in which a task would wake up to read.
        over: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                if not over.done():
                    over.set_exception(error)
            if self._over:
                loop.remove_reader(self._socket)
                if not over.done():
                    over.set_result(None)

        loop.add_reader(self._socket, read)
        try:
            await over
        finally:
            loop.remove_reader(self._socket)

    def _read(self) -> bool:
        """Handle what one read brings; False if it brought nothing, or was the last."""
        if self._over:
            return False
        reader = self._reader
        came = reader.read()
        try:
            while (parts := reader.take()) is not None:
                if not self._handle(parts):
                    reader.over = True
        finally:
            self._over = reader.over
        return came

    async def _flush(self) -> None:
        while True:
            if not self._writer.waiting:
                await self._full.wait()
                continue
            await anyio.wait_writable(self._socket)
            try:
                self._writer.flush()
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        # Whatever it was, the engine misses something. So `pump` reads the end, too.
        self._writer.drop()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class PairServer:
    """The engine's end, as a `ServerTransport` of one client.

    Args:
        descriptor: Of the socket that was inherited.
        leave: Called when the client has hung up: nobody else can ever come.
    """

    def __init__(self, descriptor: int, leave: Callable[[], None]) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        # A program may have set a timeout for all sockets that it makes.
        self._socket.setblocking(False)
        self._leave = leave
        self._reader = FrameReader(
            self._socket,
            head=wire.largest_head(wire.FROM_CLIENT),
            tensors=wire.MAX_TENSORS,
        )
        self._writer = FrameWriter(self._socket)
        # Whether more than the socket's news is to be looked at: messages read ahead.
        self._ahead = False
        self._news = select.poll()
        self._news.register(descriptor, select.POLLIN)
        self._any = select.poll()
        self._any.register(descriptor, select.POLLIN | select.POLLOUT)

    def __enter__(self) -> Self:
        """Do nothing; it is connected already."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Send what fits without waiting, and close."""
        waiting = -1
        with suppress(OSError):
            while waiting != self._writer.waiting:
                waiting = self._writer.waiting
                self._writer.flush()
        self._reader.close()
        self._socket.close()

    def poll(self, milliseconds: int | None) -> None:
        """Wait until there is something to receive, or as long; ``None``: no end."""
        if not self._ahead:
            (self._any if self._writer.waiting else self._news).poll(milliseconds)

    @property
    def ahead(self) -> bool:
        """Whether there may be messages that were read, but not received."""
        return self._ahead

    @property
    def full(self) -> bool:
        """Whether the client has left so much unread that the rest waits here."""
        return self._writer.waiting > 0

    async def wait(self, *, room: bool = False) -> None:
        """Wait until something may have come; with *room*, until more may be sent.

        Cancellation: nothing is lost.
        """
        await (anyio.wait_writable if room else anyio.wait_readable)(self._socket)

    def receive(self) -> tuple[bytes, Sequence[Buffer] | None] | None:
        """Return who sent the next message and its parts; None when there is none.

        Raises:
            ProtocolError: What came is no message; next, its client is gone.
        """
        if self._writer.waiting:
            with suppress(OSError):
                self._writer.flush()
        self._ahead = True
        for _ in range(_READS):
            parts = self._reader.take()
            if parts is not None:
                return _ADDRESS, parts
            over = self._reader.over
            if over or not (self._reader.read() or self._waits_for_rest()):
                break
        else:
            return None  # what came last is to be looked at before anybody sleeps
        if not self._reader.over:
            self._ahead = False
            return None
        self._leave()
        return _ADDRESS, None

    def send(self, address: bytes, head: bytes) -> bool:
        """Take a message for a client; False when that client is gone."""
        del address
        taken = False
        with suppress(OSError):
            taken = self._writer.write([head])
        if not taken:
            # What it misses it would wait for, if the end were not told to it.
            self._reader.over = self._ahead = True
        return taken

    def _waits_for_rest(self) -> bool:
        # The client writes on as soon as its loop turns, a step may take long.
        reader = self._reader
        return (
            not reader.over
            and reader.amid
            and bool(self._news.poll(_REST_MILLISECONDS))
        )
