"""What happens at a gate: the way into the line, and the ways out of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import anyio

from ._books import Books
from ._fair import Fair
from ._lease import Lease
from ._line import Lanes
from ._park import current_task, new_waiter
from ._refusal import Refusals
from ._ticket import HELD, whole
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
    from ._park import Waiter
    from ._ticket import Cost, Ticket
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
        line = Fair(self.share, self.now) if fair else Lanes()
        super().__init__(capacity, line, emit)
        self.name = name
        self.refusals = Refusals(name, self, clock)
        self.closed = False
        self.refused = self.timeouts = self.lost = self.overlooked = 0
        self._enforce = enforce
        self._max_waiting = max_waiting
        # Tasks inside `with lease:` blocks, and the leases of these.
        self._inside: dict[object, tuple[Lease, ...]] = {}

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
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame
        return waiter

    def _decide(
        self, lease: Lease, *, wait: bool
    ) -> tuple[Waiter | None, Refused | None]:
        hash(lease.key)  # raises here, where nothing is charged yet
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
                line = f"its line of {most} is full" if most else "nobody may wait"
                return self.refusals.full(f"has no room, and {line}")
            if self._inside:
                mine = self._inside.get(current_task(), ())
                if any(lease.held for lease in mine):
                    raise self.refusals.itself()
        return None

    def share(self, cost: Cost) -> float:
        """The part of the gate that *cost* takes: the larger of its two shares."""
        slots, nbytes = cost
        return max(slots / (self.slots or 1), nbytes / (self.nbytes or 1))

    def now(self) -> float:
        """Seconds by the gate's clock, as far as it can be read here."""
        return self.refusals.now()

    async def wait(self, lease: Lease, waiter: Waiter, max_wait: float | None) -> None:
        """Wait in line, and come back with the lease held or not at all."""
        began = self._seconds()
        try:
            if max_wait is None:
                await waiter.park()
            else:
                with anyio.move_on_after(max_wait):
                    await waiter.park()
        except BaseException:
            waited = self._seconds() - began
            self.apply(partial(self._left_by_cancellation, lease, waited))
            raise
        refusal = self._outcome_of(lease, max_wait)
        if refusal is None:
            self.tell_granted(lease, self._seconds() - began)
            return
        self._tell_refused(lease.cost, refusal)
        try:
            raise refusal
        finally:
            del refusal  # its traceback holds this frame

    def _seconds(self) -> float:
        return 0.0 if self.emit is None else self.now()

    def _outcome_of(self, lease: Lease, max_wait: float | None) -> Refused | None:
        # Locked: another thread wakes a waiter before it has charged it.
        with self._lock:
            self.resume(lease)
            refusal, lease.refusal = lease.refusal, None
            if lease.state != HELD and refusal is None:
                # Where the grant came in the same moment, the grant wins.
                self.withdraw(lease)
                self.timeouts += 1
                self.refused += 1
                refusal = self.refusals.timeout(max_wait)
        self._drain()
        return refusal

    def _left_by_cancellation(self, lease: Lease, waited_s: float) -> None:
        self.resume(lease)
        if lease.state == HELD:
            self.tell(self._grant_of(lease, waited_s))
            self._give_back(lease)
        elif lease.refusal is not None:
            self.tell(self._refusal_of(lease.cost, lease.refusal))
        else:
            self.withdraw(lease)
            slots, nbytes = lease.cost
            self.tell(AdmissionCancelled(gate=self.name, slots=slots, bytes=nbytes))

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
        if self.emit is not None:
            self.emit(self._grant_of(lease, waited_s))

    def _tell_refused(self, cost: Cost, refusal: Refused) -> None:
        if self.emit is not None:
            self.emit(self._refusal_of(cost, refusal))

    def _grant_of(self, lease: Lease, waited_s: float) -> LeaseGranted:
        slots, nbytes = lease.cost
        return LeaseGranted(
            gate=self.name, slots=slots, bytes=nbytes, waited_s=waited_s
        )

    def _refusal_of(self, cost: Cost, refusal: Refused) -> AdmissionRefused:
        return AdmissionRefused(
            gate=self.name,
            slots=cost[0],
            bytes=cost[1],
            reason=refusal.reason,
            retry_after=refusal.retry_after,
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
        actual = whole("bytes", actual)

        def change() -> None:
            estimated = lease.bytes
            if self.adjust(lease, (lease.slots, actual)):
                self.tell(
                    LeaseSettled(
                        gate=self.name, estimated_bytes=estimated, actual_bytes=actual
                    )
                )

        self.apply(change)

    def enter(self, task: object, lease: Lease) -> None:
        """Note that *task* went into a ``with lease:`` block."""
        self._inside[task] = (*self._inside.get(task, ()), lease)

    def leave(self, task: object, lease: Lease) -> None:
        """Note that *task* is not inside the block of *lease* any more."""
        mine = self._inside.pop(task, ())
        rest = tuple(other for other in mine if other is not lease)
        if rest:
            self._inside[task] = rest
