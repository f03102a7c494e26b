"""A budget that is learned from the memory that requests really take."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lifecycle import GateStatistics
from lifecycle_asgi.asgi_types import AnyGate
from lifecycle_asgi.memory_limit import (
    MemoryLimit,
    body_text,
    is_worker,
    memory_limit,
)

# Seconds of a window, at least, and until the next try where nothing could be read.
_WINDOW, _BLIND = 1.0, 60.0
# Parts of the limit above which the budget falls, and below which it may rise.
_HIGH, _LOW = 0.85, 0.75
# The same, of what is left where most of the limit is in use without any request.
_HIGH_OF_REST, _LOW_OF_REST = 0.5, 0.25
_DECREASE, _STEPS = 0.7, 10
# Idle windows after which memory that stays counts no more as that of requests.
_IDLE_WINDOWS: Final = 8
_log: Final = logging.getLogger("lifecycle")
_PROCESS: Final = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
_VERSION_1: Final = re.compile(rb"^total_(?:rss|shmem) (\d+)$", re.MULTILINE)
_VERSION_2: Final = re.compile(rb"^(?:anon|shmem) (\d+)$", re.MULTILINE)


def memory_use(limit: MemoryLimit, root: Path = Path("/")) -> int | None:
    """Return the memory that counts against *limit*, in bytes; ``None`` if unknown.

    Anonymous and shared memory of the group that has the limit, with all processes in
    it. Not the page cache, which the kernel takes back. Where the limit is that of the
    machine: of this process alone, without its children.
    """
    try:
        text = (limit.stat or root / "proc/self/status").read_bytes()
    except OSError:
        return None
    pattern, unit = _PROCESS, 1024
    if limit.stat is not None:
        pattern, unit = (_VERSION_1 if b"\ntotal_rss " in text else _VERSION_2), 1
    found = pattern.findall(text)
    return sum(map(int, found)) * unit if len(found) == 2 else None


class BudgetController:
    """Decides on a budget, window by window: additive up, multiplicative down. Pure.

    Above 0.85 of the limit, the budget falls to 0.7 of itself, and not again before
    requests hold no more than that. Below 0.75, it rises by a tenth of the ceiling
    while requests wait for it. In windows that begin without requests it rises, too,
    whatever is in use: requests do not cause that.

    Memory that stays while no request holds any is the baseline, the least of the last
    eight such windows. Where it leaves little, both thresholds are parts of the rest: a
    leak, or an allocator that keeps what was freed, is no reason to shrink for ever.
    """

    def __init__(self, limit: int, *, floor: int, ceiling: int) -> None:
        self.budget = ceiling
        self._limit, self._floor, self._ceiling = limit, min(floor, ceiling), ceiling
        self._step = -(-ceiling // _STEPS)
        self._idle: deque[int] = deque(maxlen=_IDLE_WINDOWS)
        self._observed = -math.inf

    def observe(self, now: float, used: int, held: int, *, binding: bool) -> int:
        """End a window; return the budget for the next.

        Args:
            now: Monotonic seconds.
            used: Bytes of memory in use.
            held: Bytes that requests have held since the last of them came or went.
            binding: A request waited or was refused in this window.
        """
        since, self._observed = now - self._observed, now
        if not held:
            self._idle.append(used)
            self._raise(int(min(max(1, since / _WINDOW), _STEPS)))
        elif used > self._threshold(_HIGH, _HIGH_OF_REST):
            if held <= self.budget:  # else the last decrease has yet to show
                self.budget = max(self._floor, int(self.budget * _DECREASE))
        elif binding and used < self._threshold(_LOW, _LOW_OF_REST):
            self._raise(1)
        return self.budget

    def _raise(self, steps: int) -> None:
        self.budget = min(self._ceiling, self.budget + steps * self._step)

    def _threshold(self, part: float, of_rest: float) -> float:
        baseline = min(self._idle, default=0)
        rest = max(0, self._limit - baseline)
        return max(part * self._limit, baseline + of_rest * rest)


class LearnedBudget:
    """Resizes a gate, as the memory that is in use permits.

    No task of its own: requests that come and go end the windows.

    Args:
        gate: Of this process alone. Its bytes are the ceiling, where it begins.
        floor: Bytes of the largest request that has to fit.
        body: Bytes that one body may have, if the budget permits no more.
        limit: Default: what `memory_limit` finds.
        use: Returns the memory in use; ``None`` if it cannot be read.
        clock: Monotonic seconds.

    Raises:
        ValueError: The memory in use cannot be read.
    """

    def __init__(
        self,
        gate: AnyGate,
        *,
        floor: int,
        body: int | None = None,
        limit: MemoryLimit | None = None,
        use: Callable[[MemoryLimit], int | None] = memory_use,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limit = limit or memory_limit()
        if limit is None or use(limit) is None:
            raise ValueError(
                "bytes='auto' needs to read what memory is in use, and this system "
                "does not say; give a number of bytes, such as LIFECYCLE_BYTES=8GiB"
            )
        self.ceiling = most = gate.statistics().bytes or 0
        self._gate, self._limit, self._use, self._clock = gate, limit, use, clock
        self._controller = BudgetController(limit.bytes, floor=floor, ceiling=most)
        self._lock = threading.Lock()
        self._next, self._refused, self._binding = clock() + _WINDOW, 0, False
        _log.info(
            "Admission: a learned budget, %.0f MiB at first and at most and %.0f MiB "
            "at least for requests that the application works on, from %.0f MiB that "
            "%s has%s",
            *(most / 2**20, min(floor, most) / 2**20, limit.bytes / 2**20, limit.owner),
            body_text(body),
        )
        if is_worker():
            _log.warning(
                "Admission: each worker process learns a budget of its own; if several "
                "run, set LIFECYCLE_BYTES to a number, and LIFECYCLE_SHARED to a folder"
            )

    def observe(self) -> None:
        """End the window if it is time. Before a request takes or gives back bytes."""
        if not self._lock.acquire(blocking=False):
            return  # another thread does
        try:
            state = self._gate.statistics()
            self._binding = self._binding or state.waiting > 0
            if (now := self._clock()) >= self._next:
                self._next = now + _WINDOW
                self._end_window(now, state)
        finally:
            self._lock.release()

    def _end_window(self, now: float, state: GateStatistics) -> None:
        refused, held = state.refused + state.over_limit, state.bytes_in_use
        binding = self._binding or refused > self._refused
        self._refused, self._binding = refused, False
        used = self._use(self._limit)
        if used is None:
            self._next = now + _BLIND
            _log.warning("Admission: memory in use is unreadable now; the budget stays")
            return
        before = self._controller.budget
        after = self._controller.observe(now, used, held, binding=binding)
        if after != before:
            self._gate.resize(bytes=after)
            mib = (after, before, used, self._limit.bytes, held)
            _log.info(
                "Admission: %.0f MiB for requests, after %.0f MiB: %.0f of %.0f MiB "
                "of memory are in use, and requests hold %.0f MiB",
                *(each / 2**20 for each in mib),
            )
