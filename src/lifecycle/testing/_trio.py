"""The same on trio: a seeded order, virtual time, and every schedule."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

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

    As `simulate`, but steps are steps of tasks, and timers fall due only when
    there is nothing else to do.

    Raises:
        Hang: Nothing can run any more, or *max_steps* were not enough.
        Exception: What *main*, a fault or the check raised.
        ImportError: trio is not installed.
    """
    source = random.Random(seed)  # noqa: S311 - it must be repeatable
    run = _Run(main, f"simulation of seed {seed}", max_steps)
    run.faults.update(faults or {})
    run.check = check
    return run(source)


def explore_trio(
    scenario: Callable[[], Awaitable[object]],
    *,
    delays: int = 2,
    max_schedules: int = 20_000,
    max_steps: int = 10_000,
    schedule: Sequence[int] | None = None,
) -> Explored:
    """Run *scenario* on trio under every schedule with few departures.

    As `explore`, without early timers; the stock order is that in which tasks
    were made.

    Raises:
        Hang: Under some schedule nothing can run any more.
        Exception: The first failure, with a note of its schedule.
        ImportError: trio is not installed.
    """

    def run(choices: Choices) -> None:
        _Run(scenario, "exploration", max_steps)(_Shuffle(choices))

    return search(run, delays, max_schedules, schedule)


class _Shuffle:
    """Stands in for the random source of trio's scheduler."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def shuffle(self, batch: list[Any]) -> None:
        order = []
        while batch:
            n = len(batch)
            order.append(batch.pop(self._choices.choose(n) if n > 1 else 0))
        batch[:] = order[::-1]  # trio takes them from the end


class _Run(Generic[T]):
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
        import trio.testing

        instrument = cast("trio.abc.Instrument", self)
        clock = trio.testing.MockClock(autojump_threshold=0)
        # Private switches of trio, but those that hypothesis-trio is served by.
        scheduler = vars(trio._core._run)  # noqa: SLF001
        switches = {"_r": source, "_ALLOW_DETERMINISTIC_SCHEDULING": True}
        before = {name: scheduler[name] for name in switches}
        scheduler.update(switches)
        try:
            values = trio.run(self._root, clock=clock, instruments=[instrument])
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

        # The clock jumps here only when nobody else has anything to wait for.
        await trio.sleep(_NEVER)
        stacks = [
            f"\n  {task.name}: {stack_of(task.coro)}"
            for task in self._numbers
            if getattr(task.coro, "cr_await", None) is not None
        ]
        self._fail(Hang("nothing is ready and no timer is set" + "".join(stacks)))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            digest = f"{self._digest & 0xFFFFFFFF:08x}"
            where = f"step {self._steps}, {self._seconds:.6f} s, digest {digest}"
            error.add_note(f"{self._label}: {where}")
            self._scope.cancel()

    # What trio calls; an error in here would only be logged.

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self._numbers[task] = len(self._numbers)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        import trio

        self._steps += 1
        self._seconds = trio.current_time()
        moment = int(self._seconds * 1e9)
        self._digest = hash((self._digest, self._numbers[task], moment))
        if self._steps > self._max_steps:
            self._fail(Hang(f"no end after {self._max_steps} steps"))
        self._guarded(self.faults.pop(self._steps, None))

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        self._guarded(self.check)

    def _guarded(self, callback: Callable[[], object] | None) -> None:
        if callback is not None and self._failure is None:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                self._fail(error)
