"""Reading from a socket no more than is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Reading(asyncio.BufferedProtocol):
    """Reads for a protocol, which says how much at a time.

    Left alone, a loop reads 256 KiB before anybody can say that it is enough, from
    every client that waits to be let in.

    Args:
        protocol: Told of everything.
        appetite: How many bytes it takes next, at most; at least one.
    """

    def __init__(self, protocol: asyncio.Protocol, appetite: Callable[[], int]) -> None:
        self._protocol = protocol
        self._appetite = appetite
        self._buffer = bytearray()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Room for what comes next."""
        # Of its own for each reading: one for all would be no less, and clients'
        # bytes would lie where another loop's are read.
        self._buffer = bytearray(self._appetite())
        # Under TLS asyncio fills slices of it, which of a bytearray would be copies.
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """It came."""
        data, self._buffer = memoryview(self._buffer)[:nbytes], bytearray()
        self._protocol.data_received(data)  # type: ignore[arg-type]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As the protocol does."""
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As the protocol does."""
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """As the protocol does."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """As the protocol does."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """As the protocol does."""
        self._protocol.resume_writing()
