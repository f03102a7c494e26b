"""A gate at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatistics:
    """A gate at one moment.

    Attributes:
        slots: Slot capacity, or ``None`` if unbounded.
        slots_in_use: Slots held by live leases.
        bytes: Byte capacity, or ``None`` if unbounded.
        bytes_in_use: Bytes held by live leases; above capacity after an
            estimate was settled upwards.
        waiting: Requests in the queue.
        max_waiting: Maximum length of the queue, or ``None`` if unbounded.
        admitted: Leases granted.
        refused: Requests refused for any reason.
        cancelled: Requests whose task was cancelled before it had its lease.
        released: Leases given back; ``admitted - released`` are live.
        lost: Leases among them that only the garbage collector gave back.
        over_limit: Leases granted by a gate with ``enforce=False`` that would
            otherwise have been refused or kept waiting.
    """

    slots: int | None
    slots_in_use: int
    bytes: int | None
    bytes_in_use: int
    waiting: int
    max_waiting: int | None
    admitted: int
    refused: int
    cancelled: int
    released: int
    lost: int
    over_limit: int

    @property
    def received(self) -> int:
        """Requests so far, with all outcomes."""
        return self.admitted + self.refused + self.cancelled + self.waiting

    @property
    def saturation(self) -> float:
        """How full the gate is: the larger share of its slots and bytes in use.

        At least 1 while requests wait, though the next of them may need more than is
        free; above 1 where estimates were settled upwards.
        """
        limits = (self.slots_in_use, self.slots), (self.bytes_in_use, self.bytes)
        shares = [used / limit for used, limit in limits if limit]
        return max([*shares, 1.0 if self.waiting else 0.0])
