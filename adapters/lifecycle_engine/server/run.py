"""Running the server: announce it when it is ready, drain it on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import anyio
import uvicorn
from PIL import Image
from starlette.applications import Starlette

from lifecycle import EngineLost
from lifecycle_engine.server.listener import (
    Address,
    OperatorServer,
    configured,
    join_address,
    listen,
    operating,
)
from lifecycle_engine.server.service import Service
from lifecycle_engine.server.tls import TlsListener, server_context
from lifecycle_engine.server.uvicorn_protocol import (
    Connection,
    ConnectionLimits,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL = 0.05
_SWITCH_INTERVAL = 0.001
# Backlog of the kernel, and number of connections that asyncio accepts in one turn of
# the loop (uvloop accepts one). asyncio has one option for both.
_BACKLOG, _ACCEPTED_AT_ONCE = 2048, 1
# Seconds after the drain: for the engine to end the remaining sessions, and for clients
# to read what has been sent. Together less than the two seconds that an exit may take.
_END_SECONDS = 0.3
_FLUSH_SECONDS = 0.3
# Descriptors that are not for clients: for the engine, files and libraries.
_RESERVED = 256
# Fewer than this are worth a warning.
_FEW_CONNECTIONS = 256
# Options of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Larger blocks get pages of their own; for smaller ones that would cost too much.
_LARGE = 4 * 2**20
# Up to this much free memory stays at the end of a heap, for the next request.
_KEPT = 16 * 2**20


def configure_malloc() -> bool:
    """Make ``free`` return pages to the system; False without glibc.

    By default, glibc puts blocks on the heap that are as large as the largest block
    freed so far, up to 32 MiB. After a burst of pictures many small blocks lie between
    large holes, and the process keeps its peak memory forever.

    Threads share one heap: each further heap would keep free memory of its own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = {
        _M_MMAP_THRESHOLD: _LARGE,
        _M_TRIM_THRESHOLD: _KEPT,
        _M_ARENA_MAX: 1,
    }
    done = [mallopt(name, value) for name, value in options.items()]
    return all(done)


def reuse_image_memory(count: int) -> None:
    """Decode pictures into the memory of earlier ones.

    Fresh pages are a large part of the cost of decoding. And without reuse, the peak
    memory depends on how decodings overlap. Pillow keeps one block for each thread, as
    large as the last picture decoded in it and 16 MiB at most.
    """
    Image.core.set_blocks_max(count)  # type: ignore[attr-defined]


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude the objects of now from garbage collection, until the end of the block.

    A full collection stops the process and visits all objects. A server's modules are
    some hundred thousand objects that never become garbage: 30 to 80 ms each time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class DrainingServer(uvicorn.Server):
    """uvicorn that drains the sessions before it closes connections.

    The first SIGTERM or SIGINT closes admission: readiness becomes false, new requests
    are refused as shutting down, streams get *drain* seconds, and the remaining ones
    end with an error in the form of their API. A second SIGINT ends the drain early, a
    third one kills the process. Unlike in uvicorn, the exit is ordinary otherwise: the
    signal is not raised again.

    Args:
        config: With a limited ``timeout_graceful_shutdown``.
        service: The service whose sessions are drained.
        drain: Seconds that streams may take.
        on_ready: Called once the server listens and the engine is ready.
        operator: Serves the operator until the drain is over.
        tls: Makes the listener of HTTPS from a socket, a protocol and *connections*.

    Attributes:
        failure: Why the engine never became ready; the server then stops by itself.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        *,
        drain: float,
        on_ready: Callable[[], None] = lambda: None,
        operator: OperatorServer | None = None,
        tls: Callable[..., TlsListener] | None = None,
    ) -> None:
        config.backlog = _ACCEPTED_AT_ONCE
        super().__init__(config)
        self._service = service
        self._drain = drain
        self._on_ready = on_ready
        self._operator = operator
        self._tls = tls
        self._awaiting: asyncio.Task[None] | None = None
        self._end_now = self._interrupted = False
        self._draining: anyio.CancelScope | None = None
        self.failure: EngineLost | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at once; announce the server when the engine is ready, too."""
        await super().startup([] if self._tls else sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)
            if self._tls is not None:
                self._serve_https(each, self._tls)
        if self._operator is not None:
            await self._operator.start()
        if not self.should_exit:
            self._awaiting = asyncio.create_task(self._await_engine())

    def _serve_https(self, listener: socket.socket, made: Callable[..., Any]) -> None:
        state, connection = self.server_state, self.config.http_protocol_class
        protocol = partial(
            cast("Callable[..., Any]", connection),
            config=self.config,
            server_state=state,
            app_state=self.lifespan.state,
        )
        self.servers.append(made(listener, protocol, connections=state.connections))

    async def _await_engine(self) -> None:
        try:
            await self._service.engine.wait_ready()
        except EngineLost as error:
            # An engine that never became ready will not become ready next time.
            self.failure = error
            self.should_exit = True
        else:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then shut down as uvicorn does."""
        service = self._service
        if self._awaiting is not None:
            self._awaiting.cancel()
        service.admission.close()
        for gate in service.gates:
            gate.close()
        if self._interrupted and (left := service.sessions.statistics().live):
            streams = "1 stream" if left == 1 else f"{left} streams"
            logging.getLogger("lifecycle").warning(
                "%s left, for %g s at most; Ctrl-C again stops now",
                streams,
                self._drain,
            )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_on_second_signal)
            with anyio.move_on_after(self._drain + _END_SECONDS) as self._draining:
                await service.sessions.drain(self._drain)
            service.sessions.close_all("shutdown")
            if service.sessions.statistics().closing:
                # An engine that is slow or stopped would delay the exit.
                service.engine.close()
            loop = asyncio.get_running_loop()
            loop.call_later(_FLUSH_SECONDS, self._abort_idle_connections)
            if self._operator is not None:
                tasks.start_soon(self._operator.stop)
            await super().shutdown(sockets)
            tasks.cancel_scope.cancel()

    def _abort_idle_connections(self) -> None:
        # An idle connection may still have a task that is about to close it.
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.abort_if_idle()

    async def _end_on_second_signal(self) -> None:
        # A signal handler sets a flag; there is nothing to wait on.
        while not self._end_now:  # noqa: ASYNC110
            await anyio.sleep(_POLL)
        if self._draining is not None:
            self._draining.cancel()
        self._service.sessions.close_all("shutdown")
        self._service.engine.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Record a signal."""
        # uvicorn's own handler would skip the end of the lifespan after a second
        # signal, also if that interrupts the first one.
        if self.should_exit and sig == signal.SIGINT:
            self._end_now = True
        self._interrupted |= sig == signal.SIGINT
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would restore the handlers too early."""
        yield

    @contextlib.contextmanager
    def handling_signals(self, after: signal.Handlers | None) -> Iterator[None]:
        """Handle signals in the block; then *after* does, or what did so before."""

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self.should_exit:
                # The next one kills the process.
                signal.signal(number, signal.SIG_DFL)
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if after is None else after)


def run(
    app: Starlette,
    *,
    host: str,
    port: int,
    drain: float = 10.0,
    limits: ConnectionLimits | None = None,
    announce: Callable[..., None] = print,
    operator: Address | None = None,
    operator_moves: bool = False,
    proxies: Sequence[str] = (),
    certificate: Path | None = None,
    key: Path | None = None,
    signals_after: signal.Handlers | None = None,
) -> None:
    """Serve *app* until SIGTERM or SIGINT; must be called on the main thread.

    Call it in a process of its own: while it serves, it changes the process's signal
    handlers, garbage collector and thread switching, and the settings of glibc's and
    Pillow's allocators for good.

    Args:
        app: Made by `create_app`.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        drain: Seconds that running streams get to finish at shutdown.
        limits: Of connections; the number of file descriptors limits theirs, too.
        announce: Called once with the server's address, and the operator's if any.
        operator: Where ``app.state.operator`` is served, without TLS, if anywhere.
        operator_moves: Whether a free port does where the operator's is taken.
        proxies: Addresses and networks whose ``X-Forwarded-For`` is trusted. By
            default none is, not even the loopback address.
        certificate: PEM file of a certificate and its chain; serves HTTPS.
        key: PEM file of its key. Default: in *certificate*.
        signals_after: What SIGTERM and SIGINT do afterwards, such as ``SIG_IGN`` in a
            process that then exits. Default: what they did before.

    Raises:
        OSError: An address cannot be listened on; the operator's is its ``filename``.
        EngineLost: The engine ended before it ever served, with the tail of its output.
    """
    service = app.state.service
    _configure_process(service)
    limits = _within_descriptor_limit(limits or ConnectionLimits())
    tls = _tls(certificate, key, limits)
    # Without the lifespan there is no engine, so a failure of it ends the start.
    config = configured(app, limits, proxies, lifespan="on")
    operated = operating(app.state.operator, operator, limits, moves=operator_moves)
    with listen((host, port), backlog=_BACKLOG) as listener, operated as own:
        scheme = "http" if tls is None else "https"
        address = f"{scheme}://{join_address(host, listener.getsockname()[1])}"
        ready = partial(announce, address, *([own.address] if own else []))
        server = DrainingServer(
            config, service, drain=drain, on_ready=ready, operator=own, tls=tls
        )
        signals = server.handling_signals(signals_after)
        with frozen_heap(), _short_switch_interval(), signals:
            server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


def _tls(
    certificate: Path | None, key: Path | None, limits: ConnectionLimits
) -> Callable[..., TlsListener] | None:
    if certificate is None:
        return None
    return partial(TlsListener, context=server_context(certificate, key), limits=limits)


def _configure_process(service: Service) -> None:
    # Broken metadata in clients' pictures would add a log line for each tag.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    configure_malloc()
    reuse_image_memory(int(service.threads.total_tokens))


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    # The event loop releases the GIL whenever it polls its sockets. While a thread
    # parses a body, the loop gets the GIL back after this, not after the default 5 ms.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _within_descriptor_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Limit connections by the number of descriptors, raised if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _RESERVED
    if soft in range(wanted):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(
            OSError, ValueError
        ):  # some systems have a lower maximum
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        wanted = min(wanted, soft)
    served = max(wanted - _RESERVED, 1)
    if served < min(limits.connections, _FEW_CONNECTIONS):
        logging.getLogger("lifecycle").warning(
            "open files are limited to %d, which leaves %d for connections; raise the "
            "limit (ulimit -n) to %d or more",
            soft,
            served,
            limits.connections + _RESERVED,
        )
    return replace(limits, connections=served)
