"""How many more requests may come, with those that are on their way."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from lifecycle import Gate

# Seconds that a place is kept for a body. One that was sent with its head is there long
# before; who sends slowly, or nothing, is to keep nobody out.
_KEPT = 0.05


class Places:
    """Says which requests would be refused on arrival at a gate over requests.

    They arrive with their bodies. Of all that come while one place is free, one will
    have it, and the others would be read and parsed to be refused; so a place is kept
    for a moment for whoever was let through.

    Args:
        gate: Which one.
        clock: Monotonic seconds.
    """

    def __init__(
        self, gate: Gate, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._until: dict[object, float] = {}  # in the order of time

    @property
    def full(self) -> bool:
        """Whether a request that comes now would find no place.

        One that may wait, or that there is room for, has one: whether it gets in is
        only decided when it is there, with its body.
        """
        now = self._gate.statistics()
        if now.max_waiting is None:
            return False
        free = math.inf if now.slots is None else now.slots - now.slots_in_use
        line = now.max_waiting - now.waiting
        return line + (0 if now.waiting else max(free, 0)) <= self._expected()

    def refuse_when_full(self) -> None:
        """Refuse now who would be refused on arrival.

        Raises:
            GateFull: There is no place; it counts as refused.
            GateClosed: The gate is closed besides.
        """
        if self.full:
            # As many as are on their way, and one: which is refused, and told when to
            # come back. Not more than there are at all: that would be refused for good.
            most = max(self._gate.statistics().slots or 0, 1)
            wanted = min(self._expected() + 1, most)
            self._gate.try_admit(slots=wanted).release()

    def expect(self, request: object) -> None:
        """Keep a place for *request*, which is let through."""
        self._until[request] = self._clock() + _KEPT

    def arrived(self, request: object) -> None:
        """Keep it no longer: it is at the gate, or will never be. Idempotent."""
        self._until.pop(request, None)

    def _expected(self) -> int:
        now = self._clock()
        while self._until and self._until[first := next(iter(self._until))] <= now:
            del self._until[first]
        return len(self._until)
