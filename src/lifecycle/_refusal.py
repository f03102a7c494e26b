"""Refusals of a gate: their words, and how long the client should stay away."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ._errors import AdmissionTimeout, CostTooLarge, GateClosed, GateFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._ledger import Ledger
    from ._ticket import Cost

_SHORTEST: Final = 1.0
_LONGEST: Final = 60.0
# Multiples of the golden ratio spread more evenly than random numbers do, and
# a core without randomness can be replayed.
_GOLDEN: Final = 0.6180339887498949


class DrainRate:
    """How fast leases leave a gate, and what follows for newcomers.

    Sampled only where somebody is refused or has to wait, so admissions that go
    straight through pay nothing for it.
    """

    __slots__ = ("_departed", "_interval", "_refusals", "_since")

    def __init__(self) -> None:
        self._departed = 0
        self._since: float | None = None
        self._interval: float | None = None
        self._refusals = 0

    def sample(self, departed: int, now: float) -> float:
        """Return the seconds from one departure to the next, as far as known.

        Args:
            departed: Leases that ever left.
            now: Monotonic seconds.
        """
        if self._since is None:
            self._departed, self._since = departed, now
        window, departures = now - self._since, departed - self._departed
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
            self._departed, self._since = departed, now
        return interval

    def retry_after(self, ahead: int, departed: int, now: float) -> float:
        """Seconds until *ahead* leases will have left, jittered, 1 to 60.

        The jitter is a factor of 0.5 to 1.5, so that clients refused together
        do not come back together.
        """
        self._refusals += 1
        # The bounds leave room for the jitter: clipped afterwards, a herd
        # would meet again at the bound.
        expected = max(ahead * self.sample(departed, now), 2 * _SHORTEST)
        expected = min(expected, _LONGEST / 1.5)
        return expected * (0.5 + self._refusals * _GOLDEN % 1.0)


class Refusals:
    """Words and numbers for those whom a gate turns away.

    Args:
        name: Name of the gate.
        ledger: The books that the numbers come from.
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_ledger", "_name", "_rate", "_read")

    def __init__(self, name: str, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._name = name
        self._ledger = ledger
        self._clock = clock
        self._rate = DrainRate()
        self._read = 0.0

    def now(self) -> float:
        """Seconds by the gate's clock.

        In a thread that has no loop to ask, those that were read last.
        """
        with contextlib.suppress(RuntimeError):
            self._read = self._clock()
        return self._read

    def full(self, how: str) -> GateFull:
        """There is no room, and no room to wait in."""
        hint = self._hint()
        return GateFull(
            f"gate {self._name!r} {how}; retry in {hint:.1f} s", retry_after=hint
        )

    def timeout(self, max_wait: float | None) -> AdmissionTimeout:
        """There was no room for as long as the request would wait."""
        hint = self._hint()
        return AdmissionTimeout(
            f"gate {self._name!r} had no room within {max_wait} s; "
            f"retry in {hint:.1f} s",
            retry_after=hint,
        )

    def closed(self) -> GateClosed:
        """The gate is closed for good."""
        return GateClosed(f"gate {self._name!r} is closed; ask another server")

    def too_large(self, cost: Cost) -> CostTooLarge:
        """The request can never fit."""
        limits = self._ledger.slots, self._ledger.nbytes
        beyond = [
            (f"{asked} {unit}", f"{limit} {unit}")
            for asked, limit, unit in zip(cost, limits, ("slots", "bytes"), strict=True)
            if 0 < limit < asked
        ]
        asked, limit = (" and ".join(side) for side in zip(*beyond, strict=True))
        return CostTooLarge(
            f"a request of {asked} can never pass gate {self._name!r} of {limit}; "
            f"make it smaller"
        )

    def itself(self) -> RuntimeError:
        """The task waits for what it holds."""
        return RuntimeError(
            f"this task would wait for itself at gate {self._name!r}: it is inside "
            f"a with block of a lease of the same gate; ask for all that the "
            f"request needs in one admission"
        )

    def _hint(self) -> float:
        ledger = self._ledger
        return self._rate.retry_after(ledger.waiting + 1, ledger.released, self.now())
