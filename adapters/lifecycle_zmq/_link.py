"""The client's socket, read through anyio so that asyncio and trio both work.

The descriptor of a ZMQ socket tells that *something* changed, once: every send and
every receive may swallow the news of a waiting message. So `receive` is called until
it returns nothing before `wait`, and `pending` is looked at after every `send`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import anyio
import zmq

from . import wire


class Link:
    """A DEALER that never blocks and never queues for an engine that is not there.

    Args:
        endpoint: The ``ipc://`` address of one incarnation.
    """

    __slots__ = ("_context", "_descriptor", "_socket")

    def __init__(self, endpoint: str) -> None:
        # A context of its own: closing the link ends its I/O thread, and no other.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,
            # Without a live connection a send is refused, not kept for the next engine.
            zmq.IMMEDIATE: 1,
            zmq.RECONNECT_IVL: 20,
            # Bounded by the streams in flight. A full queue here would lose an END.
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: wire.largest_head(wire.FROM_ENGINE),
        }
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise
        self._descriptor = cast("int", self._socket.get(zmq.FD))

    def send(self, parts: Sequence[wire.Buffer]) -> bool:
        """Copy `parts` into the socket; False when there is no connection."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return the parts of the next message, or None when none is there yet."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return None

    @property
    def pending(self) -> bool:
        """Whether a message waits that the descriptor may not tell of again."""
        return bool(cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    async def wait(self) -> None:
        """Wait until something may have changed.

        Cancellation: nothing is lost, no message is taken here.
        """
        await anyio.wait_readable(self._descriptor)

    def close(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._context.destroy(linger=0)
