"""Every schedule of a small program, within a bound.

Delay-bounded search: the schedule of a stock loop first, then those that depart
from it at one decision, then at two. Most races need one or two departures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lifecycle.testing.simulation import SimLoop, TrioRun, run_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search covered without finding a failure."""

    schedules: int  #: how many were run
    complete: bool  #: whether that was all of them within the bound


@dataclass(slots=True)
class Choices:
    """Follows a schedule, then takes the stock order; remembers both."""

    prefix: Sequence[int]
    delays: int  # how many may be other than 0, which is what a stock loop does
    # Each choice, with the number of alternatives that it had.
    made: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, alternatives: int) -> int:
        """Return one of ``range(alternatives)``."""
        at = len(self.made)
        planned = self.prefix[at] if at < len(self.prefix) else 0
        choice = min(planned, alternatives - 1)
        self.made.append((choice, alternatives if self.delays > 0 else 1))
        self.delays -= choice > 0
        return choice

    def following(self) -> list[int] | None:
        """The next schedule in depth-first order; ``None`` after the last."""
        made = self.made
        while made and made[-1][0] + 1 >= made[-1][1]:
            made.pop()
        if not made:
            return None
        return [choice for choice, _ in made[:-1]] + [made[-1][0] + 1]


def explore(
    scenario: Callable[[], Awaitable[object]],
    *,
    delays: int = 2,
    early_timers: float = 0.1,
    max_schedules: int = 20_000,
    max_steps: int = 10_000,
    schedule: Sequence[int] | None = None,
) -> Explored:
    """Run *scenario* on asyncio under every schedule with few departures.

    For scenarios of a handful of tasks: the count grows with the steps to the
    power of *delays*. Time is virtual, and a hang is found at once.

    Args:
        scenario: A coroutine function that builds everything anew and asserts
            what must be true.
        delays: Departures from the order of a stock loop. Each runs something
            before what is older, or lets a timer fall due early.
        early_timers: Longest wait in seconds that a timer may skip.
        max_schedules: Where to stop an incomplete search.
        max_steps: Steps after which one schedule is a `Deadlock`.
        schedule: Run this schedule alone, from the note of a failure.

    Raises:
        Deadlock: Under some schedule nothing can run any more.
        Exception: The first failure, with a note of its schedule.
    """

    def run(choices: Choices) -> None:
        loop = _ExploringLoop(choices, early_timers, max_steps)
        run_on(loop, scenario, label="exploration")

    return search(run, delays, max_schedules, schedule)


def search(
    run: Callable[[Choices], object],
    delays: int,
    max_schedules: int,
    schedule: Sequence[int] | None,
) -> Explored:
    """Drive *run* through the schedules, depth first."""
    following: Sequence[int] | None = schedule or []
    count = 0
    while following is not None and count < max_schedules:
        # A schedule that is replayed is followed to its end, and no further.
        choices = Choices(following, delays if schedule is None else len(schedule))
        count += 1
        try:
            run(choices)
        except BaseException as error:
            taken = [choice for choice, _ in choices.made]
            while taken and not taken[-1]:
                taken.pop()
            error.add_note(f"schedule {count}; replay with schedule={taken}")
            raise
        if schedule is not None:
            break
        following = choices.following()
    return Explored(schedules=count, complete=following is None)


class _ExploringLoop(SimLoop):
    def __init__(self, choices: Choices, early_timers: float, max_steps: int) -> None:
        super().__init__(early_timers=early_timers, max_steps=max_steps)
        self._choices = choices

    def _choose(self, ready: int) -> int:
        return self._choices.choose(ready)

    def _falls_due(self, wait: float) -> bool:
        return wait <= self._early and self._choices.choose(2) == 1


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
        Deadlock: Under some schedule nothing can run any more.
        Exception: The first failure, with a note of its schedule.
        ImportError: trio is not installed.
    """

    def run(choices: Choices) -> None:
        TrioRun(scenario, "exploration", max_steps)(_Shuffle(choices))

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
