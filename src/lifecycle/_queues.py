"""Queues of tickets: what is in use, which tickets wait, and which one is next.

Pure: nothing here awaits, locks, logs or knows an event loop. Each method takes the
queue from one valid state to the next before it returns, so no cancellation can
land halfway and no reader can see free capacity beside a ticket that fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, Protocol

WAITING: Final = 0
HELD: Final = 1
DONE: Final = 2

# How long a key that has been seen counts as company of the others.
_COMPANY_SECONDS: Final = 60.0
# How fast the expected hold time of a key follows the last one.
_SMOOTHING: Final = 0.25
# Below these many keys a sweep of idle ones is not worth its while.
_FEW_KEYS: Final = 64
# Idle keys that are remembered because they have had more than the others.
_MAX_IDLE_KEYS: Final = 4096
# Of the longest wait, what a request may wait for where the newest goes first.
_STANDING_SHARE: Final = 0.2
# Size classes that each release examines for a ticket that may overtake the first.
MAX_OVERTAKERS: Final = 32
# And in all, with those of keys that have their share.
_MAX_HEADS: Final = 256

_SHORTEST_RETRY: Final = 1.0
_LONGEST_RETRY: Final = 60.0
# Multiples of the golden ratio spread more evenly than random numbers do, and
# a core without randomness can be replayed.
_GOLDEN_RATIO: Final = 0.6180339887498949


class Wakeable(Protocol):
    """The task behind a waiting ticket."""

    def wake(self) -> bool:
        """Let the task run; ``False`` if it was cancelled or its loop is closed."""


class Ticket:
    """One request's place in a queue.

    Attributes:
        priority: A higher one goes first, but for the fair order.
        state: `WAITING`, `HELD` or `DONE`.
        waiter: What to wake once it is granted; set before it is enqueued.
    """

    # Those of the fair order are set there; each would cost 2 % of an admission.
    __slots__ = (
        "bytes",
        "charged",
        "key",
        "overtaken_by",
        "priority",
        "slots",
        "state",
        "waiter",
    )
    slots: int
    bytes: int
    key: str | None
    priority: int
    state: int
    waiter: Wakeable
    charged: tuple[float, float, float]  # since when, its share, service charged
    overtaken_by: float  # sum of the shares of tickets that overtook it


class FifoQueue:
    """Slots and bytes, each with a capacity, and one queue: first in, first out.

    A higher priority goes before every lower one. The head blocks the tickets behind
    it, even smaller ones, and those of lower priority: this is what keeps a large
    request from waiting for ever beside a stream of small ones.

    The two resources are written out: a loop over any number of them costs half
    as much again for each admission. ``math.inf`` is unbounded and 0 is paused.
    """

    def __init__(self, slots: float, nbytes: float) -> None:
        self.slots, self.nbytes = slots, nbytes
        self.slots_in_use = self.bytes_in_use = 0
        self.waiting = self.admitted = self.released = self.withdrawn = 0
        # A mark for each ticket that waits, or was granted while its task has not
        # run since: a later request that fits would overtake it here. The task
        # removes its mark without the gate's lock, hence no plain number.
        self.ahead: deque[None] = deque()
        # Highest priority first. Ordered dicts are linked lists with an index:
        # leaving costs the same everywhere, and leaves nothing behind.
        self._by_priority: dict[int, OrderedDict[Ticket, float]] = {}

    def fits(self, ticket: Ticket) -> bool:
        """Whether *ticket* could be charged now; what costs nothing always fits."""
        slots, nbytes = ticket.slots, ticket.bytes
        return not (
            (slots and self.slots_in_use + slots > self.slots)
            or (nbytes and self.bytes_in_use + nbytes > self.nbytes)
        )

    def must_wait(self, ticket: Ticket) -> bool:
        """Whether *ticket* does not fit, or another is to be granted before it."""
        return bool(self.waiting) or not self.fits(ticket)

    def make_room(self, ticket: Ticket) -> bool:  # noqa: ARG002 - a hook
        """Return whether the full queue has a place for *ticket* after all."""
        return False

    def seconds_to_recheck(self, ticket: Ticket) -> float:  # noqa: ARG002 - a hook
        """Return after how long *ticket* may fit though nothing was released."""
        return math.inf

    def too_large(self, ticket: Ticket) -> bool:
        """Whether *ticket* can never fit. A paused resource refuses no request."""
        return 0 < self.slots < ticket.slots or 0 < self.nbytes < ticket.bytes

    def admit(self, ticket: Ticket, ahead: object) -> bool:
        """Charge *ticket* if it fits and none is *ahead*: check and charge are one."""
        slots, nbytes = ticket.slots, ticket.bytes
        # `fits` and `charge`, written out: every admission comes through here.
        if (
            ahead
            or (slots and self.slots_in_use + slots > self.slots)
            or (nbytes and self.bytes_in_use + nbytes > self.nbytes)
        ):
            return False
        ticket.state = HELD
        self.slots_in_use += slots
        self.bytes_in_use += nbytes
        self.admitted += 1
        return True

    def charge(self, ticket: Ticket) -> None:
        """Let *ticket* hold what it costs, whether it fits or not."""
        ticket.state = HELD
        self.slots_in_use += ticket.slots
        self.bytes_in_use += ticket.bytes
        self.admitted += 1

    def release(self, ticket: Ticket) -> bool:
        """Take back what *ticket* holds; ``False`` if it holds nothing."""
        if ticket.state != HELD:
            return False
        ticket.state = DONE
        self.slots_in_use -= ticket.slots
        self.bytes_in_use -= ticket.bytes
        self.released += 1
        if self.waiting:
            self.grant()
        return True

    def enqueue(self, ticket: Ticket) -> None:
        """Let *ticket* wait, and grant it if it is next and fits already."""
        self.insert(ticket)
        ticket.state = WAITING
        self.waiting += 1
        self.ahead.append(None)
        self.grant()

    def withdraw(self, ticket: Ticket) -> None:
        """Remove *ticket* if it waits: its request was cancelled or timed out."""
        if ticket.state == WAITING:
            self.withdrawn += 1
            self.discard([ticket])

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """Remove waiting *tickets*."""
        for ticket in tickets:
            self.remove(ticket)
            self.waiting -= 1
            ticket.state = DONE
        # One of them may have been a large head that blocked smaller tickets.
        self.grant()

    def settle(self, ticket: Ticket, nbytes: int) -> None:
        """Change what a held *ticket* costs.

        Growing never fails. It may take the bytes over their capacity, and then
        nothing that needs bytes is granted until they are back below.
        """
        self.bytes_in_use += nbytes - ticket.bytes
        ticket.bytes = nbytes
        self.grant()

    def grant(self) -> None:
        """Grant every ticket that is next and fits."""
        while self.waiting and (ticket := self.take_next()) is not None:
            self.waiting -= 1
            # Before the wake-up: in another thread the task may run at once.
            ticket.state = HELD
            if ticket.waiter.wake():
                self.charge(ticket)
            else:  # its task is being cancelled
                ticket.state = DONE
                self.withdrawn += 1

    # The order, which other queues replace.

    def tickets(self) -> list[Ticket]:
        """Return the waiting tickets, in no promised order."""
        return [ticket for queue in self._by_priority.values() for ticket in queue]

    def insert(self, ticket: Ticket) -> None:
        """Put *ticket* in its place, or raise before anything is changed."""
        priority = ticket.priority
        if priority not in self._by_priority:
            # One that cannot be sorted would stop all the others.
            # Empty queues are dropped here, or one of each priority would be kept.
            queues = {each: queue for each, queue in self._by_priority.items() if queue}
            queues[priority] = OrderedDict()
            self._by_priority = {
                each: queues[each] for each in sorted(queues, reverse=True)
            }
        self._by_priority[ticket.priority][ticket] = 0.0

    def remove(self, ticket: Ticket) -> None:
        """Take *ticket* out, wherever it is."""
        del self._by_priority[ticket.priority][ticket]

    def take_next(self) -> Ticket | None:
        """Take out the ticket to be granted now, if there is one."""
        for queue in self._by_priority.values():
            for head in queue:
                if self.fits(head):
                    del queue[head]
                    return head
                return None
        return None


class AdaptiveQueue(FifoQueue):
    """First in, first out; the newest first where the queue does not get empty.

    Adaptive LIFO with controlled delay (Maurer, "Fail at Scale", ACM Queue 2015). Under
    lasting overload all requests of a first-in queue are served late, as most clients
    are about to give up. Here most are served soon, and the others are refused early.

    Args:
        longest: Seconds without an empty queue until the newest goes first.
        most: Length of the queue: then a newcomer takes the place of the oldest.
        refuse: Discards tickets that have waited for too long since.
    """

    def __init__(
        self,
        slots: float,
        nbytes: float,
        clock: Callable[[], float],
        longest: float,
        most: float,
        refuse: Callable[[list[Ticket]], object],
    ) -> None:
        super().__init__(slots, nbytes)
        self._clock, self._longest, self._most = clock, longest, most
        self._refuse = refuse
        # To wait, the first since the queue was empty or the gate paused.
        self._began = 0.0
        self._stands = self._paused = False
        self._late = -math.inf  # who has waited since before is refused

    def make_room(self, ticket: Ticket) -> bool:
        self.grant()
        if self._stands and self.waiting >= self._most:
            self._drop(self._oldest(ticket.priority))
        return self.waiting < self._most

    def insert(self, ticket: Ticket) -> None:
        now = self._clock()
        super().insert(ticket)
        self._by_priority[ticket.priority][ticket] = now
        # A queue that only refusals have emptied goes on to stand, for a while.
        if not self.waiting and not (self._stands and now - self._late < self._longest):
            self._began = now

    def grant(self) -> None:
        if not self.waiting:
            self._stands = False
            return
        now, paused = self._clock(), not (self.slots and self.nbytes)
        if paused or self._paused:  # which is no overload
            self._began = now
        self._paused = paused
        self._stands = now - self._began > self._longest
        self._late = now - self._longest * _STANDING_SHARE
        super().grant()  # first, so that no refusal leaves a place empty
        self._stands &= self.waiting > 0
        if self._stands:
            self._drop(self._stale())

    def _drop(self, tickets: list[Ticket]) -> None:
        if tickets:
            self._refuse(tickets)
            self._stands = True  # though none may be left to wait

    def _oldest(self, priority: int) -> list[Ticket]:
        """Return the first ticket of the lowest priority, up to *priority*."""
        queues = self._by_priority.items()
        low = [queue for each, queue in queues if each <= priority and queue]
        return [next(iter(low[-1]))] if low else []

    def _stale(self) -> list[Ticket]:
        late = self._late
        return [
            ticket
            for queue in self._by_priority.values()
            for ticket, _ in takewhile(lambda each: each[1] < late, queue.items())
        ]

    def take_next(self) -> Ticket | None:
        if not self._stands:
            return super().take_next()
        for queue in self._by_priority.values():
            for newest in reversed(queue):
                if self.fits(newest):
                    del queue[newest]
                    return newest
                if queue[newest] >= self._late:  # else its refusal is due
                    return None
        return None


class Company:
    """Whether a key is alone, or another one has been seen within the last minute.

    Of all keys, only the two that were seen last are remembered.
    """

    __slots__ = ("_last", "_other")

    def __init__(self) -> None:
        self._last: tuple[str | None, float] = (None, -math.inf)
        self._other = -math.inf

    def see(self, key: str | None, now: float) -> None:
        """Note that *key* gives something back *now*."""
        last, at = self._last
        if key != last:
            self._other = at
        self._last = key, now

    def of(self, key: str | None, now: float) -> bool:
        """Whether a key other than *key* has been seen."""
        return self.seconds_left(key, now) > 0

    def seconds_left(self, key: str | None, now: float) -> float:
        """Return after how long *key* is alone, unless another is seen; at least 0."""
        last, at = self._last
        seen_s = now - (self._other if key == last else at)
        return max(0.0, _COMPANY_SECONDS - seen_s)


@dataclass(slots=True, eq=False, repr=False)
class SizeClass:
    """Waiting tickets of one key and about one size, first in, first out."""

    served: float
    queue: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    rank: tuple[Any, ...] = ()  # among the size classes with waiting tickets


@dataclass(slots=True, repr=False)
class Flow:
    """One key: the service it has had, and its waiting tickets by size class."""

    served: float
    hold_s: float
    clock: float = 0.0
    live: int = 0  # tickets that wait or are held
    slots: int = 0  # held, as the bytes
    bytes: int = 0
    classes: dict[int, SizeClass] = field(default_factory=dict)

    def size_class(self, ticket: Ticket) -> SizeClass:
        """Return the class of *ticket*: sizes within a factor of four count as one."""
        number = (ticket.bytes.bit_length() + 1) // 2
        found = self.classes.get(number)
        if found is None:
            found = self.classes[number] = SizeClass(self.clock)
        return found


class FairQueue(FifoQueue):
    """Keys share the capacity evenly, by the share-seconds that they hold of it.

    Start-time fair queueing over keys (Goyal, Vin, Cheng 1996), on the dominant
    share of a ticket: the larger of its shares of slots and of bytes (Ghodsi et al.
    2011), times the seconds that it is held. Within a key, size classes take turns
    in the same way, so that small requests need not wait behind the large ones of
    the same key.

    The next key is the one that has had the least. While its ticket does not fit,
    others may overtake it until they have been granted, together, as much as it
    asks for itself; those that are expected to be held for longer count for more.
    From then on the capacity is kept free for it.

    While a key has company, it takes no more than the capacity without the *reserve*,
    so that the others need not wait until something of it is released. A key that
    holds nothing may take all, and a ticket that is too large beside what its key holds
    is overtaken by those of its key as if it did not fit: none waits for ever.
    """

    def __init__(
        self,
        slots: float,
        nbytes: float,
        clock: Callable[[], float],
        reserve: float = 0.0,
    ) -> None:
        super().__init__(slots, nbytes)
        self._clock = clock
        self._share_of_one = 1.0 - reserve
        self._company = Company()
        self._present = 0  # keys that wait or hold something
        self._flows: dict[str | None, Flow] = {}
        # The classes with waiting tickets, sorted: a move is a search and a copy.
        self._order: list[tuple[float, float, int, SizeClass]] = []
        self._serial = 0
        self._hold_s = 1.0
        # What the last key to be granted had had by then: where new and returning
        # keys start, so that none saves up service while idle.
        self._virtual_time = 0.0
        self._sweep_at = _FEW_KEYS

    def admit(self, ticket: Ticket, ahead: object) -> bool:
        if ahead or not self.fits(ticket):
            return False
        self.charge(ticket)
        return True

    def fits(self, ticket: Ticket) -> bool:
        return super().fits(ticket) and self._leaves_reserve(ticket)

    def _leaves_reserve(self, ticket: Ticket) -> bool:
        """Whether the key of *ticket*, with it, leaves the reserve to the others."""
        most, flow = self._share_of_one, self._flows.get(ticket.key)
        if most == 1.0 or flow is None or not (flow.slots or flow.bytes):
            return True
        # Of few slots, no part is reserved: there are no halves of one.
        slots = ticket.slots and flow.slots + ticket.slots >= most * self.slots + 1
        nbytes = ticket.bytes and flow.bytes + ticket.bytes > most * self.nbytes
        if not slots and not nbytes:
            return True
        others = self._present > bool(flow.live)
        return not (others or self._company.of(ticket.key, self._clock()))

    def must_wait(self, ticket: Ticket) -> bool:
        if not self.fits(ticket) or len(self._order) > _MAX_HEADS:
            return True
        over = set()
        for *_, each in self._order:
            head = next(iter(each.queue))
            if not self._leaves_reserve(head):
                over.add(head.key)
            elif head.key not in over:
                return True
        return ticket.key in over

    def seconds_to_recheck(self, ticket: Ticket) -> float:
        """Return after how long the company of *ticket* may have left."""
        if self._share_of_one == 1.0:
            return math.inf
        left = self._company.seconds_left(ticket.key, self._clock())
        return max(left, _SHORTEST_RETRY) if left else _COMPANY_SECONDS

    def charge(self, ticket: Ticket) -> None:
        # These may raise, the last one of an int beyond all floats: hence first.
        since, flow, share = self._clock(), self.flow(ticket), self._share(ticket)
        super().charge(ticket)
        flow.slots += ticket.slots
        flow.bytes += ticket.bytes
        service = share * flow.hold_s
        self._virtual_time = max(self._virtual_time, flow.served)
        flow.served += service
        self._count(flow, 1)
        size_class = flow.size_class(ticket)
        flow.clock = max(flow.clock, size_class.served)
        size_class.served += service
        self._move(flow)
        ticket.charged = since, share, service

    def release(self, ticket: Ticket) -> bool:
        # Before the next is chosen: what was held for longer counts for more.
        if ticket.state == HELD:
            since, share, service = ticket.charged
            now = self._clock()
            held_s = now - since
            if self._share_of_one < 1.0:
                self._company.see(ticket.key, now)
            flow = self._flows[ticket.key]
            self._count(flow, -1)
            flow.slots -= ticket.slots
            flow.bytes -= ticket.bytes
            flow.served += share * held_s - service
            self._move(flow)
            flow.hold_s += _SMOOTHING * (held_s - flow.hold_s)
            self._hold_s += _SMOOTHING * (held_s - self._hold_s)
        return super().release(ticket)

    def settle(self, ticket: Ticket, nbytes: int) -> None:
        self._flows[ticket.key].bytes += nbytes - ticket.bytes
        super().settle(ticket, nbytes)

    def tickets(self) -> list[Ticket]:
        return [ticket for *_, each in self._order for ticket in each.queue]

    def insert(self, ticket: Ticket) -> None:
        self._share(ticket)  # may raise, hence first
        flow = self.flow(ticket)
        size_class = flow.size_class(ticket)
        if not size_class.queue:
            size_class.served = max(size_class.served, flow.clock)
            self._serial += 1
            size_class.rank = flow.served, size_class.served, self._serial, size_class
            insort(self._order, size_class.rank)
        size_class.queue[ticket] = None
        ticket.overtaken_by = 0.0
        self._count(flow, 1)

    def remove(self, ticket: Ticket) -> None:
        flow = self._flows[ticket.key]
        size_class = flow.size_class(ticket)
        del size_class.queue[ticket]
        if not size_class.queue:
            self._take_out(size_class)
        self._count(flow, -1)

    def _count(self, flow: Flow, more: int) -> None:
        before, flow.live = flow.live, flow.live + more
        self._present += bool(flow.live) - bool(before)

    def _move(self, flow: Flow) -> None:
        """Sort the classes of *flow* in anew: it has had more or less service."""
        for size_class in flow.classes.values():
            if size_class.rank:
                serial = size_class.rank[2]
                self._take_out(size_class)
                size_class.rank = flow.served, size_class.served, serial, size_class
                insort(self._order, size_class.rank)

    def _take_out(self, size_class: SizeClass) -> None:
        del self._order[bisect_left(self._order, size_class.rank)]
        size_class.rank = ()

    def take_next(self) -> Ticket | None:
        first, examined = None, 0
        over: dict[str | None, Ticket] = {}  # the first of each key that has its share
        for *_, each in self._order[:_MAX_HEADS]:
            head = next(iter(each.queue))
            # One that has its share keeps none of the other keys waiting.
            if not self._leaves_reserve(head):
                over.setdefault(head.key, head)
                continue
            own = over.get(head.key)
            if self.fits(head) and self.may_overtake(head, first, own):
                self.remove(head)
                return head
            if own is None:
                first = first or head
            if (examined := examined + 1) == MAX_OVERTAKERS:
                break
        return None

    def may_overtake(self, ticket: Ticket, *those: Ticket | None) -> bool:
        """Whether *ticket* may go before *those*, which cannot go yet. Counts it."""
        overtaken_by = {}
        for first in filter(None, those):
            held_s, first_s = (self._flows[it.key].hold_s for it in (ticket, first))
            # A ticket that is held for longer keeps the first one waiting for longer.
            longer = max(held_s / first_s, 1.0) if first_s else 1.0
            total = first.overtaken_by + self._share(ticket) * longer
            if total > self._share(first):
                return False
            overtaken_by[first] = total
        for first, total in overtaken_by.items():
            first.overtaken_by = total
        return True

    def _share(self, ticket: Ticket) -> float:
        return max(ticket.slots / (self.slots or 1), ticket.bytes / (self.nbytes or 1))

    def flow(self, ticket: Ticket) -> Flow:
        """Return the flow of the ticket's key."""
        flow = self._flows.get(ticket.key)
        if flow is None:
            if len(self._flows) >= self._sweep_at:
                self._forget_idle()
                self._sweep_at = max(_FEW_KEYS, 2 * len(self._flows))
            flow = Flow(self._virtual_time, self._hold_s)
            self._flows[ticket.key] = flow
        elif not flow.live:
            flow.served = max(flow.served, self._virtual_time)
        return flow

    def _forget_idle(self) -> None:
        """Forget keys that would start anew anyway, and the oldest beyond a bound."""
        idle = [key for key, flow in self._flows.items() if not flow.live]
        surplus = len(idle) - _MAX_IDLE_KEYS
        for i, key in enumerate(idle):
            if i < surplus or self._flows[key].served <= self._virtual_time:
                del self._flows[key]


class DrainRate:
    """Estimates how fast leases are released, and when a refused request may retry.

    Sampled only where a request is refused, so admissions that go straight
    through pay nothing for it.
    """

    def __init__(self) -> None:
        self._refused = self._released = 0
        self._since: float | None = None
        self._interval: float | None = None

    def retry_after(self, ahead: int, released: int, now: float) -> float:
        """Return the seconds until *ahead* leases are released, jittered, 1 to 60.

        The jitter is a factor of 0.5 to 1.5, so that clients refused together do
        not come back together.

        Args:
            ahead: Requests in the queue, this one included.
            released: Leases released so far.
            now: Seconds, by any clock that never goes backwards.
        """
        self._refused += 1
        # The bounds leave room for the jitter: clipped afterwards, clients refused
        # together would come back together at the bound.
        expected = ahead * self.seconds_per_release(released, now)
        expected = min(max(expected, 2 * _SHORTEST_RETRY), _LONGEST_RETRY / 1.5)
        return expected * (0.5 + self._refused * _GOLDEN_RATIO % 1.0)

    def seconds_per_release(self, released: int, now: float) -> float:
        """Return the seconds from one release to the next, as far as known."""
        if self._since is None:
            self.restart(released, now)
            return 0.0
        window, departures = now - self._since, released - self._released
        # Where nothing was released, the wait so far is the best guess there is:
        # short at first, and longer the longer the gate is stuck.
        interval = window / max(departures, 1)
        if self._interval is not None:
            # Weighted by time: a burst of refusals within a millisecond must not
            # drown a minute of evidence.
            weight = window / (window + _SHORTEST_RETRY)
            interval = self._interval + weight * (interval - self._interval)
        if departures and window >= _SHORTEST_RETRY:
            self._interval = interval
            self._released, self._since = released, now
        return interval

    def restart(self, released: int, now: float) -> None:
        """Begin a new window: an idle time says nothing about how fast a queue drains.

        Estimates of earlier windows are kept.
        """
        self._released, self._since = released, now
