"""Which row of the KV cache each slot's request has, and what goes on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .held import Held
from .kv import SlotCache
from .sampling import Sampler


@dataclass(slots=True)
class Seat:
    """What is remembered of the request in a slot.

    Attributes:
        row: Of the cache. It changes when the rows of a batch are packed.
        sampler: Its source of tokens.
        held: What its positions were made from, if a next turn may go on from it.
        length: KV positions filled.
        token: The last one drawn; negative until the prompt is read.
        delta: Of its rotary positions while decoding.
    """

    row: int
    sampler: Sampler
    held: Held | None = None
    length: int = 0
    token: int = -1
    delta: int = 0


class Seating:
    """The seats of a runner's slots, each with a row of its own.

    Args:
        cache: Whose rows they are.
        slots: Rows that requests can have; the cache's reserved one is not among them.
        max_length: Positions of a row.
    """

    def __init__(self, cache: SlotCache, *, slots: int, max_length: int) -> None:
        self._cache, self._slots, self._max_length = cache, slots, max_length
        self._seats: dict[int, Seat] = {}

    def __getitem__(self, slot: int) -> Seat:
        return self._seats[slot]

    def __len__(self) -> int:
        return len(self._seats)

    def take(self, slot: int, sampler: Sampler, held: Held | None) -> None:
        """Seat a request anew, in the first free row."""
        self.free(slot)
        taken = {seat.row for seat in self._seats.values()}
        row = next(row for row in range(self._slots) if row not in taken)
        self._seats[slot] = Seat(row, sampler, held)

    def keep(self, slot: int, sampler: Sampler, held: Held) -> int:
        """Seat a request on what its slot holds already; return how much of it.

        At least one token is left, whose pass draws the next one.
        """
        seat = self._seats[slot]
        shared = 0
        if seat.held is not None:
            shared = seat.held.shared(held)
        shared = min(shared, seat.length, len(held.ids) - 1)
        self._cache.clear(seat.row, shared, self._written(seat))
        self._seats[slot] = Seat(seat.row, sampler, held, length=shared)
        return shared

    def free(self, slot: int) -> None:
        """Forget a slot's request and zero what it wrote; nothing there is fine."""
        seat = self._seats.pop(slot, None)
        if seat is not None:
            self._cache.clear(seat.row, 0, self._written(seat))

    def pack(self, slots: Sequence[int], width: Callable[[int], int]) -> int:
        """Bring a batch's rows together at the front; return its width.

        Where a prompt that is being read sits among them it stays, and the batch
        is as much wider until it is read. What is kept for a next turn makes room.

        Args:
            slots: The batch.
            width: Lanes that a batch of so many is run with.
        """
        batch = [self._seats[slot] for slot in slots]
        reading = {seat.row for seat in self._seats.values() if seat.token < 0}
        front, room = 0, width(len(batch))
        while front < room:  # as wide as those who stay there make it
            front = room
            room = width(len(batch) + sum(row < front for row in reading))
        fixed = {seat.row for seat in batch} | reading
        free = (row for row in range(front) if row not in fixed)
        for seat in batch:
            if seat.row >= front and (to := next(free, None)) is not None:
                self._swap(seat, to)
        return width(max(seat.row for seat in batch) + 1)

    def _swap(self, seat: Seat, to: int) -> None:
        there = [each for each in self._seats.values() if each.row == to]
        for each in there:
            each.row = seat.row
        written = max(self._written(each) for each in (seat, *there))
        self._cache.swap(seat.row, to, written)
        seat.row = to

    def _written(self, seat: Seat) -> int:
        # One more: a step that failed half-way has written it already.
        return min(seat.length + 1, self._max_length)
