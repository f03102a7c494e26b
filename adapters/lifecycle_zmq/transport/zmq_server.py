"""The server's socket, and the memory of what it receives."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self, cast

import anyio
import zmq

from lifecycle_zmq.protocol import wire

# Shorter parts lie in a receive buffer of libzmq that they share and keep alive.
_COPIED_BELOW = 16 * 2**10
# As enumerations, they take longer than the socket does.
_IN = int(zmq.POLLIN)
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Router:
    """A ROUTER that listens on an endpoint and never waits for a client.

    Args:
        endpoint: The address.
        descriptor: Of a socket that listens there already, if one was inherited.
    """

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
        """Do nothing; it listens already."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the socket without lingering."""
        self._context.destroy(linger=0)

    def poll(self, milliseconds: int | None) -> None:
        """Wait until there is something to receive, or as long; ``None``: no end."""
        self._socket.poll(milliseconds)

    @property
    def ahead(self) -> bool:
        """Whether there is something to receive: its descriptor tells of news only."""
        return bool(cast("int", self._socket.get(zmq.EVENTS)) & _IN)

    @property
    def full(self) -> bool:
        """Never: a thread of libzmq takes it all."""
        return False

    async def wait(self, *, room: bool = False) -> None:
        """Wait until something may have come.

        Cancellation: nothing is lost.
        """
        del room
        await anyio.wait_readable(cast("int", self._socket.get(zmq.FD)))

    def receive(self) -> tuple[bytes, list[wire.Buffer]] | None:
        """Return who sent the next message and its parts; None when there is none."""
        # Asked first: an attempt that fails costs three times as much.
        if not self.ahead:
            return None
        frames = self._socket.recv_multipart(_NOW, copy=False)
        return frames[0].bytes, own(frames[1:])

    def send(self, address: bytes, head: bytes) -> bool:
        """Take a message for a client; False when that client is gone."""
        try:
            # The address tells whether there is anybody; what follows always goes.
            self._socket.send(address, _MORE)
            self._socket.send(head, _NOW)
        except zmq.ZMQError as error:
            if error.errno not in {errno.EHOSTUNREACH, errno.EAGAIN}:
                raise
            return False
        return True


def own(frames: Sequence[zmq.Frame]) -> list[wire.Buffer]:
    """Return the memory of `frames`, which keeps nothing else alive."""
    return [
        frame.buffer if len(frame) >= _COPIED_BELOW else bytearray(frame.buffer)
        for frame in frames
    ]


def _options() -> dict[int, int]:
    options: dict[int, int] = {
        zmq.LINGER: 0,
        # A client that is gone is an error to be told of, not a message to be lost.
        zmq.ROUTER_MANDATORY: 1,
        # Bounded by the streams that were admitted; a full queue would lose a DONE.
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: wire.MAX_TENSOR_BYTES,
    }
    if sys.platform == "linux":
        # The directory keeps other users out already; this does where it was opened.
        options[zmq.IPC_FILTER_UID] = os.getuid()
    return options
