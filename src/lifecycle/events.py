"""What happened, as frozen facts, and the observer that is told.

Fields are ids, counts, seconds, bytes and literal reasons. A field that could
hold a prompt, an image or any other payload does not belong here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Outcome = Literal[
    "completed",
    "client_gone",
    "cancelled",
    "deadline",
    "refused",
    "engine_lost",
    "failed",
    "shutdown",
]
"""How a session ended. Every session ends with exactly one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Root of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(Event):
    """A request was admitted after waiting *waited_s* seconds."""

    gate: str
    slots: int
    bytes: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(Event):
    """A lease gave back what it held; *lost* if only the collector found it."""

    gate: str
    slots: int
    bytes: int
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettled(Event):
    """An estimate was replaced by the actual size."""

    gate: str
    estimated_bytes: int
    actual_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefused(Event):
    """A request was not admitted."""

    gate: str
    slots: int
    bytes: int
    reason: Literal["full", "timeout", "closed", "too_large"]
    retry_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCancelled(Event):
    """A request left the line by cancellation."""

    gate: str
    slots: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadReleased(Event):
    """A payload box of a session was emptied."""

    session: str
    bytes: int
    how: Literal["taken", "cleared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(Event):
    """A session was entered into its registry."""

    session: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed(Event):
    """A session got its one outcome."""

    session: str
    generation: int
    outcome: Outcome
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSettled(Event):
    """A supervised start came to its end, known or not."""

    session: str
    generation: int
    how: Literal["started", "failed", "withheld", "unknown"]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded(Event):
    """A stream of a session gave its last item."""

    session: str
    generation: int
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFailed(Event):
    """END of a session could not be completed; the engine may still hold it."""

    session: str
    generation: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted(Event):
    """A registry admits nobody any more."""

    live: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFinished(Event):
    """Every session of a drained registry has ended; *cut* of them by force."""

    cut: int
    duration_s: float


class Observer(Protocol):
    """Called with each event, at once and synchronously, in whatever thread it is.

    It must not block and must not await. An observer that raises is reported
    once, to the logger ``lifecycle``, and never breaks a request.
    """

    def __call__(self, event: Event, /) -> None:
        """Take note of *event*."""


def guarded(observer: Observer | None) -> Callable[[Event], None] | None:
    """Called by gates and registries: keep errors of *observer* from requests."""
    if observer is None:
        return None
    reported = False

    def emit(event: Event) -> None:
        nonlocal reported
        try:
            observer(event)
        except Exception:
            if not reported:
                reported = True
                logging.getLogger("lifecycle").exception(
                    "observer failed on %s; further failures are not reported",
                    type(event).__name__,
                )

    return emit
