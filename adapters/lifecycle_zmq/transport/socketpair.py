"""The socket pair transport: made before the engine process, which inherits one end."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

import anyio

from lifecycle.lowlevel import LoopWaiter
from lifecycle_zmq import protocol
from lifecycle_zmq.exceptions import ProtocolError
from lifecycle_zmq.shared_memory import memfd
from lifecycle_zmq.shared_memory.tensors import MAX_TENSORS, Buffer
from lifecycle_zmq.transport.base import HUNG_UP_SECONDS, MessageHandler
from lifecycle_zmq.transport.framing import FrameReader, FrameWriter, prepare

_ADDRESS = b"pair"
# How long, and how often, to wait for the rest of a message.
_REST_MILLISECONDS = 1
_READS = 64


class SocketPair:
    """Both ends, until each has its owner."""

    address = "pair:"

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._ours: socket.socket | None = ours
        prepare(ours)
        prepare(self._theirs)
        self.inherited = {"link": self._theirs.fileno()}

    def connect(self, handle: MessageHandler) -> SocketPairClient:
        """Return the client's transport over its end; once. The caller closes it."""
        ours, self._ours = self._ours, None
        assert ours is not None
        return SocketPairClient(ours, handle)

    def unlink(self) -> None:
        """Do nothing: the pair has no name."""

    def close(self) -> None:
        """Close the ends that have no other owner."""
        self._theirs.close()
        if self._ours is not None:
            self._ours.close()


class SocketPairClient:
    """The client's end, as a `ClientTransport`."""

    __slots__ = ("_at_end", "_full", "_handle", "_reader", "_socket", "_writer")
    # Large tensors may be copied to sealed memory before they are sent.
    passes_memory = memfd.SUPPORTED

    def __init__(self, sock: socket.socket, handle: MessageHandler) -> None:
        self._socket = sock
        self._handle = handle
        self._reader = FrameReader(
            sock, head=protocol.largest_head(protocol.FROM_ENGINE), tensors=0
        )
        self._writer = FrameWriter(sock)
        self._full = LoopWaiter()
        self._at_end = False

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send or queue a message; False if the engine has left too much unread.

        After a hang-up messages are dropped, and `pump` ends.

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
        """Send the first message, then handle the engine's messages until it hangs up.

        Raises:
            ProtocolError: The received data is no message.

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
        """Close at once; unsent data is dropped."""
        self._socket.close()
        # A reader of a finished stream may keep the client, and so this, alive.
        self._writer.drop()

    async def _read_until_over(self) -> Exception | None:
        # Returned: raised here, it would become an exception group.
        loop = self._full.loop
        try:
            if loop is not None:
                await self._read_by_callback(loop)
            while not self._at_end:
                await anyio.wait_readable(self._socket)
                self._read()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    async def _read_by_callback(self, loop: asyncio.AbstractEventLoop) -> None:
        # A permanent reader saves two system calls a message, a future, and the loop
        # iteration in which a task would wake up to read.
        at_end: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - raised by the future
                if not at_end.done():
                    at_end.set_exception(error)
            if self._at_end:
                loop.remove_reader(self._socket)
                if not at_end.done():
                    at_end.set_result(None)

        loop.add_reader(self._socket, read)
        try:
            await at_end
        finally:
            loop.remove_reader(self._socket)

    def _read(self) -> bool:
        """Handle what one read brings; False if it brought nothing, or was the last."""
        if self._at_end:
            return False
        reader = self._reader
        came = reader.read()
        try:
            while (parts := reader.take()) is not None:
                if not self._handle(parts):
                    reader.at_end = True
        finally:
            self._at_end = reader.at_end
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
        # A message was lost, so end the link: `pump` reads end of file.
        self._writer.drop()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class SocketPairServer:
    """The engine's end, as a `ServerTransport` of one client."""

    def __init__(self, descriptor: int, leave: Callable[[], None]) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        # A program may have set a default timeout for sockets.
        self._socket.setblocking(False)
        self._leave = leave
        self._reader = FrameReader(
            self._socket,
            head=protocol.largest_head(protocol.FROM_CLIENT),
            tensors=MAX_TENSORS,
        )
        self._writer = FrameWriter(self._socket)
        # Whether messages may have been read ahead.
        self._ahead = False
        self._news = select.poll()
        self._news.register(descriptor, select.POLLIN)
        self._any = select.poll()
        self._any.register(descriptor, select.POLLIN | select.POLLOUT)

    def __enter__(self) -> Self:
        """Return the transport; it is connected already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Send what fits without waiting, and close."""
        waiting = -1
        with suppress(OSError):
            while waiting != self._writer.waiting:
                waiting = self._writer.waiting
                self._writer.flush()
        self._reader.close()
        self._socket.close()

    def poll(self, milliseconds: int | None) -> None:
        """Wait for something to receive, at most for a time; ``None``: no limit."""
        if not self._ahead:
            (self._any if self._writer.waiting else self._news).poll(milliseconds)

    @property
    def ahead(self) -> bool:
        """Whether there may be messages that were read, but not received."""
        return self._ahead

    @property
    def full(self) -> bool:
        """Whether the client has left so much unread that messages are queued here."""
        return self._writer.waiting > 0

    async def wait(self, *, room: bool = False) -> None:
        """Wait until there may be something to receive; with *room*, to send more.

        Cancellation: nothing is lost.
        """
        await (anyio.wait_writable if room else anyio.wait_readable)(self._socket)

    def receive(self) -> tuple[bytes, Sequence[Buffer] | None] | None:
        """Return sender and parts of the next message; None if there is none.

        Raises:
            ProtocolError: The received data is no message; the client counts as gone.
        """
        if self._writer.waiting:
            with suppress(OSError):
                self._writer.flush()
        self._ahead = True
        for _ in range(_READS):
            try:
                parts = self._reader.take()
                if parts is not None:
                    return _ADDRESS, parts
                at_end = self._reader.at_end
                if at_end or not (self._reader.read() or self._waits_for_rest()):
                    break
            except ProtocolError as error:
                error.sender = _ADDRESS
                raise
        else:
            return None  # handle the last read before sleeping
        if not self._reader.at_end:
            self._ahead = False
            return None
        self._leave()
        return _ADDRESS, None

    def send(self, address: bytes, head: bytes) -> bool:
        """Send a message to the client; False if it is gone."""
        del address
        taken = False
        with suppress(OSError):
            taken = self._writer.write([head])
        if not taken:
            # The client would wait for the lost message, so hang up.
            self._reader.at_end = self._ahead = True
        return taken

    def _waits_for_rest(self) -> bool:
        # The client soon writes the rest; a step may take long.
        reader = self._reader
        return (
            not reader.at_end
            and reader.mid_message
            and bool(self._news.poll(_REST_MILLISECONDS))
        )
