"""Admission: a gate in front of work that costs slots and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, final

import anyio

from ._admission import Admission
from ._decorators import Decorator, managed
from ._fair import Fair
from ._lease import Lease
from ._ticket import cost_of, limit, whole
from .events import Observer, guarded

if TYPE_CHECKING:
    from collections.abc import Callable


class _AsBefore:
    """A default that is told from ``None`` and reads well in ``help()``."""

    def __repr__(self) -> str:
        return "<as before>"


_AS_BEFORE: Final[Any] = _AsBefore()


def _seconds(max_wait: float | None) -> float | None:
    try:
        if max_wait is None or not math.isnan(max_wait):
            return max_wait
    except TypeError:
        what = type(max_wait).__name__
        raise TypeError(
            f"max_wait must be a number of seconds or None, not {what}"
        ) from None
    raise ValueError("max_wait must be a number of seconds or None, not NaN")


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
class Gate:
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
            while its request does not fit, others may overtake it until they
            have got as much as it asks for itself.
        enforce: ``False`` refuses nobody and keeps nobody waiting, but counts
            who would have been, to try limits out on live traffic.
        name: For events, errors and metrics.
        observer: Told of each grant, release and refusal.
        clock: Monotonic seconds. Read only where somebody waits or is refused,
            or where an observer is set.

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
        self._max_wait = _seconds(max_wait)
        if max_waiting is not None:
            max_waiting = whole("max_waiting", max_waiting)
        self._admission = Admission(
            name,
            (limit("slots", slots), limit("bytes", bytes)),
            max_waiting=max_waiting,
            fair=order == "fair",
            enforce=enforce,
            emit=guarded(observer),
            clock=clock,
        )

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
                one. Use few.
            max_wait: Longest wait in seconds, by default the gate's own;
                ``None`` waits without limit.

        Returns:
            A held lease. The caller owes one `Lease.release`, which ``with``
            pays.

        Raises:
            GateFull: The line was full on arrival.
            AdmissionTimeout: *max_wait* went by.
            GateClosed: The gate was closed, before or during the wait.
            CostTooLarge: The request asks for more than the gate's capacity.
            RuntimeError: The task would wait for itself: it is inside a
                ``with lease:`` block of this gate.
            ValueError: A cost is negative, not a whole number, or all are zero;
                or *max_wait* is NaN.

        Cancellation:
            A checkpoint only where it has to wait. It returns a lease or raises
            holding nothing; a lease granted in the same moment is passed on.
        """
        longest = self._max_wait if max_wait is _AS_BEFORE else _seconds(max_wait)
        admission = self._admission
        lease = Lease(admission, cost_of(slots, bytes), key, priority)
        lease._gate = self  # noqa: SLF001
        waiter = admission.request(lease, wait=True)
        if waiter is not None:
            await admission.wait(lease, waiter, longest)
        elif admission.emit is not None:
            admission.tell_granted(lease, 0.0)
        return lease

    def try_admit(
        self,
        *,
        bytes: int = 0,  # noqa: A002 - the unit is the name
        slots: int = 1,
        key: str | None = None,
        priority: int = 0,
    ) -> Lease:
        """Return a held lease now, or refuse.

        Any thread; needs no event loop.

        Args:
            bytes: As in `admit`.
            slots: As in `admit`.
            key: As in `admit`.
            priority: As in `admit`; whoever would overtake others is refused.

        Returns:
            A held lease.

        Raises:
            GateFull: There is no room, or others wait for it already.
            GateClosed: The gate is closed.
            CostTooLarge: As in `admit`.
            ValueError: As in `admit`.
        """
        admission = self._admission
        lease = Lease(admission, cost_of(slots, bytes), key, priority)
        lease._gate = self  # noqa: SLF001
        admission.request(lease, wait=False)
        if admission.emit is not None:
            admission.tell_granted(lease, 0.0)
        return lease

    def resize(
        self,
        *,
        slots: int | None = _AS_BEFORE,
        bytes: int | None = _AS_BEFORE,  # noqa: A002 - the unit is the name
    ) -> None:
        """Change the capacity; what is not named stays.

        Raising it wakes everybody who fits now. Lowering it takes nothing from
        live leases, but grants nothing until they are back below it, and
        refuses at once whoever waits for more than there will ever be. Zero
        pauses: nobody is admitted and nobody is refused.

        Raises:
            ValueError: A limit is negative or not a whole number.
        """
        new_slots = None if slots is _AS_BEFORE else limit("slots", slots)
        new_bytes = None if bytes is _AS_BEFORE else limit("bytes", bytes)

        admission = self._admission

        def change() -> None:
            old_slots, old_bytes = admission.slots, admission.nbytes
            misfits = admission.resize(
                (
                    old_slots if new_slots is None else new_slots,
                    old_bytes if new_bytes is None else new_bytes,
                )
            )
            for ticket in misfits:
                admission.send_away(ticket, admission.refusals.too_large(ticket.cost))

        admission.apply(change)

    def close(self) -> None:
        """Refuse everybody in line and everybody to come. Idempotent.

        Live leases stay valid until they are released.
        """
        admission = self._admission

        def change() -> None:
            admission.closed = True
            for ticket in admission.clear_line():
                admission.send_away(ticket, admission.refusals.closed())

        admission.apply(change)

    def admits(
        self,
        cost: int | Callable[..., int] = 0,
        *,
        slots: int = 1,
    ) -> Decorator:
        """Decorate a function that streams: each stream is admitted here.

        Args:
            cost: Bytes to ask for, or a function of the call's arguments.
            slots: Slots to ask for.

        See `lifecycle.managed` for when the lease is released.
        """
        return managed(gate=self, cost=cost, slots=slots)

    def _held_s(self, lease: Lease) -> float | None:
        account = self._admission._account  # noqa: SLF001
        return account.held_s(lease) if isinstance(account, Fair) else None

    @property
    def name(self) -> str:
        """The name that was given to the gate."""
        return self._admission.name

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._admission.closed

    def statistics(self) -> GateStatistics:
        """The gate as it is now. Any thread."""
        admission = self._admission
        locked = admission.lock()
        try:
            slots, nbytes = admission.slots, admission.nbytes
            cancelled = admission.withdrawn - admission.timeouts
            return GateStatistics(
                slots=None if slots == math.inf else int(slots),
                slots_in_use=admission.slots_in_use,
                bytes=None if nbytes == math.inf else int(nbytes),
                bytes_in_use=admission.bytes_in_use,
                waiting=admission.waiting,
                admitted=admission.granted,
                refused=admission.refused,
                cancelled=cancelled,
                released=admission.released,
                lost=admission.lost,
                overlooked=admission.overlooked,
            )
        finally:
            if locked:
                admission.unlock()

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<Gate {self.name!r}: {now.slots_in_use} of {now.slots} slots, "
            f"{now.bytes_in_use} of {now.bytes} bytes, {now.waiting} waiting>"
        )
