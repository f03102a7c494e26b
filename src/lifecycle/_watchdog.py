"""One watchdog for all streams of a registry.

A cancel scope around every item costs microseconds per item and can cut the
consumer instead of the source. A watchdog costs one reading of the clock per
item, and looks at a stream only when its deadline may have been broken.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._stream import Stream


# Below this many entries a sweep is not worth its while.
_SWEEP_AT: Final = 128
# No stream is looked at more often, or one with a deadline of nothing would be
# looked at for ever and nobody else ever again.
_SHORTEST: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Limits of one stream in seconds; ``None`` is no limit.

    Attributes:
        first_item: Longest wait for the first item.
        idle: Longest wait for any later item. Time that the consumer takes
            between two items is not counted.
        total: Longest life of the stream.
    """

    first_item: float | None = None
    idle: float | None = None
    total: float | None = None

    def __post_init__(self) -> None:
        for name in ("first_item", "idle", "total"):
            limit = getattr(self, name)
            if limit is not None and math.isnan(limit):
                raise ValueError(f"{name} must be a number of seconds, not NaN")

    def __bool__(self) -> bool:
        return not (self.first_item is self.idle is self.total is None)


class _Watched:
    __slots__ = ("began", "limits", "stream")

    def __init__(self, stream: Stream[Any], limits: Deadlines, began: float) -> None:
        self.stream = ref(stream)
        self.limits = limits
        self.began = began

    def over(self) -> bool:
        """Whether there is nothing left to watch."""
        stream = self.stream()
        return stream is None or stream.closed

    def look(self, now: float) -> float | None:
        """Stop the stream if it is late, else say when to look again."""
        stream = self.stream()
        if stream is None or stream.closed:
            return None
        limits = self.limits
        total_at = math.inf if limits.total is None else self.began + limits.total
        if now >= total_at:
            stream.expire("total", limits.total or 0)
            return None
        waiting = limits.idle if stream.items else limits.first_item
        since = stream.waiting_since()
        if waiting is not None and since is not None and now >= since + waiting:
            stream.expire("idle" if stream.items else "first_item", waiting)
            return None
        # A wait that begins after this look can be late no earlier than that.
        next_wait = math.inf if limits.idle is None else now + limits.idle
        this_wait = next_wait
        if waiting is not None:
            this_wait = (now if since is None else since) + waiting
        return min(total_at, this_wait, next_wait)


class Watchdog:
    """Stops streams that break their deadlines.

    Args:
        clock: Monotonic seconds, the same that ``anyio.sleep_until`` goes by.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, _Watched]] = []
        self._serial = 0
        self._sweep_at = _SWEEP_AT
        self._earlier = anyio.Event()

    def add(self, stream: Stream[Any], limits: Deadlines) -> None:
        """Watch *stream* until it is closed."""
        stream.watch(self._clock)
        now = self._clock()
        watched = _Watched(stream, limits, now)
        self._push(watched, watched.look(now))

    async def run(self) -> None:
        """Watch for ever.

        Cancellation:
            At any time; nothing needs to be cleaned up.
        """
        while True:
            self._earlier = anyio.Event()
            due = self._heap[0][0] if self._heap else math.inf
            with anyio.CancelScope(deadline=due):
                await self._earlier.wait()
            now = self._clock()
            while self._heap and self._heap[0][0] <= now:
                _due, _serial, watched = heapq.heappop(self._heap)
                again = watched.look(now)
                if again is not None:
                    self._push(watched, max(again, now + _SHORTEST))

    def _push(self, watched: _Watched, due: float | None) -> None:
        if due is None or due == math.inf:
            return
        if len(self._heap) >= self._sweep_at:
            # Most streams end long before their deadline would find them.
            self._heap = [entry for entry in self._heap if not entry[2].over()]
            heapq.heapify(self._heap)
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._heap))
        if not self._heap or due < self._heap[0][0]:
            self._earlier.set()
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, watched))
