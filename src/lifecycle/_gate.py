"""Admission: a gate in front of work that costs slots and bytes."""

# ruff: noqa: SLF001 - a lease and its gate are one thing in two modules

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, final

import anyio

from ._books import Books
from ._checks import Unique, cost, limit, seconds_or_none
from ._decorators import Decorator, managed
from ._fair import Fair
from ._lease import Lease
from ._ledger import Ledger
from ._park import readable
from .events import Observer, guarded

if TYPE_CHECKING:
    from collections.abc import Callable


class _AsBefore:
    """A default that is told from ``None`` and reads well in ``help()``."""

    def __repr__(self) -> str:
        return "<as before>"


_AS_BEFORE: Final[Any] = _AsBefore()
_MAY_WAIT: Final = True
_NOW_OR_NEVER: Final = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatistics:
    """A gate at one moment.

    Attributes:
        slots: Slot capacity, or ``None`` if unbounded.
        slots_in_use: Slots held by live leases.
        bytes: Byte capacity, or ``None`` if unbounded.
        bytes_in_use: Bytes held by live leases; above capacity after an
            estimate was settled upwards.
        waiting: Requests in line.
        max_waiting: Longest line, or ``None`` if unbounded.
        admitted: Leases granted.
        refused: Requests turned away for any reason.
        cancelled: Requests whose task was cancelled before it had its lease.
        released: Leases given back; ``admitted - released`` are live.
        lost: Leases among them that only the garbage collector gave back.
        overlooked: Leases that a gate that enforced its limits would have refused
            or kept waiting.
    """

    slots: int | None
    slots_in_use: int
    bytes: int | None
    bytes_in_use: int
    waiting: int
    max_waiting: int | None
    admitted: int
    refused: int
    cancelled: int
    released: int
    lost: int
    overlooked: int

    @property
    def received(self) -> int:
        """Requests that ever asked, whatever became of them."""
        return self.admitted + self.refused + self.cancelled + self.waiting


@final
class Gate(Unique, Books):
    """Admits requests in the order they come, as far as slots and bytes reach.

    One gate guards one lifetime. Payload memory until hand-off and requests in
    flight until their end are two lifetimes, hence two gates.

    A gate can be made before any event loop runs, and shared by threads.

    Args:
        slots: Leases' slots at a time; ``None`` is unbounded, 0 is paused.
        bytes: Leases' bytes at a time; ``None`` is unbounded, 0 is paused.
        max_waiting: Longest line; a newcomer beyond it is refused at once.
            ``None`` is unbounded, 0 refuses whoever would have to wait.
        max_wait: Longest wait in seconds unless the request names its own.
        order: ``"fifo"``: as they come, the head blocks those behind it.
            ``"fair"``: the key that has had the least share-seconds goes next;
            while its request does not fit, those next in order may overtake it
            until they have got as much as it asks for itself, those that are
            held for longer counting for more.
        enforce: ``False`` refuses nobody and keeps nobody waiting, but counts
            who would have been, to try limits out on live traffic.
        name: For events, errors and metrics.
        observer: Told of each grant, release and refusal.
        clock: Monotonic seconds. Read only where somebody waits or is refused,
            or where an observer is set.

    Attributes:
        name: The name that was given to the gate.
        closed: Whether `close` was called.

    Raises:
        ValueError: A limit is negative or not a whole number; or *max_wait* is
            NaN; or there is no such *order*.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        bytes: int | None = None,  # noqa: A002 - the unit is the name
        max_waiting: int | None = None,
        max_wait: float | None = None,
        order: Literal["fifo", "fair"] = "fifo",
        enforce: bool = True,
        name: str = "gate",
        observer: Observer | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        if order not in ("fifo", "fair"):
            raise ValueError(f"order must be 'fifo' or 'fair', not {order!r}")
        now = readable(clock)
        limits = limit("slots", slots), limit("bytes", bytes)
        ledger = Fair(*limits, now) if order == "fair" else Ledger(*limits)
        super().__init__(name, ledger, guarded(observer), now)
        self._enforce = enforce
        self._max_wait = seconds_or_none("max_wait", max_wait)
        self._max_waiting = limit("max_waiting", max_waiting)

    async def admit(
        self,
        *,
        bytes: int = 0,  # noqa: A002 - the unit is the name
        slots: int = 1,
        key: str | None = None,
        priority: int = 0,
        max_wait: float | None = _AS_BEFORE,
    ) -> Lease:
        """Wait for room and return the lease that holds it.

        All resources are granted together or not at all. Who fits at once and
        has nobody to stand behind gets in without yielding to the scheduler.

        Args:
            bytes: Estimated size of what is about to be created, 0 or more.
            slots: Slots to take, 0 or more.
            key: On whose behalf; with ``order="fair"`` keys share the gate evenly.
            priority: With ``order="fifo"``, a higher one goes before every lower
                one. Use few. (What is the other order's changes nothing here.)
            max_wait: Longest wait in seconds, by default the gate's own;
                ``None`` waits without limit.

        Returns:
            A held lease. Its owner owes one `Lease.release`, which ``with`` pays.

        Raises:
            GateFull: The line was full on arrival.
            AdmissionTimeout: *max_wait* went by.
            GateClosed: The gate was closed, also during the wait.
            CostTooLarge: The request asks for more than the gate's capacity.
            RuntimeError: The task would wait for itself: it is inside a
                ``with lease:`` block of this gate.
            ValueError: A cost is negative, not a whole number, or all are zero;
                or *max_wait* is NaN.

        Cancellation:
            A checkpoint only where it has to wait. It returns a lease or raises
            holding nothing; a lease granted in the same moment is passed on.
        """
        if max_wait is not _AS_BEFORE:
            max_wait = seconds_or_none("max_wait", max_wait)
        if type(slots) is not int or type(bytes) is not int or slots < 1 or bytes < 0:
            slots, bytes = cost(slots, bytes)  # noqa: A001
        lease = self._request(slots, bytes, key, priority, _MAY_WAIT)
        if (waiter := lease._waiter) is not None:
            longest = self._max_wait if max_wait is _AS_BEFORE else max_wait
            await self._wait(lease, waiter, longest)
        return lease

    def try_admit(
        self,
        *,
        bytes: int = 0,  # noqa: A002 - the unit is the name
        slots: int = 1,
        key: str | None = None,
        priority: int = 0,
    ) -> Lease:
        """Return a held lease now, or refuse. Any thread; needs no event loop.

        Arguments and refusals are those of `admit`; nobody is overtaken.

        Raises:
            GateFull: There is no room, or others wait for it already; or the
                caller is a finaliser or signal handler that interrupts the gate.
        """
        slots, bytes = cost(slots, bytes)  # noqa: A001
        return self._request(slots, bytes, key, priority, _NOW_OR_NEVER)

    def resize(
        self,
        *,
        slots: int | None = _AS_BEFORE,
        bytes: int | None = _AS_BEFORE,  # noqa: A002 - the unit is the name
    ) -> None:
        """Change the capacity; what is not named stays. Any thread.

        Raising it wakes everybody who fits now. Lowering it takes nothing from
        live leases, but grants nothing until they are back below it, and
        refuses at once whoever waits for more than there will ever be. Zero
        pauses: nobody is admitted and nobody is refused.

        Raises:
            ValueError: A limit is negative or not a whole number.
        """
        new_slots = None if slots is _AS_BEFORE else limit("slots", slots)
        new_bytes = None if bytes is _AS_BEFORE else limit("bytes", bytes)
        self._change(self._resize, new_slots, new_bytes)

    def close(self) -> None:
        """Refuse everybody in line and everybody to come. Idempotent. Any thread.

        Live leases stay valid until they are released.
        """
        self._change(self._close)

    def admits(
        self, cost: int | Callable[..., int] = 0, *, slots: int = 1
    ) -> Decorator:
        """Decorate a function that streams, as `lifecycle.managed` with this gate."""
        return managed(gate=self, cost=cost, slots=slots)

    def statistics(self) -> GateStatistics:
        """The gate as it is now. Any thread."""
        return self._look(self._read)

    def _read(self) -> GateStatistics:
        ledger = self._ledger
        slots, nbytes, longest = ledger.slots, ledger.nbytes, self._max_waiting
        return GateStatistics(
            slots=None if slots == math.inf else int(slots),
            slots_in_use=ledger.slots_in_use,
            bytes=None if nbytes == math.inf else int(nbytes),
            bytes_in_use=ledger.bytes_in_use,
            waiting=ledger.waiting,
            max_waiting=None if longest == math.inf else int(longest),
            admitted=ledger.admitted,
            refused=self._refused,
            cancelled=ledger.withdrawn - self._timed_out,
            released=ledger.released,
            lost=self._lost,
            overlooked=self._overlooked,
        )

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<Gate {self.name!r}: {now.slots_in_use} of {now.slots} slots, "
            f"{now.bytes_in_use} of {now.bytes} bytes, {now.waiting} waiting>"
        )
