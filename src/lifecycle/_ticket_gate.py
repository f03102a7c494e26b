"""Requests that no task of this process waits for, at an ordinary gate."""

from __future__ import annotations

from ._exceptions import Refused
from ._gate import Gate
from ._lock import FOR_EVER
from ._queues import HELD, Ticket, Wakeable


class TicketGate:
    """A gate for tickets: a callback says that a wait is over; there is no event loop.

    For requests that come from other processes. Nothing is claimed for a session, and a
    ticket that is dropped is no lost lease. Any thread may call anything here.

    Args:
        gate: The gate. Other requests may come to it as they always do.
    """

    # ruff: noqa: SLF001 - a part of `Gate`, apart for its length

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        # Those that have a mark in the queue's `ahead`, until their wait is over.
        self._marked: set[Ticket] = set()

    def submit(self, ticket: Ticket, waiter: Wakeable | None) -> bool:
        """Charge *ticket* now, or let it wait until `Wakeable.wake` is called.

        The callback comes in the middle of a change, from any thread, and at most once:
        it may note that, and must not use the gate. What it is about, `outcome` tells.

        Args:
            ticket: With its cost, key and priority.
            waiter: Of a request that may wait; ``None`` refuses what would have to.

        Returns:
            Whether it is held at once; if not, the *waiter* is or was woken.

        Raises:
            Refused: As from `Gate.admit`, or from `Gate.try_admit` without a *waiter*.
        """
        gate = self.gate
        if gate._lock.interrupted():
            raise gate._refuse_busy(ticket, "is interrupted by this very call")
        return gate._ask(FOR_EVER, self._submit, ticket, waiter)

    def _submit(self, ticket: Ticket, waiter: Wakeable | None) -> bool:
        gate, queue = self.gate, self.gate._queue
        ahead = queue.waiting if waiter is None else queue.ahead
        if not gate.closed and queue.admit(ticket, ahead):
            return True
        self._marked.add(ticket)  # first: another thread may be woken at once
        waits = False
        try:
            may_wait = waiter is not None
            waits = gate._enqueue(ticket, ticket.priority, may_wait, waiter)
        finally:
            if not waits:
                self._marked.remove(ticket)
        return not waits

    def outcome(self, ticket: Ticket) -> Refused | None:
        """Return why *ticket* was refused, or ``None``; once its waiter was woken."""
        self._unmark(ticket)
        return self.gate._refusals.pop(ticket, None)

    def charge(self, ticket: Ticket) -> None:
        """Let *ticket* hold what it costs, though it may not fit: it did elsewhere."""
        self.gate._ask(FOR_EVER, self.gate._queue.charge, ticket)

    def settle(self, ticket: Ticket, nbytes: int) -> None:
        """Change what *ticket* is charged with, if it is held."""
        self.gate._apply(self.gate._settle_now, ticket, nbytes)

    def give_back(self, ticket: Ticket) -> None:
        """Take *ticket* back, whether it is held or waits. Never waits itself."""
        self.gate._apply(self._give_back, ticket)

    def _give_back(self, ticket: Ticket) -> None:
        if ticket.state == HELD:
            self.gate._take_back(ticket)
        else:
            self.gate._cancel(ticket, 0.0)
        self._unmark(ticket)

    def expire(self, ticket: Ticket, max_wait: float | None) -> None:
        """Refuse *ticket* if it waits still; its waiter is woken as by a grant."""
        self.gate._ask(FOR_EVER, self._expire, ticket, max_wait)

    def _expire(self, ticket: Ticket, max_wait: float | None) -> None:
        if ticket in self._marked and ticket not in self.gate._refusals:
            held = ticket.state == HELD
            self.gate._time_out(ticket, max_wait)
            if not held:
                ticket.waiter.wake()

    def recheck(self) -> None:
        """Grant what fits by now though nothing was released; call it now and then."""
        self.gate._ask(FOR_EVER, self.gate._queue.grant)

    def _unmark(self, ticket: Ticket) -> None:
        if ticket in self._marked:
            self._marked.remove(ticket)
            self.gate._queue.ahead.pop()
