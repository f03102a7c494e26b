"""The same on trio: a seeded order, virtual time, and every schedule."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

from ._explore import Choices, Explored, search
from ._loop import Hang, stack_of
from ._simulate import Simulated

if TYPE_CHECKING:
    import trio

T = TypeVar("T")

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

    As `simulate`. Steps are steps of tasks, and timers fall due only when there
    is nothing else to do.

    Args:
        main: A coroutine function; anyio may be used in it.
        seed: Decides the order within each batch of tasks that are ready.
        faults: What to call just before which step, counted from 1.
        check: Called after every step.
        max_steps: Steps after which the run is a `Hang`.

    Raises:
        Hang: Nothing can run any more, or *max_steps* were not enough.
        Exception: What *main*, a fault or the check raised.
        ImportError: trio is not installed.
    """
    source = random.Random(seed)  # noqa: S311 - it must be repeatable
    label = f"simulation of seed {seed}"
    return _World(main, dict(faults or {}), check, max_steps, label).run(source)


def explore_trio(
    scenario: Callable[[], Awaitable[object]],
    *,
    delays: int = 2,
    max_schedules: int = 5_000,
    max_steps: int = 10_000,
    schedule: Sequence[int] | None = None,
) -> Explored:
    """Run *scenario* on trio under every schedule with few departures.

    As `explore`, without early timers.

    Args:
        scenario: A coroutine function that builds everything anew and asserts
            what must be true.
        delays: Departures from the order in which tasks were made.
        max_schedules: Where to stop an incomplete search.
        max_steps: Steps after which one schedule is a `Hang`.
        schedule: Run this schedule alone, from the note of a failure.

    Raises:
        Hang: Under some schedule nothing can run any more.
        Exception: The first failure, with a note of its schedule.
        ImportError: trio is not installed.
    """

    def run(choices: Choices) -> None:
        _World(scenario, {}, None, max_steps, "exploration").run(_Shuffle(choices))

    return search(run, delays, max_schedules, schedule)


class _Source(Protocol):
    """What trio's scheduler asks of its random source."""

    def shuffle(self, batch: list[Any], /) -> None: ...


class _Shuffle:
    """Stands in for the scheduler's source: each permutation is choices."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def shuffle(self, batch: list[Any], /) -> None:
        order = []
        while batch:
            n = len(batch)
            order.append(batch.pop(self._choices.choose(n) if n > 1 else 0))
        batch[:] = order[::-1]  # trio takes them from the end


class _World(Generic[T]):
    """One run, and the instrument that counts its steps."""

    def __init__(
        self,
        main: Callable[[], Awaitable[T]],
        faults: dict[int, Callable[[], object]],
        check: Callable[[], object] | None,
        max_steps: int,
        label: str,
    ) -> None:
        self._label = label
        self._main = main
        self._faults = faults
        self._check = check
        self._max_steps = max_steps
        self._steps = self._digest = 0
        self._seconds = 0.0
        self._failure: BaseException | None = None
        self._numbers: dict[trio.lowlevel.Task, int] = {}
        self._scope: trio.CancelScope | None = None

    def run(self, source: _Source) -> Simulated[T]:
        import trio.testing

        instrument = cast("trio.abc.Instrument", self)
        clock = trio.testing.MockClock(autojump_threshold=0)
        with _scheduled_by(source):
            value = trio.run(self._root, clock=clock, instruments=[instrument])
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure
        return Simulated(
            value=value[0],
            steps=self._steps,
            seconds=self._seconds,
            digest=self._digest & 0xFFFFFFFF,
        )

    async def _root(self) -> list[T]:
        import trio

        values: list[T] = []
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._watch, trio.lowlevel.current_task())
            try:
                values.append(await self._main())
            except Exception as error:  # noqa: BLE001 - raised again by run
                self._fail(error)
            nursery.cancel_scope.cancel()
        self._scope = None
        self._seconds = trio.current_time()
        return values

    async def _watch(self, root: trio.lowlevel.Task) -> None:
        import trio

        # The clock jumps here only when nobody else has anything to wait for.
        await trio.sleep(_NEVER)
        lines = ["nothing is ready and no timer is set"]
        pending = [root]
        while pending:
            task = pending.pop()
            if task is not trio.lowlevel.current_task():
                lines.append(f"  {task.name}: {stack_of(task.coro)}")
            for nursery in task.child_nurseries:
                pending += sorted(nursery.child_tasks, key=self._number, reverse=True)
        self._fail(Hang("\n".join(lines)))

    def _number(self, task: trio.lowlevel.Task) -> int:
        return self._numbers.get(task, 0)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            error.add_note(
                f"{self._label}: step {self._steps}, {self._seconds:.6f} s, "
                f"digest {self._digest & 0xFFFFFFFF:08x}"
            )
            if self._scope is not None:
                self._scope.cancel()

    # What trio calls; an error in here would only be logged.

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self._numbers[task] = len(self._numbers)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        import trio

        self._steps += 1
        self._seconds = trio.current_time()
        moment = int(self._seconds * 1e9)
        self._digest = hash((self._digest, self._number(task), moment))
        if self._steps > self._max_steps:
            self._fail(Hang(f"no end after {self._max_steps} steps"))
        fault = self._faults.pop(self._steps, None)
        if fault is not None:
            self._guarded(fault)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        if self._check is not None and self._failure is None:
            self._guarded(self._check)

    def _guarded(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - raised again by run
            self._fail(error)


@contextmanager
def _scheduled_by(source: _Source) -> Iterator[None]:
    # A private switch, but the one that hypothesis-trio is served by.
    from trio._core import _run as scheduler

    names = "_r", "_ALLOW_DETERMINISTIC_SCHEDULING"
    before = [getattr(scheduler, name) for name in names]
    try:
        for name, value in zip(names, (source, True), strict=True):
            setattr(scheduler, name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(scheduler, name, value)
