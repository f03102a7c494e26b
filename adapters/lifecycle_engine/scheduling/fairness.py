"""Whose chunk is next, and who gives a slot back to whom: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from .task import Task


def giving_way(
    shares: Sequence[str], prefilling: Sequence[Task], running: Collection[Task]
) -> tuple[Task, str] | None:
    """Return a task that is to wait again, and the share that its slot is for.

    A share without any slot goes before one with several. The last prompt gives way
    that can still be read from its start, of a share that has another slot besides:
    so whoever gives way gets on all the same, and what is lost is part of a prefill.

    Args:
        shares: Those in line, the one whose turn it is first.
        prefilling: Tasks whose prompt is being read, in the order in which they came.
        running: Tasks that stream.

    Returns:
        ``None`` if everybody keeps the slot that he has.
    """
    if not prefilling:
        return None
    slots = Counter(task.request.share for task in (*prefilling, *running))
    share = next((each for each in shares if not slots[each]), None)
    if share is None:
        return None
    for task in reversed(prefilling):
        if task.replayable and slots[task.request.share] > 1:
            return task, share
    return None


class Turns:
    """Says whose chunk is next: in turn the oldest and the one that is soonest done.

    The oldest alone would let a short prompt wait for all of a long one, the shortest
    alone a long prompt for ever.
    """

    __slots__ = ("_oldest",)

    def __init__(self) -> None:
        self._oldest = True

    def next(self, prefilling: Collection[Task]) -> Task:
        """Return one of the tasks, which are in the order in which they came."""
        oldest, self._oldest = self._oldest, not self._oldest
        if oldest:
            return next(iter(prefilling))
        return min(prefilling, key=lambda task: task.left)
