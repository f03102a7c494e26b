"""A server's transport over queues in its own process, filled by other threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import anyio.lowlevel

from lifecycle_zmq.protocol.wire import Buffer
from lifecycle_zmq.transport.bell import Bell


class QueuedTransport:
    """Carries messages between the thread of an `EngineLoop` and any others.

    Attributes:
        turns: Counts on with every turn of the loop, so that others see it get on.
        waiting: Whether the loop sleeps until a message comes.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[bytes, Sequence[Buffer] | None]] = deque()
        self._news = threading.Condition()
        self._clients: dict[bytes, Callable[[bytes], None]] = {}
        # Of the loop's event loop, where it has one.
        self._bell: Bell | None = None
        self.turns = 0
        self.waiting = False

    def join(self, address: bytes, deliver: Callable[[bytes], None]) -> None:
        """Let a client in; `deliver` takes what is said to it, in the loop's thread."""
        self._clients[address] = deliver

    def leave(self, address: bytes) -> None:
        """Let a client go: its streams are ended, nothing more is said to it."""
        if self._clients.pop(address, None) is not None:
            self._append(address, None)

    def put(self, address: bytes, parts: Sequence[Buffer]) -> None:
        """Take a message of a client; the parts are the engine's from now on."""
        self._append(address, parts)

    def poll(self, milliseconds: int | None) -> None:
        """Wait until there is something to receive, or as long; ``None``: no end."""
        seconds = None if milliseconds is None else milliseconds / 1000
        with self._news:
            self._news.wait_for(lambda: self._arrived, seconds)

    @property
    def ahead(self) -> bool:
        """Whether there is something to receive."""
        return bool(self._arrived)

    @property
    def full(self) -> bool:
        """Never: whoever a message is for takes it at once."""
        return False

    async def wait(self, *, room: bool = False) -> None:
        """Wait until something may have come; in the loop's thread, one task alone.

        Cancellation: nothing is lost.
        """
        del room
        if self._bell is None:
            self._bell = Bell()
        if self._arrived:
            await anyio.lowlevel.checkpoint()  # others get on, however much comes
        else:
            await self._bell.wait()

    def turn(self, *, idle: bool) -> None:
        """Begin a turn of the loop, or of sleep until a message comes."""
        self.turns += 1
        self.waiting = idle

    def receive(self) -> tuple[bytes, Sequence[Buffer] | None] | None:
        """Return who sent the next message and its parts; None when there is none."""
        return self._arrived.popleft() if self._arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        """Take a message for a client; False when that client is gone."""
        deliver = self._clients.get(address)
        if deliver is None:
            return False
        deliver(head)
        return True

    def _append(self, address: bytes, parts: Sequence[Buffer] | None) -> None:
        with self._news:
            self._arrived.append((address, parts))
            self._news.notify()
        if self._bell is not None:
            self._bell.ring()
