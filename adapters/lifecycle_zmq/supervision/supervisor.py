"""One process after another: who is there now, and when the next one comes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import anyio

from lifecycle import EngineLost
from lifecycle_zmq import _options
from lifecycle_zmq.client.engine_client import EngineClient
from lifecycle_zmq.supervision.life import Life
from lifecycle_zmq.supervision.restarts import Restarts

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


L = TypeVar("L", bound=Life)
Spawn = Callable[[int, float, Callable[[], None]], L]
"""Makes an incarnation of its number, the seconds that its waiters are told when it
dies, and what to call when it began to serve and when it is given up."""


class Supervisor(Generic[L]):
    """Runs incarnations until it is told not to start another.

    Args:
        spawn: Makes each.
        restarts: When the next one may be.

    Attributes:
        number: Of the last process, from 1; 0 before the first.
        current: The last process.
        closing: Set when none is to be started any more.
        broken: Whether none is started for a while, after a crash loop.
        false_starts: How many processes ended before they ever served.
        changed: Set, and replaced, whenever any of this may have changed.
    """

    changed: anyio.Event
    _retry: anyio.Event

    def __init__(self, spawn: Spawn[L], restarts: Restarts) -> None:
        _options.callables(spawn=spawn)
        _options.expect(Restarts, "restarts must be Restarts", restarts)
        self._spawn = spawn
        self._restarts = restarts
        self.number = 0
        self.current: L | None = None
        self.closing = False
        self.broken = False
        self.false_starts = 0
        # For how long requests will be refused: measured, not guessed, after a start.
        self._start_seconds = 1.0
        self._expected = 0.0
        self._thread = 0

    def begin(self) -> None:
        """Call once in the event loop, before anything else."""
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
            with anyio.move_on_after(self._bury(current, lived)):
                await self._retry.wait()
            self.broken = False

    def check_thread(self) -> None:
        """Raise `RuntimeError` in any thread but that of the event loop."""
        # What wakes a task from elsewhere breaks the link, for all who wait at it.
        if self._thread not in {0, threading.get_ident()}:
            raise RuntimeError(
                "the engine belongs to the event loop that entered it; call it there, "
                "such as by anyio.from_thread.run"
            )

    def check_entered(self) -> None:
        """Raise `RuntimeError` before `begin`: nothing would ever come."""
        if self._thread == 0:
            raise RuntimeError("enter the engine with async with first")

    def reset(self) -> None:
        """Forget all deaths, and start the next process now if one is to come."""
        self.check_thread()
        self._restarts.reset()
        self._retry.set()

    @property
    def client(self) -> EngineClient | None:
        """The client of the process that is there, if one is; in its thread only."""
        self.check_thread()
        return self.current.client if self.current is not None else None

    @property
    def takes(self) -> bool:
        """Whether requests are taken, as far as the last look at the process goes."""
        # A look of its own would be too much for every request.
        return not self.closing and self.current is not None and self.current.takes

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
        first = current is None or (self.number == 1 and current.why == "starting")
        return "starting" if first else "restarting"

    def loss(self, more: str = "") -> EngineLost:
        """What to tell those who ask for an engine that is not there."""
        if self.closing:
            return EngineLost("the engine is closed", reason="closed")
        self.check_entered()
        reason = self.current.why if self.current is not None else "starting"
        words = reason
        if self.broken:
            reason, words = "broken", f"broken after {reason}"
        retry_after = _clamp(self._expected - anyio.current_time())
        return EngineLost(
            f"engine {self.number} takes no requests: {words}; "
            f"retry in {retry_after:.0f} s{more}",
            reason=reason,
            retry_after=retry_after,
        )

    def _bury(self, ended: L, lived: float) -> float:
        served = 0.0
        if ended.start_seconds is None:
            self.false_starts += 1
        else:
            self._start_seconds = ended.start_seconds
            served = lived - ended.start_seconds
        now = anyio.current_time()
        delay, self.broken = self._restarts.bury(now, served)
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
