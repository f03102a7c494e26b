"""Figures that survive a busy machine.

What is compared runs in turns within one process, in chunks so short that most of
them are not interrupted. A figure is the median over many rounds; a ratio is the
median of the ratios within each round, so both sides of it met the same moment.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

Chunk = Callable[[], Awaitable[float]]
"""Repeats an operation some hundred times; returns the seconds of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a candidate.

    Attributes:
        seconds: Median at most this long.
        times: At most so many times what it is compared with.
        extra: At most so many seconds more than what it is compared with.
    """

    seconds: float | None = None
    times: float | None = None
    extra: float | None = None


async def in_turns(
    chunks: Mapping[str, Chunk], rounds: int, *, warm: bool = True
) -> dict[str, list[float]]:
    """Run each of *chunks* once per round, without the collector; return all figures.

    With *warm*, each runs once before, to specialise its bytecode and fill its
    free lists. Chunks had better measure ``time.thread_time``, which stands still
    while another process has the processor.
    """
    taken: dict[str, list[float]] = {name: [] for name in chunks}
    for chunk in chunks.values() if warm else ():
        await chunk()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, chunk in chunks.items():
                taken[name].append(await chunk())
    finally:
        gc.enable()
    return taken


def show(
    title: str, taken: Mapping[str, list[float]], goals: Mapping[str, Goal]
) -> bool:
    """Print one line per candidate, compared with the first.

    Returns:
        Whether each goal was reached.
    """
    (basis, beside), *_ = taken.items()
    print(f"\n{title}\n{'':34}{'median':>10}   {'10 % - 90 %':17} x {basis}")
    reached = True
    for name, figures in taken.items():
        median = statistics.median(figures)
        ratio = statistics.median(map(float.__truediv__, figures, beside))
        extra = statistics.median(map(float.__sub__, figures, beside))
        tenths = statistics.quantiles(figures, n=10)
        verdicts = _verdicts(goals.get(name, Goal()), median, ratio, extra)
        reached &= all(met for met, _ in verdicts)
        remarks = "  ".join(
            f"{'ok' if met else 'MISSED'}: {it}" for met, it in verdicts
        )
        spread = f"{_unit(tenths[0])} - {_unit(tenths[-1])}"
        line = f"  {name:<32}{_unit(median):>10}   {spread:17} {ratio:6.2f}   {remarks}"
        print(line.rstrip())
    return reached


def _verdicts(
    goal: Goal, median: float, ratio: float, extra: float
) -> list[tuple[bool, str]]:
    verdicts = []
    if goal.seconds is not None:
        verdicts.append((median <= goal.seconds, f"<= {_unit(goal.seconds)}"))
    if goal.times is not None:
        verdicts.append((ratio <= goal.times, f"<= {goal.times:.2f} x"))
    if goal.extra is not None:
        what = f"+{_unit(extra)}, goal <= +{_unit(goal.extra)}"
        verdicts.append((extra <= goal.extra, what))
    return verdicts


def _unit(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
