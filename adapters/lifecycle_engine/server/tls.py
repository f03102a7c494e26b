"""HTTPS: handshakes that count as connections, and end in time.

An event loop's own server shows a connection only after its handshake, so that clients
that never shake hands would be limited by nothing but the descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from lifecycle_engine.server.uvicorn_protocol import ConnectionLimits

# Seconds that a handshake may take where heads may take for ever.
_LONGEST = 600.0
# Seconds without new connections when the system has no room for one, as in asyncio.
_PAUSE = 1.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the settings of a server with this certificate.

    Raises:
        OSError: It cannot be read, or is none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # An empty password: asked for one, OpenSSL would wait for a terminal.
    context.load_cert_chain(certificate, key, password="")
    return context


class TlsListener:
    """Accepts connections for an `asyncio` protocol, encrypted; as `asyncio.Server`.

    Args:
        listener: Where clients connect.
        protocol: Makes what serves a connection, once it is encrypted.
        context: Made by `server_context`.
        limits: A handshake may take as long as the head of a request.
        connections: All connections that are encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], Any],
        *,
        context: ssl.SSLContext,
        limits: ConnectionLimits,
        connections: Collection[Any],
    ) -> None:
        self._listener, self._protocol, self._context = listener, protocol, context
        self._limits, self._connections = limits, connections
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._start()

    def _start(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept one, and cut it if there are too many: a refusal needs a handshake."""
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # also of a client that has left, or if there is none
            if error.errno in _NO_ROOM:
                self._loop.remove_reader(self._listener)
                self._paused = self._loop.call_later(_PAUSE, self._start)
            return
        if len(self._connections) + len(self._handshakes) >= self._limits.connections:
            accepted.close()
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._shake_hands(accepted))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        with suppress(OSError):  # of ssl, too, and when it took too long
            await self._loop.connect_accepted_socket(
                self._protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=min(self._limits.head, _LONGEST),
            )

    def close(self) -> None:
        """Accept no more, and cut the handshakes."""
        self._loop.remove_reader(self._listener)
        if self._paused is not None:
            self._paused.cancel()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return at once, as uvicorn waits for the connections itself.

        Cancellation:
            At any time.
        """
