"""An asyncio event loop of virtual time that decides who runs next.

Everything that makes a concurrent program differ from one run to the next is
drawn from a seed, so that a seed is a whole reproduction.
"""

# ruff: noqa: SLF001 - an event loop is written from inside

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

# Bound methods of tasks come first, so that the order of a set of tasks (anyio
# keeps such sets) never decides anything.
_LAST: Final = 1 << 60
# anyio delivers a cancellation again and again until its tasks have left. After
# so many deliveries in a row without anything else, only time can help.
_SPINS: Final = 4


class Hang(AssertionError):
    """Nothing can ever run again, or a step limit was passed; names the tasks."""


class SimTask(asyncio.Task[Any]):
    """A task that knows how many tasks its loop had made before it."""

    number: int = 0


class SimLoop(asyncio.BaseEventLoop):
    """Runs what is ready in an order drawn from *seed*, in virtual time.

    Use it through `simulate`, or as the loop factory of ``asyncio.Runner`` or
    ``anyio.run(..., backend_options={"loop_factory": SimLoop})``. Sockets,
    threads and processes are not simulated: waiting for one of them is a hang.

    Args:
        seed: Decides everything that is left open.
        order: ``"random"``, or ``"fifo"`` as on a stock loop; then the seed only
            decides about timers.
        early_timers: Share of steps, 0 to 1, in which the next timer falls due
            though there is work; less the further away it is, a quarter of it
            at 1 s. Without it a timeout never meets a wake-up.
        max_steps: Steps after which the program is taken to run in circles.
    """

    # Of the base class, which does not declare them to type checkers.
    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(
        self,
        seed: int = 0,
        *,
        order: Literal["random", "fifo"] = "random",
        early_timers: float = 0.1,
        max_steps: int = 100_000,
    ) -> None:
        super().__init__()
        self.steps = 0  #: callbacks that have run so far
        self.digest = 0  #: the same in every process for the same schedule
        #: What to call just before which step, counted from 1.
        self.faults: dict[int, Callable[[], object]] = {}
        #: Called after each step; what it raises stops the loop.
        self.after_step: Callable[[], object] | None = None
        #: What the loop's exception handler was told.
        self.errors: list[dict[str, Any]] = []
        self._draw = random.Random(seed).random  # noqa: S311 - to be repeatable
        self._fifo = order == "fifo"
        self._early = early_timers
        self._max_steps = max_steps
        self._now = 0.0
        self._tasks = self._spins = self._queued = 0
        factory: Any = self._make_task
        self.set_task_factory(factory)
        self.set_exception_handler(lambda _loop, context: self.errors.append(context))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def where(self) -> str:
        """How far the program got, in words."""
        digest = self.digest & 0xFFFFFFFF
        return f"step {self.steps}, {self._now:.6f} s, digest {digest:08x}"

    # The decisions.

    def _choose(self, ready: int) -> int:
        """Which of *ready* > 1 callbacks runs next, the oldest being 0."""
        return 0 if self._fifo else int(self._draw() * ready)

    def _falls_due(self, wait: float) -> bool:
        """Whether the timer in *wait* seconds falls due though there is work."""
        # Long deadlines guard against the impossible. Were they as likely to
        # strike early as short ones, little else would ever happen.
        return self._draw() * (1.0 + wait) ** 2 < self._early

    # What the base loop calls.

    def _make_task(self, loop: Any, coro: Any, **options: Any) -> SimTask:
        task = SimTask(coro, loop=loop, **options)
        self._tasks += 1
        task.number = self._tasks
        return task

    def _process_events(self, event_list: object) -> None: ...

    def _write_to_self(self) -> None: ...

    def _run_once(self) -> None:
        ready = self._ready
        self.steps += 1
        if self.steps in self.faults:
            self.faults[self.steps]()
        if len(ready) > self._queued + 1:
            self._sort_newest()
        self._pass_time()
        if self.steps > self._max_steps:
            raise self._hang(f"no end after {self._max_steps} steps")
        n = len(ready)
        if n > 1 and self._spins <= _SPINS and (at := self._choose(n)):
            handle = ready[at]
            del ready[at]
        else:
            handle = ready.popleft()
        self._queued = n - 1
        self.digest = hash((self.digest, _number(handle), int(self._now * 1e9)))
        if not handle._cancelled:
            self._spins = self._spins + 1 if _is_delivery(handle) else 0
            handle._run()
        if self.after_step is not None:
            self.after_step()

    def _sort_newest(self) -> None:
        """Put what the last step queued in order of the tasks' numbers."""
        ready = self._ready
        newest = [ready.pop() for _ in range(len(ready) - self._queued)][::-1]
        ready.extend(sorted(newest, key=_number))

    def _pass_time(self) -> None:
        ready, timers = self._ready, self._scheduled
        while timers and (timers[0]._cancelled or timers[0]._when == math.inf):
            heapq.heappop(timers)._scheduled = False
        # Deliveries alone change nothing any more once each of them has run.
        idle = not ready or (
            self._spins > _SPINS + len(ready) and all(map(_is_delivery, ready))
        )
        if timers and (idle or self._falls_due(timers[0]._when - self._now)):
            self._now = max(self._now, timers[0]._when)
            self._spins = 0
        elif idle:
            raise self._hang("nothing is ready and no timer is set")
        while timers and timers[0]._when <= self._now:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)

    def _hang(self, what: str) -> Hang:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        stacks = [f"\n  {t.get_name()}: {stack_of(t.get_coro())}" for t in tasks]
        return Hang(what + "".join(stacks))


def _number(handle: Any) -> int:
    owner = getattr(handle._callback, "__self__", None)
    return owner.number if type(owner) is SimTask else _LAST


def _is_delivery(handle: Any) -> bool:
    return getattr(handle._callback, "__name__", "") == "_deliver_cancellation"


def stack_of(awaited: Any) -> str:
    """Name the coroutines that *awaited* is suspended in, outermost first."""
    names: list[str] = []
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = awaited.cr_await
    return " > ".join(names)
