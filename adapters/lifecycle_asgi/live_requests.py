"""Live requests: what each request that has not ended does and holds.

A request pays for some attributes that are set; all else is computed when a viewer
looks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal
from weakref import WeakSet, ref

from lifecycle import Gate, Lease, Session
from lifecycle.debug import lease_state, payloads

LIVE_KEY: Final = "lifecycle.live"
"""Key of the `LiveRequest` in the ASGI scope, set by `LiveView`."""

ShownPhase = Literal[
    "waiting", "reading", "preparing", "running", "streaming", "ending"
]
"""What a request is doing, in the words of the live view."""

# What a phase of `RequestScope.phase` is called.
_SHOWN: Final[Mapping[str, ShownPhase]] = MappingProxyType(
    {
        "read": "reading",
        "queue": "waiting",
        "fetch": "preparing",
        "prepare": "preparing",
        "hand_off": "preparing",
        "stream": "running",
        "cleanup": "ending",
    }
)
# A request that admits again and again: what is over is forgotten at so many.
_MOST_CLAIMS: Final = 16


class LiveRequest:
    """One request, from its arrival until its application and its sessions have ended.

    All times are seconds of `time.monotonic`; ``None`` is for what has not happened.

    Attributes:
        id: Random id.
        what: Method and path, without the query.
        client: Name of the client.
        gives_up_s: Seconds after which the client gives up, if it said so.
        began: Arrival.
        read: Bytes of its body so far.
        body_done: The whole body was given to the application.
        sent: Bytes of its response so far.
        parts: Parts of the response that were sent.
        tokens: Tokens that the application counted.
        first_part: The first part of the response was sent.
        sending: The application waits in ``send`` since then.
        complete: The response is complete.
        gone: The client disconnected before that.
        ended: The application has returned.
        rate: Tokens, or parts, per second; see `measure`.
    """

    __slots__ = (
        "__weakref__",
        "_cancel",
        "_leases",
        "_measured",
        "_phase",
        "_phase_began",
        "_reading",
        "_sessions",
        "_waiting_since",
        "began",
        "body_done",
        "client",
        "complete",
        "ended",
        "first_part",
        "gates",
        "gives_up_s",
        "gone",
        "id",
        "parts",
        "rate",
        "read",
        "sending",
        "sent",
        "tokens",
        "what",
    )

    def __init__(
        self, what: str, client: str, gates: WeakSet[Gate], gives_up_s: float | None
    ) -> None:
        self.id = secrets.token_hex(4)
        self.what = what
        self.client = client
        self.gates = gates
        self.gives_up_s = gives_up_s
        self.began = time.monotonic()
        self.read = self.sent = self.parts = self.tokens = 0
        self.rate = 0.0
        self.body_done: float | None = None
        self.first_part: float | None = None
        self.sending: float | None = None
        self.complete: float | None = None
        self.gone: float | None = None
        self.ended: float | None = None
        self._reading = False
        self._leases: list[ref[Lease]] = []
        self._sessions: list[ref[Session]] = []
        self._waiting_since = self._phase_began = self.began
        self._phase: str | None = None
        self._cancel: Callable[[], object] | None = None
        self._measured = (self.began, 0)

    # Called while the request is served.

    def claim(self, made: object) -> None:
        """Note a lease or a session that was made for this request."""
        if isinstance(made, Lease):
            if len(self._leases) >= _MOST_CLAIMS:
                self._leases = [each for each in self._leases if _is_live(each())]
            self._leases.append(ref(made))
            self._waiting_since = time.monotonic()
            self.gates.add(made.gate)
        elif isinstance(made, Session):
            if len(self._sessions) >= _MOST_CLAIMS:
                self._sessions = [ref(each) for each in self.sessions()]
            self._sessions.append(ref(made))

    def enter(self, phase: str) -> str | None:
        """Begin *phase*; return the one before, for `leave`."""
        before, self._phase = self._phase, phase
        self._phase_began = time.monotonic()
        return before

    def leave(self, before: str | None) -> None:
        """End the phase."""
        self._phase, self._phase_began = before, time.monotonic()

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        """Have `cancel` call *cancel* where no session can be stopped."""
        self._cancel = cancel

    def receiving(self, message: Mapping[str, Any] | None) -> None:
        """Note that the application asks for a message, or what it got."""
        if message is None:
            self._reading = True
            return
        self._reading = False
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

    # Called when a viewer looks.

    @property
    def cancellable(self) -> bool:
        """Whether `cancel` can end it."""
        if self._cancel is not None:
            return self.ended is None
        return any(each.outcome is None for each in self.sessions())

    def cancel(self) -> None:
        """Stop its sessions, or cancel the application where it has none."""
        sessions = [each for each in self.sessions() if each.outcome is None]
        for session in sessions:
            session.stop()
        if not sessions and self._cancel is not None and self.ended is None:
            self._cancel()

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

    def holdings(self, sessions: Iterable[Session]) -> tuple[int, Gate | None]:
        """Return the bytes that it holds, and the gate that it waits at.

        Payloads are in bytes that leases are charged with, as a rule; so it is
        whichever is more.

        Args:
            sessions: Its sessions, which the caller has asked for already.
        """
        charged, boxed, gate = 0, 0, None
        for each in self._leases:
            lease = each()
            if lease is None:
                continue
            if lease.held:
                charged += lease.bytes
            elif lease_state(lease) == "waiting":
                gate = lease.gate
        for session in sessions:
            for box in payloads(session):
                boxed += box.nbytes
        return max(charged, boxed), gate

    def held_objects(self) -> Iterator[tuple[str, object]]:
        """Yield what keeps bytes: its leases and its boxes, each with a name."""
        for each in self._leases:
            lease = each()
            if lease is not None and lease.held and lease.bytes:
                yield f"lease of gate {lease.gate.name!r}", lease
        for session in self.sessions():
            for box in payloads(session):
                yield f"payload of {box.nbytes} bytes", box

    def phase(self, *, waits: bool) -> tuple[ShownPhase, float]:
        """Return what it is doing, and since when."""
        over = self.ended or self.gone or self.complete
        if over is not None:
            return "ending", over
        if waits:
            return "waiting", self._waiting_since
        if self.first_part is not None:
            return "streaming", self.first_part
        if self._phase is not None:
            return _SHOWN.get(self._phase, "running"), self._phase_began
        if self.body_done is None and self._reading:
            return "reading", self.began
        return "running", self.body_done or self.began

    def measure(self, now: float) -> None:
        """Compute `rate`, if the last time was long enough ago."""
        since, before = self._measured
        if now - since >= 0.5:
            count = self.tokens or self.parts
            self.rate = max(0.0, (count - before) / (now - since))
            self._measured = now, count


def _is_live(lease: Lease | None) -> bool:
    return lease is not None and lease_state(lease) != "done"


class LiveRequests:
    """The requests that are shown, and the gates that they came by.

    Args:
        gates: Gates to show before a request comes to them.

    Attributes:
        gates: The gates.
    """

    def __init__(self, gates: tuple[Gate, ...] = ()) -> None:
        self._given = gates  # the set alone would let go of them
        self.gates: WeakSet[Gate] = WeakSet(gates)
        self._requests: dict[str, LiveRequest] = {}

    def begin(self, what: str, client: str, gives_up_s: float | None) -> LiveRequest:
        """Return a new request, which is shown until it has ended."""
        request = LiveRequest(what, client, self.gates, gives_up_s)
        self._requests[request.id] = request
        return request

    def end(self, request: LiveRequest) -> None:
        """Its application has returned; a session that is not quiet keeps it here."""
        request.ended = time.monotonic()
        if not request.sessions():
            self._requests.pop(request.id, None)

    def get(self, id_: str) -> LiveRequest | None:
        """Return the request with this id, or with a session of this id."""
        found = self._requests.get(id_)
        if found is None:
            of_session = (
                each
                for each in self._requests.values()
                if any(session.id == id_ for session in each.sessions())
            )
            found = next(of_session, None)
        return found

    def all(self) -> list[LiveRequest]:
        """Return all requests, oldest first, and forget those that have ended."""
        requests = list(self._requests.values())
        over = [each for each in requests if each.ended and not each.sessions()]
        for each in over:
            self._requests.pop(each.id, None)
        return [each for each in requests if each.id in self._requests]
