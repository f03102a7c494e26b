"""Events as frozen dataclasses, observers that are called with them, and a log.

Fields are ids, counts, seconds, bytes and literal reasons: a field that could
hold a prompt, an image or any other payload does not belong here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from inspect import iscoroutinefunction
from typing import Any, Literal, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfGate(Event):
    gate: str
    slots: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(_OfGate):
    """A request was admitted after waiting *waited_s* seconds."""

    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(_OfGate):
    """A lease gave back what it held; *lost* if only the collector found it."""

    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettled(Event):
    """An estimate was replaced by the actual size."""

    gate: str
    estimated_bytes: int
    actual_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefused(_OfGate):
    """A request was not admitted."""

    reason: Literal[
        "full", "timeout", "closed", "too_large", "client_share", "client_limit"
    ]
    retry_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCancelled(_OfGate):
    """A request was cancelled while it waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadReleased(Event):
    """A payload box of a session was emptied."""

    session: str
    bytes: int
    how: Literal["taken", "cleared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfSession(Event):
    session: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(_OfSession):
    """A session was entered into its registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed(_OfSession):
    """A session ended, with its one outcome."""

    outcome: Outcome
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSettled(_OfSession):
    """A supervised start has an outcome, known or not."""

    how: Literal["started", "failed", "withheld", "unknown"]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded(_OfSession):
    """A stream of a session gave its last item."""

    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFailed(_OfSession):
    """END of a session could not be completed; the engine may still hold it."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted(Event):
    """A registry opens no more sessions."""

    live: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainFinished(Event):
    """Every session of a drained registry has ended; *cut* of them by force."""

    cut: int
    duration_s: float


Observer: TypeAlias = Callable[[Event], object]
"""Called with each event, at once and synchronously, in the thread that caused it.

It must not block. One that raises is reported once, to the logger ``lifecycle``,
and never breaks a request.
"""


def guarded(observer: Observer | None) -> Callable[[Event], None] | None:
    """Keep the errors of *observer* from requests.

    Raises:
        TypeError: It cannot be called, or would have to be awaited.
    """
    if observer is None:
        return None
    if (waits := iscoroutinefunction(observer)) or not callable(observer):
        kind = "async " * waits + type(observer).__name__
        raise TypeError(f"an observer is a plain function of an event, not {kind}")
    reported = False

    def emit(event: Event) -> None:
        nonlocal reported
        try:
            observer(event)
        except Exception:
            if not reported:
                reported = True
                text = "observer failed on %s; further failures are not reported"
                logging.getLogger("lifecycle").exception(text, type(event).__name__)

    return emit


def combine_observers(*observers: Observer | None) -> Observer:
    """Return one observer for several; if one fails, the others still get the event."""
    emits = [emit for each in observers if (emit := guarded(each)) is not None]

    def observe(event: Event) -> None:
        for emit in emits:
            emit(event)

    return observe


_QUIET = frozenset({"LeaseGranted", "LeaseReleased", "LeaseSettled", "PayloadReleased"})


def structlog_observer(logger: Any = None) -> Observer:
    """Log each event with structlog, as ``lifecycle.session_closed`` and so on.

    Events that occur several times a request are logged at level debug, those that
    need attention at warning, the rest at info.

    Args:
        logger: A structlog logger; by default a new one named ``lifecycle``.

    Raises:
        ImportError: structlog is not installed.
    """
    if logger is None:
        try:
            import structlog
        except ImportError as error:
            raise ImportError(
                "structlog_observer needs structlog; install anyio-lifecycle[observe]"
            ) from error
        logger = structlog.get_logger("lifecycle")

    def observe(event: Event) -> None:
        name, fields = type(event).__name__, asdict(event)
        log = logger.debug if name in _QUIET else logger.info
        if name == "EndFailed" or fields.get("lost"):
            log = logger.warning
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        rounded = {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in fields.items()
        }
        log(f"lifecycle.{snake}", **rounded)

    return observe
