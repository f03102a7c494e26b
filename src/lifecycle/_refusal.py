"""How long those whom a gate turns away should stay away."""

from __future__ import annotations

from typing import Final

_SHORTEST: Final = 1.0
_LONGEST: Final = 60.0
# Multiples of the golden ratio spread more evenly than random numbers do, and
# a core without randomness can be replayed.
_GOLDEN: Final = 0.6180339887498949


class DrainRate:
    """How fast leases leave a gate, and what follows for newcomers.

    Sampled only where somebody is turned away, so admissions that go straight
    through pay nothing for it.
    """

    def __init__(self) -> None:
        self._refused = self._released = 0
        self._since: float | None = None
        self._interval: float | None = None

    def retry_after(self, ahead: int, released: int, now: float) -> float:
        """Seconds until *ahead* leases will have left, jittered, 1 to 60.

        The jitter is a factor of 0.5 to 1.5, so that clients refused together do
        not come back together.
        """
        self._refused += 1
        # The bounds leave room for the jitter: clipped afterwards, a herd
        # would meet again at the bound.
        expected = max(ahead * self._sample(released, now), 2 * _SHORTEST)
        expected = min(expected, _LONGEST / 1.5)
        return expected * (0.5 + self._refused * _GOLDEN % 1.0)

    def _sample(self, released: int, now: float) -> float:
        """Seconds from one release to the next, as far as known."""
        if self._since is None:
            self._released, self._since = released, now
        window, departures = now - self._since, released - self._released
        # Where nothing left, the wait so far is the best guess there is: short
        # at first, and longer the longer the gate is stuck.
        interval = window / max(departures, 1)
        if self._interval is not None:
            # By the time that was watched: a burst of refusals within a
            # millisecond must not drown a minute of evidence.
            weight = window / (window + _SHORTEST)
            interval = self._interval + weight * (interval - self._interval)
        if departures and window >= _SHORTEST:
            self._interval = interval
            self._released, self._since = released, now
        return interval
