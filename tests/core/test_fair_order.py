"""The fair order beside a model that sorts everybody again for each grant.

As in the test of the ledger, the order is pure: it is driven without event loops.
"""

import random
from collections import Counter
from typing import Any

import pytest

from lifecycle._fair import _MOST_PASSERS, Fair
from lifecycle._ledger import DONE, HELD, WAITING

SIZES = (0, 1, 3, 5, 10, 30, 60, 90)


class Sorting(Fair):
    """Fair shares, whose order is made anew whenever it is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turns: dict[Any, Any] = {}

    def line(self) -> list[Any]:
        return [lease for lane in self.turns for lease in lane.queue]

    def push(self, lease: Any) -> None:
        flow = self._flow(lease)
        lane = flow.lane(lease)
        if not lane.queue:
            lane.served = max(lane.served, flow.clock)
            self.turns[lane] = flow
        lane.queue[lease] = None
        lease._passed = 0.0
        flow.live += 1

    def drop(self, lease: Any) -> None:
        flow = self._flows[lease._key]
        lane = flow.lane(lease)
        del lane.queue[lease]
        if not lane.queue:
            del self.turns[lane]
        flow.live -= 1

    def turn(self) -> Any:
        turns = [(flow.served, lane.served, lane) for lane, flow in self.turns.items()]
        turns.sort(key=lambda turn: turn[:2])
        heads = [next(iter(lane.queue)) for *_, lane in turns[:_MOST_PASSERS]]
        for head in heads:
            if self.fits(head) and (head is heads[0] or self._may_pass(head, heads[0])):
                self.drop(head)
                return head
        return None


class Guest:
    """What the order needs of a lease, its own waiter at once."""

    def __init__(self, number: int, key: str | None, cost: tuple[int, int]) -> None:
        self.number = number
        self._key = key
        self.slots, self.bytes = cost
        self._state = DONE
        self._waiter = self

    def wake(self) -> bool:
        return self.number % 17 > 0  # some are on their way out already


class Twins:
    """Two ledgers that are told the same."""

    def __init__(self, keys: int, seed: int) -> None:
        self.now = 0.0
        self.keys = keys
        self.chance = random.Random(seed)
        self.ledgers = [kind(4, 100, lambda: self.now) for kind in (Fair, Sorting)]
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
        found = [guests for guests in self.guests if guests[0]._state == state]
        if found:
            chosen = self.chance.choice(found)
            for ledger, guest in zip(self.ledgers, chosen, strict=True):
                either: Any = ledger.release if state == HELD else ledger.withdraw
                either(guest)

    def change(self) -> None:
        slots, nbytes = self.chance.choice([(4, 100), (0, 100), (8, 0), (2, 120)])
        for ledger in self.ledgers:
            ledger.slots, ledger.nbytes = slots, nbytes
            ledger.pump()

    def states(self) -> list[list[int]]:
        pairs = zip(*self.guests, strict=True)
        return [[guest._state for guest in guests] for guests in pairs]


@pytest.mark.parametrize("seed", range(12))
def test_grants_as_if_everybody_was_sorted_at_each_grant(seed: int) -> None:
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


def test_looks_at_no_more_for_each_grant_where_ten_times_as_many_wait() -> None:
    """What a release does depends on what it may grant, not on who waits."""

    class Counting(Fair):
        looks = 0

        def fits(self, lease: Any) -> bool:
            self.looks += 1
            return super().fits(lease)

    looks = []
    for waiting in (1_000, 10_000):
        ledger = Counting(1, 100, lambda: 0.0)
        first, *others = (Guest(n * 17 + 1, str(n), (1, 5)) for n in range(waiting))
        ledger.admit(first, None)  # type: ignore[arg-type]
        for guest in others:
            ledger.enqueue(guest)  # type: ignore[arg-type]
        ledger.looks = 0
        ledger.release(first)  # type: ignore[arg-type]
        looks.append(ledger.looks)
        assert ledger.waiting == waiting - 2
    assert looks == [1 + _MOST_PASSERS] * 2
