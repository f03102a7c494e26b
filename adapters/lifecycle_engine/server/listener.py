"""The operator's listener: ``/_lifecycle`` and ``/metrics``, apart from all clients.

A proxy that forwards the public address never connects here, so that neither a peer's
address nor a header has to tell the operator from a client.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import uvicorn

from lifecycle_engine.server.uvicorn_protocol import ConnectionLimits, http_protocol

Address = tuple[str, int] | Path
"""Host and port, or the path of a Unix socket."""

# Viewers and scrapers: more of them are a mistake.
_CONNECTIONS: Final = 64


def configured(
    app: Any, limits: ConnectionLimits, proxies: Sequence[str] = (), **options: Any
) -> uvicorn.Config:
    """Return the options of a server for clients within *limits*, and *options*."""
    return uvicorn.Config(
        app,
        http=http_protocol(limits),
        ws="none",
        log_level="error",  # requests that are not HTTP are not logged
        access_log=False,
        timeout_graceful_shutdown=1,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        **options,
    )


def join_address(host: str, port: int) -> str:
    """Return a host and a port, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: Address, *, backlog: int | None = None) -> socket.socket:
    """Listen on *address*, also at the Unix socket of a server that was killed."""
    if not isinstance(address, Path):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=backlog)
    _remove_abandoned(address)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(address))
        address.chmod(0o600)  # before any process can connect
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _remove_abandoned(path: Path) -> None:
    """Remove the socket of a server that was killed, and nothing else."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # its server may accept no one
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def _remove_name(listener: socket.socket) -> None:
    """Remove the name of a Unix socket that still listens.

    Of one that is closed, it may be that of the next server already.
    """
    if listener.family == socket.AF_UNIX and listener.fileno() >= 0:
        with suppress(OSError):  # what follows it is to happen in any case
            Path(listener.getsockname()).unlink(missing_ok=True)


class OperatorServer(uvicorn.Server):
    """Serves the operator's application beside another server, in its event loop.

    Attributes:
        address: What `lifecycle top` takes, with the port that *listener* has.
    """

    def __init__(
        self, app: Any, listener: socket.socket, limits: ConnectionLimits
    ) -> None:
        own = ConnectionLimits(
            head=limits.head, reader=limits.reader, connections=_CONNECTIONS
        )
        # The date is kept up to date by a main loop alone.
        config = configured(app, own, lifespan="off", date_header=False)
        super().__init__(config)
        self._listener = listener
        name = listener.getsockname()
        unix = listener.family == socket.AF_UNIX
        self.address = f"unix:{name}" if unix else f"http://{join_address(*name[:2])}"

    async def start(self) -> None:
        """Accept connections.

        Cancellation:
            It may listen or not; `stop` is due in both cases.
        """
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup([self._listener])

    async def stop(self) -> None:
        """Cut all connections; viewers of the live view never leave by themselves.

        Cancellation:
            Requests may still run.
        """
        if self.started:
            _remove_name(self._listener)
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await self.shutdown([self._listener])


def _listen_near(address: Address, *, moves: bool) -> socket.socket:
    try:
        return listen(address)
    except OSError as error:
        if not moves or isinstance(address, Path) or error.errno != errno.EADDRINUSE:
            raise
        return listen((address[0], 0))


@contextmanager
def operating(
    app: Any, address: Address | None, limits: ConnectionLimits, *, moves: bool = False
) -> Iterator[OperatorServer | None]:
    """Listen on *address* for *app*; without one, there is no server.

    With *moves*, a free port does where that of *address* is taken.

    Raises:
        OSError: The address cannot be listened on; the ``filename`` shows it.
    """
    if address is None:
        yield None
        return
    try:
        listener = _listen_near(address, moves=moves)
    except OSError as error:
        shown = str(address) if isinstance(address, Path) else join_address(*address)
        raise OSError(error.errno, error.strerror or str(error), shown) from None
    with listener:
        try:
            yield OperatorServer(app, listener, limits)
        finally:
            _remove_name(listener)
