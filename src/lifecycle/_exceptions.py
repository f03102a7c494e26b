"""The exceptions of the library, one tree.

Cancellation is never wrapped and an error raised by user code is never renamed:
each of these is a decision of the library itself. No message holds a payload.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "full", "timeout", "closed", "too_large", "client_share", "client_limit"
]


class LifecycleError(Exception):
    """Base class of every error that the library raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Process pools pickle errors, and some of these need more than a message.
        new = type(self).__new__
        return new, (type(self),), {"args": self.args, **vars(self)}


class Refused(LifecycleError):
    """A request was not admitted; it holds nothing and needs no cleanup.

    Attributes:
        reason: One word for metrics and logs, fixed per subclass.
        retry_after: Seconds after which a retry has a fair chance, 1 to 60, or
            ``None`` where retrying the same request cannot help.
    """

    reason: Reason = "full"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GateFull(Refused):
    """The queue was full, or waiting was not wanted."""


class AdmissionTimeout(Refused, TimeoutError):
    """The request waited for ``max_wait``, or for too long at an adaptive gate."""

    reason = "timeout"


class GateClosed(Refused):
    """The gate admits no more requests, as while a server drains."""

    reason = "closed"


class CostTooLarge(Refused):
    """The request asks for more than the gate will ever have."""

    reason = "too_large"


class EngineLost(LifecycleError):
    """The engine that ran the request is gone; the request may have run.

    Attributes:
        reason: Why the engine is gone, such as ``"killed"``.
        retry_after: Seconds until another engine can be expected, or ``None``.
    """

    def __init__(
        self, message: str, *, reason: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class StartTimeout(LifecycleError, TimeoutError):
    """A supervised start did not settle in time; what it sent is ended by key."""


class StreamTimeout(LifecycleError, TimeoutError):
    """A stream broke its *deadline*: ``"first_item"``, ``"idle"`` or ``"total"``."""

    def __init__(self, message: str, *, deadline: str) -> None:
        super().__init__(message)
        self.deadline = deadline


class SessionEnded(LifecycleError):
    """Another task ended the session, as *outcome*, while its owner worked on it."""

    def __init__(self, message: str, *, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class SessionExists(LifecycleError):
    """The session id is in use."""


class SessionNotFound(LifecycleError, LookupError):
    """No live session has this id."""
