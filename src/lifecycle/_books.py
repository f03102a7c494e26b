"""What happens at a gate: the way into its line, and the ways out of it."""

# ruff: noqa: SLF001 - a lease and its gate are one thing in two modules

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from ._errors import AdmissionTimeout, CostTooLarge, GateClosed, GateFull, Refused
from ._lease import Lease
from ._ledger import DONE, HELD
from ._monitor import Monitor, writes
from ._park import current_task, new_waiter, park_until
from ._refusal import DrainRate
from .events import (
    AdmissionCancelled,
    AdmissionRefused,
    LeaseGranted,
    LeaseReleased,
    LeaseSettled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._ledger import Ledger
    from ._park import Waiter
    from .events import Event

_new = object.__new__


class Books(Monitor):
    """A ledger, the tasks that stand in its line, and what is said to them."""

    _enforce: bool
    _max_waiting: float

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        emit: Callable[[Event], None] | None,
        now: Callable[[], float],
    ) -> None:
        super().__init__(emit)
        self.name = name
        self.closed = False
        self._ledger = ledger
        self._now = now
        self._rate = DrainRate()
        self._refused = self._timed_out = self._lost = self._overlooked = 0
        # What those who were sent away from the line will be told.
        self._answers: dict[Lease, Refused] = {}
        # Tasks inside `with lease:` blocks, and the leases of these.
        self._inside: dict[object, tuple[Lease, ...]] = {}

    @writes
    def _request(
        self, slots: int, nbytes: int, key: str | None, priority: int, wait: object
    ) -> Lease:
        """Return a lease that is held already, or has a waiter to wait on."""
        # `Lease(...)`, written out: every admission comes through here.
        lease = _new(Lease)
        lease._gate = self
        lease.slots = slots
        lease.bytes = nbytes
        lease._key = key
        lease._priority = priority
        lease._state = DONE
        lease._waiter = None  # type: ignore[assignment]
        try:
            del self._pen[0]
        except IndexError:
            if not self._take():
                how = "is being changed by this very thread; retry in 1.0 s"
                refusal = GateFull(f"gate {self.name!r} {how}", retry_after=1.0)
                self._change(self._refuse, lease, refusal)
                raise refusal from None
        try:
            ledger = self._ledger
            ahead = ledger.ahead if wait else ledger.waiting
            if self.closed or not ledger.admit(lease, ahead):
                self._queue(lease, wait)
            elif self._emit is not None:
                self._tell(LeaseGranted, lease, waited_s=0.0)
            return lease
        finally:
            self._pen.append(None)
            if self._mail or self._outbox:
                self._drain()

    def _queue(self, lease: Lease, wait: object) -> None:
        hash(lease._key)  # raises here, where nothing is charged yet
        ledger = self._ledger
        if self.closed:
            raise self._refuse(lease, self._closing())
        if not self._enforce:
            self._overlooked += 1
            ledger.charge(lease)
            self._tell(LeaseGranted, lease, waited_s=0.0)
            return
        if ledger.too_large(lease):
            raise self._refuse(lease, self._too_large(lease))
        if not wait:
            raise self._refuse(lease, self._later(GateFull, "has no room now"))
        if ledger.waiting or not ledger.fits(lease):
            # It will really wait, not only for its turn to run.
            most = self._max_waiting
            if ledger.waiting >= most:
                line = f"its line of {most} is full" if most else "nobody may wait"
                how = f"has no room, and {line}"
                raise self._refuse(lease, self._later(GateFull, how))
            if self._inside:
                self._refuse_itself(lease)
        lease._waiter = new_waiter()
        ledger.enqueue(lease)

    def _refuse_itself(self, lease: Lease) -> None:
        mine = self._inside.get(current_task(), ())
        if any(each.held for each in mine):
            self._refuse(lease, GateFull("nested"))
            where = f"gate {self.name!r}: it is inside a with block of a lease of it"
            how = "ask for all that the request needs in one admission"
            raise RuntimeError(f"this task would wait for itself at {where}; {how}")

    async def _wait(self, lease: Lease, waiter: Waiter, max_wait: float | None) -> None:
        """Wait in line, and come back with the lease held or not at all."""
        began = 0.0 if self._emit is None else self._now()
        try:
            if max_wait is None or max_wait == math.inf:
                await waiter
            else:
                await park_until(waiter, anyio.current_time() + max_wait)
                self._look(self._time_out, lease, max_wait)
        except BaseException:
            self._change(self._cancel, lease, began)
            raise
        finally:
            self._ledger.ahead.pop()
        # Without the pen: whoever wakes decides first.
        if lease._state != HELD:
            raise self._answers.pop(lease)
        if self._emit is not None:
            self._tell(LeaseGranted, lease, waited_s=self._now() - began)
            self._drain()

    def _time_out(self, lease: Lease, max_wait: float) -> None:
        # Where the grant came in the same moment, the grant wins.
        if lease._state != HELD and lease not in self._answers:
            self._ledger.withdraw(lease)
            self._timed_out += 1
            refusal = self._later(AdmissionTimeout, f"had no room within {max_wait} s")
            self._answers[lease] = self._refuse(lease, refusal)

    def _cancel(self, lease: Lease, began: float) -> None:
        if lease._state == HELD:
            self._tell(LeaseGranted, lease, waited_s=self._now() - began)
            self._take_back(lease)
        elif self._answers.pop(lease, None) is None:
            self._ledger.withdraw(lease)
            self._tell(AdmissionCancelled, lease)

    def _take_back(self, lease: Lease, lost: bool = False) -> None:  # noqa: FBT001, FBT002
        if self._ledger.release(lease):
            self._lost += lost
            self._tell(LeaseReleased, lease, lost=lost)

    def _settle(self, lease: Lease, actual: int) -> None:
        if lease._state == HELD:
            before = lease.bytes
            self._ledger.adjust(lease, actual)
            if self._emit is not None:
                told = LeaseSettled(
                    gate=self.name, estimated_bytes=before, actual_bytes=actual
                )
                self._outbox.append(told)

    def _resize(self, slots: float | None, nbytes: float | None) -> None:
        ledger = self._ledger
        ledger.slots = ledger.slots if slots is None else slots
        ledger.nbytes = ledger.nbytes if nbytes is None else nbytes
        misfits = [lease for lease in ledger.line() if ledger.too_large(lease)]
        self._send_away({lease: self._too_large(lease) for lease in misfits})

    def _close(self) -> None:
        self.closed = True
        self._send_away({lease: self._closing() for lease in self._ledger.line()})

    def _send_away(self, answers: dict[Lease, Refused]) -> None:
        self._ledger.expel(answers)
        for lease, refusal in answers.items():
            self._answers[lease] = self._refuse(lease, refusal)
            lease._waiter.wake()

    def _enter_block(self, task: object, lease: Lease) -> None:
        self._inside[task] = (*self._inside.get(task, ()), lease)

    def _leave_block(self, task: object, lease: Lease) -> None:
        mine = self._inside.pop(task, ())
        rest = tuple(other for other in mine if other is not lease)
        if rest:
            self._inside[task] = rest

    def _held_s(self, lease: Lease) -> float | None:
        """Seconds that *lease* has been held, where the order depends on it."""
        account = getattr(lease, "_account", None)
        return None if account is None else self._now() - account[0]

    def _refuse(self, lease: Lease, refusal: Refused) -> Refused:
        self._refused += 1
        reason, retry_after = refusal.reason, refusal.retry_after
        self._tell(AdmissionRefused, lease, reason=reason, retry_after=retry_after)
        return refusal

    def _tell(self, event: Callable[..., Event], lease: Lease, **more: object) -> None:
        """Put an event down, to be told without the pen."""
        if self._emit is not None:
            slots, nbytes = lease.slots, lease.bytes
            told = event(gate=self.name, slots=slots, bytes=nbytes, **more)
            self._outbox.append(told)

    def _later(self, refused: type[GateFull | AdmissionTimeout], how: str) -> Refused:
        ahead, released = self._ledger.waiting + 1, self._ledger.released
        hint = self._rate.retry_after(ahead, released, self._now())
        message = f"gate {self.name!r} {how}; retry in {hint:.1f} s"
        return refused(message, retry_after=hint)

    def _closing(self) -> Refused:
        return GateClosed(f"gate {self.name!r} is closed; ask another server")

    def _too_large(self, lease: Lease) -> Refused:
        ledger, asked, most = self._ledger, list[str](), list[str]()
        for cost, limit, unit in (
            (lease.slots, ledger.slots, "slots"),
            (lease.bytes, ledger.nbytes, "bytes"),
        ):
            if 0 < limit < cost:
                asked.append(f"{cost} {unit}")
                most.append(f"{limit} {unit}")
        return CostTooLarge(
            f"a request of {' and '.join(asked)} can never pass gate {self.name!r} "
            f"of {' and '.join(most)}; make it smaller"
        )
