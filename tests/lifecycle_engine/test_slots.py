from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from more_examples import TIMES

from lifecycle_engine.scheduling.slots import NoFreeSlot, SlotPool


class SlotPoolMachine(RuleBasedStateMachine):
    """Any sequence of allocations and frees, against a plain set."""

    @initialize(size=st.integers(1, 6))
    def make(self, size: int) -> None:
        self.pool = SlotPool(size)
        self.held: set[int] = set()

    @precondition(lambda self: len(self.held) < self.pool.size)
    @rule()
    def allocate(self) -> None:
        slot = self.pool.allocate()
        assert slot not in self.held
        assert 0 <= slot < self.pool.size, "the reserved row was handed out"
        assert slot == min(set(range(self.pool.size)) - self.held)
        self.held.add(slot)

    @precondition(lambda self: len(self.held) == self.pool.size)
    @rule()
    def exhaust(self) -> None:
        with pytest.raises(NoFreeSlot, match=str(self.pool.size)):
            self.pool.allocate()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(slot)
        self.held.remove(slot)

    @rule(slot=st.integers(-2, 8))
    def free_what_is_not_held(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.free(slot)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.free_slots + len(self.held) == self.pool.size


TestSlotPool = SlotPoolMachine.TestCase
TestSlotPool.settings = settings(
    max_examples=TIMES * 60, stateful_step_count=40, deadline=None
)


def test_free_twice_raises() -> None:
    """A double free is an error and changes nothing."""
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.free(slot)
    with pytest.raises(ValueError, match="not in use"):
        pool.free(slot)
    assert pool.free_slots == 2


def test_make_pool_without_slots_raises() -> None:
    """A pool of nothing is a mistake in the configuration."""
    with pytest.raises(ValueError, match="at least one"):
        SlotPool(0)
