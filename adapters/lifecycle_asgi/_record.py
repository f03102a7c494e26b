"""What is told of one request, and when."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import anyio

from lifecycle.events import Event, Outcome
from lifecycle_asgi._places import places
from lifecycle_asgi._types import Scope
from lifecycle_asgi.events import (
    FirstItem,
    Phase,
    PhaseEnded,
    RequestEnded,
    RequestStarted,
)

# Version 00 of the W3C's trace context, neither id being all zeros.
_TRACEPARENT = re.compile(
    rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


class Record:
    """Tells an observer of one request.

    Args:
        emit: Told of each event; it never raises.
        operation: What kind of request it is.
        scope: Of ASGI, or anything with ``headers``; read here and not kept.
    """

    __slots__ = (
        "_began",
        "_counts",
        "_emit",
        "_error",
        "_first",
        "_operation",
        "_places",
        "_request",
    )

    def __init__(
        self,
        emit: Callable[[Event], None],
        operation: str,
        scope: Scope,
    ) -> None:
        self._emit = emit
        self._request = secrets.token_hex(8)
        self._operation = operation
        self._began = anyio.current_time()
        self._counts: dict[str, int] = {}
        self._error: str | None = None
        self._places: tuple[str, ...] = ()
        self._first = False
        trace = _traceparent(scope)
        self._tell(RequestStarted, traceparent=trace)

    def count(self, **counts: int) -> None:
        """Have *counts* told at the end."""
        self._counts |= counts

    def fail(self, error: BaseException) -> None:
        """Have *error* told at the end, without its words; the first one counts."""
        if self._error is None:
            self._error, self._places = type(error).__name__, places(error)

    def first_item(self) -> None:
        """The first item is there. Idempotent."""
        if not self._first:
            self._first = True
            self._tell(FirstItem, after_s=anyio.current_time() - self._began)

    def end(self, outcome: Outcome, status: int | None, session: str | None) -> None:
        """The request is over; called once."""
        self._tell(
            RequestEnded,
            outcome=outcome,
            status=status,
            duration_s=anyio.current_time() - self._began,
            session=session,
            counts=dict(self._counts),
            error=self._error,
            traceback=self._places,
        )

    def phase(self, phase: Phase, began: float, error: str | None) -> None:
        """A phase that began at *began* is over."""
        self._tell(
            PhaseEnded,
            phase=phase,
            began_s=began - self._began,
            duration_s=anyio.current_time() - began,
            error=error,
        )

    def _tell(self, kind: Callable[..., Event], **facts: Any) -> None:
        self._emit(kind(request=self._request, operation=self._operation, **facts))


class InPhase:
    """A block of code that is one phase of a request; nothing where none is told.

    A class and no generator: the frame of one would be one more in every traceback.
    """

    __slots__ = ("_began", "_phase", "_record")

    def __init__(self, record: Record | None, phase: Phase) -> None:
        self._record = record
        self._phase: Phase = phase
        self._began = 0.0

    def __enter__(self) -> None:
        if self._record is not None:
            self._began = anyio.current_time()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._record is not None:
            name = None if exc_type is None else exc_type.__name__
            self._record.phase(self._phase, self._began, name)


def _traceparent(scope: Scope) -> str | None:
    headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
    found = [value for name, value in headers if name == b"traceparent"]
    if len(found) == 1 and _TRACEPARENT.fullmatch(found[0]):
        return found[0].decode()
    return None


def outcome_of(
    status: int | None, error: BaseException | None, *, gone: bool
) -> Outcome:
    """What a request without a session is counted as.

    Args:
        status: That was answered.
        error: What the application raised.
        gone: The client left first.
    """
    if gone:
        return "client_gone"
    if error is not None:
        return "failed" if isinstance(error, Exception) else "cancelled"
    if status is None:
        return "failed"
    if status < 400:
        return "completed"
    # 529 is Anthropic's word for 503.
    return "refused" if status < 500 or status in (503, 529) else "failed"


def tell_refusal(
    emit: Callable[[Event], None], operation: str, scope: Scope, status: int
) -> None:
    """Tell of a request that is refused by its head, from its start to its end.

    For what stands in front of `LifecycleMiddleware`, which tells of all others.

    Args:
        emit: Told of both events; it must not raise.
        operation: What kind of request it is: a fixed word.
        scope: Of ASGI.
        status: That is answered.
    """
    Record(emit, operation, scope).end("refused", status, None)
