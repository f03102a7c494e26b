"""What is noted of a request: its events for observers, its state for the live view.

As in `lifecycle.events`, fields are ids, counts, seconds and fixed words. An exception
is described by its type and its places in the code only: its text and the values of
local variables may contain part of a payload.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal
from weakref import WeakSet, ref

import anyio

from lifecycle import Lease, Session
from lifecycle.debug import lease_state
from lifecycle.events import Event, Observer, Outcome
from lifecycle.lowlevel import current_task
from lifecycle_asgi.asgi_types import AnyGate, Scope

LIVE_KEY: Final = "lifecycle.live"
"""Key of the `LiveRequest` in the ASGI scope, set by `LiveView`."""

Phase = Literal["read", "queue", "fetch", "prepare", "hand_off", "stream", "cleanup"]
"""What a request is doing. ``cleanup`` may continue after the request has ended."""

# Version 00 of the W3C trace context; neither id may be all zeros.
_TRACEPARENT: Final = re.compile(
    rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
# A request that admits again and again: what is over is forgotten at so many.
_MOST_CLAIMS: Final = 16
_MAX_PATH: Final = 100
# Request headers of the SDKs of OpenAI and Anthropic: the client's timeout in seconds.
_TIMEOUTS: Final = frozenset({b"x-stainless-read-timeout", b"x-stainless-timeout"})
# Longer chains and stacks are recursion: their ends are enough to find the cause.
_MAX_ERRORS: Final = 8
_MAX_FRAMES: Final = 32
# A disconnect is an ordinary end of a stream, and refusals are what a gate is for.
# These outcomes need attention; "failed" is a mistake in the code.
_LOG_LEVELS: Final = {
    "deadline": "warning",
    "engine_lost": "warning",
    "failed": "error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent(Event):
    """Base class of the events of one request.

    Attributes:
        request: Random id, unique to the request.
        operation: Kind of request: a fixed word of the application.
    """

    request: str
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted(RequestEvent):
    """A request has arrived.

    Attributes:
        traceparent: The caller's trace context, if the request has a valid one.
    """

    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded(RequestEvent):
    """A request has left a phase.

    Attributes:
        phase: The phase.
        began_s: Seconds from the arrival of the request to the start of the phase.
        duration_s: Seconds that the phase took.
        error: Type of the exception raised in the phase; a cancellation counts.
    """

    phase: Phase
    began_s: float
    duration_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstItem(RequestEvent):
    """The first item of the response is available.

    Attributes:
        after_s: Seconds from the arrival of the request.
    """

    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded(RequestEvent):
    """A request has ended, with exactly one outcome.

    Attributes:
        outcome: How it ended.
        status: HTTP status of the response, if one was sent.
        duration_s: Seconds from the arrival of the request.
        session: Id of the session attached to the request, if any.
        response_id: Id in the head of the response, by which its client knows it.
        counts: What the application counted, by fixed words.
        error: Type of the exception that made the request fail.
        traceback: Places in the code that the exception passed, without text or
            local variables.
    """

    outcome: Outcome
    status: int | None
    duration_s: float
    session: str | None = None
    response_id: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    traceback: tuple[str, ...] = ()


def current_count(count: int | Callable[[], int]) -> int:
    """Return a count as it is now."""
    return count() if callable(count) else count


@dataclass(slots=True, eq=False, repr=False)
class RequestRecorder:
    """Emits the events of one request.

    Args:
        emit: Called with each event; it never raises.
        operation: Kind of request.
        scope: ASGI scope, or any mapping with ``headers``; read here and not kept.
    """

    _emit: Callable[[Event], None]
    _operation: str
    scope: InitVar[Scope]
    _request: str = field(default_factory=partial(secrets.token_hex, 8), init=False)
    _began: float = field(default_factory=anyio.current_time, init=False)
    _counts: dict[str, int | Callable[[], int]] = field(
        default_factory=dict, init=False
    )
    _error: str | None = field(default=None, init=False)
    _traceback: tuple[str, ...] = field(default=(), init=False)
    _has_first_item: bool = field(default=False, init=False)

    def __post_init__(self, scope: Scope) -> None:
        self._emit_event(RequestStarted, traceparent=_traceparent(scope))

    def count(self, **counts: int | Callable[[], int]) -> None:
        """Report *counts* when the request ends."""
        self._counts |= counts

    def fail(self, error: BaseException) -> None:
        """Report *error* when the request ends; only the first error is kept."""
        if self._error is None:
            self._error, self._traceback = type(error).__name__, safe_traceback(error)

    def first_item(self) -> None:
        """Report that the first item is available. Idempotent."""
        if not self._has_first_item:
            self._has_first_item = True
            self._emit_event(FirstItem, after_s=anyio.current_time() - self._began)

    def end(
        self,
        outcome: Outcome,
        status: int | None,
        session: str | None,
        response_id: str | None,
    ) -> None:
        """Report the end of the request; called once."""
        self._emit_event(
            RequestEnded,
            outcome=outcome,
            status=status,
            duration_s=anyio.current_time() - self._began,
            session=session,
            response_id=response_id,
            counts={name: current_count(each) for name, each in self._counts.items()},
            error=self._error,
            traceback=self._traceback,
        )

    def phase_ended(self, phase: Phase, began: float, error: str | None) -> None:
        """Report the end of a phase that began at *began*."""
        self._emit_event(
            PhaseEnded,
            phase=phase,
            began_s=began - self._began,
            duration_s=anyio.current_time() - began,
            error=error,
        )

    def _emit_event(self, event: Callable[..., Event], **fields: Any) -> None:
        self._emit(event(request=self._request, operation=self._operation, **fields))


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class LiveRequest:
    """One request, from its arrival until its application and its sessions have ended.

    It only notes what happens; `lifecycle_asgi.live_snapshot` computes the rest when a
    viewer looks. All times are seconds of `time.monotonic`; ``None`` is for what has
    not happened.

    Attributes:
        id: Random id.
        what: Method and path, without the query.
        client: What identifies the client.
        gives_up_s: Seconds after which the client gives up, if it said so.
        began: Arrival.
        read: Bytes of its body so far.
        reading: The application waits for more of the body.
        body_done: The whole body was given to the application.
        sent: Bytes of its response so far.
        parts: Parts of the response that were sent.
        tokens: Tokens that the application counted, or what returns them.
        first_part: The first part of the response was sent.
        sending: The application waits in ``send`` since then.
        complete: The response is complete.
        gone: The client disconnected before that.
        ended: The application has returned.
        phase: Phase of the application, if it named one.
        phase_began: Since when.
        leases: Leases that were made for it.
        waiting_since: When the last of them was made.
        cancel: Cancels the application, where that is possible.
        keeps_bytes: It is meant to hold its bytes while the response streams.
    """

    scope: InitVar[Scope]
    client: bytes | str
    gates: WeakSet[AnyGate]
    id: str = field(default_factory=partial(secrets.token_hex, 4), init=False)
    what: str = field(init=False)
    gives_up_s: float | None = field(init=False)
    began: float = field(default_factory=time.monotonic, init=False)
    read: int = 0
    reading: bool = False
    body_done: float | None = None
    sent: int = 0
    parts: int = 0
    tokens: int | Callable[[], int] = 0
    first_part: float | None = None
    sending: float | None = None
    complete: float | None = None
    gone: float | None = None
    ended: float | None = None
    phase: str | None = None
    phase_began: float = field(init=False)
    leases: list[ref[Lease]] = field(default_factory=list)
    waiting_since: float = field(init=False)
    cancel: Callable[[], object] | None = None
    keeps_bytes: bool = False
    # Of the last time that a viewer looked: when, how many tokens, and their rate.
    measured: tuple[float, int] = field(init=False)
    rate: float = 0.0
    _sessions: list[ref[Session]] = field(default_factory=list)

    def __post_init__(self, scope: Scope) -> None:
        self.what = f"{scope['method']} {scope['path'][:_MAX_PATH]}"
        timeout = client_timeout(scope)
        self.gives_up_s = timeout if timeout < math.inf else None
        self.waiting_since = self.phase_began = self.began
        self.measured = self.began, 0

    def claim(self, made: object) -> None:
        """Note a lease or a session that was made for this request."""
        if isinstance(made, Lease):
            if len(self.leases) >= _MOST_CLAIMS:
                self.leases = [each for each in self.leases if _is_live(each())]
            self.leases.append(ref(made))
            self.waiting_since = time.monotonic()
            self.gates.add(made.gate)
        elif isinstance(made, Session):
            if len(self._sessions) >= _MOST_CLAIMS:
                self._sessions = [ref(each) for each in self.sessions()]
            self._sessions.append(ref(made))

    def sessions(self) -> list[Session]:
        """Its sessions that are not quiet yet."""
        found = []
        for each in self._sessions:
            session = each()
            # Most are open, and to ask for the phase costs more.
            if session is not None and (
                session.outcome is None or session.phase != "quiet"
            ):
                found.append(session)
        return found

    def enter(self, phase: str) -> str | None:
        """Begin *phase*; return the one before, for `leave`."""
        before, self.phase = self.phase, phase
        self.phase_began = time.monotonic()
        return before

    def leave(self, before: str | None) -> None:
        """End the phase."""
        self.phase, self.phase_began = before, time.monotonic()

    def receiving(self, message: Mapping[str, Any] | None) -> None:
        """Note that the application asks for a message, or what it got."""
        if message is None:
            self.reading = True
            return
        self.reading = False
        if message["type"] == "http.disconnect":
            if self.complete is None and self.gone is None:
                self.gone = time.monotonic()
            return
        self.read += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.body_done = time.monotonic()

    def sent_message(self, message: Mapping[str, Any]) -> None:
        """Note a message that was sent."""
        self.sending = None
        if message["type"] != "http.response.body":
            return
        if size := len(message.get("body", b"")):
            self.sent += size
            self.parts += 1
            if self.first_part is None:
                self.first_part = time.monotonic()
        if not message.get("more_body", False):
            self.complete = time.monotonic()


def client_timeout(scope: Scope) -> float:
    """Return the seconds until the client gives up; infinite if it does not say."""
    timeouts = [math.inf]
    for name, value in scope["headers"]:
        if name in _TIMEOUTS:
            with suppress(ValueError):
                timeouts.append(float(value))
    return min(timeout for timeout in timeouts if timeout > 0)


def _is_live(lease: Lease | None) -> bool:
    return lease is not None and lease_state(lease) != "done"


class LiveRequests:
    """The requests that are shown, and the gates that they came by.

    Args:
        gates: Gates to show before a request comes to them.
        client: Returns what identifies the client of a scope.

    Attributes:
        gates: The gates.
        found: The requests by their ids.
        queued: Keys of sessions that an engine has accepted, and not begun to work on;
            set by a server that asks its engine.
    """

    def __init__(
        self, gates: Iterable[AnyGate], client: Callable[[Scope], bytes | str]
    ) -> None:
        self._given = tuple(gates)  # the set alone would let go of them
        self._client = client
        self.gates: WeakSet[AnyGate] = WeakSet(self._given)
        self.found: dict[str, LiveRequest] = {}
        self.queued: Container[str] = ()
        # Those that have ended before their sessions were quiet.
        self._closing: deque[LiveRequest] = deque()

    def begin(self, scope: Scope) -> LiveRequest:
        """Return a new request, which is shown until it has ended."""
        request = LiveRequest(scope, self._client(scope), self.gates)
        self.found[request.id] = request
        return request

    def end(self, request: LiveRequest) -> None:
        """Its application has returned; a session that is not quiet keeps it here."""
        request.ended = time.monotonic()
        if request.sessions():
            self._closing.append(request)
        else:
            self.found.pop(request.id, None)
        # Two for each that ends, so that they go without a viewer who looks, too.
        for _ in range(min(2, len(self._closing))):
            oldest = self._closing.popleft()
            if oldest.sessions():
                self._closing.append(oldest)
            else:
                self.found.pop(oldest.id, None)


@dataclass(slots=True, eq=False, repr=False)
class PhaseTimer:
    """Context manager that times one phase, and shows it in the live view.

    Without a recorder and a live view it does nothing.

    A class and not a generator: a generator would add a frame to every traceback.
    """

    _recorder: RequestRecorder | None
    _phase: Phase
    _shown: LiveRequest | None = None
    _before: str | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._began = anyio.current_time()
        if self._shown is not None:
            self._before = self._shown.enter(self._phase)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown is not None:
            self._shown.leave(self._before)
        if self._recorder is not None:
            name = None if exc_type is None else exc_type.__name__
            self._recorder.phase_ended(self._phase, self._began, name)


def request_outcome(
    status: int | None, error: BaseException | None, *, client_gone: bool
) -> Outcome:
    """Return the outcome of a request that has no session."""
    if client_gone:
        return "client_gone"
    if error is not None:
        return "failed" if isinstance(error, Exception) else "cancelled"
    if status is None:
        return "failed"
    if status < 400:
        return "completed"
    # Anthropic's API uses 529 for 503.
    return "refused" if status < 500 or status in (503, 529) else "failed"


def log_failures(event: Event) -> None:
    """Log each failed request to the logger ``lifecycle``: error type and traceback.

    Neither the text of the exception nor local variables are logged, since they may
    contain a prompt.
    """
    if isinstance(event, RequestEnded) and event.error is not None:
        logging.getLogger("lifecycle").error(
            "request %s (%s) failed with %s\n  %s",
            event.response_id or event.request,
            event.operation,
            event.error,
            "\n  ".join(event.traceback),
        )


def request_log(logger: Any = None) -> Observer:
    """Log each request once, when it has ended, with structlog.

    The log line is named ``request`` and has the id that the response named (else one
    of its own), the operation, the outcome, the status, the duration in seconds and
    what the application counted. The line of a failed request has the type of the
    exception and its places in the code, never its text or local variables.

    Args:
        logger: A structlog logger. Default: a new one named ``lifecycle``.

    Raises:
        ImportError: structlog is not installed.
    """
    if logger is None:
        try:
            import structlog
        except ImportError as error:
            raise ImportError(
                "request_log needs structlog; install anyio-lifecycle[observe]"
            ) from error
        logger = structlog.get_logger("lifecycle")

    def observe(event: Event) -> None:
        if isinstance(event, RequestEnded):
            log = getattr(logger, _LOG_LEVELS.get(event.outcome, "info"))
            log("request", **_log_fields(event))

    return observe


def _log_fields(event: RequestEnded) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request": event.response_id or event.request,
        "session": event.session,
        "operation": event.operation,
        "outcome": event.outcome,
        "status": event.status,
        "duration_s": round(event.duration_s, 6),
        **event.counts,
    }
    if event.error is not None:
        fields |= {"error": event.error, "traceback": list(event.traceback)}
    return fields


def safe_traceback(error: BaseException) -> tuple[str, ...]:
    """Format the traceback of *error* and its causes without text, oldest cause first.

    Each frame is ``file:line in function``, and the type of an exception follows its
    frames. Of an exception group, the first member is followed.
    """
    chain: list[BaseException] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(chain) < _MAX_ERRORS:
        chain.append(current)
        seen.add(id(current))
        current = _cause(current)
    lines: list[str] = []
    for each in reversed(chain):
        lines += _frames(each)
        lines.append(type(each).__name__)
    return tuple(lines)


def _cause(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _frames(error: BaseException) -> list[str]:
    frames = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return frames[-_MAX_FRAMES:]


def _traceparent(scope: Scope) -> str | None:
    headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
    values = [value for name, value in headers if name == b"traceparent"]
    if len(values) == 1 and _TRACEPARENT.fullmatch(values[0]):
        return values[0].decode()
    return None


class Claims:
    """The leases that an application makes, to know when it waits at a gate.

    An application that waits there holds nothing of that gate, and has not begun what
    the gate admits it to. Leases of its other tasks are not counted: this task may have
    begun something.

    Args:
        show: Called with all that is made; ``None`` without a live view.

    Attributes:
        show: The same.
    """

    __slots__ = ("_made", "_newest", "_task", "show")

    def __init__(self, show: Callable[[object], object] | None) -> None:
        self.show = show
        self._task = id(current_task())
        self._newest: ref[Lease] | None = None
        self._made: anyio.Event | None = None

    def note(self, made: object) -> None:
        """Note what a gate or a registry has made."""
        if self.show is not None:
            self.show(made)
        if isinstance(made, Lease) and id(current_task()) == self._task:
            self._newest = ref(made)
            if self._made is not None:
                self._made.set()

    async def wait_at_gate(self) -> None:
        """Wait until the application's own task waits at a gate.

        Cancellation:
            Changes nothing.
        """
        while not self._waits():
            self._made = anyio.Event()
            await self._made.wait()

    def _waits(self) -> bool:
        lease = None if self._newest is None else self._newest()
        return lease is not None and lease_state(lease) == "waiting"
