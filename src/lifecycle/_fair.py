"""A fair order: nobody's share of the gate depends on how much they ask for.

Start-time fair queueing over keys (Goyal, Vin, Cheng 1996), on the dominant
share of a request: the larger of its shares of slots and of bytes (Ghodsi et al.
2011), times the seconds that it is held. Within a key, size classes take turns
in the same way, so that small requests need not stand behind the large ones of
the same key.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final

from ._ticket import WAITING, Cost, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How fast the expected hold time of a key follows the last one.
_SMOOTHING: Final = 0.25
# Below these many, a sweep of idle keys or of tombstones is not worth its while.
_FEW_KEYS: Final = 64
_FEW_DEAD: Final = 64
# Idle keys that are remembered because they have had more than the others.
_MOST_IDLE: Final = 4096


def _size_class(ticket: Ticket) -> int:
    """Sizes in bytes within a factor of four count as one."""
    return (ticket.cost[1].bit_length() + 1) // 2


class _Lane:
    """Requests of one key and about one size, first in, first out."""

    __slots__ = ("queue", "served")

    def __init__(self, served: float) -> None:
        self.served = served
        self.queue: deque[Ticket] = deque()

    def head(self) -> Ticket | None:
        while self.queue and self.queue[0].state != WAITING:
            self.queue.popleft()
        return self.queue[0] if self.queue else None


class _Flow:
    """One key: what it has had, and what it waits for by size class."""

    __slots__ = ("clock", "hold_s", "lanes", "out", "served")

    def __init__(self, served: float, hold_s: float) -> None:
        self.served = served
        self.hold_s = hold_s
        self.clock = 0.0
        self.out = 0
        self.lanes: dict[int, _Lane] = {}

    def idle(self) -> bool:
        return not self.out and not any(lane.head() for lane in self.lanes.values())


class Fair:
    """Keys share a gate evenly, by the share-seconds that they hold of it.

    The next to go is the key that has had the least. While its request does not
    fit, others may overtake it until they have been granted, together, as much
    as it asks for itself; from then on the gate is kept free for it.

    Args:
        share: The part of the gate that a cost takes, 0 to 1.
        clock: Monotonic seconds.
    """

    __slots__ = (
        "_clock",
        "_dead",
        "_flows",
        "_hold_s",
        "_length",
        "_now",
        "_out",
        "_passed",
        "_share",
        "_stuck",
        "_sweep_at",
    )

    counts: ClassVar[bool] = True

    def __init__(
        self, share: Callable[[Cost], float], clock: Callable[[], float]
    ) -> None:
        self._share = share
        self._clock = clock
        self._flows: dict[str | None, _Flow] = {}
        self._hold_s = 1.0
        # What the last key to be granted had had by then: where newcomers and
        # those who come back start, so that nobody saves up while idle.
        self._now = 0.0
        # By identity, for a lost lease must stay collectable.
        self._out: dict[int, tuple[float, float, float]] = {}
        self._stuck: Ticket | None = None
        self._passed = 0.0
        self._length = self._dead = 0
        self._sweep_at = _FEW_KEYS

    def push(self, ticket: Ticket) -> None:
        """See `Line.push`."""
        flow = self._flow(ticket)
        size_class = _size_class(ticket)
        lane = flow.lanes.get(size_class)
        if lane is None:
            lane = flow.lanes[size_class] = _Lane(flow.clock)
        elif lane.head() is None:
            lane.served = max(lane.served, flow.clock)
        lane.queue.append(ticket)
        self._length += 1

    def pick(self, fits: Callable[[Cost], bool]) -> Ticket | None:
        """See `Line.pick`."""
        turns = sorted(
            (flow.served, lane.served, i, lane)
            for i, (flow, lane) in enumerate(self._lanes())
            if lane.head() is not None
        )
        for place, (_served, _lane_served, _i, lane) in enumerate(turns):
            head = lane.queue[0]
            if not place and head is not self._stuck:
                self._stuck, self._passed = head, 0.0
            if fits(head.cost):
                if place and not self._may_pass(head):
                    continue
                lane.queue.popleft()
                self._length -= 1
                return head
        return None

    def _may_pass(self, ticket: Ticket) -> bool:
        assert self._stuck is not None
        passed = self._passed + self._share(ticket.cost)
        if passed > self._share(self._stuck.cost):
            return False
        self._passed = passed
        return True

    def bury(self, count: int) -> None:
        """See `Line.bury`."""
        self._dead += count
        if self._dead > _FEW_DEAD and 2 * self._dead > self._length:
            self._dead = self._length = 0
            for _flow, lane in self._lanes():
                lane.queue = deque(t for t in lane.queue if t.state == WAITING)
                self._length += len(lane.queue)

    def granted(self, ticket: Ticket) -> None:
        """See `Line.granted`."""
        flow = self._flow(ticket)
        self._now = max(self._now, flow.served)
        share = self._share(ticket.cost)
        charged = share * flow.hold_s
        flow.served += charged
        flow.out += 1
        lane = flow.lanes.get(_size_class(ticket))
        if lane is not None:
            flow.clock = max(flow.clock, lane.served)
            lane.served += charged
        self._out[id(ticket)] = self._clock(), share, charged

    def released(self, ticket: Ticket) -> None:
        """See `Line.released`: what was held for longer counts for more."""
        since, share, charged = self._out.pop(id(ticket))
        held_s = self._clock() - since
        flow = self._flow(ticket)
        flow.out -= 1
        flow.served += share * held_s - charged
        flow.hold_s += _SMOOTHING * (held_s - flow.hold_s)
        self._hold_s += _SMOOTHING * (held_s - self._hold_s)

    def held_s(self, ticket: Ticket) -> float | None:
        """Return for how long *ticket* has been held; ``None`` if it is not."""
        entry = self._out.get(id(ticket))
        return None if entry is None else self._clock() - entry[0]

    def _flow(self, ticket: Ticket) -> _Flow:
        flow = self._flows.get(ticket.key)
        if flow is None:
            if len(self._flows) >= self._sweep_at:
                self._forget_idle()
                self._sweep_at = max(_FEW_KEYS, 2 * len(self._flows))
            flow = self._flows[ticket.key] = _Flow(self._now, self._hold_s)
        elif flow.idle():
            flow.served = max(flow.served, self._now)
        return flow

    def _forget_idle(self) -> None:
        """Forget keys that would start anew anyway, and the oldest beyond a bound."""
        idle = [key for key, flow in self._flows.items() if flow.idle()]
        surplus = len(idle) - _MOST_IDLE
        for i, key in enumerate(idle):
            if i < surplus or self._flows[key].served <= self._now:
                del self._flows[key]

    def _lanes(self) -> Iterator[tuple[_Flow, _Lane]]:
        for flow in self._flows.values():
            for lane in flow.lanes.values():
                yield flow, lane

    def __iter__(self) -> Iterator[Ticket]:
        return (
            t for _, lane in self._lanes() for t in lane.queue if t.state == WAITING
        )
