"""What is left when there should be nothing, and what was told on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, final

from lifecycle import Gate, SessionRegistry
from lifecycle.events import Event

E = TypeVar("E", bound=Event)


@final
class RecordingObserver:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []  #: what was told so far, oldest first

    def __call__(self, event: Event, /) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one *kind*, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def names(self) -> list[str]:
        """The class names of all events, oldest first."""
        return [type(event).__name__ for event in self.events]


def assert_quiescent(*holders: Gate | SessionRegistry) -> None:
    """Check that nothing in *holders* is held or left to do, and say what is.

    A gate is quiescent when no lease is live and nobody waits; a registry when
    no session is live, no start and no END is under way and no payload is in a
    box. The books of both must balance.

    Raises:
        AssertionError: Something is left; the message has one line for each.
    """
    left: list[str] = []
    for holder in holders:
        if isinstance(holder, Gate):
            left += (f"gate {holder.name!r}: {what}" for what in _left_in(holder))
        else:
            left += (f"sessions: {what}" for what in _left_among(holder))
    if left:
        raise AssertionError("not quiescent:\n  " + "\n  ".join(left))


def _left_in(gate: Gate) -> Iterator[str]:
    now = gate.statistics()
    leases = now.admitted - now.released
    slots, nbytes = now.slots_in_use, now.bytes_in_use
    if leases or slots or nbytes:
        yield f"{leases} live leases of {slots} slots and {nbytes} bytes"
    if now.waiting:
        yield f"{now.waiting} requests waiting in line"
    if leases < 0 or now.cancelled < 0:
        yield f"the books do not balance: {now}"


def _left_among(sessions: SessionRegistry) -> Iterator[str]:
    now = sessions.statistics()
    for session in sessions.live():
        yield f"live session {session.key!r} ({session.phase})"
    if now.closing:
        yield f"{now.closing} closed sessions with a start or an END under way"
    if now.payloads or now.payload_bytes:
        yield f"{now.payloads} payloads of {now.payload_bytes} bytes in boxes"
    if now.opened != now.live + sum(now.outcomes.values()):
        yield f"the books do not balance: {now}"
