"""Admission: a gate in front of work that costs slots and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import anyio

from ._books import Books
from ._decorators import Decorator, managed
from ._errors import Refused
from ._lease import Lease
from ._ledger import HELD, Ledger, cost_of, limit, whole
from ._park import current_task, new_waiter
from ._refusal import Refusals
from .events import (
    AdmissionCancelled,
    AdmissionRefused,
    LeaseGranted,
    LeaseReleased,
    LeaseSettled,
    Observer,
    guarded,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._ledger import Ticket
    from ._park import Waiter

_AS_BEFORE: Final[Any] = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatistics:
    """A gate at one moment. At any moment
    ``received = refused + cancelled + admitted + waiting``.

    Attributes:
        slots: Slot capacity, or ``None`` if unbounded.
        slots_in_use: Slots held by live leases.
        bytes: Byte capacity, or ``None`` if unbounded.
        bytes_in_use: Bytes held by live leases; above capacity after an
            estimate was settled upwards.
        waiting: Requests in line.
        received: Requests that ever asked, refused ones included.
        admitted: Leases granted.
        refused: Requests turned away for any reason.
        cancelled: Requests whose task was cancelled before it had its lease.
        released: Leases given back; ``admitted - released`` are live.
        lost: Leases among them that only the garbage collector gave back.
    """

    slots: int | None
    slots_in_use: int
    bytes: int | None
    bytes_in_use: int
    waiting: int
    received: int
    admitted: int
    refused: int
    cancelled: int
    released: int
    lost: int


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
        name: For events, errors and metrics.
        observer: Told of each grant, release and refusal.
        clock: Monotonic seconds. Read only where somebody waits or is refused,
            or where an observer is set.

    Raises:
        ValueError: A limit is negative or not a whole number.
    """

    def __init__(
        self,
        *,
        slots: int | None = None,
        bytes: int | None = None,  # noqa: A002 - the unit is the name
        max_waiting: int | None = None,
        max_wait: float | None = None,
        name: str = "gate",
        observer: Observer | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.name = name
        self._max_waiting = max_waiting
        self._max_wait = max_wait
        if max_waiting is not None:
            whole("max_waiting", max_waiting)
        self._ledger = Ledger((limit("slots", slots), limit("bytes", bytes)))
        self._books = Books(guarded(observer))
        self._refusals = Refusals(name, self._ledger, clock)
        self._closed = False
        self._received = self._refused = self._timeouts = self._lost = 0
        # Tasks inside a `with lease:` block, each as often as it is inside.
        self._inside: dict[object, int] = {}

    async def admit(
        self,
        *,
        bytes: int = 0,  # noqa: A002 - the unit is the name
        slots: int = 1,
        max_wait: float | None = _AS_BEFORE,
    ) -> Lease:
        """Wait for room and return the lease that holds it.

        All resources are granted together or not at all. Who fits at once and
        has nobody to stand behind gets in without yielding to the scheduler.

        Args:
            bytes: Estimated size of what is about to be created, 0 or more.
            slots: Slots to take, 0 or more.
            max_wait: Longest wait in seconds; ``None`` waits without limit.

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
            ValueError: A cost is negative, not a whole number, or all are zero.

        Cancellation:
            A checkpoint only where it has to wait. It returns a lease or raises
            holding nothing; a lease granted in the same moment is passed on.
        """
        lease = Lease(self, cost_of(slots, bytes))
        waiter = self._request(lease)
        waited = 0.0
        if waiter is not None:
            longest = self._max_wait if max_wait is _AS_BEFORE else max_wait
            began = self._refusals.now()
            await self._wait(lease, waiter, longest)
            waited = self._refusals.now() - began
        if self._books.emit is not None:
            self._tell_granted(lease, waited)
        return lease

    def try_admit(
        self,
        *,
        bytes: int = 0,  # noqa: A002 - the unit is the name
        slots: int = 1,
    ) -> Lease:
        """Return a held lease now, or refuse.

        Any thread; needs no event loop.

        Args:
            bytes: As in `admit`.
            slots: As in `admit`.

        Returns:
            A held lease.

        Raises:
            GateFull: There is no room, or others wait for it already.
            GateClosed: The gate is closed.
            CostTooLarge: As in `admit`.
            ValueError: As in `admit`.
        """
        lease = Lease(self, cost_of(slots, bytes))
        self._request(lease, wait=False)
        if self._books.emit is not None:
            self._tell_granted(lease, 0.0)
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

        def change() -> None:
            old_slots, old_bytes = self._ledger.capacity
            misfits = self._ledger.resize(
                (
                    old_slots if new_slots is None else new_slots,
                    old_bytes if new_bytes is None else new_bytes,
                )
            )
            for ticket in misfits:
                self._send_away(ticket, self._refusals.too_large(ticket.cost))

        self._books.apply(change)

    def close(self) -> None:
        """Refuse everybody in line and everybody to come. Idempotent.

        Live leases stay valid until they are released.
        """

        def change() -> None:
            self._closed = True
            for ticket in self._ledger.clear_line():
                self._send_away(ticket, self._refusals.closed())

        self._books.apply(change)

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

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def statistics(self) -> GateStatistics:
        """The gate as it is now. Any thread."""
        locked = self._books.lock()
        try:
            ledger = self._ledger
            slots, nbytes = ledger.capacity
            return GateStatistics(
                slots=None if slots == math.inf else int(slots),
                slots_in_use=ledger.in_use[0],
                bytes=None if nbytes == math.inf else int(nbytes),
                bytes_in_use=ledger.in_use[1],
                waiting=ledger.waiting,
                received=self._received,
                admitted=ledger.granted,
                refused=self._refused,
                cancelled=ledger.withdrawn - self._timeouts,
                released=ledger.released,
                lost=self._lost,
            )
        finally:
            if locked:
                self._books.unlock()

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"<Gate {self.name!r}: {now.slots_in_use} of {now.slots} slots, "
            f"{now.bytes_in_use} of {now.bytes} bytes, {now.waiting} waiting>"
        )

    # What a lease calls.

    def release(self, lease: Lease, *, lost: bool = False) -> None:
        """Take *lease* back; see `Lease.release`."""
        if self._books.lock_if_free():
            try:
                self._give_back(lease, lost=lost)
            finally:
                self._books.unlock()
        else:
            self._books.apply(partial(self._give_back, lease, lost=lost))

    def settle(self, lease: Lease, actual: int) -> None:
        """Correct what *lease* is charged with; see `Lease.settle`."""
        whole("bytes", actual)

        def change() -> None:
            estimated = lease.bytes
            if self._ledger.adjust(lease, (lease.slots, actual)):
                self._books.tell(
                    LeaseSettled(
                        gate=self.name, estimated_bytes=estimated, actual_bytes=actual
                    )
                )

        self._books.apply(change)

    def enter(self, task: object) -> None:
        """Note that *task* went into a ``with lease:`` block."""
        self._inside[task] = self._inside.get(task, 0) + 1

    def leave(self, task: object) -> None:
        """Note that a ``with lease:`` block that *task* had entered was left."""
        depth = self._inside.pop(task, 1) - 1
        if depth:
            self._inside[task] = depth

    # Into the line, and out of it.

    def _request(self, lease: Lease, *, wait: bool = True) -> Waiter | None:
        """Grant at once (``None``), or queue and return what to wait on."""
        if not self._books.lock():
            raise self._refusals.full("is being changed by this very thread")
        try:
            waiter, refusal = self._decide(lease, wait=wait)
            self._received += 1
            self._refused += refusal is not None
        finally:
            self._books.unlock()
        if refusal is not None:
            self._tell_refused(lease.cost, refusal)
            raise refusal
        return waiter

    def _decide(
        self, lease: Lease, *, wait: bool
    ) -> tuple[Waiter | None, Refused | None]:
        ledger = self._ledger
        if self._closed:
            return None, self._refusals.closed()
        if ledger.too_large(lease.cost):
            return None, self._refusals.too_large(lease.cost)
        if not (wait and ledger.must_queue()) and ledger.try_charge(lease):
            return None, None
        if not wait:
            return None, self._refusals.full("has no room now")
        if ledger.waiting or not ledger.fits(lease.cost):
            # It will really wait, not only for its turn to run.
            most = self._max_waiting
            if most is not None and ledger.waiting >= most:
                return None, self._refusals.full(f"has its line of {most} full")
            if self._inside and current_task() in self._inside:
                raise self._refusals.itself()
            self._refusals.sample()
        waiter = lease.waiter = new_waiter()
        ledger.enqueue(lease)
        return waiter, None

    async def _wait(self, lease: Lease, waiter: Waiter, max_wait: float | None) -> None:
        try:
            if max_wait is None:
                await waiter.park()
            else:
                with anyio.move_on_after(max_wait):
                    await waiter.park()
        except BaseException:
            self._books.apply(partial(self._left_by_cancellation, lease))
            raise
        if lease.state == HELD:  # also where the time was up in the same moment
            self._books.apply(partial(self._ledger.resume, lease))
            return
        refusal, lease.refusal = lease.refusal, None
        if refusal is None:
            self._books.apply(partial(self._left_by_timeout, lease))
            refusal = self._refusals.timeout(max_wait)
        else:
            self._books.apply(partial(self._ledger.resume, lease))
        self._tell_refused(lease.cost, refusal)
        try:
            raise refusal
        finally:
            del refusal  # its traceback holds this frame

    def _left_by_cancellation(self, lease: Lease) -> None:
        self._ledger.resume(lease)
        if lease.state == HELD:
            self._give_back(lease)
        elif lease.refusal is None:
            self._ledger.withdraw(lease)
            slots, nbytes = lease.cost
            self._books.tell(
                AdmissionCancelled(gate=self.name, slots=slots, bytes=nbytes)
            )

    def _left_by_timeout(self, lease: Lease) -> None:
        self._ledger.resume(lease)
        self._ledger.withdraw(lease)
        self._timeouts += 1
        self._refused += 1

    def _give_back(self, lease: Lease, *, lost: bool = False) -> None:
        if self._ledger.release(lease):
            self._lost += lost
            if self._books.emit is not None:
                slots, nbytes = lease.cost
                self._books.tell(
                    LeaseReleased(gate=self.name, slots=slots, bytes=nbytes, lost=lost)
                )

    def _send_away(self, ticket: Ticket, refusal: Refused) -> None:
        assert isinstance(ticket, Lease)
        ticket.refusal = refusal
        self._refused += 1
        ticket.granted()  # wakes it; the refusal tells it what for

    def _tell_granted(self, lease: Lease, waited_s: float) -> None:
        emit = self._books.emit
        if emit is not None:
            slots, nbytes = lease.cost
            emit(
                LeaseGranted(
                    gate=self.name, slots=slots, bytes=nbytes, waited_s=waited_s
                )
            )

    def _tell_refused(self, cost: tuple[int, ...], refusal: Refused) -> None:
        emit = self._books.emit
        if emit is not None:
            emit(
                AdmissionRefused(
                    gate=self.name,
                    slots=cost[0],
                    bytes=cost[1],
                    reason=refusal.reason,
                    retry_after=refusal.retry_after,
                )
            )
