"""When the next process may start: at once, later, or not for a long while."""

from __future__ import annotations

from collections import deque

from lifecycle_zmq import _options


class Restarts:
    """Backoff between the processes of one engine, and a breaker for a crash loop.

    The first death in a row is followed by a start at once if the process had served,
    each other one by a delay that doubles. A process that has served long enough ends
    the row. When more
    than `max_crashes` processes have ended within `crash_window`, the engine is
    *broken*: none is started for `broken_for` seconds, then one is tried. If that one
    ends before it has served long enough, the engine is broken again.

    Args:
        backoff: Seconds before the first start of a row that has to wait.
        max_backoff: Upper end of the doubling; also, for how long a process must
            serve to end the row.
        max_crashes: Ends within the window that are put up with; ``None`` is any
            number.
        crash_window: Seconds.
        broken_for: Seconds.

    Raises:
        TypeError: One of these is no number.
        ValueError: One is less than 0.
    """

    def __init__(
        self,
        *,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        max_crashes: int | None = 3,
        crash_window: float = 60.0,
        broken_for: float = 60.0,
    ) -> None:
        _options.seconds(backoff=backoff, max_backoff=max_backoff)
        _options.seconds(crash_window=crash_window, broken_for=broken_for)
        if max_crashes is not None:
            _options.whole(max_crashes=max_crashes)
        self._backoff = backoff
        self._max_backoff = max_backoff
        self._max_crashes = max_crashes
        self._window = crash_window
        self._broken_for = broken_for
        self._row = 0
        self._crashes: deque[float] = deque(maxlen=(max_crashes or 0) + 1)
        self._trial = False

    @property
    def delay(self) -> float:
        """Seconds that a start would have to wait after a death now."""
        if not self._row:
            return 0.0
        # The exponent is capped, as a float is not endless: 2 ** 1024 overflows.
        return min(self._max_backoff, self._backoff * 2.0 ** min(self._row - 1, 64))

    def bury(self, now: float, served_seconds: float) -> tuple[float, bool]:
        """Note the end of a process.

        Returns:
            The seconds until the next may start, and whether that is because the
            engine is broken.
        """
        if served_seconds >= self._max_backoff:
            self._row = 0
            self._trial = False
        if not served_seconds:
            # What has not even started will not start the next moment either.
            self._row = max(1, self._row)
        delay = self.delay
        self._row += 1
        self._crashes.append(now)
        broken = self._loops(now) or self._trial
        self._trial = broken
        return (self._broken_for if broken else delay), broken

    def reset(self) -> None:
        """Forget every death."""
        self._row = 0
        self._crashes.clear()
        self._trial = False

    def _loops(self, now: float) -> bool:
        full = len(self._crashes) == self._crashes.maxlen
        if self._max_crashes is None or not full:
            return False
        return now - self._crashes[0] <= self._window
