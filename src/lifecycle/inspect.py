"""What gates and registries hold right now, and who keeps an object alive.

For a debug endpoint, a test or a console. Both answers come from the garbage
collector, so a request pays nothing for being inspectable, and whoever asks pays
for a walk over the heap.
"""

# ruff: noqa: SLF001 - what nobody else needs to see is looked up inside
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import anyio

from ._gate import Gate
from ._holders import Holder, who_holds
from ._lease import Lease
from ._sessions import SessionRegistry

__all__ = ("Held", "Holder", "Snapshot", "snapshot", "who_holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A live lease, a session that is not quiet yet, or a payload in its box.

    Attributes:
        what: ``lease``, ``session`` or ``payload``.
        name: Name of the gate, or ``id#generation`` of the session.
        phase: ``held``; or of the session: ``open``, ``starting``, ``started`` or
            the outcome that it was closed with.
        age_s: Seconds since the session was opened, or the lease was granted; as
            only ``order="fair"`` knows that, else since a snapshot first showed
            the lease. ``None`` if not known.
        slots: Slots of a lease.
        bytes: Bytes that a lease is charged with, or of a payload.
    """

    what: str
    name: str
    phase: str
    age_s: float | None
    slots: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        words = [f"{self.name}: {self.what}", self.phase]
        words += [f"{self.slots} slots"] if self.slots else []
        words += [f"{self.bytes} bytes"] if self.bytes else []
        words += [] if self.age_s is None else [f"{self.age_s:.1f} s old"]
        return ", ".join(words)


class Snapshot(tuple[Held, ...]):
    """What was held at one moment, as a tuple; ``str`` of it is a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing is held"


def snapshot(*parts: Gate | SessionRegistry) -> Snapshot:
    """List the live leases of gates, and the sessions and payloads of registries.

    Call it in the thread of the event loop; then the list and the ``statistics()``
    of the parts belong to the same moment, but for what other threads release.
    Leases are found by a walk over the heap for each gate: some 0.1 s for a million
    objects, and none that were there at ``gc.freeze``.
    """
    lists = (_leases(p) if isinstance(p, Gate) else _sessions(p) for p in parts)
    return Snapshot(held for each in lists for held in each)


def _leases(gate: Gate) -> Iterator[Held]:
    # No gate needs to keep a list, and a lost lease stays collectable.
    for lease in gc.get_referrers(gate):
        if type(lease) is Lease and lease.held:
            yield Held(
                what="lease",
                name=gate.name,
                phase="held",
                age_s=_age(lease),
                slots=lease.slots,
                bytes=lease.bytes,
            )


def _age(lease: Lease) -> float | None:
    with suppress(RuntimeError):  # no event loop runs in this thread
        age_s = lease._gate._held_s(lease)
        if age_s is not None:
            return age_s
        now = anyio.current_time()
        if hasattr(lease, "_seen_at"):
            return now - lease._seen_at
        lease._seen_at = now
    return None


def _sessions(registry: SessionRegistry) -> Iterator[Held]:
    now = None
    with suppress(RuntimeError):
        now = registry._now()
    sessions = [*registry.live(), *registry._closing]
    for session in sorted(sessions, key=lambda session: session.generation):
        shown = Held(
            what="session",
            name=session.key,
            phase=session.outcome or session.phase,
            age_s=None if now is None else now - session.opened_at,
        )
        yield shown
        for payload in session._boxes.values():
            yield replace(shown, what="payload", bytes=payload.nbytes)
