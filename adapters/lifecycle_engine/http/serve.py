"""Running the server: announce it when it is ready, drain it when told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType

import anyio
import uvicorn
from starlette.applications import Starlette

from lifecycle import EngineLost
from lifecycle_engine.service import Service

from .connections import Connection, ConnectionLimits, http_protocol
from .heap import (
    give_back_what_is_freed,
    keep_pages_of_pictures,
    loaded_set_apart,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL = 0.05
_SWITCH = 0.001
# Connections that wait in the system, and those that asyncio takes before anything else
# runs; uvloop takes one. It has one name for both.
_BACKLOG, _TAKEN = 2048, 1
# Seconds, once the drain is over: for the engine to end what was cut, and for clients
# to read what waits for them. Together they stay below the two that an exit may take.
_ENDS = 0.3
_LAST_WORDS = 0.3
# Descriptors that are not for clients: the engine's, files, and what comes up.
_RESERVED = 256


class DrainingServer(uvicorn.Server):
    """uvicorn that drains the sessions before it closes connections.

    The first SIGTERM or SIGINT closes admission: readiness goes false, new
    requests are told to go elsewhere, streams get *drain* seconds and the rest is
    ended with an error in its protocol. A second SIGINT cuts that short, a third
    one kills the process. Unlike uvicorn's own, the exit is otherwise an ordinary
    one: the signal is not raised again.

    Args:
        config: With a bounded ``timeout_graceful_shutdown``.
        service: Whose sessions are drained.
        drain: Seconds that streams may take.
        on_ready: Called once the server listens and the engine is there.

    Attributes:
        failure: Why the engine never came; the server then stops by itself.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        *,
        drain: float,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        config.backlog = _TAKEN
        super().__init__(config)
        self._service = service
        self._drain = drain
        self._on_ready = on_ready
        self._awaiting: asyncio.Task[None] | None = None
        self._hurried = False
        self._draining: anyio.CancelScope | None = None
        self.failure: EngineLost | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at once, and announce the server when the engine is there, too."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)
        if not self.should_exit:
            self._awaiting = asyncio.create_task(self._await_engine())

    async def _await_engine(self) -> None:
        try:
            await self._service.engine.wait_ready()
        except EngineLost as error:
            # One that never served will not serve the next time either.
            self.failure = error
            self.should_exit = True
        else:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then shut down as uvicorn does."""
        service = self._service
        if self._awaiting is not None:
            self._awaiting.cancel()
        service.intake.close()
        for gate in service.gates:
            gate.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hurry)
            with anyio.move_on_after(self._drain + _ENDS) as self._draining:
                await service.sessions.drain(self._drain)
            service.sessions.close_all("shutdown")
            if service.sessions.statistics().closing:
                # It is to end every stream, and may be slow, or stopped.
                service.engine.close()
            loop = asyncio.get_running_loop()
            loop.call_later(_LAST_WORDS, self._give_up_clients)
            await super().shutdown(sockets)
            tasks.cancel_scope.cancel()

    def _give_up_clients(self) -> None:
        # Where nothing waits for its client, a task may still be about to say it.
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.give_up()

    async def _hurry(self) -> None:
        # A signal handler sets a flag; there is nothing to wait on.
        while not self._hurried:  # noqa: ASYNC110
            await anyio.sleep(_POLL)
        if self._draining is not None:
            self._draining.cancel()
        self._service.sessions.close_all("shutdown")
        self._service.engine.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Note a signal."""
        # Not uvicorn's own: it would skip the end of the lifespan after a second one,
        # also after one that interrupts the first.
        if self.should_exit and sig == signal.SIGINT:
            self._hurried = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `heeding_signals`: uvicorn lets go of them too early."""
        yield

    @contextlib.contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Handle the signals meanwhile, and leave no handler behind."""

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self.should_exit:
                # The next one is not ours: it kills, whatever is waited for here.
                signal.signal(number, signal.SIG_DFL)
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(
    app: Starlette,
    *,
    host: str,
    port: int,
    drain: float = 10.0,
    limits: ConnectionLimits | None = None,
    announce: Callable[[str], None] = print,
    proxies: Sequence[str] = (),
) -> None:
    """Serve *app* until SIGTERM or SIGINT; must be called on the main thread.

    It is for a process of its own, whose signals, garbage collector and threads it sets
    as a server needs them, for as long as it serves; and what glibc and Pillow keep,
    for good.

    Args:
        app: Made by `create_app`.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        drain: Seconds that running streams get at the end.
        limits: On each connection, and on how many there are; as many as there are
            descriptors for, at most.
        announce: Given the server's address, once, when it is ready.
        proxies: Addresses and networks whose ``X-Forwarded-For`` is believed; nobody's
            else, the loopback's included.

    Raises:
        OSError: The address cannot be listened on.
        EngineLost: The engine ended before it ever served, with its last words.
    """
    # Of what is wrong in clients' pictures: a line of the log for each of their tags.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    give_back_what_is_freed()
    keep_pages_of_pictures(int(app.state.service.threads.total_tokens))
    config = uvicorn.Config(
        app,
        http=http_protocol(_affordable(limits or ConnectionLimits())),
        ws="none",
        lifespan="on",  # without it there is no engine: say so, and do not serve
        log_level="error",  # what is no HTTP is no line of the log
        access_log=False,
        timeout_graceful_shutdown=1,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(
        (host, port), family=family, backlog=_BACKLOG
    ) as listener:
        address = _address(host, listener.getsockname()[1])
        server = DrainingServer(
            config,
            app.state.service,
            drain=drain,
            on_ready=lambda: announce(address),
        )
        with loaded_set_apart(), _switching_soon(), server.heeding_signals():
            server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure


@contextlib.contextmanager
def _switching_soon() -> Iterator[None]:
    # The loop gives the interpreter away with each look at its sockets. Where a thread
    # reads a body, it has it back after this, not after the 5 ms that are usual.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _affordable(limits: ConnectionLimits) -> ConnectionLimits:
    """As many connections as there are descriptors for, having asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _RESERVED
    if soft in range(wanted):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # some systems want it lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        wanted = min(wanted, soft)
    return replace(limits, connections=max(wanted - _RESERVED, 1))


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
