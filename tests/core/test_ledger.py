"""The ledger against a naive model of itself.

The only test that looks inside the package: the ledger is pure, so a machine can
try sequences of operations on it that no event loop would get through in time.
"""

import math
import weakref
from typing import Any

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from lifecycle._fair import Fair
from lifecycle._ledger import Ledger
from lifecycle._line import Lanes
from lifecycle._ticket import DONE, HELD, WAITING, Ticket, cost_of, limit

SLOTS = st.integers(0, 4)
BYTES = st.integers(0, 12)
COSTS = st.tuples(SLOTS, BYTES).filter(any)
LIMITS = st.tuples(
    st.one_of(SLOTS, st.just(math.inf)), st.one_of(BYTES, st.just(math.inf))
)


class Guest(Ticket):
    """A ticket whose waiter may be on its way out when its turn comes."""

    __slots__ = ("__weakref__", "gone", "woken")

    def __init__(
        self,
        cost: tuple[int, int],
        *,
        gone: bool = False,
        priority: int = 0,
        key: str | None = None,
    ) -> None:
        super().__init__(cost, key, priority)
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
        self.line.sort(key=lambda guest: -guest.priority)  # stable: else by arrival
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
        self.ledger = Ledger(capacity, Lanes())
        self.model = Naive(capacity)
        self.queued: list[Guest] = []

    @rule(target=guests, cost=COSTS)
    def charge(self, cost: tuple[int, int]) -> Guest:
        guest = Guest(cost)
        assert self.ledger.fits(cost) is self.model.fits(cost)
        if not self.model.line and self.model.fits(cost):
            self.ledger.charge(guest)
            self.model.grant(guest)
        return guest

    @rule(
        target=guests, cost=COSTS, gone=st.booleans(), priority=st.sampled_from([0, 9])
    )
    def enqueue(self, cost: tuple[int, int], gone: bool, priority: int) -> Guest:
        guest = Guest(cost, gone=gone, priority=priority)
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
        if guest in self.queued and guest not in self.model.line:
            self.ledger.resume(guest)
            self.ledger.resume(guest)  # idempotent
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
        assert ledger.slots_in_use == model.in_use(0)
        assert ledger.bytes_in_use == model.in_use(1)
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
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    # A fault shows within seconds. To study it, let it be shrunk.
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)


class FairMachine(RuleBasedStateMachine):
    """In the fair order too, the books add up and nobody waits for nothing."""

    guests = Bundle("guests")

    @initialize(slots=st.integers(1, 4), nbytes=st.integers(4, 12))
    def begin(self, slots: int, nbytes: int) -> None:
        self.now = 0.0
        self.size = slots, nbytes
        line = Fair(lambda c: max(c[0] / slots, c[1] / nbytes), lambda: self.now)
        self.ledger = Ledger(self.size, line)
        self.live: list[Guest] = []

    @rule(
        target=guests,
        cost=COSTS,
        gone=st.booleans(),
        key=st.sampled_from(["a", "b", None]),
    )
    def enqueue(self, cost: tuple[int, int], gone: bool, key: str | None) -> Guest:
        guest = Guest(cost, gone=gone, key=key)
        if not self.ledger.too_large(cost):
            self.live.append(guest)
            self.ledger.enqueue(guest)
        return guest

    @rule(guest=guests)
    def leave(self, guest: Guest) -> None:
        assert not (self.ledger.release(guest) and self.ledger.withdraw(guest))
        self.ledger.withdraw(guest)
        assert guest.state == DONE

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def clear_line(self) -> None:
        waiting = [g for g in self.live if g.state == WAITING]
        assert set(self.ledger.clear_line()) == set(waiting)

    @rule(slots=st.integers(1, 4))
    def resize(self, slots: int) -> None:
        for misfit in self.ledger.resize((slots, self.size[1])):
            assert misfit.cost[0] > slots

    @invariant()
    def adds_up(self) -> None:
        held = [g for g in self.live if g.state == HELD]
        waiting = [g for g in self.live if g.state == WAITING]
        ledger = self.ledger
        assert ledger.slots_in_use == sum(g.cost[0] for g in held)
        assert ledger.bytes_in_use == sum(g.cost[1] for g in held)
        assert ledger.waiting == len(waiting)
        assert ledger.granted - ledger.released == len(held)
        # An empty gate with somebody in line would stay so for ever.
        assert held or not waiting


TestFairLedger = FairMachine.TestCase
TestFairLedger.settings = TestLedger.settings


@pytest.mark.parametrize("fair", [False, True])
def test_forgets_waiters_that_left(fair: bool) -> None:
    """A storm of cancellations does not leave a line of tombstones behind."""
    line = Fair(lambda cost: cost[0], lambda: 0.0) if fair else Lanes()
    ledger = Ledger((1, math.inf), line)
    ledger.charge(Ticket((1, 0)))
    left = []
    for i in range(2000):
        ticket = Guest((1, 0), key=str(i % 3))
        left.append(weakref.ref(ticket))
        ledger.enqueue(ticket)
        ledger.withdraw(ticket)
        ledger.resume(ticket)
        del ticket
    assert sum(ref() is not None for ref in left) < 200
    assert ledger.unresumed == 0


def test_grants_a_plain_ticket_that_fits() -> None:
    """A ticket that nobody waits on is granted as it is put in line."""
    ledger = Ledger((1, math.inf), Lanes())
    ticket = Ticket((1, 0))
    ledger.enqueue(ticket)
    assert ticket.state == HELD


def test_picks_nobody_from_an_empty_line() -> None:
    """Where nobody waits, nobody is next."""
    for line in (Lanes(), Fair(lambda cost: cost[0], lambda: 0.0)):
        assert line.pick(lambda _cost: True) is None


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
