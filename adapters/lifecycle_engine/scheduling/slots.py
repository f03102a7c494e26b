"""The books of the KV slots: pure, no torch."""

from __future__ import annotations

import heapq


class NoFreeSlot(RuntimeError):
    """Every slot is in use."""


class SlotPool:
    """Hands out the slots ``0 .. size - 1``, the lowest free one first.

    The lowest first, because rows close together are cheaper to gather. Row
    ``size``, where a runner has one, is reserved for padded lanes; it is outside
    of the books, so no sequence of calls can hand it out.
    """

    __slots__ = ("_free", "_used", "size")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; at least one slot is needed")
        self.size = size
        self._free = list(range(size))
        self._used: set[int] = set()

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free slot.

        Raises:
            NoFreeSlot: Every slot is in use.
        """
        if not self._free:
            raise NoFreeSlot(f"all {self.size} slots are in use")
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: The slot is not in use: a double free, or never allocated.
        """
        if slot not in self._used:
            raise ValueError(f"slot {slot} is not in use; it was freed before")
        self._used.remove(slot)
        heapq.heappush(self._free, slot)
