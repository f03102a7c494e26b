"""Warnings of the live view: what is wrong with requests, gates and the engine.

Pure functions of one moment, so that each warning is tested without a server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from lifecycle_asgi.memory_limit import size_text

ShownPhase = Literal[
    "waiting", "reading", "preparing", "queued", "running", "streaming", "ending"
]
"""What a request is doing, in the words of the live view."""

WarningKind = Literal[
    "work after its client left",
    "payload held after hand-off",
    "overdue",
    "gate binding",
    "reader behind",
    "engine full",
    "engine slow",
]

# Health of an engine, as `lifecycle_zmq` calls it, that delays requests.
_SLOW: Final = frozenset({"busy", "stopped", "stalled", "broken", "restarting"})


class RequestView(NamedTuple):
    """One request at one moment; seconds are ages, and ``None`` is for never.

    Attributes:
        id: Its id.
        client: Name of the client.
        phase: What it is doing.
        phase_s: For how long.
        age_s: Since its arrival.
        bytes: Bytes that it holds.
        gone_s: Since its client left.
        first_s: Since the first part of its response was sent.
        sending_s: Since the part that the client has yet to take was sent.
        gives_up_s: Seconds from its arrival until the client gives up.
        keeps_bytes: It is meant to hold its bytes while the response streams.
        holds: Slots and bytes that it holds, by the name of the gate.
        what: Its method and path.
    """

    id: str
    client: str
    phase: ShownPhase
    phase_s: float
    age_s: float
    bytes: int = 0
    gone_s: float | None = None
    first_s: float | None = None
    sending_s: float | None = None
    gives_up_s: float | None = None
    keeps_bytes: bool = False
    holds: Mapping[str, tuple[int, int]] = MappingProxyType({})
    what: str = "request"


class GateView(NamedTuple):
    """A gate, or all gates of one name, at one moment.

    Attributes:
        name: Its name.
        slots: Capacity in slots; ``None`` without a limit.
        slots_in_use: Slots that are held.
        bytes: Capacity in bytes; ``None`` without a limit.
        bytes_in_use: Bytes that are held.
        waiting: Requests in its queue.
        max_waiting: Most of them; ``None`` without a limit.
        refused: Refused so far.
        waiting_s: For how long there has always been a request in the queue.
    """

    name: str
    slots: int | None
    slots_in_use: int
    bytes: int | None
    bytes_in_use: int
    waiting: int
    max_waiting: int | None
    refused: int
    waiting_s: float


class EngineView(NamedTuple):
    """The engine at one moment.

    Attributes:
        health: One word, such as ``serving`` or ``busy``.
        health_s: For how long.
        incarnation: Number of engine processes started so far.
        pid: Its process id, if it has one.
        restarts: How often it was started again.
    """

    health: str
    health_s: float
    incarnation: int
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningLimits:
    """When a warning is due, in seconds and bytes.

    Attributes:
        gone_s: Work goes on for so long after its client left.
        held_s: So long after the first part of the response, bytes are still held.
        held_bytes: At least so many.
        overdue_s: So long in one phase before the response begins.
        waiting_s: So long, a gate always had requests in its queue, or the engine no
            place in its batch for one.
        behind_s: For so long, the client has not taken what was sent.
        engine_s: For so long, the engine is busy; other states warn at once.
    """

    gone_s: float = 0.5
    held_s: float = 0.5
    held_bytes: int = 2**16
    overdue_s: float = 60.0
    waiting_s: float = 0.5
    behind_s: float = 0.5
    engine_s: float = 0.5


class LiveWarning(NamedTuple):
    """One warning.

    Attributes:
        kind: What is wrong, as fixed words.
        subject: Id of the request, name of the gate, or ``engine``.
        text: One sentence about it.
    """

    kind: WarningKind
    subject: str
    text: str


def find_warnings(
    requests: Sequence[RequestView],
    gates: Iterable[GateView],
    engine: EngineView | None,
    limits: WarningLimits,
) -> list[LiveWarning]:
    """Return all warnings of one moment: of the engine, of gates, then of requests."""
    found: list[LiveWarning] = []
    if engine is not None and engine.health in _SLOW:
        text = f"the engine is {engine.health} for {_seconds(engine.health_s)}"
        if engine.health != "busy" or engine.health_s >= limits.engine_s:
            found.append(LiveWarning("engine slow", "engine", text))
    queued = [each.phase_s for each in requests if each.phase == "queued"]
    if max(queued, default=0.0) >= limits.waiting_s:
        text = f"{_wait(len(queued))} for a place in the engine's batch, one of them "
        text += f"for {_seconds(max(queued))}"
        found.append(LiveWarning("engine full", "engine", text))
    found += (
        LiveWarning("gate binding", gate.name, _binding(gate, requests))
        for gate in gates
        if gate.waiting and gate.waiting_s >= limits.waiting_s
    )
    for request in requests:
        found += _of_request(request, limits)
    return found


def _of_request(request: RequestView, limits: WarningLimits) -> Iterator[LiveWarning]:
    """Yield the warnings of one request; most have none, so it is quick to say so."""
    begun = request.first_s is not None or request.gone_s is not None
    if request.gone_s is not None and request.gone_s >= limits.gone_s:
        text = f"{_name(request)} works {_seconds(request.gone_s)} after its client "
        yield LiveWarning(
            "work after its client left", request.id, f"{text}left{_held(request)}"
        )
    elif (
        request.first_s is not None
        and request.first_s >= limits.held_s
        and request.bytes >= limits.held_bytes
        and not request.keeps_bytes
    ):
        text = f"{_name(request)} holds {size_text(request.bytes)} since it began to "
        text += f"answer {_seconds(request.first_s)} ago"
        yield LiveWarning("payload held after hand-off", request.id, text)
    if request.sending_s is not None and request.sending_s >= limits.behind_s:
        text = f"the client of {_name(request)} has read nothing for "
        text += f"{_seconds(request.sending_s)}{_held(request)}"
        yield LiveWarning("reader behind", request.id, text)
    if request.gives_up_s is not None and request.age_s > request.gives_up_s:
        text = f"{_name(request)} is {_seconds(request.age_s)} old, and its client "
        text += f"gives up after {_seconds(request.gives_up_s)}"
        yield LiveWarning("overdue", request.id, text)
    elif request.phase_s >= limits.overdue_s and not begun:
        text = f"{_name(request)} is {request.phase} for {_seconds(request.phase_s)}"
        yield LiveWarning("overdue", request.id, text)


def _held(request: RequestView) -> str:
    return f", {size_text(request.bytes)} held" if request.bytes else ""


def _name(request: RequestView) -> str:
    return f"{request.what} {request.id} of {request.client}"


def _binding(gate: GateView, requests: Iterable[RequestView]) -> str:
    used = []
    if gate.slots is not None:
        used.append(f"{gate.slots_in_use} of {gate.slots} slots")
    if gate.bytes is not None:
        used.append(f"{size_text(gate.bytes_in_use)} of {size_text(gate.bytes)}")
    taken = f" at {' and '.join(used)}" if used else ""
    text = f"{_wait(gate.waiting)} at gate {gate.name!r}{taken}"
    return text + _holders(gate, requests)


def _wait(number: int) -> str:
    return f"{number} {'request waits' if number == 1 else 'requests wait'}"


def _holders(gate: GateView, requests: Iterable[RequestView]) -> str:
    """Return the client that holds most of the scarcer limit, and what none holds."""
    slots, nbytes = gate.slots_in_use, gate.bytes_in_use
    by_bytes = nbytes / (gate.bytes or math.inf) >= slots / (gate.slots or math.inf)
    held: Counter[str] = Counter()
    for each in requests:
        held[each.client] += each.holds.get(gate.name, (0, 0))[by_bytes]

    def amount(number: int) -> str:
        return size_text(number) if by_bytes else f"{number} slot{'s' * (number != 1)}"

    client, most = (held.most_common(1) or [("", 0)])[0]
    text = f"; {client} holds most, {amount(most)}" if most else ""
    missing = (slots, nbytes)[by_bytes] - held.total()
    rest = f"; no request that is live here holds {amount(missing)}"
    return text + rest * (missing > most)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
