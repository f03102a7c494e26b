"""`ZmqEngine`: a supervised engine process, and its incarnations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self, get_args

import anyio

from lifecycle.lowlevel import check_choice, check_int, check_seconds, check_type
from lifecycle_zmq.client import EngineClient
from lifecycle_zmq.heartbeat import StallLimits
from lifecycle_zmq.process import (
    EngineProcess,
    check_command,
    check_descriptors,
    check_environment,
    open_pidfd,
)
from lifecycle_zmq.shared_memory.arena import Arena
from lifecycle_zmq.shared_memory.memfd import ArenaKind
from lifecycle_zmq.supervisor import (
    EngineInstance,
    LiveHealth,
    LivenessMonitor,
    Restarts,
    SupervisedEngine,
    Supervisor,
)
from lifecycle_zmq.transport import endpoints
from lifecycle_zmq.transport.endpoints import IpcEndpoint, remove_stale
from lifecycle_zmq.transport.socketpair import SocketPair

_VERDICTS: tuple[LiveHealth, ...] = ("stopped", "stalled")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Options of every incarnation of one engine; see `ZmqEngine`."""

    argv: Sequence[str]
    env: Mapping[str, str] | None
    pass_fds: Sequence[int]
    channel: Callable[[], SocketPair | IpcEndpoint]
    ready_timeout: float
    limits: StallLimits
    arena: Callable[[], Arena | None]
    arena_idle: float | None


class ProcessInstance(EngineInstance):
    """Runs one engine process with its client, from the spawn until it is reaped."""

    def __init__(
        self,
        settings: EngineSettings,
        number: int,
        retry_after: float,
        changed: Callable[[], None],
    ) -> None:
        super().__init__(number, retry_after, changed)
        self._settings = settings
        self.process: EngineProcess | None = None
        self.liveness: LivenessMonitor | None = None
        self.output = ""

    @property
    def unavailable_reason(self) -> str:
        """Why it accepts no requests, in one word."""
        lost = self.client.lost if self.client is not None else None
        return (
            "stopped" if lost is None and self.stopped else super().unavailable_reason
        )

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal, according to the last samples."""
        return self.liveness is not None and self.liveness.detector.stopped

    @property
    def accepting(self) -> bool:
        """Whether requests are accepted, according to the last samples."""
        return super().accepting and not self.stopped

    @property
    def health(self) -> LiveHealth | None:
        """How its process is doing now; ``None`` if it does not serve."""
        client, liveness = self.client, self.liveness
        if client is None or liveness is None:
            return None
        if client.ready:
            return liveness.health()
        # After the verdict, until the process is gone.
        return next((it for it in _VERDICTS if it == client.lost), None)

    async def run(self) -> None:
        """Spawn, serve, reap; an error of any of it becomes `reason`, never raised.

        Cancellation: the process is killed and reaped, its waiters fail.
        """
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001
            self.reason = "spawn_failed" if self.process is None else "link_fault"
            self.output += f"{type(error).__name__}: {error}"

    async def _run(self) -> None:
        channel = self._settings.channel()
        try:
            async with EngineClient(
                channel.connect,
                incarnation=self._number,
                retry_after=self._retry_after,
                arena=self._settings.arena(),
            ) as client:
                channel.unlink()
                self.client = client
                try:
                    await self._run_process(channel, client)
                finally:
                    self.client = None
        finally:
            channel.close()

    async def _run_process(
        self, channel: SocketPair | IpcEndpoint, client: EngineClient
    ) -> None:
        with LivenessMonitor(self._settings.limits) as liveness:
            process = self._spawn(channel, liveness)
            self.process, self.liveness = process, liveness
            channel.close()  # only the engine may hold its end open
            liveness.process = process
            try:
                await self._supervise(process, client, liveness)
            finally:
                client.mark_failed("closed")
                await process.close()  # noqa: ASYNC102 - shielded and bounded in there
                self.output = process.output
                self._release_leases(process)

    def _release_leases(self, process: EngineProcess) -> None:
        # Not before it was reaped: until then it may read the arena.
        arena = self._settings.arena()
        if arena is not None and process.reaped:
            arena.release_all_leases()

    def _spawn(
        self, channel: SocketPair | IpcEndpoint, liveness: LivenessMonitor
    ) -> EngineProcess:
        inherited = {**channel.inherited, **liveness.inherited}
        arena = self._settings.arena()
        if arena is not None and arena.descriptor is not None:
            inherited["arena"] = arena.descriptor
        ours = open_pidfd(os.getpid())
        if ours is not None:
            inherited["parent"] = ours
        endpoint = endpoints.join(channel.address, inherited)
        tail = ["--endpoint", endpoint, "--incarnation", str(self._number)]
        try:
            return EngineProcess(
                [*self._settings.argv, *tail],
                env=self._settings.env,
                pass_fds=[*self._settings.pass_fds, *inherited.values()],
            )
        finally:
            if ours is not None:
                os.close(ours)

    async def _supervise(
        self, process: EngineProcess, client: EngineClient, liveness: LivenessMonitor
    ) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.drain)
            tasks.start_soon(self._wait_until_ready, client, liveness)
            tasks.start_soon(self._kill_when_lost, process, client)
            tasks.start_soon(liveness.monitor, client)
            tasks.start_soon(self._give_back)
            await process.wait()
            # Messages that it sent before it died count, such as a finish.
            client.drain()
            process.reap()
            client.mark_failed(*process.exit_reason(process.code or 0))
            self.reason = client.lost or "exit"
            tasks.cancel_scope.cancel()

    async def _wait_until_ready(
        self, client: EngineClient, liveness: LivenessMonitor
    ) -> None:
        with anyio.move_on_after(self._settings.ready_timeout) as waiting:
            await self._await_ready(client)
        if waiting.cancelled_caught:
            # This event loop may have been blocked, with READY unread.
            client.drain()
            if not client.ready:
                client.mark_failed("start_timeout")
            await self._await_ready(client)  # settled by now
        if client.ready:
            await liveness.mark_failed_on_exit(client)

    async def _give_back(self) -> None:
        arena, seconds = self._settings.arena(), self._settings.arena_idle
        if arena is None or seconds is None:
            return
        while True:
            more = arena.give_back(_GIVEN_BACK)
            await anyio.sleep(0 if more else seconds)

    async def _kill_when_lost(
        self, process: EngineProcess, client: EngineClient
    ) -> None:
        # An engine that broke the protocol, or hung up, will not exit when asked to.
        await client.wait_lost()
        self._changed()
        process.kill()


def _check_idle(seconds: float | None) -> None:
    if seconds is None:
        return
    check_seconds(arena_idle=seconds)
    if not seconds:
        raise ValueError("arena_idle must be above 0 s; None keeps the pages")


# Bytes at a time, which take a fraction of a millisecond.
_GIVEN_BACK = 4 * 2**20
_TRANSPORTS = ("pair", "ipc")
_EXIT_POLL_SECONDS = 0.05


class ZmqEngine(SupervisedEngine[ProcessInstance]):
    """An engine process, its client, and its restarts.

    Each process is an *incarnation* with a number, a link and a client of its own, so
    no message of one reaches another. All methods belong to the event loop that
    entered the engine, whose thread must outlive it; in another thread they raise
    `RuntimeError`.

    The process is monitored. One that is stopped by a signal accepts no requests, and
    is replaced if it stays stopped; one whose step takes long is busy, and is replaced
    if it takes too long. After too many exits a circuit breaker opens: nothing is
    started for a while, and requests are refused at once.

    Args:
        argv: The program and its arguments; ``--endpoint ENDPOINT --incarnation N`` is
            appended.
        env: Its environment; ``None`` inherits that of this process.
        pass_fds: Descriptors that it inherits.
        transport: ``"pair"``, two connected sockets of which the engine inherits
            one; or ``"ipc"``, ZeroMQ over a socket in a directory of its own.
        directory: Where the directories of ``"ipc"`` are made; ``None`` is the
            system's directory for temporary files.
        ready_timeout: Seconds that an incarnation may take until it serves.
        backoff: Seconds before a restart, doubled for each further one in a row, until
            an incarnation has served for `max_backoff` seconds. The first restart of
            an engine that did serve is immediate.
        max_backoff: Upper limit of the delay.
        stop_timeout: Seconds that the engine may take to exit when asked to.
        busy_after: Seconds without a turn of the engine's loop until `health` is
            ``busy``.
        stalled_after: Seconds that one step of the backend may take; then all waiters
            fail with ``stalled`` and the engine is replaced.
        stopped_after: Seconds that the process may be stopped by a signal; then all
            waiters fail with ``stopped`` and the engine is replaced.
        max_crashes: Exits within `crash_window` that are tolerated; one more, and the
            engine is broken. ``None`` is any number.
        crash_window: Seconds.
        broken_for: Seconds until a broken engine is tried again.
        arena_bytes: Size of the arena, one for all incarnations, so that its pages
            stay warm; 0 makes none, and payloads are sent.
        arena: How it is shared, as for `Arena`; ``None`` takes the best there is.
        arena_idle: Seconds for which pages of the arena are kept that nothing uses;
            then the system gets them. ``None`` keeps them, as you must where the
            engine has the arena pinned for a device.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is not one of the allowed values, or too small.
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
        arena: ArenaKind | None = None,
        arena_idle: float | None = None,
    ) -> None:
        check_environment(env)
        check_choice(_TRANSPORTS, transport=transport)
        check_type(Path | None, "directory must be a Path or None", directory)
        check_seconds(ready_timeout=ready_timeout, stop_timeout=stop_timeout)
        check_seconds(busy_after=busy_after, stalled_after=stalled_after)
        check_seconds(stopped_after=stopped_after)
        check_int(arena_bytes=arena_bytes)
        check_choice((None, *get_args(ArenaKind)), arena=arena)
        _check_idle(arena_idle)
        self._uses_ipc = transport == "ipc"
        self._directory = directory
        self._arena_bytes = arena_bytes
        self._arena_kind = arena
        self._arena: Arena | None = None
        self._stop_timeout = stop_timeout
        settings = EngineSettings(
            argv=check_command(argv),
            env=env,
            pass_fds=check_descriptors(pass_fds),
            channel=partial(IpcEndpoint, directory)
            if transport == "ipc"
            else SocketPair,
            ready_timeout=ready_timeout,
            limits=StallLimits(busy_after, stalled_after, stopped_after),
            # Made by __aenter__, and the same for every incarnation.
            arena=lambda: self._arena,
            arena_idle=arena_idle,
        )
        restarts = Restarts(
            backoff=backoff,
            max_backoff=max_backoff,
            max_crashes=max_crashes,
            crash_window=crash_window,
            broken_for=broken_for,
        )
        super().__init__(Supervisor(partial(ProcessInstance, settings), restarts))

    async def __aenter__(self) -> Self:
        """Begin to start the engine; `wait_ready` returns when it accepts requests."""
        self._supervisor.check_new()
        if self._arena_bytes:
            self._arena = Arena(self._arena_bytes, kind=self._arena_kind)
        if self._uses_ipc:
            remove_stale(self._directory)
        return await super().__aenter__()

    async def __aexit__(self, *raised: object) -> None:
        """Let the engine exit within `stop_timeout`, or kill it; never restart it."""
        client = self._client
        self._supervisor.closing = True
        try:
            if client is not None and client.ready:
                client.shutdown()
                with anyio.move_on_after(self._stop_timeout, shield=True):
                    await self._wait_for_exit(client)
        finally:  # a native cancellation gets through the shield
            try:
                await super().__aexit__(*raised)  # noqa: ASYNC102 - cut
            finally:
                if self._arena is not None:
                    self._arena.close()

    @property
    def arena(self) -> Arena:
        """The arena, for payloads that shall not be copied.

        Raises:
            RuntimeError: The engine has none, or was not entered yet.
        """
        if self._arena is None:
            raise RuntimeError("there is no arena; pass arena_bytes= and enter first")
        return self._arena

    @property
    def pid(self) -> int | None:
        """Process ID of the current process, if there is one."""
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

    async def _wait_for_exit(self, client: EngineClient) -> None:
        current = self._supervisor.current
        # A stopped process would use all of the time, and not exit.
        while current is not None and current.health not in {None, "stopped"}:
            with anyio.move_on_after(_EXIT_POLL_SECONDS):
                await client.wait_lost()

    def _sample_soon(self) -> None:
        current = self._supervisor.current
        if current is not None and current.liveness is not None:
            current.liveness.sample_soon()

    def _output_tail(self) -> str:
        tail = self.output[-2000:].strip()
        return f"; its output ends with:\n{tail}" if tail else ""
