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

from lifecycle._checks import cost as cost_of, limit
from lifecycle._fair import Fair
from lifecycle._ledger import DONE, HELD, WAITING, Ledger

SLOTS = st.integers(0, 4)
BYTES = st.integers(0, 12)
COSTS = st.tuples(SLOTS, BYTES).filter(any)
LIMITS = st.tuples(
    st.one_of(SLOTS, st.just(math.inf)), st.one_of(BYTES, st.just(math.inf))
)


class Guest:
    """What the ledger needs of a lease; its waiter may be on its way out already."""

    def __init__(
        self,
        cost: tuple[int, int],
        *,
        gone: bool = False,
        priority: int = 0,
        key: str | None = None,
    ) -> None:
        self.slots, self.bytes = cost
        self._key = key
        self._priority = priority
        self._state = DONE
        self._waiter = Mock(gone)

    @property
    def cost(self) -> tuple[int, int]:
        return self.slots, self.bytes


class Mock:
    """A waiter that counts how often it was woken."""

    def __init__(self, gone: bool) -> None:
        self.gone = gone
        self.woken = 0

    def wake(self) -> bool:
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
        self.line.sort(key=lambda guest: -guest._priority)  # stable: else by arrival
        while self.line and self.fits(self.line[0].cost):
            guest = self.line.pop(0)
            if guest._waiter.gone:
                self.withdrawn += 1
            else:
                self.grant(guest)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations leaves ledger and model in the same state."""

    guests = Bundle("guests")

    @initialize(capacity=LIMITS)
    def begin(self, capacity: tuple[float, float]) -> None:
        self.ledger = Ledger(*capacity)
        self.model = Naive(capacity)
        self.queued: list[Guest] = []

    @rule(target=guests, cost=COSTS)
    def charge(self, cost: tuple[int, int]) -> Guest:
        guest = Guest(cost)
        expected = not self.model.line and self.model.fits(cost)
        assert self.ledger.fits(guest) is self.model.fits(cost)
        assert self.ledger.admit(guest, self.model.line) is expected
        if expected:
            self.model.grant(guest)
        return guest

    @rule(
        target=guests, cost=COSTS, gone=st.booleans(), priority=st.sampled_from([0, 9])
    )
    def enqueue(self, cost: tuple[int, int], gone: bool, priority: int) -> Guest:
        guest = Guest(cost, gone=gone, priority=priority)
        assert self.ledger.too_large(guest) is self.model.never(cost)
        if not self.model.never(cost):
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
        self.ledger.withdraw(guest)

    @rule(guest=guests)
    def resume(self, guest: Guest) -> None:
        if guest in self.queued and guest not in self.model.line:
            self.ledger.ahead.pop()
            self.queued.remove(guest)

    @rule(guest=guests, nbytes=BYTES)
    def adjust(self, guest: Guest, nbytes: int) -> None:
        if guest in self.model.held:
            self.ledger.adjust(guest, nbytes)
            assert guest.bytes == nbytes
            self.model.settle()

    @rule(capacity=LIMITS)
    def resize(self, capacity: tuple[float, float]) -> None:
        self.model.capacity = capacity
        misfits = [g for g in self.model.line if self.model.never(g.cost)]
        self.model.line = [g for g in self.model.line if g not in misfits]
        self.model.settle()
        self.ledger.slots, self.ledger.nbytes = capacity
        self.ledger.expel(misfits)

    @rule()
    def clear(self) -> None:
        line, self.model.line = self.model.line, []
        assert self.ledger.line() == line
        self.ledger.expel(line)

    @invariant()
    def agrees(self) -> None:
        ledger, model = self.ledger, self.model
        assert ledger.slots_in_use == model.in_use(0)
        assert ledger.bytes_in_use == model.in_use(1)
        assert ledger.waiting == len(model.line)
        assert ledger.admitted == model.granted
        assert ledger.released == model.released
        assert ledger.withdrawn == model.withdrawn
        assert len(ledger.ahead) == len(self.queued)
        assert all(guest._state == HELD for guest in model.held)
        assert all(guest._state == WAITING for guest in model.line)
        woken = [g._waiter.woken for g in model.held if g in self.queued]
        assert set(woken) <= {1}
        # The promise of all: no free place beside a waiter that fits.
        assert not (model.line and ledger.fits(model.line[0]))


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
        self.ledger = Fair(slots, nbytes, lambda: self.now)
        self.live: list[Guest] = []

    @rule(
        target=guests,
        cost=COSTS,
        gone=st.booleans(),
        key=st.sampled_from(["a", "b", None]),
    )
    def enqueue(self, cost: tuple[int, int], gone: bool, key: str | None) -> Guest:
        guest = Guest(cost, gone=gone, key=key)
        if not self.ledger.too_large(guest):
            self.live.append(guest)
            self.ledger.enqueue(guest)
        return guest

    @rule(guest=guests)
    def leave(self, guest: Guest) -> None:
        self.ledger.release(guest)
        self.ledger.withdraw(guest)
        assert guest._state == DONE

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def clear(self) -> None:
        waiting = [g for g in self.live if g._state == WAITING]
        assert set(self.ledger.line()) == set(waiting)
        self.ledger.expel(waiting)

    @rule(slots=st.integers(1, 4))
    def resize(self, slots: int) -> None:
        self.ledger.slots = slots
        self.ledger.expel([g for g in self.ledger.line() if g.slots > slots])

    @invariant()
    def adds_up(self) -> None:
        held = [g for g in self.live if g._state == HELD]
        waiting = [g for g in self.live if g._state == WAITING]
        ledger = self.ledger
        assert ledger.slots_in_use == sum(g.cost[0] for g in held)
        assert ledger.bytes_in_use == sum(g.cost[1] for g in held)
        assert ledger.waiting == len(waiting)
        assert ledger.admitted - ledger.released == len(held)
        # An empty gate with somebody in line would stay so for ever.
        assert held or not waiting


TestFairLedger = FairMachine.TestCase
TestFairLedger.settings = TestLedger.settings


@pytest.mark.parametrize("fair", [False, True])
def test_forgets_waiters_that_left(fair: bool) -> None:
    """Who leaves the line leaves nothing behind, wherever they stood in it."""
    ledger = Fair(1, math.inf, lambda: 0.0) if fair else Ledger(1, math.inf)
    ledger.charge(Guest((1, 0)))
    guests = [Guest((1, 0), key=str(i % 3), priority=i % 2) for i in range(60)]
    left = [weakref.ref(guest) for guest in guests]
    for guest in guests:
        ledger.enqueue(guest)
    for guest in guests[::2] + guests[::-2]:
        ledger.withdraw(guest)
    del guests, guest
    assert not any(ref() for ref in left)
    assert ledger.waiting == 0


@pytest.mark.parametrize("fair", [False, True])
def test_picks_nobody_from_an_empty_line(fair: bool) -> None:
    """Where nobody waits, or nobody any more, nobody is next."""
    ledger = Fair(1, 1, lambda: 0.0) if fair else Ledger(1, 1)
    assert ledger.turn() is None
    ledger.charge(Guest((1, 0)))
    guest = Guest((1, 0))
    ledger.enqueue(guest)
    ledger.withdraw(guest)
    assert ledger.turn() is None


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
