"""The gate's books: what is in use, and who waits for it in line.

Nothing here awaits, locks, logs or reads a clock. Each method takes the books
from one valid state to the next before it returns, so no cancellation can land
halfway and no reader can see a free place beside a waiter that fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._ticket import DONE, HELD, WAITING, Cost, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._line import Line


class Ledger:
    """Slots and bytes, each with a capacity, and one line.

    The two resources are written out. A loop over any number of them costs half
    as much again for each admission.

    Args:
        capacity: Slots and bytes; ``math.inf`` is unbounded and 0 is paused.
        line: Who is next.

    Attributes:
        slots: Slot capacity.
        nbytes: Byte capacity.
        slots_in_use: Slots that live tickets hold.
        bytes_in_use: Bytes that live tickets hold.
        waiting: Tickets in line.
        unresumed: Tickets in line, or granted there and not running again yet.
            A newcomer that went straight in now would overtake those.
        granted: Tickets ever granted.
        released: Tickets ever given back.
        withdrawn: Tickets that ever left the line ungranted of their own accord.
    """

    __slots__ = (
        "_account",
        "bytes_in_use",
        "granted",
        "line",
        "nbytes",
        "released",
        "slots",
        "slots_in_use",
        "unresumed",
        "waiting",
        "withdrawn",
    )

    def __init__(self, capacity: Sequence[float], line: Line) -> None:
        self.slots, self.nbytes = capacity
        self.slots_in_use = self.bytes_in_use = 0
        self.waiting = self.unresumed = 0
        self.granted = self.released = self.withdrawn = 0
        self.line = line
        self._account = line if line.counts else None

    def fits(self, cost: Cost) -> bool:
        """Whether *cost* could be charged now; what costs nothing always fits."""
        slots, nbytes = cost
        return not (
            (slots and self.slots_in_use + slots > self.slots)
            or (nbytes and self.bytes_in_use + nbytes > self.nbytes)
        )

    def too_large(self, cost: Cost) -> bool:
        """Whether *cost* can never fit. A paused resource refuses nobody."""
        slots, nbytes = cost
        return 0 < self.slots < slots or 0 < self.nbytes < nbytes

    def charge(self, ticket: Ticket) -> None:
        """Let *ticket* hold what it costs, whether it fits or not."""
        slots, nbytes = ticket.cost
        self.slots_in_use += slots
        self.bytes_in_use += nbytes
        self.granted += 1
        ticket.state = HELD
        if self._account is not None:
            self._account.granted(ticket)

    def enqueue(self, ticket: Ticket) -> None:
        """Put *ticket* in line, and grant it if its turn has come already."""
        ticket.state = WAITING
        ticket.queued = True
        self.line.push(ticket)
        self.waiting += 1
        self.unresumed += 1
        self.pump()

    def resume(self, ticket: Ticket) -> None:
        """Note that the waiter of *ticket* runs again, whatever it was told."""
        if ticket.queued:
            ticket.queued = False
            self.unresumed -= 1

    def release(self, ticket: Ticket) -> bool:
        """Give back what *ticket* holds; ``False`` if it holds nothing."""
        if ticket.state != HELD:
            return False
        ticket.state = DONE
        slots, nbytes = ticket.cost
        self.slots_in_use -= slots
        self.bytes_in_use -= nbytes
        self.released += 1
        if self._account is not None:
            self._account.released(ticket)
        if self.waiting:
            self.pump()
        return True

    def withdraw(self, ticket: Ticket) -> bool:
        """Take *ticket* out of the line; ``False`` if it was not waiting."""
        if ticket.state != WAITING:
            return False
        ticket.state = DONE
        self.waiting -= 1
        self.withdrawn += 1
        self.line.bury(1)
        # A large head may have left that kept smaller ones out.
        self.pump()
        return True

    def adjust(self, ticket: Ticket, cost: Cost) -> bool:
        """Change what a held *ticket* costs; ``False`` if it is not held.

        Growing never fails. It may take a resource over its capacity, and then
        nothing that needs this resource is granted until it is back below.
        """
        if ticket.state != HELD:
            return False
        self.slots_in_use += cost[0] - ticket.cost[0]
        self.bytes_in_use += cost[1] - ticket.cost[1]
        ticket.cost = cost
        self.pump()
        return True

    def resize(self, capacity: Sequence[float]) -> list[Ticket]:
        """Set new limits; return the waiters that can never fit them."""
        self.slots, self.nbytes = capacity
        misfits = self._send_away([t for t in self.line if self.too_large(t.cost)])
        self.pump()
        return misfits

    def clear_line(self) -> list[Ticket]:
        """Send everybody in line away, and return them."""
        return self._send_away(list(self.line))

    def pump(self) -> None:
        """Grant whoever's turn has come."""
        while self.waiting:
            ticket = self.line.pick(self.fits)
            if ticket is None:
                return
            self.waiting -= 1
            if ticket.granted():
                self.charge(ticket)
            else:
                ticket.state = DONE
                self.withdrawn += 1

    def _send_away(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            ticket.state = DONE
        self.waiting -= len(tickets)
        self.line.bury(len(tickets))
        return tickets
