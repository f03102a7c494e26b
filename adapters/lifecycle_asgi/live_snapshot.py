"""Snapshots of the live view: requests, clients, gates and warnings, as JSON."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from lifecycle import Gate
from lifecycle_asgi.live_requests import LiveRequest, LiveRequests
from lifecycle_asgi.live_warnings import (
    EngineView,
    GateView,
    LiveWarning,
    RequestView,
    WarningLimits,
    find_warnings,
)

# Rows of each table: more than a screen has, and what bounds the cost of a snapshot.
_MOST_REQUESTS: Final = 200
_MOST_CLIENTS: Final = 20
_MOST_WARNINGS: Final = 50
# A snapshot serves all viewers for this long.
_FRESH_SECONDS: Final = 0.4


class Snapshots:
    """Takes snapshots of requests, gates and an engine.

    Args:
        requests: The requests, and their gates.
        limits: When a warning is due.
        engine: Returns ``health``, ``incarnation`` and ``pid`` of the engine.
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

    def text(self) -> str:
        """Return a snapshot as JSON; that of another viewer, if it is new enough."""
        now = time.monotonic()
        if not self._text or now - self._taken_at >= _FRESH_SECONDS:
            self._text = json.dumps(self.take(now), separators=(",", ":"))
            self._taken_at = now
        return self._text

    def take(self, now: float) -> dict[str, Any]:
        """Return a snapshot of *now*, by `time.monotonic`."""
        requests = [_view(each, now) for each in self._requests.all()]
        gates = self._gates(now)
        engine = self._engine_view(now)
        warnings = find_warnings(requests, gates, engine, self._limits)
        return {
            "uptime_s": round(now - self._started, 1),
            "pid": os.getpid(),
            "total": len(requests),
            "phases": Counter(each.phase for each in requests),
            "requests": _rows(requests, warnings),
            "clients": _clients(requests),
            "gates": [each._asdict() for each in gates],
            "engine": engine and {**engine._asdict(), "restarts": engine.restarts},
            "warnings": [each._asdict() for each in warnings[:_MOST_WARNINGS]],
            "warnings_total": len(warnings),
        }

    def _gates(self, now: float) -> list[GateView]:
        by_name: dict[str, list[Gate]] = {}
        for gate in sorted(self._requests.gates, key=lambda each: each.name):
            by_name.setdefault(gate.name, []).append(gate)
        views = [_gate_view(name, gates) for name, gates in by_name.items()]
        since = {
            view.name: self._waiting.get(view.name, now)
            for view in views
            if view.waiting
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
        return EngineView(
            health,
            round(now - self._health[1], 1),
            int(state.get("incarnation", 0)),
            state.get("pid"),
        )


def _view(request: LiveRequest, now: float) -> RequestView:
    request.measure(now)
    nbytes, gate = request.holdings()
    phase, since = request.phase(waits=gate is not None)
    sessions = request.sessions()
    return RequestView(
        request.id,
        ",".join(each.id for each in sessions) if sessions else "",
        request.what,
        request.client,
        phase,
        now - since,
        now - request.began,
        nbytes,
        None if gate is None else gate.name,
        _age(request.gone, now),
        _age(request.first_part, now),
        _age(request.sending, now),
        request.gives_up_s,
        request.read,
        request.sent,
        request.tokens or request.parts,
        request.rate,
        request.cancellable,
    )


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else now - since


def _rows(
    requests: list[RequestView], warnings: Iterable[LiveWarning]
) -> list[dict[str, Any]]:
    """Return what is shown of the requests: those with warnings, then by bytes."""
    kinds: dict[str, list[str]] = {}
    for warning in warnings:
        kinds.setdefault(warning.subject, []).append(warning.kind)

    def weight(each: RequestView) -> tuple[bool, int, float]:
        return each.id in kinds, each.bytes, each.age_s

    if len(requests) > _MOST_REQUESTS:
        requests = sorted(requests, key=weight, reverse=True)[:_MOST_REQUESTS]
        requests.sort(key=lambda each: -each.age_s)
    return [_row(each, kinds.get(each.id, [])) for each in requests]


def _row(each: RequestView, kinds: list[str]) -> dict[str, Any]:
    return {
        "id": each.id,
        "session": each.session,
        "what": each.what,
        "client": each.client,
        "phase": each.phase,
        "phase_s": round(each.phase_s, 1),
        "age_s": round(each.age_s, 1),
        "bytes": each.bytes,
        "gate": each.gate,
        "gone_s": None if each.gone_s is None else round(each.gone_s, 1),
        "read": each.read,
        "sent": each.sent,
        "tokens": each.tokens,
        "rate": round(each.rate, 1),
        "cancellable": each.cancellable,
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


def _gate_view(name: str, gates: list[Gate]) -> GateView:
    """Return the sum of the gates of one name: one for each client, for example."""
    each = [gate.statistics() for gate in gates]
    limits = [
        None if None in values else sum(value or 0 for value in values)
        for values in (
            [now.slots for now in each],
            [now.bytes for now in each],
            [now.max_waiting for now in each],
        )
    ]
    return GateView(
        name,
        limits[0],
        sum(now.slots_in_use for now in each),
        limits[1],
        sum(now.bytes_in_use for now in each),
        sum(now.waiting for now in each),
        limits[2],
        sum(now.refused for now in each),
        0.0,
    )
