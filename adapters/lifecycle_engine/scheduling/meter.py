"""How long steps take and what they yield: the scheduler's own clockwork."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Steps that the figures of "now" are taken over.
_RECENT = 64


@dataclass(slots=True)
class _Work:
    """One kind of work: prefill or decode.

    Attributes:
        runs: Calls of the runner.
        tokens: Prompt tokens read, or tokens made.
        seconds: In the runner.
        recent: ``(tokens, seconds)`` of the latest runs.
    """

    runs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recent: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_RECENT)
    )

    def add(self, tokens: int, seconds: float) -> None:
        self.runs += 1
        self.tokens += tokens
        self.seconds += seconds
        self.recent.append((tokens, seconds))

    def report(self) -> dict[str, Any]:
        tokens = sum(count for count, _ in self.recent)
        seconds = sum(second for _, second in self.recent)
        runs = len(self.recent)
        return {
            "runs": self.runs,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "recent_tokens_per_second": tokens / seconds if seconds else 0.0,
            "recent_run_seconds": seconds / runs if runs else 0.0,
            "recent_tokens_per_run": tokens / runs if runs else 0.0,
            "longest_recent_run_seconds": max(
                (second for _, second in self.recent), default=0.0
            ),
        }


class Meter:
    """Times what a scheduler does; prefill and decode apart.

    Args:
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_steps", "decode", "prefill")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.prefill = _Work()
        self.decode = _Work()
        self._steps = _Work()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole step."""
        begin = self._clock()
        try:
            yield
        finally:
            self._steps.add(0, self._clock() - begin)

    @contextmanager
    def run(self, work: _Work, tokens: int) -> Iterator[None]:
        """Time one call of the runner for *tokens*."""
        begin = self._clock()
        try:
            yield
        finally:
            work.add(tokens, self._clock() - begin)

    def report(self) -> dict[str, Any]:
        """Counters and the averages of the latest steps, of plain values."""
        steps = self._steps
        inside = self.prefill.seconds + self.decode.seconds
        recent = [seconds for _, seconds in steps.recent]
        return {
            "step_seconds": steps.seconds,
            "overhead_seconds": max(steps.seconds - inside, 0.0),
            "recent_step_seconds": sum(recent) / len(recent) if recent else 0.0,
            "longest_recent_step_seconds": max(recent, default=0.0),
            "prefill": self.prefill.report(),
            "decode": self.decode.report(),
        }
