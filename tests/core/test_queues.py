"""The queues against a naive model of themselves, and the fair order against one that sorts.

Queues are pure, so a machine can try sequences of operations on them that no event
loop would get through in time.
"""

import math
import random
import weakref
from collections import Counter
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

from lifecycle._queues import (
    DONE,
    HELD,
    MAX_OVERTAKERS,
    WAITING,
    DrainRate,
    FairQueue,
    FifoQueue,
    Flow,
    Ticket,
)
from lifecycle._validation import check_capacity as limit, check_cost as cost_of

SLOTS = st.integers(0, 4)
BYTES = st.integers(0, 12)
COSTS = st.tuples(SLOTS, BYTES).filter(any)
LIMITS = st.tuples(
    st.one_of(SLOTS, st.just(math.inf)), st.one_of(BYTES, st.just(math.inf))
)


class MockTicket:
    """A ticket; its waiter may be cancelled already."""

    def __init__(
        self,
        cost: tuple[int, int],
        *,
        gone: bool = False,
        priority: int = 0,
        key: str | None = None,
    ) -> None:
        self.slots, self.bytes = cost
        self.key = key
        self.priority = priority
        self.state = DONE
        self.waiter = Mock(gone)

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
    """What a queue promises, in lists and sums."""

    def __init__(self, capacity: tuple[float, float]) -> None:
        self.capacity = capacity
        self.held: list[MockTicket] = []
        self.line: list[MockTicket] = []
        self.granted = self.released = self.withdrawn = 0

    def in_use(self, i: int) -> int:
        return sum(ticket.cost[i] for ticket in self.held)

    def fits(self, cost: tuple[int, int]) -> bool:
        return all(
            not cost[i] or self.in_use(i) + cost[i] <= self.capacity[i] for i in (0, 1)
        )

    def never(self, cost: tuple[int, int]) -> bool:
        return any(0 < self.capacity[i] < cost[i] for i in (0, 1))

    def grant(self, ticket: MockTicket) -> None:
        self.held.append(ticket)
        self.granted += 1

    def settle(self) -> None:
        self.line.sort(key=lambda ticket: -ticket.priority)  # stable: else by arrival
        while self.line and self.fits(self.line[0].cost):
            ticket = self.line.pop(0)
            if ticket.waiter.gone:
                self.withdrawn += 1
            else:
                self.grant(ticket)


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of operations leaves queue and model in the same state."""

    tickets = Bundle("tickets")

    @initialize(capacity=LIMITS)
    def begin(self, capacity: tuple[float, float]) -> None:
        self.queue = FifoQueue(*capacity)
        self.model = Naive(capacity)
        self.queued: list[MockTicket] = []

    @rule(target=tickets, cost=COSTS)
    def charge(self, cost: tuple[int, int]) -> MockTicket:
        ticket = MockTicket(cost)
        expected = not self.model.line and self.model.fits(cost)
        assert self.queue.fits(ticket) is self.model.fits(cost)
        assert self.queue.admit(ticket, self.model.line) is expected
        if expected:
            self.model.grant(ticket)
        return ticket

    @rule(
        target=tickets, cost=COSTS, gone=st.booleans(), priority=st.sampled_from([0, 9])
    )
    def enqueue(self, cost: tuple[int, int], gone: bool, priority: int) -> MockTicket:
        ticket = MockTicket(cost, gone=gone, priority=priority)
        assert self.queue.too_large(ticket) is self.model.never(cost)
        if not self.model.never(cost):
            self.queued.append(ticket)
            self.model.line.append(ticket)
            self.queue.enqueue(ticket)
            self.model.settle()
        return ticket

    @rule(ticket=tickets)
    def release(self, ticket: MockTicket) -> None:
        expected = ticket in self.model.held
        if expected:
            self.model.held.remove(ticket)
            self.model.released += 1
            self.model.settle()
        assert self.queue.release(ticket) is expected

    @rule(ticket=tickets)
    def withdraw(self, ticket: MockTicket) -> None:
        expected = ticket in self.model.line
        if expected:
            self.model.line.remove(ticket)
            self.model.withdrawn += 1
            self.model.settle()
        self.queue.withdraw(ticket)

    @rule(ticket=tickets)
    def resume(self, ticket: MockTicket) -> None:
        if ticket in self.queued and ticket not in self.model.line:
            self.queue.ahead.pop()
            self.queued.remove(ticket)

    @rule(ticket=tickets, nbytes=BYTES)
    def adjust(self, ticket: MockTicket, nbytes: int) -> None:
        if ticket in self.model.held:
            self.queue.settle(ticket, nbytes)
            assert ticket.bytes == nbytes
            self.model.settle()

    @rule(capacity=LIMITS)
    def resize(self, capacity: tuple[float, float]) -> None:
        self.model.capacity = capacity
        misfits = [g for g in self.model.line if self.model.never(g.cost)]
        self.model.line = [g for g in self.model.line if g not in misfits]
        self.model.settle()
        self.queue.slots, self.queue.nbytes = capacity
        self.queue.discard(misfits)

    @rule()
    def clear(self) -> None:
        line, self.model.line = self.model.line, []
        assert self.queue.tickets() == line
        self.queue.discard(line)

    @invariant()
    def agrees(self) -> None:
        queue, model = self.queue, self.model
        assert queue.slots_in_use == model.in_use(0)
        assert queue.bytes_in_use == model.in_use(1)
        assert queue.waiting == len(model.line)
        assert queue.admitted == model.granted
        assert queue.released == model.released
        assert queue.withdrawn == model.withdrawn
        assert len(queue.ahead) == len(self.queued)
        assert all(ticket.state == HELD for ticket in model.held)
        assert all(ticket.state == WAITING for ticket in model.line)
        woken = [g.waiter.woken for g in model.held if g in self.queued]
        assert set(woken) <= {1}
        # The promise of all: no free place beside a waiter that fits.
        assert not (model.line and queue.fits(model.line[0]))


TestFifoQueue = pytest.mark.thorough(QueueMachine.TestCase)
TestFifoQueue.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    # A fault shows within seconds. To study it, let it be shrunk.
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)


class FairQueueMachine(RuleBasedStateMachine):
    """In the fair order too, the sums are right and no request waits without need."""

    tickets = Bundle("tickets")

    @initialize(
        slots=st.integers(1, 4),
        nbytes=st.integers(4, 12),
        reserve=st.sampled_from([0.0, 0.3]),
    )
    def begin(self, slots: int, nbytes: int, reserve: float) -> None:
        self.now = 0.0
        self.size = slots, nbytes
        self.queue = FairQueue(slots, nbytes, lambda: self.now, reserve)
        self.live: list[MockTicket] = []

    @rule(
        target=tickets,
        cost=COSTS,
        gone=st.booleans(),
        key=st.sampled_from(["a", "b", None]),
    )
    def enqueue(self, cost: tuple[int, int], gone: bool, key: str | None) -> MockTicket:
        ticket = MockTicket(cost, gone=gone, key=key)
        if not self.queue.too_large(ticket):
            self.live.append(ticket)
            self.queue.enqueue(ticket)
        return ticket

    @rule(ticket=tickets)
    def leave(self, ticket: MockTicket) -> None:
        self.queue.release(ticket)
        self.queue.withdraw(ticket)
        assert ticket.state == DONE

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def clear(self) -> None:
        waiting = [g for g in self.live if g.state == WAITING]
        assert set(self.queue.tickets()) == set(waiting)
        self.queue.discard(waiting)

    @rule(slots=st.integers(1, 4))
    def resize(self, slots: int) -> None:
        self.queue.slots = slots
        self.queue.discard([g for g in self.queue.tickets() if g.slots > slots])

    @invariant()
    def adds_up(self) -> None:
        held = [g for g in self.live if g.state == HELD]
        waiting = [g for g in self.live if g.state == WAITING]
        queue = self.queue
        assert queue.slots_in_use == sum(g.cost[0] for g in held)
        assert queue.bytes_in_use == sum(g.cost[1] for g in held)
        assert queue.waiting == len(waiting)
        assert queue.admitted - queue.released == len(held)
        # An empty gate with a waiting request would stay so for ever.
        assert held or not waiting


TestFairQueue = pytest.mark.thorough(FairQueueMachine.TestCase)
TestFairQueue.settings = TestFifoQueue.settings


@pytest.mark.parametrize("fair", [False, True])
def test_forgets_waiters_that_left(fair: bool) -> None:
    """A ticket that leaves the queue leaves nothing behind, wherever it was."""
    queue = FairQueue(1, math.inf, lambda: 0.0) if fair else FifoQueue(1, math.inf)
    queue.charge(MockTicket((1, 0)))
    tickets = [MockTicket((1, 0), key=str(i % 3), priority=i % 2) for i in range(60)]
    left = [weakref.ref(ticket) for ticket in tickets]
    for ticket in tickets:
        queue.enqueue(ticket)
    for ticket in tickets[::2] + tickets[::-2]:
        queue.withdraw(ticket)
    del tickets, ticket
    assert not any(ref() for ref in left)
    assert queue.waiting == 0


def test_learns_the_rate_of_releases_from_a_second_or_more() -> None:
    """A shorter time says little, and is part of the next one."""
    rate = DrainRate()
    rate.restart(0, 10.0)
    assert rate.seconds_per_release(5, 10.5) == 0.1
    assert rate.seconds_per_release(5, 11.0) == 0.2
    assert rate.seconds_per_release(5, 13.0) == pytest.approx(0.2 + 1.8 * 2 / 3)


def test_looks_again_only_where_company_may_leave() -> None:
    """Without a reserve, nothing but a change of the gate lets a ticket in."""
    for queue in (FifoQueue(1, 1), FairQueue(1, 1, lambda: 0.0)):
        assert queue.seconds_to_recheck(MockTicket((1, 0))) == math.inf
    reserving = FairQueue(1, 1, lambda: 0.0, 0.5)
    assert reserving.seconds_to_recheck(MockTicket((1, 0))) == 60.0


@pytest.mark.parametrize("fair", [False, True])
def test_picks_no_ticket_from_an_empty_queue(fair: bool) -> None:
    """In an empty queue, no ticket is next."""
    queue = FairQueue(1, 1, lambda: 0.0) if fair else FifoQueue(1, 1)
    assert queue.take_next() is None
    queue.charge(MockTicket((1, 0)))
    ticket = MockTicket((1, 0))
    queue.enqueue(ticket)
    queue.withdraw(ticket)
    assert queue.take_next() is None


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
    with pytest.raises(ValueError, match="slots must be a whole number, not bool"):
        cost_of(True, 0)
    assert limit("slots", None) == math.inf


SIZES = (0, 1, 3, 5, 10, 30, 60, 90)


class Sorting(FairQueue):
    """FairQueue shares, whose order is made anew whenever it is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns: dict[Any, Any] = {}

    def tickets(self) -> list[Any]:
        return [lease for lane in self.turns for lease in lane.queue]

    def insert(self, lease: Any) -> None:
        flow = self.flow(lease)
        lane = flow.size_class(lease)
        if not lane.queue:
            lane.served = max(lane.served, flow.clock)
            self.turns[lane] = flow
        lane.queue[lease] = None
        lease.overtaken_by = 0.0
        flow.live += 1

    def remove(self, lease: Any) -> None:
        flow = self.flow(lease)
        lane = flow.size_class(lease)
        del lane.queue[lease]
        if not lane.queue:
            del self.turns[lane]
        flow.live -= 1

    def take_next(self) -> Any:
        turns = [(flow.served, lane.served, lane) for lane, flow in self.turns.items()]
        turns.sort(key=lambda turn: turn[:2])
        heads = [next(iter(lane.queue)) for *_, lane in turns[:MAX_OVERTAKERS]]
        for head in heads:
            if self.fits(head) and (
                head is heads[0] or self.may_overtake(head, heads[0])
            ):
                self.remove(head)
                return head
        return None


class Guest:
    """A ticket that is its own waiter."""

    def __init__(self, number: int, key: str | None, cost: tuple[int, int]) -> None:
        self.number = number
        self.key = key
        self.slots, self.bytes = cost
        self.state = DONE
        self.waiter = self

    def wake(self) -> bool:
        return self.number % 17 > 0  # some are on their way out already


class Twins:
    """Two queues that are given the same calls."""

    def __init__(self, keys: int, seed: int) -> None:
        self.now = 0.0
        self.keys = keys
        self.chance = random.Random(seed)
        self.ledgers = [kind(4, 100, lambda: self.now) for kind in (FairQueue, Sorting)]
        self.guests: list[tuple[Guest, ...]] = []

    def ask(self) -> None:
        chance = self.chance
        key = chance.choice([None, *map(str, range(self.keys))])
        cost = chance.choice([0, 1, 1, 1, 2]), chance.choice(SIZES)
        guests = tuple(Guest(len(self.guests), key, cost) for _ in self.ledgers)
        if any(cost):
            self.guests.append(guests)
            for ledger, guest in zip(self.ledgers, guests, strict=True):
                if not ledger.admit(guest, ledger.waiting):  # type: ignore[arg-type]
                    ledger.enqueue(guest)  # type: ignore[arg-type]

    def end(self, state: int) -> None:
        found = [guests for guests in self.guests if guests[0].state == state]
        if found:
            chosen = self.chance.choice(found)
            for ledger, guest in zip(self.ledgers, chosen, strict=True):
                either: Any = ledger.release if state == HELD else ledger.withdraw
                either(guest)

    def change(self) -> None:
        slots, nbytes = self.chance.choice([(4, 100), (0, 100), (8, 0), (2, 120)])
        for ledger in self.ledgers:
            ledger.slots, ledger.nbytes = slots, nbytes
            ledger.grant()

    def states(self) -> list[list[int]]:
        pairs = zip(*self.guests, strict=True)
        return [[guest.state for guest in guests] for guests in pairs]


@pytest.mark.parametrize("seed", range(12))
def test_grants_as_if_all_were_sorted_at_each_grant(seed: int) -> None:
    """Keys, sizes, leavers, hold times and limits of all kinds: the same grants."""
    twins = Twins(keys=(3, 12, 60)[seed % 3], seed=seed)
    for _ in range(400):
        twins.now += twins.chance.choice([0.0, 0.0, 0.1, 2.0])
        what = twins.chance.random()
        if what < 0.5:
            twins.ask()
        elif what < 0.9:
            twins.end(HELD)
        elif what < 0.98:
            twins.end(WAITING)
        else:
            twins.change()
        if twins.guests:
            fast, sorting = twins.states()
            assert fast == sorting
    assert Counter(fast)[DONE] > 50


def looks_at_a_release(waiting: int) -> int:
    """Return how many tickets a release looks at, where so many of all sizes wait."""

    class Counting(FairQueue):
        looks = 0

        def fits(self, lease: Any) -> bool:
            self.looks += 1
            return super().fits(lease)

    ledger = Counting(1, 100, lambda: 0.0)
    first, *others = (Guest(n * 17 + 1, str(n), (1, 5)) for n in range(waiting))
    ledger.admit(first, None)  # type: ignore[arg-type]
    for guest in others:
        ledger.enqueue(guest)  # type: ignore[arg-type]
    ledger.looks = 0
    ledger.release(first)  # type: ignore[arg-type]
    assert ledger.waiting == waiting - 2
    return ledger.looks


def test_looks_at_as_many_for_each_grant_as_it_says() -> None:
    """Beside what is granted, at 32 size classes, by docs/design.md."""
    assert looks_at_a_release(100) == 1 + 32


def test_looks_at_no_more_for_each_grant_where_ten_times_as_many_wait() -> None:
    """What a release does depends on what it may grant, not on how many wait."""
    assert looks_at_a_release(1_000) == looks_at_a_release(10_000)


@pytest.mark.parametrize(
    ("sizes", "classes"),
    [
        ((0,), 1),
        ((1, 2, 3), 1),
        ((3, 4), 2),
        ((4, 15), 1),
        ((15, 16), 2),
        ((16, 63), 1),
        ((63, 64), 2),
        (tuple(range(1, 2**12)), 6),
    ],
)
def test_sorts_sizes_by_a_factor_of_four(sizes: tuple[int, ...], classes: int) -> None:
    """Few classes, as each costs a look: a thousand sizes have five."""
    flow = Flow(0.0, 0.0)
    for size in sizes:
        ticket: Any = MockTicket((1, size))
        assert flow.size_class(ticket) is flow.size_class(ticket)
    assert len(flow.classes) == classes


def test_looks_at_few_of_many_keys_that_have_their_share() -> None:
    """A release costs no more where ten times as many keys have their share."""

    class Counting(FairQueue):
        looks = 0

        def _leaves_reserve(self, ticket: Any) -> bool:
            self.looks += 1
            return super()._leaves_reserve(ticket)

    looks = []
    for keys in (1_000, 10_000):
        queue = Counting(math.inf, 10**9, lambda: 0.0, reserve=0.125)
        first, *_ = [ticket(queue, str(n), 1_000) for n in range(keys)]
        for n in range(keys):
            queue.insert(ticket(queue, str(n), 10**9, held=False))
        queue.waiting = keys
        queue.looks = 0
        queue.release(first)
        looks.append(queue.looks)
    assert looks[0] == looks[1]


def ticket(queue: FairQueue, key: str, nbytes: int, *, held: bool = True) -> Ticket:
    """A ticket, and whether it holds what it costs."""
    made = Ticket()
    made.key, made.slots, made.bytes = key, 0, nbytes
    if held:
        assert queue.admit(made, None)
    return made
