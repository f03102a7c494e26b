"""What happens at a gate: the way into the line, and the ways out of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, final

import anyio

from ._books import Books
from ._lease import Lease
from ._fair import Fair
from ._line import Lanes
from ._ticket import HELD, whole
from ._park import current_task, new_waiter
from ._refusal import Refusals
from .events import (
    AdmissionCancelled,
    AdmissionRefused,
    LeaseGranted,
    LeaseReleased,
    LeaseSettled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._errors import Refused
    from ._ticket import Cost, Ticket
    from ._park import Waiter
    from .events import Event


@final
class Admission(Books):
    """The books of one gate, and the tasks that stand in its line.

    Args:
        name: Name of the gate.
        capacity: Slots and bytes.
        max_waiting: Longest line, or ``None``.
        fair: Whether keys share the gate evenly.
        enforce: Whether anybody is refused or kept waiting at all.
        emit: Told of events.
        clock: Monotonic seconds.
    """

    __slots__ = (
        "_enforce",
        "_inside",
        "_max_waiting",
        "closed",
        "lost",
        "name",
        "overlooked",
        "refusals",
        "refused",
        "timeouts",
    )

    def __init__(
        self,
        name: str,
        capacity: Sequence[float],
        *,
        max_waiting: int | None,
        fair: bool,
        enforce: bool,
        emit: Callable[[Event], None] | None,
        clock: Callable[[], float],
    ) -> None:
        line = Fair(self.share, clock) if fair else Lanes()
        super().__init__(capacity, line, emit)
        self.name = name
        self.refusals = Refusals(name, self, clock)
        self.closed = False
        self.refused = self.timeouts = self.lost = self.overlooked = 0
        self._enforce = enforce
        self._max_waiting = max_waiting
        # Tasks inside a `with lease:` block, each as often as it is inside.
        self._inside: dict[object, int] = {}

    # What a gate calls.

    def request(self, lease: Lease, *, wait: bool) -> Waiter | None:
        """Grant at once (``None``), or queue and return what to wait on."""
        lock = self._lock
        if not lock.acquire(False) and not self.lock():
            raise self.refusals.full("is being changed by this very thread")
        waiter = refusal = None
        try:
            slots, nbytes = lease.cost
            # `fits` and `charge`, written out: every admission comes through here.
            if (
                self.closed
                or (self.unresumed if wait else self.waiting)
                or self._account is not None
                or (slots and self.slots_in_use + slots > self.slots)
                or (nbytes and self.bytes_in_use + nbytes > self.nbytes)
            ):
                waiter, refusal = self._decide(lease, wait=wait)
            else:
                self.slots_in_use += slots
                self.bytes_in_use += nbytes
                self.granted += 1
                lease.state = HELD
        finally:
            lock.release()
            if self._mail:
                self._drain()
        if refusal is not None:
            self._tell_refused(lease.cost, refusal)
            raise refusal
        return waiter

    def _decide(
        self, lease: Lease, *, wait: bool
    ) -> tuple[Waiter | None, Refused | None]:
        straight_in = not (self.unresumed if wait else self.waiting)
        if not self.closed and straight_in and self.fits(lease.cost):
            self.charge(lease)
            return None, None
        if not self._enforce and not self.closed:
            self.overlooked += 1
            self.charge(lease)
            return None, None
        refusal = self._objection(lease.cost, wait=wait)
        if refusal is not None:
            self.refused += 1
            return None, refusal
        waiter = lease.waiter = new_waiter()
        lease.refusal = None
        self.enqueue(lease)
        return waiter, None

    def _objection(self, cost: Cost, *, wait: bool) -> Refused | None:
        if self.closed:
            return self.refusals.closed()
        if self.too_large(cost):
            return self.refusals.too_large(cost)
        if not wait:
            return self.refusals.full("has no room now")
        if self.waiting or not self.fits(cost):
            # It will really wait, not only for its turn to run.
            most = self._max_waiting
            if most is not None and self.waiting >= most:
                return self.refusals.full(f"has its line of {most} full")
            if self._inside and current_task() in self._inside:
                raise self.refusals.itself()
        return None

    def share(self, cost: Cost) -> float:
        """The part of the gate that *cost* takes: the larger of its two shares."""
        slots, nbytes = cost
        return max(slots / (self.slots or 1), nbytes / (self.nbytes or 1))

    async def wait(self, lease: Lease, waiter: Waiter, max_wait: float | None) -> None:
        """Wait in line, and come back with the lease held or not at all."""
        began = 0.0 if self.emit is None else self.refusals.now()
        try:
            if max_wait is None:
                await waiter.park()
            else:
                with anyio.move_on_after(max_wait):
                    await waiter.park()
        except BaseException:
            self.apply(partial(self._left_by_cancellation, lease))
            raise
        if lease.state != HELD:
            self._raise_refusal(lease, max_wait)
        # Also where the time was up in the same moment: the grant wins.
        self.apply(partial(self.resume, lease))
        if self.emit is not None:
            self.tell_granted(lease, self.refusals.now() - began)

    def _raise_refusal(self, lease: Lease, max_wait: float | None) -> NoReturn:
        refusal, lease.refusal = lease.refusal, None
        if refusal is None:
            self.apply(partial(self._left_by_timeout, lease))
            refusal = self.refusals.timeout(max_wait)
        else:
            self.apply(partial(self.resume, lease))
        self._tell_refused(lease.cost, refusal)
        try:
            raise refusal
        finally:
            del refusal  # its traceback holds this frame

    def _left_by_cancellation(self, lease: Lease) -> None:
        self.resume(lease)
        if lease.state == HELD:
            self._give_back(lease)
        elif lease.refusal is None:
            self.withdraw(lease)
            slots, nbytes = lease.cost
            self.tell(AdmissionCancelled(gate=self.name, slots=slots, bytes=nbytes))

    def _left_by_timeout(self, lease: Lease) -> None:
        self.resume(lease)
        self.withdraw(lease)
        self.timeouts += 1
        self.refused += 1

    def _give_back(self, lease: Lease, *, lost: bool = False) -> None:
        if self.release(lease):
            self.lost += lost
            slots, nbytes = lease.cost
            self.tell(
                LeaseReleased(gate=self.name, slots=slots, bytes=nbytes, lost=lost)
            )

    def send_away(self, ticket: Ticket, refusal: Refused) -> None:
        """Wake a waiter that the ledger has dropped."""
        assert isinstance(ticket, Lease)
        ticket.refusal = refusal
        self.refused += 1
        ticket.granted()  # wakes it; the refusal tells it what for

    def tell_granted(self, lease: Lease, waited_s: float) -> None:
        """Tell the observer."""
        emit = self.emit
        if emit is not None:
            slots, nbytes = lease.cost
            emit(
                LeaseGranted(
                    gate=self.name, slots=slots, bytes=nbytes, waited_s=waited_s
                )
            )

    def _tell_refused(self, cost: Cost, refusal: Refused) -> None:
        emit = self.emit
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

    # What a lease calls.

    def give_back(self, lease: Lease) -> None:
        """Take *lease* back; see `Lease.release`."""
        lock = self._lock
        if self.emit is not None or not lock.acquire(False):
            self.apply(partial(self._give_back, lease))
            return
        try:
            self.release(lease)
        finally:
            lock.release()
            if self._mail:
                self._drain()

    def lose(self, lease: Lease) -> None:
        """Take *lease* back from the garbage collector."""
        self.apply(partial(self._give_back, lease, lost=True))

    def settle(self, lease: Lease, actual: int) -> None:
        """Correct what *lease* is charged with; see `Lease.settle`."""
        whole("bytes", actual)

        def change() -> None:
            estimated = lease.bytes
            if self.adjust(lease, (lease.slots, actual)):
                self.tell(
                    LeaseSettled(
                        gate=self.name, estimated_bytes=estimated, actual_bytes=actual
                    )
                )

        self.apply(change)

    def enter(self, task: object) -> None:
        """Note that *task* went into a ``with lease:`` block."""
        self._inside[task] = self._inside.get(task, 0) + 1

    def leave(self, task: object) -> None:
        """Note that a ``with lease:`` block that *task* had entered was left."""
        depth = self._inside.pop(task, 1) - 1
        if depth:
            self._inside[task] = depth
