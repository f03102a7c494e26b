"""One watchdog for all streams and starts of a registry.

A cancel scope around every item costs microseconds per item and can cut the
consumer instead of the source. A watchdog costs one reading of the clock per
item, and looks at a stream only when its deadline may have been broken.
"""

# ruff: noqa: SLF001 - a stream notes for its watchdog since when it waits
from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from weakref import ref

import anyio

from ._checks import seconds
from ._errors import StreamTimeout
from ._stream import Stream

# Below this many entries a sweep is not worth its while.
_SWEEP_AT: Final = 128
# No stream is looked at more often, or one with a deadline of nothing would be
# looked at for ever and nobody else ever again.
_SHORTEST: Final = 0.001


class Deadlines(dict[str, float]):
    """Limits of a stream in seconds: first_item, idle, total; ``None`` is no limit."""

    def __init__(self, **limits: float | None) -> None:
        for name, limit in limits.items():
            if limit is not None:
                self[name] = seconds(name, limit)

    def look(self, watched: ref[Stream[Any]], began: float, now: float) -> float:
        """Stop the stream if it is late; return when to look again, `inf` for never."""
        stream = watched()
        if stream is None or stream.closed:
            return math.inf
        kind = "idle" if stream.items else "first_item"
        since = math.inf if stream._since is None else stream._since
        total, wait, idle = (self.get(k, math.inf) for k in ("total", kind, "idle"))
        at, deadline = min((began + total, "total"), (since + wait, kind))
        if at > now:
            # A wait that begins after this look can be late no earlier than that.
            return min(at, now + wait, now + idle)
        how = f"{deadline} deadline of {self[deadline]} s after {stream.items} items"
        late = StreamTimeout(f"the stream broke its {how}", deadline=deadline)
        stream.stop(late)
        return math.inf


class Watchdog:
    """Stops what breaks its deadlines.

    Args:
        clock: Monotonic seconds, the same that ``anyio.sleep_until`` goes by.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[float], float]]] = []
        self._serial = 0
        self._sweep_at = _SWEEP_AT
        self._earlier = anyio.Event()

    def add(self, stream: Stream[Any], limits: Deadlines) -> None:
        """Watch *stream* until it is closed."""
        stream._clock = self._clock
        now = self._clock()
        look = partial(limits.look, ref(stream), now)
        self.at(look(now), look)

    def at(self, due: float, look: Callable[[float], float]) -> None:
        """Call *look* with the time when it is *due*; it says when to do so again."""
        if len(self._heap) >= self._sweep_at:
            # Most of what is watched ends long before its deadline would find it.
            swept, self._heap, now = self._heap, [], self._clock()
            for _due, _serial, each in swept:
                self._push(each(now), each)
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._heap))
        self._push(due, look)

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
                _due, _serial, look = heapq.heappop(self._heap)
                self._push(max(look(now), now + _SHORTEST), look)

    def _push(self, due: float, look: Callable[[float], float]) -> None:
        if due < math.inf:
            if not self._heap or due < self._heap[0][0]:
                self._earlier.set()
            self._serial += 1
            heapq.heappush(self._heap, (due, self._serial, look))
