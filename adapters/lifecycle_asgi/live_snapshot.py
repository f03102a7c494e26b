"""Snapshots of the live view: requests, clients, gates and warnings, as JSON."""

from __future__ import annotations

import ipaddress
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from heapq import nlargest
from typing import Any, Final

from lifecycle import Lease, Session
from lifecycle.debug import lease_state, payloads
from lifecycle_asgi.asgi_types import AnyGate
from lifecycle_asgi.events import LiveRequest, LiveRequests, current_count
from lifecycle_asgi.live_warnings import (
    EngineView,
    GateView,
    LiveWarning,
    RequestView,
    ShownPhase,
    WarningLimits,
    find_warnings,
)
from lifecycle_asgi.memory_limit import size_text

# Rows of each table: more than a screen has, and what bounds the cost of a snapshot.
_MOST_REQUESTS: Final = 200
_MOST_CLIENTS: Final = 20
_MOST_WARNINGS: Final = 50
# Seconds between two snapshots, which serve all viewers; and how many times longer
# that is than the time of the processor that one takes.
_EVERY_SECONDS: Final = 1.0
_SHARE: Final = 150
_MOST_SECONDS: Final = 10.0
_IPV6_NETWORK: Final = 8  # bytes of what `client_address` returns
# Viewers do not come at the same moment: a snapshot that is almost due is made.
_EARLY: Final = 0.9

# What a phase of `RequestScope.phase` is called.
_SHOWN: Final[Mapping[str, ShownPhase]] = {
    "read": "reading",
    "queue": "waiting",
    "fetch": "preparing",
    "prepare": "preparing",
    "hand_off": "preparing",
    "stream": "running",
    "cleanup": "ending",
}

_MOST_LISTED: Final = 1000
_LONGEST_GAP: Final = 5.0
# What a request in a phase waits for, as far as this process knows.
_AWAITED: Final[Mapping[ShownPhase, str]] = {
    "waiting": "a gate",
    "reading": "its body",
    "preparing": "its input to be ready",
    "queued": "a place in the engine's batch",
    "running": "the first part of its response",
    "streaming": "the next part of its response",
    "ending": "its end in the engine",
}


class Snapshots:
    """Takes snapshots of requests, gates and an engine.

    Args:
        requests: The requests, and their gates.
        limits: When a warning is due.
        engine: Returns ``health``, ``incarnation`` and ``pid`` of the engine.

    Attributes:
        pause: Seconds until the next snapshot: one, or more where there are so many
            requests that this would take about a hundredth of a core.
    """

    def __init__(
        self,
        requests: LiveRequests,
        limits: WarningLimits,
        engine: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._requests = requests
        self._limits = limits
        self._engine = engine
        self._health: tuple[str, float] = ("", 0.0)
        self._waiting: dict[str, float] = {}
        self._started = time.monotonic()
        self._text, self._taken_at = "", 0.0
        self.pause = _EVERY_SECONDS

    def text(self) -> str:
        """Return a snapshot as JSON; that of another viewer, if it is new enough."""
        now = time.monotonic()
        if not self._text or now - self._taken_at >= _EARLY * self.pause:
            began = time.thread_time()
            self._text = json.dumps(self.take(now), separators=(",", ":"))
            self._taken_at = now
            due = _SHARE * (time.thread_time() - began)
            self.pause = min(max(_EVERY_SECONDS, due), _MOST_SECONDS)
        return self._text

    def take(self, now: float) -> dict[str, Any]:
        """Return a snapshot of *now*, by `time.monotonic`."""
        requests = all_of(self._requests)
        queued = self._requests.queued
        views = [_view(each, now, queued) for each in requests]
        gates = self._gates(now)
        engine = self._engine_view(now)
        warnings = find_warnings(views, gates, engine, self._limits)
        return {
            "uptime_s": round(now - self._started, 1),
            "pid": os.getpid(),
            "total": len(requests),
            "phases": Counter(each.phase for each in views),
            "requests": _rows(requests, views, warnings, now),
            "clients": _clients(views),
            "gates": [each._asdict() for each in gates],
            "engine": engine and engine._asdict(),
            "warnings": [each._asdict() for each in warnings[:_MOST_WARNINGS]],
            "warnings_total": len(warnings),
        }

    def _gates(self, now: float) -> list[GateView]:
        by_name: dict[str, list[AnyGate]] = {}
        for gate in sorted(self._requests.gates, key=lambda each: each.name):
            by_name.setdefault(gate.name, []).append(gate)
        views = [_gate_view(name, gates) for name, gates in by_name.items()]
        # Between snapshots that are far apart, a queue may have been empty.
        is_next = now - self._taken_at < _LONGEST_GAP + self.pause
        before = self._waiting if is_next else {}
        since = {
            view.name: before.get(view.name, now) for view in views if view.waiting
        }
        self._waiting = since
        return [
            view._replace(waiting_s=round(now - since.get(view.name, now), 1))
            for view in views
        ]

    def _engine_view(self, now: float) -> EngineView | None:
        if self._engine is None:
            return None
        state = self._engine()
        health = str(state.get("health", "unknown"))
        if health != self._health[0]:
            self._health = health, now
        seconds, pid = round(now - self._health[1], 1), state.get("pid")
        starts = int(state.get("incarnation", 0))
        return EngineView(health, seconds, starts, pid, max(0, starts - 1))


def _view(request: LiveRequest, now: float, queued: Container[str]) -> RequestView:
    """Return what warnings, clients and the choice of rows need: it is made for all."""
    nbytes, waiting, holds = _holdings(request, request.sessions())
    phase, since = _phase(request, waits=waiting is not None)
    if phase == "running" and any(it.key in queued for it in request.sessions()):
        phase = "queued"
    return RequestView(
        request.id,
        _client_name(request.client),
        phase,
        now - since,
        now - request.began,
        nbytes,
        None if request.gone is None else now - request.gone,
        None if request.first_part is None else now - request.first_part,
        None if request.sending is None else now - request.sending,
        request.gives_up_s,
        request.keeps_bytes,
        holds,
        request.what,
    )


def _rows(
    requests: list[LiveRequest],
    views: list[RequestView],
    warnings: Iterable[LiveWarning],
    now: float,
) -> list[dict[str, Any]]:
    """Return what is shown: requests with warnings, then those that hold most."""
    kinds: dict[str, list[str]] = {}
    for warning in warnings:
        kinds.setdefault(warning.subject, []).append(warning.kind)
    pairs = list(zip(requests, views, strict=True))
    if len(pairs) > _MOST_REQUESTS:
        weights = [(each.id in kinds, each.bytes, each.age_s) for each in views]
        places = nlargest(_MOST_REQUESTS, range(len(pairs)), key=weights.__getitem__)
        pairs = [pairs[place] for place in sorted(places)]
    return [_row(each, view, kinds.get(each.id, []), now) for each, view in pairs]


def _row(
    each: LiveRequest, view: RequestView, kinds: list[str], now: float
) -> dict[str, Any]:
    _measure(each, now)
    sessions = each.sessions()
    _, waiting, _ = _holdings(each, ())
    return {
        "id": each.id,
        "session": ",".join(session.id for session in sessions),
        "what": each.what,
        "client": view.client,
        "phase": view.phase,
        "phase_s": round(view.phase_s, 1),
        "age_s": round(view.age_s, 1),
        "bytes": view.bytes,
        "gate": waiting and waiting.gate.name,
        "waits_for": _waits_for(each, view.phase, waiting),
        "gone_s": None if view.gone_s is None else round(view.gone_s, 1),
        "read": each.read,
        "sent": each.sent,
        "tokens": _count(each),
        "rate": round(each.rate, 1),
        "cancellable": is_cancellable(each),
        "warnings": kinds,
    }


def _clients(requests: Iterable[RequestView]) -> list[dict[str, Any]]:
    """Return the clients, those that hold most bytes first."""
    number: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for each in requests:
        number[each.client] += 1
        held[each.client] += each.bytes
    first = sorted(number, key=lambda name: (-held[name], -number[name], name))
    return [
        {"client": name, "requests": number[name], "bytes": held[name]}
        for name in first[:_MOST_CLIENTS]
    ]


def _gate_view(name: str, gates: list[AnyGate]) -> GateView:
    """Return the sum of the gates of one name: one for each client, for example."""
    each = [gate.statistics() for gate in gates]

    def total(name: str) -> int:
        return sum(getattr(now, name) for now in each)

    def limit(name: str) -> int | None:
        return None if any(getattr(now, name) is None for now in each) else total(name)

    return GateView(
        name,
        limit("slots"),
        total("slots_in_use"),
        limit("bytes"),
        total("bytes_in_use"),
        total("waiting"),
        limit("max_waiting"),
        total("refused"),
        0.0,
    )


def request_rows(requests: LiveRequests) -> tuple[int, list[dict[str, Any]]]:
    """Return how many requests there are, and the oldest, with what each waits for.

    At most a thousand: the event loop stands still meanwhile.
    """
    now, rows, found = time.monotonic(), [], all_of(requests)
    for each in found[:_MOST_LISTED]:
        view = _view(each, now, requests.queued)
        session = next(iter(each.sessions()), None)
        more = {"age_s": round(view.age_s, 3), "session": session and session.id}
        more["session_phase"] = session and session.phase
        rows.append({**_row(each, view, [], now), **more})
    return len(found), rows


# Of one request -------------------------------------------------------------------


def all_of(requests: LiveRequests) -> list[LiveRequest]:
    """Return all requests, oldest first, and forget those that have ended."""
    found = list(requests.found.values())
    over = {each.id for each in found if each.ended and not each.sessions()}
    for id_ in over:
        requests.found.pop(id_, None)
    return [each for each in found if each.id not in over]


def find(requests: LiveRequests, id_: str) -> LiveRequest | None:
    """Return the request with this id, or with a session of this id."""
    of_session = (
        each
        for each in requests.found.values()
        if any(session.id == id_ for session in each.sessions())
    )
    return requests.found.get(id_) or next(of_session, None)


def is_cancellable(request: LiveRequest) -> bool:
    """Whether `cancel` can end it."""
    if request.cancel is not None:
        return request.ended is None
    return any(each.outcome is None for each in request.sessions())


def cancel(request: LiveRequest) -> None:
    """Stop its sessions, or cancel the application where it has none."""
    sessions = [each for each in request.sessions() if each.outcome is None]
    for session in sessions:
        session.stop()
    if not sessions and request.cancel is not None and request.ended is None:
        request.cancel()


def held_objects(request: LiveRequest) -> Iterator[tuple[str, object]]:
    """Yield what keeps bytes: its leases and its boxes, each with a name."""
    for each in request.leases:
        lease = each()
        if lease is not None and lease.held and lease.bytes:
            yield f"lease of gate {lease.gate.name!r}", lease
    for session in request.sessions():
        for box in payloads(session):
            yield f"payload of {box.nbytes} bytes", box


def _holdings(
    request: LiveRequest, sessions: Iterable[Session]
) -> tuple[int, Lease | None, dict[str, tuple[int, int]]]:
    """Return its bytes, the lease that it waits for, and what it holds by gate.

    Payloads are in bytes that leases are charged with, as a rule; so it is whichever
    is more.
    """
    waiting, holds = None, dict[str, tuple[int, int]]()
    for each in request.leases:
        lease = each()
        if lease is None:
            continue
        if lease.held:
            slots, nbytes = holds.get(lease.gate.name, (0, 0))
            holds[lease.gate.name] = slots + lease.slots, nbytes + lease.bytes
        elif lease_state(lease) == "waiting":
            waiting = lease
    boxed = sum(box.nbytes for session in sessions for box in payloads(session))
    charged = sum(nbytes for _, nbytes in holds.values())
    return max(charged, boxed), waiting, holds


def _phase(request: LiveRequest, *, waits: bool) -> tuple[ShownPhase, float]:
    """Return what it is doing, and since when."""
    over = request.ended or request.gone or request.complete
    if over is not None:
        return "ending", over
    if waits:
        return "waiting", request.waiting_since
    if request.first_part is not None:
        return "streaming", request.first_part
    if request.phase is not None:
        return _SHOWN.get(request.phase, "running"), request.phase_began
    if request.body_done is None and request.reading:
        return "reading", request.began
    return "running", request.body_done or request.began


def _waits_for(request: LiveRequest, phase: ShownPhase, waiting: Lease | None) -> str:
    """Return what would have to happen next, in words."""
    if phase == "waiting" and waiting is not None:
        asked = f"{size_text(waiting.bytes)} at " if waiting.bytes else ""
        return f"{asked}gate {waiting.gate.name}"
    if phase == "streaming" and request.sending is not None:
        return "its client"
    return _AWAITED[phase]


def _measure(request: LiveRequest, now: float) -> None:
    """Compute its rate, if the last time was long enough ago."""
    since, before = request.measured
    if now - since >= 0.5:
        count = _count(request)
        request.rate = max(0.0, (count - before) / (now - since))
        request.measured = now, count


def _count(request: LiveRequest) -> int:
    """Return its tokens, or the parts of its response where it counts none."""
    return current_count(request.tokens) or request.parts


def _client_name(identity: bytes | str) -> str:
    """Return a short name for what identifies a client; of a key, part of its hash."""
    if isinstance(identity, str):
        return identity
    text = identity.decode("ascii", "replace")
    if text.isprintable() and text.isascii():
        return text or "unknown"
    if len(identity) == _IPV6_NETWORK:
        return f"{ipaddress.IPv6Address(identity + bytes(_IPV6_NETWORK))}/64"
    return f"key {identity.hex()[:8]}"
