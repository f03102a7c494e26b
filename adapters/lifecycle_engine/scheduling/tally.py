"""What became of the requests that a scheduler took."""

from __future__ import annotations

from typing import Any, Literal

End = Literal["completed", "cancelled", "failed", "ended"]


class Tally:
    """Counts; every request that was started ends once, in one way.

    Attributes:
        steps: Of the scheduler.
        tokens: Items that were made.
        started: Requests that were taken.
        rejected: Requests that were not.
        preempted: Times that a prompt which was read in part gave its slot back.
        finished: Requests that are over, by how.
    """

    __slots__ = ("finished", "preempted", "rejected", "started", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = self.tokens = self.started = self.rejected = self.preempted = 0
        self.finished: dict[End, int] = {
            "completed": 0,
            "cancelled": 0,
            "failed": 0,
            "ended": 0,
        }

    def report(self) -> dict[str, Any]:
        """All of them, of plain values."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "started": self.started,
            "rejected": self.rejected,
            "preempted": self.preempted,
            "finished": dict(self.finished),
        }
