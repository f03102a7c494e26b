"""Event loops of virtual time that decide which task runs next, and runs on them.

Everything that makes a concurrent program differ from one run to the next is
drawn from a seed, so that a seed is a whole reproduction.
"""

# ruff: noqa: SLF001 - an event loop is written from inside
from __future__ import annotations

import asyncio
import heapq
import importlib
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

if TYPE_CHECKING:
    import trio


# Bound methods of tasks come first, so that the order of a set of tasks (anyio
# keeps such sets) never decides anything.
_LAST: Final = 1 << 60
# anyio delivers a cancellation again and again until its tasks have left. After
# so many deliveries in a row without anything else, only time can help.
_SPINS: Final = 4


class Deadlock(AssertionError):
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
        #: What the loop's exception handler was called with.
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
        # fall due early as short ones, little else would ever happen.
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
            raise self._deadlock(f"no end after {self._max_steps} steps")
        n = len(ready)
        if n > 1 and self._spins <= _SPINS and (at := self._choose(n)):
            handle = ready[at]
            del ready[at]
        else:
            handle = ready.popleft()
        self._queued = n - 1
        self.digest = hash((self.digest, _number(handle), int(self._now * 1e9)))
        if not handle.cancelled():
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
        while timers and (timers[0].cancelled() or timers[0].when() == math.inf):
            heapq.heappop(timers)
        # Deliveries alone change nothing any more once each of them has run.
        idle = not ready or (
            self._spins > _SPINS + len(ready) and all(map(_is_delivery, ready))
        )
        if timers and (idle or self._falls_due(timers[0].when() - self._now)):
            self._now = max(self._now, timers[0].when())
            self._spins = 0
        elif idle:
            raise self._deadlock("nothing is ready and no timer is set")
        while timers and timers[0].when() <= self._now:
            handle = heapq.heappop(timers)
            if not handle.cancelled():
                ready.append(handle)

    def _deadlock(self, what: str) -> Deadlock:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        stacks = [f"\n  {t.get_name()}: {stack_of(t.get_coro())}" for t in tasks]
        return Deadlock(what + "".join(stacks))


def _number(handle: Any) -> int:
    owner = getattr(_callback(handle), "__self__", None)
    return owner.number if type(owner) is SimTask else _LAST


def _is_delivery(handle: Any) -> bool:
    return getattr(_callback(handle), "__name__", "") == "_deliver_cancellation"


def _callback(handle: Any) -> object:
    return handle._callback


def stack_of(awaited: Any) -> str:
    """Name the coroutines that *awaited* is suspended in, outermost first."""
    names: list[str] = []
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = awaited.cr_await
    return " > ".join(names)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated(Generic[T]):
    """What came of a simulation."""

    value: T  #: what the program returned
    steps: int  #: callbacks that ran (on trio: steps of tasks)
    seconds: float  #: virtual time that went by
    digest: int  #: the same in every process where the schedule was the same


def simulate(
    main: Callable[[], Awaitable[T]],
    *,
    seed: int = 0,
    faults: Mapping[int, Callable[[], object]] | None = None,
    check: Callable[[], object] | None = None,
    order: Literal["random", "fifo"] = "random",
    early_timers: float = 0.1,
    max_steps: int = 100_000,
) -> Simulated[T]:
    """Run *main* on asyncio in virtual time, in an order drawn from *seed*.

    The same arguments give the same run in every process. What fails carries a
    note with the seed and the step.

    Args:
        main: A coroutine function; anyio may be used in it.
        seed: Decides which of the ready callbacks runs, and when timers fall due.
        faults: What to call just before which step, counted from 1. A fault may
            cancel a task, close a gate or kill an engine; it must not await.
        check: Called after every step; what it raises ends the run.
        order: See `SimLoop`.
        early_timers: See `SimLoop`.
        max_steps: See `SimLoop`.

    Raises:
        Deadlock: Nothing can run any more, or *max_steps* were not enough.
        AssertionError: *main* returned and left tasks behind, or something
            failed in a task that is not awaited.
        Exception: What *main*, a fault or the check raised.
    """
    loop = SimLoop(seed, order=order, early_timers=early_timers, max_steps=max_steps)
    loop.faults.update(faults or {})
    loop.after_step = check
    value = run_on(loop, main, label=f"simulation of seed {seed}")
    digest = loop.digest & 0xFFFFFFFF
    return Simulated(value=value, steps=loop.steps, seconds=loop.time(), digest=digest)


def run_on(loop: SimLoop, main: Callable[[], Awaitable[T]], *, label: str) -> T:
    """Run *main* on *loop*, hold it to having finished, and close the loop."""
    asyncio.set_event_loop(loop)
    try:
        value = loop.run_until_complete(main())
        _assert_finished(loop)
    except BaseException as error:
        error.add_note(f"{label}: {loop.where()}")
        _tear_down(loop)
        raise
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return value


def _assert_finished(loop: SimLoop) -> None:
    left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    if left:
        raise AssertionError(f"tasks left behind: {', '.join(left)}")
    for context in loop.errors:
        error: Any = context.get("exception")
        what = f"failed in the background: {context.get('message')} {error!r}"
        raise AssertionError(what) from error


def _tear_down(loop: SimLoop) -> None:
    """Let the tasks of a failed program end, so that the failure speaks alone."""
    loop.after_step = None
    for turn in range(240):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            return
        for task in tasks:
            # One that has not begun must begin, or it awaits nothing for ever.
            begun = getattr(task.get_coro(), "cr_await", None) is not None
            if begun and turn % 24 == 0:
                task.cancel()
        loop.call_soon(loop.stop)
        with suppress(Exception):
            loop.run_forever()
    for task in asyncio.all_tasks(loop):
        silent: Any = task
        silent._log_destroy_pending = False


# Virtual seconds. Nothing that is meant to happen is so far away.
_NEVER: Final = 1e9


def simulate_trio(
    main: Callable[[], Awaitable[T]],
    *,
    seed: int = 0,
    faults: Mapping[int, Callable[[], object]] | None = None,
    check: Callable[[], object] | None = None,
    max_steps: int = 100_000,
) -> Simulated[T]:
    """Run *main* on trio in virtual time, in an order drawn from *seed*.

    As `simulate`, but steps are steps of tasks, and timers fall due only when
    there is nothing else to do.

    Raises:
        Deadlock: Nothing can run any more, or *max_steps* were not enough.
        Exception: What *main*, a fault or the check raised.
        ImportError: trio is not installed.
    """
    source = random.Random(seed)  # noqa: S311 - it must be repeatable
    run = TrioRun(main, f"simulation of seed {seed}", max_steps)
    run.faults.update(faults or {})
    run.check = check
    return run(source)


class TrioRun(Generic[T]):
    """One run, and the instrument that counts its steps."""

    def __init__(
        self, main: Callable[[], Awaitable[T]], label: str, max_steps: int
    ) -> None:
        self._main, self._label, self._max_steps = main, label, max_steps
        self.faults: dict[int, Callable[[], object]] = {}
        self.check: Callable[[], object] | None = None
        self._steps = self._digest = 0
        self._seconds = 0.0
        self._failure: BaseException | None = None
        self._numbers: dict[trio.lowlevel.Task, int] = {}
        self._scope: trio.CancelScope

    def __call__(self, source: object) -> Simulated[T]:
        """Run the program with *source* as the scheduler's random numbers."""
        import trio.testing

        clock = trio.testing.MockClock(autojump_threshold=0)
        # Private switches of trio, but those that hypothesis-trio is served by.
        scheduler = vars(importlib.import_module("trio._core._run"))
        switches = {"_r": source, "_ALLOW_DETERMINISTIC_SCHEDULING": True}
        before = {name: scheduler[name] for name in switches}
        scheduler.update(switches)
        try:
            values = trio.run(self._root, clock=clock, instruments=[self])  # type: ignore[list-item]
        finally:
            scheduler.update(before)
        if self._failure is not None:
            raise self._failure
        digest = self._digest & 0xFFFFFFFF
        return Simulated(
            value=values[0], steps=self._steps, seconds=self._seconds, digest=digest
        )

    async def _root(self) -> list[T]:
        import trio

        values: list[T] = []
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._watch)
            try:
                values.append(await self._main())
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self._fail(error)
            nursery.cancel_scope.cancel()
        self._seconds = trio.current_time()
        return values

    async def _watch(self) -> None:
        import trio

        # The clock jumps here only when no other task waits for a timer.
        await trio.sleep(_NEVER)
        stacks = [
            f"\n  {task.name}: {stack_of(task.coro)}"
            for task in self._numbers
            if getattr(task.coro, "cr_await", None) is not None
        ]
        self._fail(Deadlock("nothing is ready and no timer is set" + "".join(stacks)))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            digest = f"{self._digest & 0xFFFFFFFF:08x}"
            where = f"step {self._steps}, {self._seconds:.6f} s, digest {digest}"
            error.add_note(f"{self._label}: {where}")
            self._scope.cancel()

    # What trio calls; an error in here would only be logged.

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """Number the task."""
        self._numbers[task] = len(self._numbers)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count the step, and inject the fault that is due."""
        import trio

        self._steps += 1
        self._seconds = trio.current_time()
        moment = int(self._seconds * 1e9)
        self._digest = hash((self._digest, self._numbers[task], moment))
        if self._steps > self._max_steps:
            self._fail(Deadlock(f"no end after {self._max_steps} steps"))
        self._guarded(self.faults.pop(self._steps, None))

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        """Check the invariants."""
        self._guarded(self.check)

    def _guarded(self, callback: Callable[[], object] | None) -> None:
        if callback is not None and self._failure is None:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self._fail(error)
