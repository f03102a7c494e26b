"""A fair order: nobody's share of the gate depends on how much they ask for.

Start-time fair queueing over keys (Goyal, Vin, Cheng 1996), on the dominant
share of a request: the larger of its shares of slots and of bytes (Ghodsi et al.
2011), times the seconds that it is held. Within a key, size classes take turns
in the same way, so that small requests need not stand behind the large ones of
the same key.
"""

# ruff: noqa: SLF001 - a lease is its own node in the line

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ._ledger import HELD, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._lease import Lease

# How fast the expected hold time of a key follows the last one.
_SMOOTHING: Final = 0.25
# Below these many keys a sweep of idle ones is not worth its while.
_FEW_KEYS: Final = 64
# Idle keys that are remembered because they have had more than the others.
_MOST_IDLE: Final = 4096
# Among so many lanes each release looks for who may overtake the first.
_MOST_PASSERS: Final = 32


@dataclass(slots=True, eq=False)
class _Lane:
    """Requests of one key and about one size, first in, first out."""

    served: float
    queue: OrderedDict[Lease, None] = field(default_factory=OrderedDict)
    place: tuple[Any, ...] = ()  # in the order of those where somebody waits


@dataclass(slots=True)
class _Flow:
    """One key: what it has had, and what it waits for by size class."""

    served: float
    hold_s: float
    clock: float = 0.0
    live: int = 0  # leases in line or held
    lanes: dict[int, _Lane] = field(default_factory=dict)

    def lane(self, lease: Lease) -> _Lane:
        # Sizes in bytes within a factor of four count as one.
        size_class = (lease.bytes.bit_length() + 1) // 2
        lane = self.lanes.get(size_class)
        if lane is None:
            lane = self.lanes[size_class] = _Lane(self.clock)
        return lane


class Fair(Ledger):
    """Keys share a gate evenly, by the share-seconds that they hold of it.

    The next to go is the key that has had the least. While its request does not
    fit, others may overtake it until they have been granted, together, as much
    as it asks for itself; those that are held for longer than it is expected to
    be count for more. From then on the gate is kept free for it.
    """

    def __init__(self, slots: float, nbytes: float, clock: Callable[[], float]) -> None:
        super().__init__(slots, nbytes)
        self.clock = clock
        self._flows: dict[str | None, _Flow] = {}
        # Where somebody waits, sorted: a move is a search and a copy of pointers.
        self._order: list[tuple[float, float, int, _Lane]] = []
        self._serial = 0
        self._hold_s = 1.0
        # What the last key to be granted had had by then: where newcomers and
        # those who come back start, so that nobody saves up while idle.
        self._now = 0.0
        self._sweep_at = _FEW_KEYS

    def admit(self, lease: Lease, ahead: object) -> bool:
        if ahead or not self.fits(lease):
            return False
        self.charge(lease)
        return True

    def charge(self, lease: Lease) -> None:
        # These may raise, the last one of an int beyond all floats: hence first.
        since, flow, share = self.clock(), self._flow(lease), self._share(lease)
        super().charge(lease)
        charged = share * flow.hold_s
        self._now = max(self._now, flow.served)
        flow.served += charged
        flow.live += 1
        lane = flow.lane(lease)
        flow.clock = max(flow.clock, lane.served)
        lane.served += charged
        self._move(flow)
        lease._account = since, share, charged

    def release(self, lease: Lease) -> bool:
        # Before the next is chosen: what was held for longer counts for more.
        if lease._state == HELD:
            since, share, charged = lease._account
            held_s = self.clock() - since
            flow = self._flows[lease._key]
            flow.live -= 1
            flow.served += share * held_s - charged
            self._move(flow)
            flow.hold_s += _SMOOTHING * (held_s - flow.hold_s)
            self._hold_s += _SMOOTHING * (held_s - self._hold_s)
        return super().release(lease)

    def line(self) -> list[Lease]:
        return [lease for *_, lane in self._order for lease in lane.queue]

    def push(self, lease: Lease) -> None:
        self._share(lease)  # may raise, hence first
        flow = self._flow(lease)
        lane = flow.lane(lease)
        if not lane.queue:
            lane.served = max(lane.served, flow.clock)
            self._serial += 1
            lane.place = flow.served, lane.served, self._serial, lane
            insort(self._order, lane.place)
        lane.queue[lease] = None
        lease._passed = 0.0
        flow.live += 1

    def drop(self, lease: Lease) -> None:
        flow = self._flows[lease._key]
        lane = flow.lane(lease)
        del lane.queue[lease]
        if not lane.queue:
            self._take_out(lane)
        flow.live -= 1

    def _move(self, flow: _Flow) -> None:
        """Put the lanes of *flow* where they belong: it has had more or less."""
        for lane in flow.lanes.values():
            if lane.place:
                serial = lane.place[2]
                self._take_out(lane)
                lane.place = flow.served, lane.served, serial, lane
                insort(self._order, lane.place)

    def _take_out(self, lane: _Lane) -> None:
        del self._order[bisect_left(self._order, lane.place)]
        lane.place = ()

    def turn(self) -> Lease | None:
        first = None
        for *_, lane in self._order[:_MOST_PASSERS]:
            head = next(iter(lane.queue))
            first = first or head
            if self.fits(head) and (head is first or self._may_pass(head, first)):
                self.drop(head)
                return head
        return None

    def _may_pass(self, lease: Lease, first: Lease) -> bool:
        held_s, first_s = (self._flows[each._key].hold_s for each in (lease, first))
        # Who is held for longer keeps it waiting for longer.
        longer = max(held_s / first_s, 1.0) if first_s else 1.0
        passed = first._passed + self._share(lease) * longer
        if passed > self._share(first):
            return False
        first._passed = passed
        return True

    def _share(self, lease: Lease) -> float:
        return max(lease.slots / (self.slots or 1), lease.bytes / (self.nbytes or 1))

    def _flow(self, lease: Lease) -> _Flow:
        flow = self._flows.get(lease._key)
        if flow is None:
            if len(self._flows) >= self._sweep_at:
                self._forget_idle()
                self._sweep_at = max(_FEW_KEYS, 2 * len(self._flows))
            flow = self._flows[lease._key] = _Flow(self._now, self._hold_s)
        elif not flow.live:
            flow.served = max(flow.served, self._now)
        return flow

    def _forget_idle(self) -> None:
        """Forget keys that would start anew anyway, and the oldest beyond a bound."""
        idle = [key for key, flow in self._flows.items() if not flow.live]
        surplus = len(idle) - _MOST_IDLE
        for i, key in enumerate(idle):
            if i < surplus or self._flows[key].served <= self._now:
                del self._flows[key]
