"""The line in front of a gate: who is next."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from ._ticket import WAITING, Cost, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Below this many finished waiters in line a sweep costs more than it saves.
_SWEEP_AT: Final = 64


class Line(Protocol):
    """An order of waiting tickets.

    A ticket that leaves of its own accord stays behind as a tombstone, so that a
    storm of cancellations costs the same for each however long the line is.

    Attributes:
        counts: Whether the order depends on what is granted and released.
    """

    counts: ClassVar[bool]

    def push(self, ticket: Ticket) -> None:
        """Put *ticket* in line."""

    def pick(self, fits: Callable[[Cost], bool]) -> Ticket | None:
        """Take out whoever is to be granted now, if anybody is."""

    def bury(self, count: int) -> None:
        """Note that *count* tickets in line do not wait any more."""

    def granted(self, ticket: Ticket) -> None:
        """Note that *ticket* was granted, in line or straight away."""

    def released(self, ticket: Ticket) -> None:
        """Note that *ticket* gave back what it held."""

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets that wait, in no promised order."""


class Lanes:
    """First in, first out; a higher priority goes before every lower one.

    The head blocks those behind it, even smaller ones, and those of lower
    priority: this is what keeps a large request from waiting for ever beside a
    stream of small ones.
    """

    __slots__ = ("_dead", "_lanes", "_length", "_order")

    counts: ClassVar[bool] = False

    def __init__(self) -> None:
        self._lanes: dict[int, deque[Ticket]] = {}
        self._order: list[deque[Ticket]] = []
        self._length = self._dead = 0

    def push(self, ticket: Ticket) -> None:
        """See `Line.push`."""
        lane = self._lanes.get(ticket.priority)
        if lane is None:
            # Before it is a lane: one that cannot be sorted would stop them all.
            if not isinstance(ticket.priority, int):
                raise ValueError(
                    f"priority must be a whole number, not "
                    f"{type(ticket.priority).__name__}"
                )
            lane = self._lanes[ticket.priority] = deque()
            self._order = [self._lanes[p] for p in sorted(self._lanes, reverse=True)]
        lane.append(ticket)
        self._length += 1

    def pick(self, fits: Callable[[Cost], bool]) -> Ticket | None:
        """See `Line.pick`."""
        for lane in self._order:
            while lane:
                head = lane[0]
                if head.state == WAITING:
                    if not fits(head.cost):
                        return None
                    self._length -= 1
                    return lane.popleft()
                lane.popleft()
                self._length -= 1
                self._dead -= 1
        return None

    def bury(self, count: int) -> None:
        """See `Line.bury`."""
        self._dead += count
        if self._dead > _SWEEP_AT and 2 * self._dead > self._length:
            waiting = list(self)
            self._lanes, self._order = {}, []
            self._length = self._dead = 0
            for ticket in waiting:
                self.push(ticket)

    def granted(self, ticket: Ticket) -> None:
        """See `Line.granted`; the order does not depend on it."""

    def released(self, ticket: Ticket) -> None:
        """See `Line.released`; the order does not depend on it."""

    def __iter__(self) -> Iterator[Ticket]:
        return (t for lane in self._order for t in lane if t.state == WAITING)
