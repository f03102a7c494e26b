"""The gate's books: what is in use, and who waits for it in line.

Nothing here awaits, locks, logs or reads a clock. Each method takes the books
from one valid state to the next before it returns, so no cancellation can land
halfway and no reader can see a free place beside a waiter that fits.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence
from typing import Final

# What one request costs: slots and bytes.
Cost = tuple[int, int]

WAITING: Final = 0
HELD: Final = 1
DONE: Final = 2

# Below this many finished waiters in line a sweep costs more than it saves.
_SWEEP_AT: Final = 64


class Ticket:
    """One request in the books: its cost and how far it got.

    The ticket is its own node in the line, so nothing is ever looked up by a
    key that two requests might share.

    Attributes:
        cost: Slots and bytes.
        state: ``WAITING``, ``HELD`` or ``DONE``.
        queued: Whether it is in line, or was granted there and does not run again
            yet. Set by `Ledger.enqueue`.
    """

    __slots__ = ("cost", "queued", "state")

    queued: bool

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.state = DONE

    def granted(self) -> bool:
        """Wake the waiter in the step that grants.

        Returns:
            ``False`` if the waiter is on its way out already and must be
            passed over.
        """
        return True


def whole(name: str, amount: object) -> int:
    """Return *amount* if it is a whole number of 0 or more.

    Raises:
        ValueError: It is not. Fractions and NaN are refused because books that
            add them up do not return to zero.
    """
    if type(amount) is not int:
        try:
            amount = operator.index(amount)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                f"{name} must be a whole number, not {type(amount).__name__}"
            ) from None
    if amount < 0:
        raise ValueError(f"{name} must be 0 or more, not {amount}")
    return amount


def limit(name: str, amount: object) -> float:
    """Return *amount* as a limit: a whole number, or infinity for ``None``.

    Raises:
        ValueError: As from `whole`.
    """
    return math.inf if amount is None else whole(name, amount)


def cost_of(slots: object, nbytes: object) -> Cost:
    """Return what a request costs.

    Raises:
        ValueError: As from `whole`, or the request costs nothing at all, which
            is more often a forgotten argument than a wish.
    """
    if type(slots) is int and type(nbytes) is int and slots > 0 <= nbytes:
        return slots, nbytes  # nearly always
    cost = whole("slots", slots), whole("bytes", nbytes)
    if cost == (0, 0):
        raise ValueError("a request must cost at least one slot or one byte")
    return cost


class Ledger:
    """Slots and bytes, each with a capacity, and one FIFO line.

    The head of the line blocks those behind it, even smaller ones: this is what
    keeps a large request from waiting for ever beside a stream of small ones.

    The two resources are written out. A loop over any number of them costs half
    as much again for each admission.

    Args:
        capacity: Slots and bytes; ``math.inf`` is unbounded and 0 is paused.

    Attributes:
        capacity: As given.
        in_use: Slots and bytes that live tickets hold.
        waiting: Tickets in line.
        unresumed: Tickets in line, or granted there and not running again yet.
            A newcomer that went straight in now would overtake those.
        granted: Tickets ever granted.
        released: Tickets ever given back.
        withdrawn: Tickets that ever left the line ungranted of their own accord.
    """

    __slots__ = (
        "_dead",
        "_line",
        "capacity",
        "granted",
        "in_use",
        "released",
        "unresumed",
        "waiting",
        "withdrawn",
    )

    def __init__(self, capacity: Sequence[float]) -> None:
        self.capacity = list(capacity)
        self.in_use = [0, 0]
        self.waiting = 0
        self.granted = 0
        self.released = 0
        self.withdrawn = 0
        self._line: deque[Ticket] = deque()
        self._dead = 0
        self.unresumed = 0

    def fits(self, cost: Cost) -> bool:
        """Whether *cost* could be charged now; what costs nothing always fits."""
        slots, nbytes = cost
        in_use, capacity = self.in_use, self.capacity
        return not (
            (slots and in_use[0] + slots > capacity[0])
            or (nbytes and in_use[1] + nbytes > capacity[1])
        )

    def too_large(self, cost: Cost) -> bool:
        """Whether *cost* can never fit. A paused resource refuses nobody."""
        slots, nbytes = self.capacity
        return 0 < slots < cost[0] or 0 < nbytes < cost[1]

    def try_charge(self, ticket: Ticket) -> bool:
        """Charge *ticket* at once if it fits and nobody waits before it."""
        # `fits` and `_charge`, written out: every admission comes through here.
        slots, nbytes = ticket.cost
        in_use, capacity = self.in_use, self.capacity
        if (
            self.waiting
            or (slots and in_use[0] + slots > capacity[0])
            or (nbytes and in_use[1] + nbytes > capacity[1])
        ):
            return False
        in_use[0] += slots
        in_use[1] += nbytes
        self.granted += 1
        ticket.state = HELD
        return True

    def enqueue(self, ticket: Ticket) -> None:
        """Put *ticket* at the end of the line, and grant it if it fits already."""
        ticket.state = WAITING
        ticket.queued = True
        self._line.append(ticket)
        self.waiting += 1
        self.unresumed += 1
        self._pump()

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
        self.released += 1
        slots, nbytes = ticket.cost
        in_use = self.in_use
        in_use[0] -= slots
        in_use[1] -= nbytes
        if self._line:
            self._pump()
        return True

    def withdraw(self, ticket: Ticket) -> bool:
        """Take *ticket* out of the line; ``False`` if it was not waiting.

        The node stays behind as a tombstone, so a storm of cancellations costs
        the same for each however long the line is.
        """
        if ticket.state != WAITING:
            return False
        ticket.state = DONE
        self.waiting -= 1
        self.withdrawn += 1
        self._dead += 1
        if self._dead > _SWEEP_AT and self._dead > self.waiting:
            self._line = deque(t for t in self._line if t.state == WAITING)
            self._dead = 0
        # A large head may have left that kept smaller ones out.
        self._pump()
        return True

    def adjust(self, ticket: Ticket, cost: Cost) -> bool:
        """Change what a held *ticket* costs; ``False`` if it is not held.

        Growing never fails. It may take a resource over its capacity, and then
        nothing that needs this resource is granted until it is back below.
        """
        if ticket.state != HELD:
            return False
        self.in_use[0] += cost[0] - ticket.cost[0]
        self.in_use[1] += cost[1] - ticket.cost[1]
        ticket.cost = cost
        self._pump()
        return True

    def resize(self, capacity: Sequence[float]) -> list[Ticket]:
        """Set new limits; return the waiters that can never fit them."""
        self.capacity = list(capacity)
        misfits = [
            t for t in self._line if t.state == WAITING and self.too_large(t.cost)
        ]
        self._drop(misfits)
        self._pump()
        return misfits

    def clear_line(self) -> list[Ticket]:
        """Send everybody in line away, and return them."""
        dropped = [t for t in self._line if t.state == WAITING]
        self._drop(dropped)
        return dropped

    def _drop(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.state = DONE
        self.waiting -= len(tickets)
        self._dead += len(tickets)

    def _charge(self, ticket: Ticket) -> None:
        slots, nbytes = ticket.cost
        in_use = self.in_use
        in_use[0] += slots
        in_use[1] += nbytes
        self.granted += 1
        ticket.state = HELD

    def _pump(self) -> None:
        line = self._line
        while line:
            head = line[0]
            if head.state != WAITING:
                line.popleft()
                self._dead -= 1
            elif not self.fits(head.cost):
                return
            else:
                line.popleft()
                self.waiting -= 1
                if head.granted():
                    self._charge(head)
                else:
                    head.state = DONE
                    self.withdrawn += 1
