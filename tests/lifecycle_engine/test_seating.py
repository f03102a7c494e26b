from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from lifecycle_engine.models.sampling import Sampler
from lifecycle_engine.models.seating import Seating
from lifecycle_engine.runner import Sampling

SLOTS = 12


class Rows:
    """A cache that knows whose row is whose, and nothing else."""

    def __init__(self) -> None:
        self.owner: list[int | None] = [None] * SLOTS

    def clear(self, row: int, start: int, stop: int) -> None:
        self.owner[row] = None

    def swap(self, row: int, other: int, length: int) -> None:
        owner = self.owner
        owner[row], owner[other] = owner[other], owner[row]


def bucket(lanes: int) -> int:
    """Powers of two, up to the slots."""
    return next(width for width in (1, 2, 4, 8, SLOTS) if width >= lanes)


@pytest.mark.parametrize("seed", range(200))
def test_batch_is_as_wide_as_those_who_take_part_make_it(seed: int) -> None:
    """Kept slots never widen it; prompts that are being read stay where they are."""
    rng = random.Random(seed)
    rows: Any = Rows()
    seats = Seating(rows, slots=SLOTS, max_length=50)
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        seats.take(slot, Sampler(Sampling()), None)
        rows.owner[seats[slot].row] = slot
    taken = [slot for slot in rows.owner if slot is not None]
    for slot in rng.sample(taken, rng.randint(0, len(taken) - 1)):
        seats.free(slot)
        taken.remove(slot)
    batch = rng.sample(taken, rng.randint(1, len(taken)))
    others = [slot for slot in taken if slot not in batch]
    reading = set(rng.sample(others, rng.randint(0, len(others))))
    for slot in set(taken) - reading:
        seats[slot].token = 1  # it streams, or is kept
    before = {slot: seats[slot].row for slot in reading}
    width = seats.pack(batch, bucket)
    assert all(seats[slot].row < width for slot in batch)
    assert width <= bucket(len(batch) + len(reading))
    assert {slot: seats[slot].row for slot in reading} == before
    assert [rows.owner[seats[slot].row] for slot in taken] == taken
