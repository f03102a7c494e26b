"""One request of a worker, as it and its leader know it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lifecycle._exceptions import Refused
from lifecycle._lease import Lease
from lifecycle._queues import Ticket


@dataclass(slots=True, eq=False)
class Request:
    """What a worker asks for.

    Attributes:
        number: Of this request within its worker.
        since: When it was made, by the clock that all processes of a host share: a new
            leader lets those that wait go on in this order.
        slots: As of `Gate.admit`, and so on.
        may_wait: Or is it refused where it would have to?
        lease: What is held once it is granted; in its own process alone.
        refusal: Why it was refused, likewise.
    """

    number: int
    since: float
    slots: int
    bytes: int
    key: str | None
    priority: int
    may_wait: bool
    lease: Lease = field(default=None)  # type: ignore[assignment]
    refusal: Refused | None = None

    def frame(self) -> tuple[Any, ...]:
        """Return what makes the same request in the leader."""
        cost = self.number, self.since, self.slots, self.bytes
        return *cost, self.key, self.priority, self.may_wait

    def ticket(self) -> Ticket:
        """Return a ticket for the leader's gate."""
        return ticket(self.slots, self.bytes, self.key, self.priority)


def ticket(slots: int, nbytes: int, key: str | None, priority: int = 0) -> Ticket:
    """Return a ticket of that cost."""
    made = Ticket()
    made.slots, made.bytes, made.key, made.priority = slots, nbytes, key, priority
    return made
