"""Who keeps an object alive, and what gates and registries hold right now.

For a debug endpoint, a test or a console. Both answers come from the garbage
collector, so a request pays nothing for being inspectable, and whoever asks pays
for a walk over the heap.
"""

# ruff: noqa: SLF001 - what nobody else needs to see is looked up inside
from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import anyio

from ._fair import Fair
from ._gate import Gate, GateStatistics
from ._holders import Holder, who_holds
from ._lease import Lease
from ._sessions import SessionRegistry, SessionStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._session import Session
    from .events import Outcome

__all__ = (
    "GateSnapshot",
    "Holder",
    "LeaseSnapshot",
    "RegistrySnapshot",
    "SessionSnapshot",
    "Snapshot",
    "snapshot",
    "who_holds",
)

_OURS: Final = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSnapshot:
    """A live lease.

    Attributes:
        slots: Slots that it holds.
        bytes: Bytes that it is charged with.
        age_s: Seconds since it was granted. Exact with ``order="fair"``, whose
            books need it; otherwise the gate reads no clock for a lease, and it
            is the least that earlier snapshots prove. ``None``: not known.
        granted_at: ``file:line`` that asked for it, or ``None`` unless
            ``tracemalloc`` records enough frames.
    """

    slots: int
    bytes: int
    age_s: float | None
    granted_at: str | None

    def __str__(self) -> str:
        where = f", granted at {self.granted_at}" if self.granted_at else ""
        return f"lease of {self.slots} slots, {self.bytes} bytes{_old(self)}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSnapshot:
    """A gate and its live leases, oldest first.

    Attributes:
        name: Name of the gate.
        statistics: Its counters; what is in use is the sum of the leases.
        leases: What is held.
    """

    name: str
    statistics: GateStatistics
    leases: tuple[LeaseSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """A session that is live, or closed and not quiet yet.

    Attributes:
        id: As the outside world knows it.
        generation: Tells sessions with the same id apart.
        phase: How far it got: ``open``, ``starting``, ``started`` or ``closing``.
        age_s: Seconds since it was opened; ``None`` outside of its event loop.
        outcome: How it was closed, or ``None`` while it is live.
        payloads: Boxes that are not empty.
        payload_bytes: Bytes in them.
    """

    id: str
    generation: int
    phase: str
    age_s: float | None
    outcome: Outcome | None
    payloads: int
    payload_bytes: int

    def __str__(self) -> str:
        return (
            f"session {self.id}#{self.generation} {self.outcome or self.phase}"
            f"{_old(self)}, {self.payload_bytes} bytes in {self.payloads} payloads"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySnapshot:
    """A registry with its live and closing sessions, oldest first.

    Attributes:
        statistics: Its counters; ``live`` and ``closing`` are the sessions.
        sessions: Live ones have no outcome, closing ones have theirs.
    """

    statistics: SessionStatistics
    sessions: tuple[SessionSnapshot, ...]


class _Memory:
    """What a snapshot hands on to the next one, beside what it shows."""

    __slots__ = ("_seen",)

    # Leases by when they were first seen. Weakly and by identity: an address
    # would soon be that of a newer lease.
    _seen: WeakKeyDictionary[Lease, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(_Memory):
    """What is held at one moment; ``str`` of it is a readable list.

    Attributes:
        gates: In the order they were given in.
        registries: Likewise.
    """

    gates: tuple[GateSnapshot, ...]
    registries: tuple[RegistrySnapshot, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for gate in self.gates:
            now = gate.statistics
            yield (
                f"gate {gate.name}: {now.slots_in_use} of {_limit(now.slots)} slots, "
                f"{now.bytes_in_use} of {_limit(now.bytes)} bytes, "
                f"{now.waiting} waiting"
            )
            yield from (f"  {lease}" for lease in gate.leases)
        for registry in self.registries:
            was = registry.statistics
            yield (
                f"registry: {was.live} live, {was.closing} closing, "
                f"{was.payload_bytes} bytes in {was.payloads} payloads"
            )
            yield from (f"  {session}" for session in registry.sessions)


def snapshot(
    *parts: Gate | SessionRegistry, previous: Snapshot | None = None
) -> Snapshot:
    """List the live leases of gates and the live sessions of registries.

    Call it in the thread of the event loop; then the lists and the statistics
    belong to the same moment, but for what other threads release meanwhile. The
    leases are found by one walk over the heap: some 0.1 s for a million objects.
    Leases that were there at ``gc.freeze`` are not found.

    Args:
        parts: Gates and registries, in any order.
        previous: An earlier snapshot of the same gates. From it, leases that are
            still there have an age. It keeps no lease alive.
    """
    gates = [part for part in parts if isinstance(part, Gate)]
    now = _read(anyio.current_time)
    seen: Mapping[Lease, float] = getattr(previous, "_seen", {})
    still: WeakKeyDictionary[Lease, float] = WeakKeyDictionary()
    shown: list[GateSnapshot] = []
    for gate, leases in zip(gates, _live_leases(gates), strict=True):
        aged = [(lease, _age(gate, lease, now, seen)) for lease in leases]
        shown.append(_gate(gate, aged))
        if now is not None:
            still.update((lease, seen.get(lease, now)) for lease in leases)
    result = Snapshot(
        gates=tuple(shown),
        registries=tuple(_registry(p) for p in parts if isinstance(p, SessionRegistry)),
    )
    object.__setattr__(result, "_seen", still)
    return result


def _live_leases(gates: list[Gate]) -> list[list[Lease]]:
    # Nothing but leases refers to the books and has a state: no gate needs to
    # keep a list, and a lost lease stays collectable.
    found = gc.get_referrers(*[gate._admission for gate in gates])
    leases = [each for each in found if type(each) is Lease and each.held]
    return [
        [lease for lease in leases if lease._books is gate._admission] for gate in gates
    ]


def _age(
    gate: Gate, lease: Lease, now: float | None, seen: Mapping[Lease, float]
) -> float | None:
    account = gate._admission._account
    if isinstance(account, Fair):
        return _read(partial(account.held_s, lease))
    since = seen.get(lease)
    return None if now is None or since is None else now - since


def _gate(gate: Gate, aged: list[tuple[Lease, float | None]]) -> GateSnapshot:
    leases = [
        LeaseSnapshot(
            slots=lease.slots,
            bytes=lease.bytes,
            age_s=age_s,
            granted_at=_granted_at(lease),
        )
        for lease, age_s in aged
    ]
    leases.sort(key=lambda lease: (lease.age_s or 0.0, lease.bytes), reverse=True)
    return GateSnapshot(
        name=gate.name, statistics=gate.statistics(), leases=tuple(leases)
    )


def _granted_at(lease: Lease) -> str | None:
    trace = tracemalloc.get_object_traceback(lease) or ()
    outside = (f for f in reversed(trace) if not f.filename.startswith(_OURS))
    return next((f"{frame.filename}:{frame.lineno}" for frame in outside), None)


def _registry(registry: SessionRegistry) -> RegistrySnapshot:
    now = _read(registry._now)
    sessions = sorted(
        [*registry.live(), *registry._closing],
        key=lambda session: session.generation,
    )
    return RegistrySnapshot(
        statistics=registry.statistics(),
        sessions=tuple(_session(session, now) for session in sessions),
    )


def _session(session: Session, now: float | None) -> SessionSnapshot:
    full = [payload.nbytes for payload in session._boxes.values()]
    return SessionSnapshot(
        id=session.id,
        generation=session.generation,
        phase=session.phase,
        age_s=None if now is None else now - session.opened_at,
        outcome=session.outcome,
        payloads=len(full),
        payload_bytes=sum(full),
    )


def _read(clock: Callable[[], float | None]) -> float | None:
    try:
        return clock()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _old(shown: LeaseSnapshot | SessionSnapshot) -> str:
    return "" if shown.age_s is None else f", {shown.age_s:.1f} s old"


def _limit(limit: int | None) -> str:
    return "unbounded" if limit is None else str(limit)
