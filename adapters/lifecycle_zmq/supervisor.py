"""The supervisor: restarts an engine that died, with backoff and a circuit breaker."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, Literal, Self, TypeVar

import anyio

from lifecycle import EngineLost
from lifecycle.lowlevel import check_callable, check_int, check_seconds, check_type
from lifecycle_zmq import heartbeat
from lifecycle_zmq.client import EngineClient
from lifecycle_zmq.heartbeat import HeartbeatPage, StallDetector, StallLimits
from lifecycle_zmq.process import EngineProcess
from lifecycle_zmq.shared_memory.tensors import TensorPayload

# Seconds between samples while requests wait for the engine, and while none does.
_SAMPLE_SECONDS = 0.08
_IDLE_SAMPLE_SECONDS = 1.0
# A thread of libzmq hands over what the engine sent before it died.
_LAST_MESSAGES_SECONDS = 0.002
_EXIT_CODE_SAMPLES = 5

LiveHealth = Literal["serving", "busy", "stopped", "stalled"]


class LivenessMonitor:
    """Makes and samples the heartbeat page of one engine process, detects its death.

    Args:
        limits: Seconds of silence until an engine counts as busy, stalled or stopped.

    Attributes:
        process: The process; set as soon as it was spawned.
        detector: Accumulates the samples.

    Raises:
        OSError: The system is out of descriptors or memory.
    """

    def __init__(self, limits: StallLimits) -> None:
        self.process: EngineProcess | None = None
        self.detector = StallDetector(limits)
        self._descriptor = heartbeat.create_page_file()
        try:
            self._page = HeartbeatPage(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._sampling_needed = anyio.Event()

    def __enter__(self) -> Self:
        """Return the monitor; the page exists already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close this process's mapping and descriptor."""
        self._page.close()
        os.close(self._descriptor)

    @property
    def inherited(self) -> dict[str, int]:
        """Descriptors that the engine inherits, by name."""
        return {"liveness": self._descriptor}

    def sample_soon(self) -> None:
        """Sample often from now on: a request waits for the engine."""
        self._sampling_needed.set()

    def health(self) -> LiveHealth:
        """Sample now; ``serving``, ``busy`` or ``stopped``."""
        self._sample()  # a verdict is repeated by the next sample
        if self.detector.stopped_now:
            return "stopped"
        return "busy" if self.detector.busy else "serving"

    async def monitor(self, client: EngineClient) -> None:
        """Sample again and again; mark the client as failed when a limit is exceeded.

        Cancellation: the ordinary way to stop.
        """
        while (verdict := self._sample()) is None:
            await self._pause(client)
        # The event loop may not report a closed link again that still has data.
        client.drain()
        client.mark_failed(verdict)

    async def mark_failed_on_exit(self, client: EngineClient) -> None:
        """Mark the client as failed the moment the engine dies, if it can be noticed.

        Returns without a verdict where it does not, and while the exit code is unknown:
        the exit of the process is noticed later, once its memory is released.

        Cancellation: the ordinary way to stop.
        """
        watcher = heartbeat.watch_exit(self._page, self._descriptor)
        if watcher is None:
            return
        try:
            await anyio.wait_readable(watcher.pipe)
        finally:
            watcher.close()
        await anyio.sleep(_LAST_MESSAGES_SECONDS)
        client.drain()
        code = await self._exit_code()
        if code is not None and self.process is not None:
            client.mark_failed(*self.process.exit_reason(code))

    def _sample(self) -> str | None:
        assert self.process is not None
        page = self._page
        return self.detector.sample(
            anyio.current_time(), self.process.state(), page.phase, page.beats
        )

    async def _pause(self, client: EngineClient) -> None:
        if client.waiters or self.detector.suspicious:
            await anyio.sleep(_SAMPLE_SECONDS)
            return
        self._sampling_needed = anyio.Event()
        with anyio.move_on_after(_IDLE_SAMPLE_SECONDS):
            await self._sampling_needed.wait()

    async def _exit_code(self) -> int | None:
        # The thread that held the lock may end a moment before its process does.
        assert self.process is not None
        for _ in range(_EXIT_CODE_SAMPLES):
            state = self.process.state()
            if state.exiting:
                return state.code
            await anyio.sleep(_LAST_MESSAGES_SECONDS)
        return None


class EngineInstance:
    """One incarnation of an engine, from its start until nothing is left of it.

    Attributes:
        reason: Why it ended, in one word.
        start_seconds: How long it took until it served; ``None`` if it never did.
    """

    def __init__(
        self, number: int, retry_after: float, changed: Callable[[], None]
    ) -> None:
        self._number = number
        self._retry_after = retry_after
        self._changed = changed
        self._began = anyio.current_time()
        self.client: EngineClient | None = None
        self.reason = "starting"
        self.start_seconds: float | None = None

    @property
    def unavailable_reason(self) -> str:
        """Why it accepts no requests, in one word."""
        return (self.client.lost if self.client is not None else None) or self.reason

    @property
    def accepting(self) -> bool:
        """Whether requests are accepted, according to the last samples."""
        return self.client is not None and self.client.ready

    @property
    def health(self) -> LiveHealth | None:
        """How it is doing now; ``None`` if it does not serve."""
        return "serving" if self.accepting else None

    async def run(self) -> None:
        """Start, serve, end; an error of any of it becomes `reason`, never raised.

        Cancellation: nothing is left of it, its waiters fail.
        """
        raise NotImplementedError

    async def _await_ready(self, client: EngineClient) -> None:
        try:
            await client.wait_ready()
        except EngineLost:
            return
        self.start_seconds = anyio.current_time() - self._began
        self._changed()


class Restarts:
    """Backoff between the processes of one engine, and a circuit breaker.

    After the first exit in a row the next process starts at once if the last one had
    served; after each other one it waits a delay that doubles. A process that has
    served long enough ends the row. When more than `max_crashes` processes have
    ended within `crash_window`, the engine is *broken*: none is started for
    `broken_for` seconds, then one is tried. If that one ends before it has served
    long enough, the engine is broken again.

    Args:
        backoff: Seconds before the first start of a row that has to wait.
        max_backoff: Upper limit of the delay; also, for how long a process must serve
            to end the row.
        max_crashes: Exits within the window that are tolerated; ``None``: any number.
        crash_window: Seconds.
        broken_for: Seconds.

    Raises:
        TypeError: An option is no number.
        ValueError: One is less than 0.
    """

    def __init__(
        self,
        *,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        max_crashes: int | None = 3,
        crash_window: float = 60.0,
        broken_for: float = 60.0,
    ) -> None:
        check_seconds(backoff=backoff, max_backoff=max_backoff)
        check_seconds(crash_window=crash_window, broken_for=broken_for)
        if max_crashes is not None:
            check_int(max_crashes=max_crashes)
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._max_crashes = max_crashes
        self._window = crash_window
        self._broken_for = broken_for
        self._streak = 0
        self._crashes: deque[float] = deque(maxlen=(max_crashes or 0) + 1)
        self._trial = False

    @property
    def delay(self) -> float:
        """Seconds that a start would have to wait after an exit now."""
        if not self._streak:
            return 0.0
        # The exponent is capped: 2.0 ** 1024 overflows.
        return min(self._max_backoff, self._backoff * 2.0 ** min(self._streak - 1, 64))

    def record_exit(self, now: float, served_seconds: float) -> tuple[float, bool]:
        """Record the exit of a process.

        Returns:
            The seconds until the next may start, and whether that is because the engine
            is broken.
        """
        if served_seconds >= self._max_backoff:
            self._streak = 0
            self._trial = False
        if not served_seconds:
            # A process that never served will not serve a moment later.
            self._streak = max(1, self._streak)
        delay = self.delay
        self._streak += 1
        self._crashes.append(now)
        broken = self._loops(now) or self._trial
        self._trial = broken
        return (self._broken_for if broken else delay), broken

    def reset(self) -> None:
        """Forget every exit."""
        self._streak = 0
        self._crashes.clear()
        self._trial = False

    def _loops(self, now: float) -> bool:
        full = len(self._crashes) == self._crashes.maxlen
        if self._max_crashes is None or not full:
            return False
        return now - self._crashes[0] <= self._window


_log = logging.getLogger("lifecycle_zmq")

Health = Literal[
    "starting",
    "serving",
    "busy",
    "stopped",
    "stalled",
    "restarting",
    "broken",
    "closed",
]

L = TypeVar("L", bound=EngineInstance)
Spawn = Callable[[int, float, Callable[[], None]], L]
"""Makes an incarnation from its number, ``retry_after`` in seconds, and a callback for
when it began to serve and when it is lost."""


class Supervisor(Generic[L]):
    """Runs incarnations of one engine, one after another.

    Args:
        spawn: Makes an incarnation.
        restarts: Decides when the next one may start.

    Attributes:
        number: Of the last process, from 1; 0 before the first.
        current: The last process.
        closing: Whether none is to be started any more.
        broken: Whether none is started for a while, after a crash loop.
        false_starts: How many processes ended before they ever served.
        changed: Set, and replaced, whenever any of this may have changed.
    """

    changed: anyio.Event
    _retry: anyio.Event

    def __init__(self, spawn: Spawn[L], restarts: Restarts) -> None:
        check_callable(spawn=spawn)
        check_type(Restarts, "restarts must be Restarts", restarts)
        self._spawn = spawn
        self._restarts = restarts
        self.number = 0
        self.current: L | None = None
        self.closing = False
        self.broken = False
        self.false_starts = 0
        # How long a start takes: measured once there was one.
        self._start_seconds = 1.0
        self._expected = 0.0
        self._thread = 0

    def begin(self) -> None:
        """Call once in the event loop, before anything else."""
        self.check_new()
        self._thread = threading.get_ident()
        self.changed = anyio.Event()
        self._retry = anyio.Event()
        self._expected = anyio.current_time() + self._start_seconds

    async def run(self) -> None:
        """Start one process after another.

        Cancellation: the ordinary way to stop; the process is killed and reaped.
        """
        while not self.closing:
            self.number += 1
            retry_after = _clamp(self._restarts.delay + self._start_seconds)
            began = anyio.current_time()
            current = self._spawn(self.number, retry_after, self._announce)
            self.current = current
            await current.run()
            lived = anyio.current_time() - began
            self._retry = anyio.Event()
            with anyio.move_on_after(self._record_exit(current, lived)):
                await self._retry.wait()
            self.broken = False

    def check_thread(self) -> None:
        """Raise `RuntimeError` in any thread but that of the event loop."""
        # Waking a task from another thread would break the link for all waiters.
        if self._thread not in {0, threading.get_ident()}:
            raise RuntimeError(
                "the engine belongs to the event loop that entered it; call it there, "
                "such as by anyio.from_thread.run"
            )

    def check_new(self) -> None:
        """Raise `RuntimeError` if it was entered or closed before."""
        if self._thread or self.closing:
            raise RuntimeError("an engine runs once; make another one to enter")

    def check_entered(self) -> None:
        """Raise `RuntimeError` before `begin`: waiting would never end."""
        if self._thread == 0:
            raise RuntimeError("enter the engine with async with first")

    def reset(self) -> None:
        """Forget all exits, and start the next process now if one is due."""
        self.check_thread()
        self._restarts.reset()
        self._retry.set()

    @property
    def client(self) -> EngineClient | None:
        """The client of the current process, if there is one; in its thread only."""
        self.check_thread()
        return self.current.client if self.current is not None else None

    @property
    def accepting(self) -> bool:
        """Whether requests are accepted, according to the last sample."""
        # A sample for every request would cost too much.
        return not self.closing and self.current is not None and self.current.accepting

    @property
    def health(self) -> Health:
        """See `ZmqEngine.health`."""
        if self.closing:
            return "closed"
        if self.broken:
            return "broken"
        current = self.current
        if current is not None and current.health is not None:
            return current.health
        first = current is None or (
            self.number == 1 and current.unavailable_reason == "starting"
        )
        return "starting" if first else "restarting"

    def lost_error(self, more: str = "") -> EngineLost:
        """Return the error for requests while no engine serves."""
        if self.closing:
            return EngineLost("the engine is closed", reason="closed")
        self.check_entered()
        reason = (
            self.current.unavailable_reason if self.current is not None else "starting"
        )
        detail = reason
        if self.broken:
            reason, detail = "broken", f"broken after {reason}"
        retry_after = _clamp(self._expected - anyio.current_time())
        return EngineLost(
            f"engine {self.number} takes no requests: {detail}; "
            f"retry in {retry_after:.0f} s{more}",
            reason=reason,
            retry_after=retry_after,
        )

    def _record_exit(self, ended: L, lived: float) -> float:
        served = 0.0
        if ended.start_seconds is None:
            self.false_starts += 1
        else:
            self._start_seconds = ended.start_seconds
            served = lived - ended.start_seconds
        now = anyio.current_time()
        delay, self.broken = self._restarts.record_exit(now, served)
        self._expected = now + delay + self._start_seconds
        if not self.closing:
            what = "is broken; tried again" if self.broken else "starts again"
            _log.warning(
                "engine %d ended: %s; it %s in %.1f s",
                self.number,
                ended.reason,
                what,
                delay,
            )
        self._announce()
        return delay

    def _announce(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


def _clamp(seconds: float) -> float:
    return min(60.0, max(1.0, seconds))


class SupervisedEngine(Generic[L]):
    """Base of engines that are restarted: one *incarnation* after another.

    Each incarnation has a client of its own, so no message of one reaches another. All
    methods belong to the event loop that entered the engine, whose thread must outlive
    it; in another thread they raise `RuntimeError`.

    Args:
        supervisor: Starts the incarnations.
    """

    _scope: anyio.CancelScope

    def __init__(self, supervisor: Supervisor[L]) -> None:
        check_type(Supervisor, "supervisor must be a Supervisor", supervisor)
        self._supervisor = supervisor

    async def __aenter__(self) -> Self:
        """Begin to start the engine; `wait_ready` returns when it accepts requests."""
        self._supervisor.begin()
        # Shielded: sessions end in order even while everything around is cancelled.
        self._scope = anyio.CancelScope(shield=True)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the engine for good."""
        self._supervisor.closing = True
        self._scope.cancel()
        # Without the exception of the block, which it would wrap in a group.
        await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above

    def close(self) -> None:
        """Kill the engine now; it is not restarted.

        Every waiter fails with ``closed``. For callers that cannot wait until streams
        have ended in order; leaving the block does the rest.
        """
        client = self._client
        self._supervisor.closing = True
        if client is not None:
            client.mark_failed("closed")

    @property
    def ready(self) -> bool:
        """Whether requests are accepted now."""
        return self._supervisor.accepting and self.health != "stopped"

    @property
    def health(self) -> Health:
        """How the engine is doing now.

        ``starting`` until it first serves; ``serving``; ``busy`` while one turn of its
        loop takes long, during which requests are accepted and wait; ``stopped`` by a
        signal; ``stalled`` from that verdict until the process is gone; ``restarting``;
        ``broken`` while nothing is started after a crash loop; ``closed``.
        """
        return self._supervisor.health

    @property
    def incarnation(self) -> int:
        """The number of the last process, from 1; 0 before the first."""
        return self._supervisor.number

    @property
    def streams(self) -> int:
        """Number of streams in the current process that are not done."""
        return self._client.streams if self._client is not None else 0

    async def wait_ready(self) -> None:
        """Wait until requests are accepted.

        Raises:
            EngineLost: The engine ended before it ever served, with the end of its
                output; or it is broken, or was closed.

        Cancellation: nothing changes.
        """
        it = self._supervisor
        it.check_entered()
        it.check_thread()
        seen = it.false_starts
        while not self.ready:
            if it.false_starts != seen:
                raise it.lost_error(self._output_tail())
            if it.closing or it.broken:
                raise it.lost_error()
            await it.changed.wait()

    async def start(
        self, key: str, request: Mapping[str, Any], tensors: TensorPayload | None = None
    ) -> AsyncIterator[Any]:
        """Hand a request to the engine and return its items.

        As `EngineClient.start`; while no engine serves, the tensors are dropped and
        `EngineLost` is raised at once, with the seconds until a retry makes sense.

        Args:
            key: Name of the stream until `end`; not in use.
            request: Plain values, at most 1 MiB on the wire.
            tensors: Payload of name to C-contiguous buffer, at most seven.

        Raises:
            EngineLost: No engine serves, or it died; the request may have run.
            RequestRejected: The engine, or a limit of the wire, refused it.
            ValueError: The key is in use, empty or too long.

        Cancellation: the engine may run the request; `end` of its key stops it.
        """
        client = self._client
        if client is None or not self._supervisor.accepting:
            if tensors is not None:
                tensors.take()
            raise self._supervisor.lost_error()
        starting = client.start(key, request, tensors)
        del request, tensors
        self._sample_soon()
        return await starting

    def cancel(self, key: str) -> None:
        """Ask the engine to stop a stream at its next step; ignores unknown keys."""
        if self._client is not None:
            self._client.cancel(key)

    async def end(self, key: str) -> None:
        """Send END for a stream; return when the engine has released everything.

        As `EngineClient.end`. Streams of an incarnation that is gone are over already.

        Cancellation: END is sent all the same; call again to wait for the rest.
        """
        client = self._client
        if client is not None:
            await client.end(key)

    async def status(self) -> dict[str, Any]:
        """Return the counters of the engine and, under ``backend``, of its backend.

        Raises:
            EngineLost: No engine serves, or it died.

        Cancellation: the answer is dropped when it comes.
        """
        client = self._client
        if client is None or not self._supervisor.accepting:
            raise self._supervisor.lost_error()
        self._sample_soon()
        return await client.status()

    def reset(self) -> None:
        """Forget all exits: an engine that is broken, or backs off, starts now."""
        self._supervisor.reset()

    async def _run(self) -> None:
        with self._scope:
            await self._supervisor.run()

    @property
    def _client(self) -> EngineClient | None:
        return self._supervisor.client

    def _sample_soon(self) -> None:
        """Called when a request begins to wait for the engine."""

    def _output_tail(self) -> str:
        """Return more text for the error of an engine that never served."""
        return ""
