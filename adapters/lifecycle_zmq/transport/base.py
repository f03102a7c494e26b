"""The transport interfaces of the client and the server.

Client and server number messages, count credit and keep waiters themselves. A
transport only carries messages, so every guarantee holds on each transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lifecycle_zmq.shared_memory.tensors import Buffer

# The exit of the process, which follows at once, gives a better reason than its socket.
HUNG_UP_SECONDS = 1.0


class ClientTransport(Protocol):
    """Carries the messages of one client, to and from one incarnation of an engine.

    Create and use it in one event loop.
    """

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Take one message; False if the engine cannot be reached.

        The first part is the header with its map, each further one the memory of a
        tensor. All of it belongs to the caller again when this returns.

        Raises:
            EncodeError: There is no room for it; nothing of it was sent.
        """

    def drain(self) -> None:
        """Handle every message that has arrived.

        Raises:
            ProtocolError: The received data is no message.
        """

    async def pump(self, greet: Callable[[], bool]) -> None:
        """Handle the engine's messages, in order, until it hangs up.

        Args:
            greet: Sends the first message, as soon as the engine may be there; called
                again until it returns True.

        Raises:
            ProtocolError: The received data is no message.

        Cancellation: no message is lost, none is taken while this waits.
        """

    def close(self) -> None:
        """Close at once; unsent data is dropped."""


MessageHandler = Callable[[Sequence[Buffer]], bool]
"""Takes the parts of a received message, keeping no reference to them; returns whether
to handle another one."""

Connect = Callable[[MessageHandler], ClientTransport]
"""Makes the transport of one client."""


class ServerTransport(Protocol):
    """Carries the messages of all clients of one engine, on the engine's thread."""

    def poll(self, milliseconds: int | None) -> None:
        """Wait for something to receive, at most for a time; ``None``: no limit."""

    def receive(self) -> tuple[bytes, Sequence[Buffer] | None] | None:
        """Return sender and parts of the next message; None if there is none.

        The parts belong to the receiver, except a single part, which is valid until
        the next call. ``None`` as parts: that client is gone.

        Raises:
            ProtocolError: The received data is no message; `sender` is that client.
        """

    def send(self, address: bytes, head: bytes) -> bool:
        """Send a message to a client; False if that client is gone."""


class AwaitedTransport(ServerTransport, Protocol):
    """A transport that an event loop can wait for."""

    @property
    def ahead(self) -> bool:
        """Whether there is something to receive for which `wait` would not return."""

    @property
    def full(self) -> bool:
        """Whether some messages could not be sent yet."""

    async def wait(self, *, room: bool = False) -> None:
        """Wait until there may be something to receive; with *room*, to send more.

        Cancellation: nothing is lost.
        """
