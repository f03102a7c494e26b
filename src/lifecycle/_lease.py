"""What one admitted request holds, whichever kind of gate granted it."""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Self, TypeVar, TypeVarTuple, final

from ._eventloop import current_task
from ._exceptions import AdmissionTimeout, GateClosed, GateFull, Refused
from ._gate_statistics import GateStatistics
from ._lock import ChangeLock
from ._owner import owner
from ._queues import DONE, HELD, Ticket
from ._validation import NoCopy, brief, check_amount, made_by
from .events import AdmissionRefused, Event, LeaseSettled, Observer, guarded

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Grantor(NoCopy, ABC):
    """What all kinds of gates share: changes under a lock, and what they say of them.

    Attributes:
        name: For events, errors and metrics.
        closed: Whether it admits no more.
    """

    def __init__(self, name: str, observer: Observer | None) -> None:
        self.name = name
        self.closed = self._bytes_only = self._has_warned = False
        self._lock = ChangeLock()
        # Reported without the lock: an observer may use the gate.
        self._emit = guarded(observer)
        self._events: deque[Event] = deque()

    @abstractmethod
    def statistics(self) -> GateStatistics:
        """Return the gate as it is now."""

    # Changes, under the lock.

    def _apply(self, change: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make *change* now, or leave it to the holder of the lock. Never waits."""
        self._lock.deferred.append((change, args))
        self._flush()

    def _ask(self, longest: float, question: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return what *question* returns while nothing changes, as `ChangeLock.ask`."""
        try:
            return self._lock.ask(longest, question, *args)
        finally:
            self._flush()

    def _flush(self) -> None:
        """Make deferred changes, then report events without the lock."""
        if self._lock.deferred:
            self._lock.make_deferred_changes()
        # Not during a change, which may be further up this very stack: an observer may
        # use the gate. The holder of the lock reports once it has unlocked, but for the
        # thread of a shared gate, which leaves that to the next call.
        while self._emit and self._events and not self._lock.interrupted():
            with suppress(IndexError):  # another thread was faster
                self._emit(self._events.popleft())

    # Of leases. None of these waits or raises.

    def _release(self, lease: Lease) -> None:
        self._apply(self._take_back, lease)

    def _lose(self, lease: Lease) -> None:
        self._apply(self._take_back, lease, True)

    def _settle(self, lease: Lease, nbytes: int) -> None:
        self._apply(self._settle_now, lease, nbytes)

    @abstractmethod
    def _take_back(self, lease: Lease, lost: bool = False) -> None: ...  # noqa: FBT001, FBT002

    @abstractmethod
    def _settle_now(self, lease: Lease, nbytes: int) -> None: ...

    def _held_seconds(self, lease: Lease) -> float | None:  # noqa: ARG002
        """Seconds that *lease* has been held, where the order depends on it."""
        return None

    # Refusals, events and warnings.

    def _refuse(self, ticket: Ticket, refusal: Refused) -> Refused:
        reason, retry_after = refusal.reason, refusal.retry_after
        self._note(AdmissionRefused, ticket, reason=reason, retry_after=retry_after)
        return refusal

    def _retry_in(
        self, seconds: float, refused: type[GateFull | AdmissionTimeout], how: str
    ) -> Refused:
        message = f"gate {self.name!r} {how}; retry in {seconds:.1f} s"
        return refused(message, retry_after=seconds)

    def _gate_closed(self) -> Refused:
        return GateClosed(f"gate {self.name!r} is closed; ask another server")

    def _note(self, kind: Callable[..., Event], ticket: Ticket, **more: object) -> None:
        """Append an event, to be reported without the lock."""
        if self._emit is not None:
            slots, nbytes = ticket.slots, ticket.bytes
            event = kind(gate=self.name, slots=slots, bytes=nbytes, **more)
            self._events.append(event)

    def _note_settled(self, estimate: int, nbytes: int) -> None:
        if self._emit is not None:
            cost = {"estimated_bytes": estimate, "actual_bytes": nbytes}
            self._events.append(LeaseSettled(gate=self.name, **cost))

    def _warn_of_limits(self) -> None:
        what = f"gate {self.name!r} has no limit and admits everything"
        warn(f"{what}; name slots or bytes, if only as None", 4)

    def _warn_of_bytes(self) -> None:
        self._bytes_only, self._has_warned = False, True
        what = f"a request named no bytes at gate {self.name!r}, which limits bytes"
        warn(f"{what}; say how many, if only bytes=0", 4)


def warn(message: str, stacklevel: int) -> None:
    """Warn of what is most likely a mistake, as *stacklevel* counts from here."""
    warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)


@final
class Lease(Ticket, NoCopy):
    """What one admitted request holds, from `Gate.admit` until hand-off.

    Use it as a context manager, or call `release` yourself. A lease may be
    released from any task and any thread, and may be passed on to another task.
    A lease that is lost to the garbage collector is released there, with a
    `ResourceWarning` (which says where it was granted under ``tracemalloc``).

    Attributes:
        slots: Slots that the lease was granted.
        bytes: Bytes that it is charged with: the estimate until `settle`.
        gate: The gate that granted it.
    """

    # ruff: noqa: SLF001 - a lease calls its gate

    # Only a gate makes leases, hence no `__init__`. `entered_by` is the task inside
    # the `with` block, and `owned_by_start` means that a supervised start releases it.
    __slots__ = (
        "__weakref__",
        "entered_by",
        "gate",
        "number",
        "owned_by_start",
        "seen_at",
    )
    gate: Grantor
    number: int  # where the gate knows its leases by number
    entered_by: object
    owned_by_start: bool
    seen_at: float  # by `lifecycle.debug.snapshot`
    __new__ = made_by("`await gate.admit()` or `gate.try_admit()`")

    @property
    def held(self) -> bool:
        """Whether the lease still holds what it was granted."""
        return self.state == HELD

    def release(self) -> None:
        """Give everything back and grant the next requests that fit.

        Synchronous, idempotent, callable from any thread, from a finaliser and
        from a signal handler; it never waits. Call it at hand-off: what happens
        afterwards is no longer this gate's concern.
        """
        self.gate._release(self)

    def settle(self, *, bytes: int) -> None:  # noqa: A002 - the unit is the name
        """Replace the estimate by the *bytes* that were really needed.

        Down grants the next requests that fit. Up never waits and never fails: it may
        take the gate over its capacity, and then no bytes are granted until that is
        repaid. A lease that is not held any more ignores the call. Any thread.

        Args:
            bytes: Actual size in bytes, 0 or more.

        Raises:
            ValueError: *bytes* is negative or not a whole number.
        """
        self.gate._settle(self, check_amount("bytes", bytes))

    def __enter__(self) -> Self:
        if self.state == HELD and (task := current_task()) is not None:
            self.entered_by = task
            _entered.set((*filter(_inside, _entered.get()), weakref.ref(self)))
        return self

    def __exit__(self, *_: object) -> None:
        self.entered_by = None
        if not self.owned_by_start:
            self.release()

    def __del__(self) -> None:
        if self.state == HELD and not sys.is_finalizing():
            self.gate._lose(self)
            cost = f"{brief(self.slots)} slots and {brief(self.bytes)} bytes"
            what = f"a lease of {cost} of gate {self.gate.name!r} was never released"
            self._warn(f"{what}; use it in a with block, or call release()")

    def __repr__(self) -> str:
        state = "held" if self.held else "not held"
        what = f"{brief(self.slots)} slots, {brief(self.bytes)} bytes"
        return f"<Lease of gate {self.gate.name!r}: {what}, {state}>"


def new_lease(gate: Grantor, slots: int, nbytes: int, key: str | None) -> Lease:
    """Return a lease that is not held yet, and is claimed by the current owner."""
    lease: Lease = object.__new__(Lease)
    lease.gate, lease.slots, lease.bytes, lease.key = gate, slots, nbytes, key
    lease.state, lease.owned_by_start = DONE, False
    if (claim := owner.get()) is not None:
        claim(lease)
    return lease


# The leases inside whose blocks a task is; its context dies with it. They are weak: one
# that is dropped there, for example with an exit stack, is lost like any other.
_entered: ContextVar[tuple[weakref.ref[Lease], ...]] = ContextVar("entered", default=())


def _inside(entered: weakref.ref[Lease]) -> bool:
    lease = entered()
    return lease is not None and lease.held and lease.entered_by is not None


def inside_lease_of(gate: Grantor) -> bool:
    """Whether this task is in a ``with lease:`` block of *gate*: to wait would hang."""
    if not _entered.get():
        return False
    task = current_task()
    inside = (entered() for entered in _entered.get() if _inside(entered))
    return any(it and it.gate is gate and it.entered_by is task for it in inside)


def deadlock(gate: Grantor) -> RuntimeError:
    """Return the error of a task that would wait for itself."""
    what = f"deadlock at gate {gate.name!r}: this task would wait inside a with"
    how = "ask for all that the request needs in one admission"
    return RuntimeError(f"{what} block of a lease of the same gate; {how}")
