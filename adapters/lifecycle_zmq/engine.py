"""The engine as a server sees it: one that comes back after it died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import anyio

from lifecycle_zmq import _options
from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.memory.mapping import Kind
from lifecycle_zmq.process.watch import Limits
from lifecycle_zmq.supervision.incarnation import Incarnation, Settings
from lifecycle_zmq.supervision.restarts import Restarts
from lifecycle_zmq.supervision.supervised import SupervisedEngine
from lifecycle_zmq.supervision.supervisor import Supervisor
from lifecycle_zmq.transport.pair import Pair
from lifecycle_zmq.transport.rendezvous import Rendezvous, sweep

_TRANSPORTS = ("pair", "ipc")
_LEAVE_LOOK_SECONDS = 0.05


class ZmqEngine(SupervisedEngine[Incarnation]):
    """An engine process, its client, and its replacement when it dies.

    Each process is an *incarnation* with a number, a link and a client of its own, so
    nothing that was meant for one ever reaches another. All methods belong to the event
    loop that entered it, whose thread must outlive it; in another thread they raise
    `RuntimeError`.

    While it lives it is watched. One that is stopped takes no requests, and is
    replaced when it stays stopped; one that is silent within a step is busy, until it
    has been so for too long. One that comes down again and again is broken: nothing
    is started for a while, and requests are refused at once.

    Args:
        argv: The program and its arguments; ``--endpoint ENDPOINT --incarnation N`` is
            appended.
        env: Its environment; ``None`` inherits ours.
        pass_fds: Descriptors that it inherits.
        transport: ``"pair"``, two connected sockets of which the engine inherits
            one; or ``"ipc"``, ZeroMQ over a socket in a directory of its own.
        directory: Where the directories of ``"ipc"`` are made; ``None`` is the
            system's place for temporary files.
        ready_timeout: Seconds that an incarnation may take until it serves.
        backoff: Seconds before a restart, doubled for each further one in a row, until
            an incarnation has served for `max_backoff` seconds. The first restart of
            an engine that did serve is at once.
        max_backoff: Upper end of the doubling.
        stop_timeout: Seconds that the engine may take to leave when told to.
        busy_after: Seconds without a turn of the engine's loop until `health` says so.
        stalled_after: Seconds that one step of the backend may take; then everybody is
            told ``stalled`` and the engine is replaced.
        stopped_after: Seconds that the process may be stopped by a signal; then
            everybody is told ``stopped`` and the engine is replaced.
        max_crashes: Ends of processes within `crash_window` that are put up with; one
            more, and the engine is broken. ``None`` is any number.
        crash_window: Seconds.
        broken_for: Seconds until a broken engine is tried again.
        arena_bytes: Size of the arena, one for all incarnations, so that its pages
            stay warm; 0 makes none, and payloads are sent.
        arena: How it is shared, as for `Arena`; ``None`` takes the best there is.

    Raises:
        TypeError: An option is of another kind than it is to be.
        ValueError: It is none of those that there are, or too small.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        transport: Literal["pair", "ipc"] = "pair",
        directory: Path | None = None,
        ready_timeout: float = 300.0,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        stop_timeout: float = 5.0,
        busy_after: float = 1.0,
        stalled_after: float = 30.0,
        stopped_after: float = 2.0,
        max_crashes: int | None = 3,
        crash_window: float = 60.0,
        broken_for: float = 60.0,
        arena_bytes: int = 0,
        arena: Kind | None = None,
    ) -> None:
        _options.environment(env)
        _options.one_of(_TRANSPORTS, transport=transport)
        _options.expect(Path | None, "directory must be a Path or None", directory)
        _options.seconds(ready_timeout=ready_timeout, stop_timeout=stop_timeout)
        _options.seconds(busy_after=busy_after, stalled_after=stalled_after)
        _options.seconds(stopped_after=stopped_after)
        _options.whole(arena_bytes=arena_bytes)
        _options.one_of((None, *get_args(Kind)), arena=arena)
        self._swept = transport == "ipc"
        self._directory = directory
        self._arena_bytes = arena_bytes
        self._arena_kind = arena
        self._arena: Arena | None = None
        self._stop_timeout = stop_timeout
        settings = Settings(
            argv=_options.command(argv),
            env=env,
            pass_fds=_options.descriptors(pass_fds),
            place=partial(Rendezvous, directory) if transport == "ipc" else Pair,
            ready_timeout=ready_timeout,
            limits=Limits(busy_after, stalled_after, stopped_after),
            # Made on entering, and the same for every incarnation.
            arena=lambda: self._arena,
        )
        restarts = Restarts(
            backoff=backoff,
            max_backoff=max_backoff,
            max_crashes=max_crashes,
            crash_window=crash_window,
            broken_for=broken_for,
        )
        super().__init__(Supervisor(partial(Incarnation, settings), restarts))

    async def __aenter__(self) -> Self:
        """Begin to start the engine; `wait_ready` tells when requests are taken."""
        if self._arena_bytes:
            self._arena = Arena(self._arena_bytes, kind=self._arena_kind)
        if self._swept:
            sweep(self._directory)
        return await super().__aenter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Let the engine leave within `stop_timeout`, or kill it; never restart it."""
        client = self._client
        self._supervisor.closing = True
        try:
            if client is not None and client.ready:
                client.shutdown()
                with anyio.move_on_after(self._stop_timeout, shield=True):
                    await self._left(client)
        finally:  # a native cancellation gets through the shield
            try:
                await super().__aexit__(exc_type, exc, tb)  # noqa: ASYNC102 - cut
            finally:
                if self._arena is not None:
                    self._arena.close()

    @property
    def arena(self) -> Arena:
        """Where to write payloads that shall not be copied.

        Raises:
            RuntimeError: The engine has none, or was not entered yet.
        """
        if self._arena is None:
            raise RuntimeError("there is no arena; pass arena_bytes= and enter first")
        return self._arena

    @property
    def pid(self) -> int | None:
        """The process that lives now, if one does."""
        current = self._supervisor.current
        if current is None or current.client is None or current.process is None:
            return None
        return current.process.pid

    @property
    def output(self) -> str:
        """The end of what the last process wrote to its standard output and error."""
        current = self._supervisor.current
        if current is None:
            return ""
        return current.output or (current.process.output if current.process else "")

    async def _left(self, client: EngineClient) -> None:
        current = self._supervisor.current
        # One that is stopped would take all of its time, and not leave.
        while current is not None and current.health not in {None, "stopped"}:
            with anyio.move_on_after(_LEAVE_LOOK_SECONDS):
                await client.wait_lost()

    def _look_closely(self) -> None:
        current = self._supervisor.current
        if current is not None and current.liveness is not None:
            current.liveness.needed()

    def _last_words(self) -> str:
        words = self.output[-2000:].strip()
        return f"; its last words were:\n{words}" if words else ""
