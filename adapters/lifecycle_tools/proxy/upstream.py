"""The upstream: its address, and a bounded pool of connections to it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from lifecycle import Gate
from lifecycle.lowlevel import check_int, check_seconds, current_loop
from lifecycle_tools.proxy.connection import Connection, UpstreamError, UpstreamTimeout

_PORTS: Final = {"http": 80, "https": 443}
_REAP_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyTimeouts:
    """How long the proxy waits for its upstream, in seconds.

    Attributes:
        connect: For a connection, and for a place in a full pool.
        head: From the request to the head of the response.
        idle: Between two pieces of a response, or of a body that it is sent.
        keep_alive: An unused connection is kept for so long. Less than the upstream
            keeps it, or requests meet connections that are about to close.
    """

    connect: float = 5.0
    head: float = 600.0
    idle: float = 300.0
    keep_alive: float = 3.0

    def __post_init__(self) -> None:
        check_seconds(
            connect=self.connect,
            head=self.head,
            idle=self.idle,
            keep_alive=self.keep_alive,
        )


class Upstream:
    """One server, and the connections to it.

    Args:
        url: ``http://HOST:PORT``, ``https://HOST``, each with a path to put in front of
            others if wanted, or ``unix:PATH`` of a socket.
        timeouts: How long to wait.
        max_connections: Most connections at a time. As many requests wait.

    Attributes:
        authority: Host and port as in a ``Host`` header.
        prefix: Path in front of those of requests.
        gate: Admits requests to the pool.
        timeouts: As given.

    Raises:
        ValueError: The URL has another form.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: ProxyTimeouts | None = None,
        max_connections: int = 1000,
    ) -> None:
        check_int(1, max_connections=max_connections)
        self.timeouts = timeouts or ProxyTimeouts()
        self.prefix = b""
        self._socket_path = ""
        self._tls: ssl.SSLContext | None = None
        if url.startswith("unix:") and len(url) > 5:
            self._socket_path = url.removeprefix("unix:")
            self._host, self._port, self.authority = "", 0, b"localhost"
        else:
            self._read_url(url)
        self._idle: deque[Connection] = deque()
        self._loop: object | None = None
        self.gate = Gate(
            slots=max_connections,
            max_waiting=max_connections,
            max_wait=self.timeouts.connect,
            name="upstream",
        )

    def _read_url(self, url: str) -> None:
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or "@" in parts.netloc)
        if parts.scheme not in _PORTS or not parts.hostname or not plain:
            raise ValueError(
                "upstream must be http://HOST:PORT, https://HOST:PORT or unix:PATH, "
                f"not {url!r}"
            )
        self._host = parts.hostname
        self._port = parts.port or _PORTS[parts.scheme]
        self.authority = parts.netloc.encode()
        self.prefix = parts.path.rstrip("/").encode()
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()

    async def connect(self, *, fresh: bool = False) -> Connection:
        """Return a connection: the one used last, or a new one.

        Args:
            fresh: A new one in any case.

        Raises:
            UpstreamError: The upstream refuses.
            UpstreamTimeout: It does not answer in time.

        Cancellation:
            What was opened is closed.
        """
        # Also here: `reap` runs in a lifespan, which a mounted application has not.
        await self._close_idle(self.timeouts.keep_alive)
        idle = self._unused()
        while idle and not fresh:
            connection = idle.pop()
            if not connection.is_stale():
                return connection
            await connection.aclose()
        return Connection(await self.open())

    async def open(self) -> ByteStream:
        """Return a stream that nothing else uses; raises as `connect` does.

        Cancellation:
            What was opened is closed.
        """
        try:
            with anyio.fail_after(self.timeouts.connect):
                return await self._open()
        except TimeoutError:
            seconds = self.timeouts.connect
            text = f"The upstream took no connection within {seconds:g} s"
            raise UpstreamTimeout(text) from None
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise UpstreamError(_why(error)) from None

    async def _open(self) -> ByteStream:
        if self._socket_path:
            return await anyio.connect_unix(self._socket_path)
        if self._tls is None:
            return await anyio.connect_tcp(self._host, self._port)
        return await anyio.connect_tcp(
            self._host,
            self._port,
            ssl_context=self._tls,
            tls_hostname=self._host,
            tls_standard_compatible=False,
        )

    async def give_back(self, connection: Connection) -> None:
        """Keep *connection* for another request, or close it.

        Cancellation:
            Shielded: it is kept or closed in any case.
        """
        if self.timeouts.keep_alive and connection.start_next(anyio.current_time()):
            self._unused().append(connection)
        else:
            await connection.aclose()

    def _unused(self) -> deque[Connection]:
        """Return the unused connections of the running event loop.

        Those of another one can be neither used nor closed here: the collector closes
        them.
        """
        loop = current_loop()
        if loop is not self._loop:
            self._loop, self._idle = loop, deque()
        return self._idle

    async def reap(self) -> None:
        """Close connections that were unused for too long, for ever.

        Cancellation:
            Ends it.
        """
        while True:
            await anyio.sleep(_REAP_SECONDS)
            await self._close_idle(self.timeouts.keep_alive)

    async def aclose(self) -> None:
        """Close all connections that are unused.

        Cancellation:
            The rest stays open.
        """
        await self._close_idle(0.0)

    async def _close_idle(self, seconds: float) -> None:
        """Close those that were unused for *seconds*; the oldest are on the left."""
        idle, latest = self._unused(), anyio.current_time() - seconds
        while idle and idle[0].idle_since <= latest:
            await idle.popleft().aclose()


def _why(error: Exception) -> str:
    """Say why there is no connection, for the log and for clients: no address."""
    found = [error.__cause__ or error]
    if isinstance(found[0], ExceptionGroup):  # of several addresses
        found = list(found[0].exceptions)
    # A machine without IPv6 fails at one address, whatever the other one does.
    numbers = [getattr(it, "errno", None) for it in found]
    telling = [it for it in (errno.EMFILE, errno.ECONNREFUSED) if it in numbers]
    cause = found[numbers.index(telling[0] if telling else numbers[-1])]
    if isinstance(cause, ssl.SSLError):
        return f"No TLS with the upstream: {cause.reason}"
    if not isinstance(cause, OSError):
        return "The upstream ended the TLS handshake"
    if cause.errno in (None, errno.ECONNREFUSED):
        return "The upstream refuses connections"
    if isinstance(cause, socket.gaierror):
        return f"No connection to the upstream: {cause.strerror}"
    remedy = "; raise the limit (ulimit -n)" if cause.errno == errno.EMFILE else ""
    return f"No connection to the upstream: {os.strerror(cause.errno)}{remedy}"
