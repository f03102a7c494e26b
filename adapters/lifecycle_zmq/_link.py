"""The client's socket, read through anyio so that asyncio and trio both work.

The descriptor of a ZMQ socket tells that *something* changed, once: every send and
every receive may swallow the news of a waiting message. So messages are taken until
there are none before anybody sleeps, and looked for after every send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import anyio
import anyio.lowlevel
import zmq

from . import wire
from .wire import Kind

# Messages handled before other tasks get a turn.
_BURST = 256


class Link:
    """A DEALER that never blocks and never queues for an engine that is not there.

    Args:
        endpoint: The ``ipc://`` address of one incarnation.
        incarnation: Its number, which every message carries.
        handle: Called with each message that came, also from within `say`; returns
            whether another is wanted.
    """

    __slots__ = (
        "_context",
        "_descriptor",
        "_handle",
        "_incarnation",
        "_sent",
        "_socket",
    )

    def __init__(
        self,
        endpoint: str,
        *,
        incarnation: int,
        handle: Callable[[list[bytes]], bool],
    ) -> None:
        self._incarnation = incarnation
        self._handle = handle
        self._sent = 0
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

    def say(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> bool:
        """Copy one message into the socket; False when there is no connection.

        Raises:
            EncodeError: The message cannot be sent; nothing has changed.
        """
        head = wire.encode(
            kind,
            body,
            incarnation=self._incarnation,
            sequence=self._sent,
            generation=generation,
            tensors=len(memory),
        )
        if not self.send([head, *memory]):
            return False
        self._sent += 1
        if cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            # The descriptor may not tell of it again.
            self.drain()
        return True

    def send(self, parts: Sequence[wire.Buffer]) -> bool:
        """Copy `parts` into the socket; False when there is no connection."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return the parts of the next message, or None when none is there yet."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return None

    def drain(self) -> None:
        """Handle every message that has arrived."""
        while self._handle_next():
            pass

    async def pump(self) -> None:
        """Greet the engine as soon as it is there, and handle what it says, for ever.

        Cancellation: no message is lost, none is taken while this waits.
        """
        greeted = False
        while True:
            for _ in range(_BURST):
                if not self._handle_next():
                    break
            else:
                await anyio.lowlevel.checkpoint()
                continue
            # The first message, refused until the connection stands. Tried after the
            # receive, so that no news of the connection is left unseen.
            if not greeted and (greeted := self.say(Kind.STATUS, {"ask": 0})):
                continue
            await anyio.wait_readable(self._descriptor)

    def close(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._context.destroy(linger=0)

    def _handle_next(self) -> bool:
        parts = self.receive()
        return parts is not None and self._handle(parts)


_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    # Without a live connection a send is refused, not kept for the next engine.
    zmq.IMMEDIATE: 1,
    zmq.RECONNECT_IVL: 20,
    # Bounded by the streams in flight. A full queue here would lose an END.
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: wire.largest_head(wire.FROM_ENGINE),
}
