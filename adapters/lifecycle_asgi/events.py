"""What becomes of requests, as frozen facts for an observer.

As in `lifecycle.events`, fields are ids, counts, seconds and fixed words. An
exception is told by its type and its places in the code: its words may be about a
payload, and so may the values of its locals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lifecycle.events import Event, Outcome

Phase = Literal["read", "queue", "fetch", "prepare", "hand_off", "stream", "cleanup"]
"""What a request is doing. ``cleanup`` may go on when the request has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent(Event):
    """Root of what is told of one request.

    Attributes:
        request: Made up for it, and for no other.
        operation: What kind of request it is: a fixed word of the application.
    """

    request: str
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted(RequestEvent):
    """A request has arrived.

    Attributes:
        traceparent: Of the caller's trace, if it sent a valid one.
    """

    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded(RequestEvent):
    """A request has left a phase.

    Attributes:
        phase: Which one.
        began_s: Seconds from the arrival of the request to its beginning.
        duration_s: Seconds that it took.
        error: Type of what was raised in it, a cancellation included.
    """

    phase: Phase
    began_s: float
    duration_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstItem(RequestEvent):
    """The first item of an answer is there, *after_s* seconds from the arrival."""

    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded(RequestEvent):
    """A request has got its one outcome.

    Attributes:
        outcome: How it ended.
        status: That was answered, if any was.
        duration_s: Seconds from its arrival.
        session: Id of the session that was attached to it, if one was.
        counts: What the application has counted, by fixed words.
        error: Type of the exception that it failed with.
        traceback: The places that it came through, without words or locals.
    """

    outcome: Outcome
    status: int | None
    duration_s: float
    session: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    traceback: tuple[str, ...] = ()
