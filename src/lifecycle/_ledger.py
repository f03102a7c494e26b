"""The gate's books: what is in use, and who waits for it in line.

Nothing here awaits, locks, logs or reads a clock. Each method takes the books
from one valid state to the next before it returns, so no cancellation can land
halfway and no reader can see a free place beside a waiter that fits.
"""

# ruff: noqa: SLF001 - a lease is its own node in the line

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._lease import Lease

WAITING: Final = 0
HELD: Final = 1
DONE: Final = 2


class Ledger:
    """Slots and bytes, each with a limit, and one line: first in, first out.

    A higher priority goes before every lower one. The head blocks those behind
    it, even smaller ones, and those of lower priority: this is what keeps a large
    request from waiting for ever beside a stream of small ones.

    The two resources are written out: a loop over any number of them costs half
    as much again for each admission. ``math.inf`` is unbounded and 0 is paused.
    """

    def __init__(self, slots: float, nbytes: float) -> None:
        self.slots, self.nbytes = slots, nbytes
        self.slots_in_use = self.bytes_in_use = 0
        self.waiting = self.admitted = self.released = self.withdrawn = 0
        # A mark for each lease in line, or granted there while its task does not
        # run again yet: a newcomer that went straight in would overtake it. The
        # task takes its mark away on its own, hence no plain number.
        self.ahead: deque[None] = deque()
        # Highest priority first. A lane is a linked list with an index: leaving
        # costs the same wherever one stands, and leaves nothing behind.
        self._lanes: dict[int, OrderedDict[Lease, None]] = {}

    def fits(self, lease: Lease) -> bool:
        """Whether *lease* could be charged now; what costs nothing always fits."""
        slots, nbytes = lease.slots, lease.bytes
        return not (
            (slots and self.slots_in_use + slots > self.slots)
            or (nbytes and self.bytes_in_use + nbytes > self.nbytes)
        )

    def too_large(self, lease: Lease) -> bool:
        """Whether *lease* can never fit. A paused resource refuses nobody."""
        return 0 < self.slots < lease.slots or 0 < self.nbytes < lease.bytes

    def admit(self, lease: Lease, ahead: object) -> bool:
        """Charge *lease* if it fits and nobody is *ahead*: check and charge are one."""
        slots, nbytes = lease.slots, lease.bytes
        # `fits` and `charge`, written out: every admission comes through here.
        if (
            ahead
            or (slots and self.slots_in_use + slots > self.slots)
            or (nbytes and self.bytes_in_use + nbytes > self.nbytes)
        ):
            return False
        lease._state = HELD
        self.slots_in_use += slots
        self.bytes_in_use += nbytes
        self.admitted += 1
        return True

    def charge(self, lease: Lease) -> None:
        """Let *lease* hold what it costs, whether it fits or not."""
        lease._state = HELD
        self.slots_in_use += lease.slots
        self.bytes_in_use += lease.bytes
        self.admitted += 1

    def release(self, lease: Lease) -> bool:
        """Take back what *lease* holds; ``False`` if it holds nothing."""
        if lease._state != HELD:
            return False
        lease._state = DONE
        self.slots_in_use -= lease.slots
        self.bytes_in_use -= lease.bytes
        self.released += 1
        if self.waiting:
            self.pump()
        return True

    def enqueue(self, lease: Lease) -> None:
        """Put *lease* in line, and grant it if its turn has come already."""
        self.push(lease)
        lease._state = WAITING
        self.waiting += 1
        self.ahead.append(None)
        self.pump()

    def withdraw(self, lease: Lease) -> None:
        """Let *lease* go out of the line, if it is there."""
        if lease._state == WAITING:
            self.withdrawn += 1
            self.expel([lease])

    def expel(self, leases: Iterable[Lease]) -> None:
        """Take waiting *leases* out of the line."""
        for lease in leases:
            self.drop(lease)
            self.waiting -= 1
            lease._state = DONE
        # A large head may have left that kept smaller ones out.
        self.pump()

    def adjust(self, lease: Lease, nbytes: int) -> None:
        """Change what a held *lease* costs.

        Growing never fails. It may take the bytes over their limit, and then
        nothing that needs bytes is granted until they are back below.
        """
        self.bytes_in_use += nbytes - lease.bytes
        lease.bytes = nbytes
        self.pump()

    def pump(self) -> None:
        """Grant whoever's turn has come."""
        while self.waiting and (lease := self.turn()) is not None:
            self.waiting -= 1
            # Before the wake-up: in another thread the task may run at once.
            lease._state = HELD
            if lease._waiter.wake():
                self.charge(lease)
            else:  # it is on its way out already
                lease._state = DONE
                self.withdrawn += 1

    # The order, which `Fair` replaces.

    def line(self) -> list[Lease]:
        """Those who wait, in no promised order."""
        return [lease for lane in self._lanes.values() for lease in lane]

    def push(self, lease: Lease) -> None:
        """Put *lease* in line, or raise before anything is changed."""
        priority: object = lease._priority
        if priority not in self._lanes:
            # One that cannot be sorted would stop all the others.
            if not isinstance(priority, int):
                what = type(priority).__name__
                raise ValueError(f"priority must be a whole number, not {what}")
            # Where nobody stands any more it ends, or each priority would be kept.
            lanes = {each: lane for each, lane in self._lanes.items() if lane}
            lanes[lease._priority] = OrderedDict()
            self._lanes = {each: lanes[each] for each in sorted(lanes, reverse=True)}
        self._lanes[lease._priority][lease] = None

    def drop(self, lease: Lease) -> None:
        """Take *lease* out, wherever it stands."""
        del self._lanes[lease._priority][lease]

    def turn(self) -> Lease | None:
        """Take out whoever is to be granted now, if anybody is."""
        for lane in self._lanes.values():
            for head in lane:
                if self.fits(head):
                    del lane[head]
                    return head
                return None
        return None
