"""The ledger against a naive model of itself.

The only test that looks inside the package: the ledger is pure, so a machine can
try sequences of operations on it that no event loop would get through in time.
"""

import math
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from lifecycle._ledger import DONE, HELD, WAITING, Ledger, Ticket, cost_of, limit

SLOTS = st.integers(0, 4)
BYTES = st.integers(0, 12)
COSTS = st.tuples(SLOTS, BYTES).filter(any)
LIMITS = st.tuples(
    st.one_of(SLOTS, st.just(math.inf)), st.one_of(BYTES, st.just(math.inf))
)


class Guest(Ticket):
    """A ticket whose waiter may be on its way out when its turn comes."""

    __slots__ = ("gone", "woken")

    def __init__(self, cost: tuple[int, int], *, gone: bool = False) -> None:
        super().__init__(cost)
        self.gone = gone
        self.woken = 0

    def granted(self) -> bool:
        self.woken += not self.gone
        return not self.gone


class Naive:
    """What the ledger promises, in lists and sums."""

    def __init__(self, capacity: tuple[float, float]) -> None:
        self.capacity = capacity
        self.held: list[Guest] = []
        self.line: list[Guest] = []
        self.granted = self.released = self.withdrawn = 0

    def in_use(self, i: int) -> int:
        return sum(guest.cost[i] for guest in self.held)

    def fits(self, cost: tuple[int, int]) -> bool:
        return all(
            not cost[i] or self.in_use(i) + cost[i] <= self.capacity[i] for i in (0, 1)
        )

    def never(self, cost: tuple[int, int]) -> bool:
        return any(0 < self.capacity[i] < cost[i] for i in (0, 1))

    def grant(self, guest: Guest) -> None:
        self.held.append(guest)
        self.granted += 1

    def settle(self) -> None:
        while self.line and self.fits(self.line[0].cost):
            guest = self.line.pop(0)
            if guest.gone:
                self.withdrawn += 1
            else:
                self.grant(guest)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations leaves ledger and model in the same state."""

    guests = Bundle("guests")

    @initialize(capacity=LIMITS)
    def begin(self, capacity: tuple[float, float]) -> None:
        self.ledger = Ledger(capacity)
        self.model = Naive(capacity)
        self.queued: list[Guest] = []

    @rule(target=guests, cost=COSTS)
    def try_charge(self, cost: tuple[int, int]) -> Guest:
        guest = Guest(cost)
        expected = not self.model.line and self.model.fits(cost)
        assert self.ledger.try_charge(guest) is expected
        if expected:
            self.model.grant(guest)
        return guest

    @rule(target=guests, cost=COSTS, gone=st.booleans())
    def enqueue(self, cost: tuple[int, int], gone: bool) -> Guest:
        guest = Guest(cost, gone=gone)
        assert self.ledger.too_large(cost) is self.model.never(cost)
        if not self.ledger.too_large(cost):
            self.queued.append(guest)
            self.model.line.append(guest)
            self.ledger.enqueue(guest)
            self.model.settle()
        return guest

    @rule(guest=guests)
    def release(self, guest: Guest) -> None:
        expected = guest in self.model.held
        if expected:
            self.model.held.remove(guest)
            self.model.released += 1
            self.model.settle()
        assert self.ledger.release(guest) is expected

    @rule(guest=guests)
    def withdraw(self, guest: Guest) -> None:
        expected = guest in self.model.line
        if expected:
            self.model.line.remove(guest)
            self.model.withdrawn += 1
            self.model.settle()
        assert self.ledger.withdraw(guest) is expected

    @rule(guest=guests)
    def resume(self, guest: Guest) -> None:
        if guest not in self.model.line:
            self.ledger.resume(guest) if guest in self.queued else None
            if guest in self.queued:
                self.queued.remove(guest)

    @rule(guest=guests, cost=COSTS)
    def adjust(self, guest: Guest, cost: tuple[int, int]) -> None:
        expected = guest in self.model.held
        assert self.ledger.adjust(guest, cost) is expected
        if expected:
            self.model.settle()

    @rule(capacity=LIMITS)
    def resize(self, capacity: tuple[float, float]) -> None:
        self.model.capacity = capacity
        misfits = [g for g in self.model.line if self.model.never(g.cost)]
        self.model.line = [g for g in self.model.line if g not in misfits]
        self.model.settle()
        assert self.ledger.resize(capacity) == misfits

    @rule()
    def clear_line(self) -> None:
        line, self.model.line = self.model.line, []
        assert self.ledger.clear_line() == line

    @invariant()
    def agrees(self) -> None:
        ledger, model = self.ledger, self.model
        assert ledger.in_use == [model.in_use(0), model.in_use(1)]
        assert ledger.waiting == len(model.line)
        assert ledger.granted == model.granted
        assert ledger.released == model.released
        assert ledger.withdrawn == model.withdrawn
        assert ledger.unresumed == len(self.queued)
        assert all(guest.state == HELD for guest in model.held)
        assert all(guest.state == WAITING for guest in model.line)
        assert all(guest.woken == 1 for guest in model.held if guest in self.queued)
        # The promise of all: no free place beside a waiter that fits.
        assert not (model.line and ledger.fits(model.line[0].cost))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None
)


def test_forgets_waiters_that_left() -> None:
    """A storm of cancellations does not leave a line of tombstones behind."""
    ledger = Ledger((1, math.inf))
    ledger.try_charge(Ticket((1, 0)))
    for _ in range(10_000):
        ticket = Ticket((1, 0))
        ledger.enqueue(ticket)
        ledger.withdraw(ticket)
        ledger.resume(ticket)
    assert len(ledger._line) < 200
    assert ledger.unresumed == 0


def test_forgets_a_cleared_line() -> None:
    """A line that was sent away is not kept."""
    ledger = Ledger((0, math.inf))
    tickets = [Ticket((1, 0)) for _ in range(100)]
    for ticket in tickets:
        ledger.enqueue(ticket)
    assert ledger.clear_line() == tickets
    assert len(ledger._line) == 0
    assert all(ticket.state == DONE for ticket in tickets)


@pytest.mark.parametrize(
    "amount", [-1, 1.0, math.nan, math.inf, "1", None, 1j, b"1"], ids=repr
)
def test_refuses_amounts_that_are_not_whole(amount: Any) -> None:
    """Negative, fractional, NaN and foreign amounts are refused at the door (B14)."""
    with pytest.raises(ValueError, match="bytes must be"):
        cost_of(1, amount)
    with pytest.raises(ValueError, match="slots must be"):
        cost_of(amount, 1)
    if amount is not None:
        with pytest.raises(ValueError, match="slots must be"):
            limit("slots", amount)


def test_refuses_a_request_for_nothing() -> None:
    """A request that costs nothing is a forgotten argument."""
    with pytest.raises(ValueError, match="at least one slot or one byte"):
        cost_of(0, 0)


def test_takes_whatever_counts_as_a_whole_number() -> None:
    """Integers of other libraries are taken as what they are."""

    class Int64:
        def __index__(self) -> int:
            return 3

    assert cost_of(Int64(), Int64()) == (3, 3)
    assert type(cost_of(True, 0)[0]) is int
    assert limit("slots", None) == math.inf
