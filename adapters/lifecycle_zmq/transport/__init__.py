"""What a client and a server need of whatever carries their messages.

Both keep all books themselves: numbers of messages, credit, who waits for what. So
another transport is these few methods, and every promise holds on it as on sockets.
The modules here are those that there are: a pair of sockets, ZeroMQ's, and queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lifecycle_zmq.protocol.wire import Buffer

# The end of the process, which comes at once, tells more than the end of its socket.
HUNG_UP_SECONDS = 1.0


class ClientTransport(Protocol):
    """Carries the messages of one client, to and from one incarnation of an engine.

    Made in the event loop that it belongs to, and called there alone.
    """

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Take one message; False when the engine cannot be reached.

        The first part is the header with its map, each further one the memory of a
        tensor. All of it is the caller's again when this returns.

        Raises:
            EncodeError: There is no room for it; nothing of it was sent.
        """
        ...

    def drain(self) -> None:
        """Handle every message that has arrived.

        Raises:
            ProtocolError: What arrived is no message.
        """
        ...

    async def pump(self, greet: Callable[[], bool]) -> None:
        """Handle what the engine says, in order, until it is seen to have hung up.

        Args:
            greet: Sends the first message, as soon as the engine may be there; called
                again and again until it returns True.

        Raises:
            ProtocolError: What arrived is no message.

        Cancellation: no message is lost, none is taken while this waits.
        """
        ...

    def close(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        ...


Handle = Callable[[Sequence[Buffer]], bool]
"""Takes the parts of a message that came, and keeps nothing of them; returns whether
another is wanted."""

Connect = Callable[[Handle], ClientTransport]
"""Makes the transport of one client."""


class ServerTransport(Protocol):
    """Carries the messages of all clients of one engine, on the engine's thread."""

    def poll(self, milliseconds: int | None) -> None:
        """Wait until there is something to receive, or as long; ``None``: no end."""
        ...

    def receive(self) -> tuple[bytes, Sequence[Buffer] | None] | None:
        """Return who sent the next message and its parts; None when there is none.

        The parts are the receiver's alone, but for one that came alone: that may be
        gone with the next call. Without any, that client is gone.

        Raises:
            ProtocolError: What came is no message.
        """
        ...

    def send(self, address: bytes, head: bytes) -> bool:
        """Take a message for a client; False when that client is gone."""
        ...


class AwaitedTransport(ServerTransport, Protocol):
    """A transport whose news an event loop may wait for."""

    @property
    def ahead(self) -> bool:
        """Whether there is something to receive that `wait` would not tell of."""
        ...

    @property
    def full(self) -> bool:
        """Whether something that was taken could not be sent yet."""
        ...

    async def wait(self, *, room: bool = False) -> None:
        """Wait until something may have come; with *room*, until more may be sent.

        Cancellation: nothing is lost.
        """
        ...
