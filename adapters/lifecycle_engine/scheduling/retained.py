"""The slots of a runner, and which of them conversations keep between turns."""

from __future__ import annotations

import logging

from lifecycle_engine.runner import Resumes, Runner

from .slots import SlotPool
from .task import Session, Task
from .traces import release, where

_log = logging.getLogger(__name__)


class Slots:
    """Gives each task a slot, and keeps those that a next turn may go on from.

    A kept slot is nobody's: whoever needs one takes the one that was left alone
    for longest. So keeping costs no request its place.

    Args:
        runner: Whose slots they are; one without `Resumes` keeps none.

    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._resumes = runner if isinstance(runner, Resumes) else None
        self._pool = SlotPool(runner.slots)
        # In the order in which they were left; each session has one at most.
        self._kept: dict[Session, int] = {}
        self._resumed = 0
        self._evicted = 0

    def report(self) -> dict[str, int]:
        """Counts: slots as they are now, and what keeping them has saved so far."""
        return {
            "slots": self._pool.size,
            # Whoever needs one takes a kept one as well.
            "slots_free": self._pool.free_slots + len(self._kept),
            "slots_kept": len(self._kept),
            "slots_evicted": self._evicted,
            "tokens_resumed": self._resumed,
        }

    def take(self, task: Task) -> None:
        """Seat a task: where its conversation was, or in a free or an evicted slot.

        Raises:
            NoFreeSlot: Every slot is a task's.
        """
        slot = None
        if task.session is not None:
            slot = self._kept.pop(task.session, None)
        if slot is None:
            if not self._pool.free_slots and self._kept:
                self._evict()
            task.slot = self._pool.allocate()
            return
        task.slot = slot
        assert self._resumes is not None
        task.read = self._resumes.resume(slot, task.request.prompt)
        task.resumed = task.read
        self._resumed += task.read

    def leave(self, task: Task, *, keep: bool = False) -> None:
        """Take a task's slot away, if it has one, and free it or keep it."""
        slot, task.slot = task.slot, None
        if slot is None:
            return
        if keep and task.session is not None and self._resumes is not None:
            before = self._kept.pop(task.session, None)
            self._kept[task.session] = slot
            slot = before  # of another turn, that ran beside this one
        if slot is not None:
            self._free(slot)

    def _evict(self) -> None:
        slot = self._kept.pop(next(iter(self._kept)))
        self._evicted += 1
        self._free(slot)

    def _free(self, slot: int) -> None:
        self._pool.free(slot)
        try:
            self._runner.free(slot)
        except Exception as error:  # noqa: BLE001  # costs nobody anything, whatever it is
            # Whoever it was of may have had its answer already, and whoever is next in
            # the slot begins it anew. Kept apart, a few of them would be all there are.
            _log.warning("free failed (%s)", where(error))
            release(error)
