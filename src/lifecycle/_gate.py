"""Admission control: a gate in front of work that costs slots and bytes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, TypeVarTuple, final

import anyio

from . import _lock
from ._eventloop import fallback_clock, new_waiter, wait_until
from ._exceptions import AdmissionTimeout, CostTooLarge, GateFull, Refused
from ._gate_statistics import GateStatistics
from ._lease import Grantor, Lease, deadlock, inside_lease_of
from ._owner import owner
from ._queues import (
    DONE,
    HELD,
    WAITING,
    AdaptiveQueue,
    DrainRate,
    FairQueue,
    FifoQueue,
    Ticket,
    Wakeable,
)
from ._validation import (
    UNCHANGED,
    UNSTATED,
    brief,
    check,
    check_bool,
    check_callable,
    check_capacity,
    check_cost,
    check_deadline_or_none,
    check_limit_or_none,
    check_order,
    check_priority,
)
from .events import (
    AdmissionCancelled,
    LeaseGranted,
    LeaseReleased,
    Observer,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_new = object.__new__


# ruff: noqa: SIM105 - nothing may come before a `release`: see `ChangeLock`


@final
class Gate(Grantor):
    """Admits requests in the order they come, as far as slots and bytes reach.

    One gate guards one lifetime. Payload memory until hand-off and requests in
    flight until their end are two lifetimes, hence two gates.

    A gate can be made before any event loop runs, and shared by threads. One that is
    given neither limit warns, as does the first request that names no *bytes* at a gate
    that limits nothing else: most likely one was forgotten. Say ``slots=None``, or
    ``bytes=0``, where it is meant. No error: it is no reason to refuse requests.

    Args:
        slots: Maximum number of slots in use; ``None`` is unbounded, 0 is paused.
        bytes: Maximum number of bytes in use; ``None`` is unbounded, 0 is paused.
        max_waiting: Maximum length of the queue; a request beyond it is refused at
            once. ``None`` is unbounded, 0 refuses what would have to wait.
        max_wait: Longest wait in seconds unless the request names its own.
        order: ``"fifo"``: as requests come, the head blocks those behind it.
            ``"fair"``: the key that has had the least share-seconds goes next;
            while its request does not fit, those next in order may overtake it
            until they have got as much as it asks for itself, those that are
            held for longer counting for more.
            ``"adaptive"``: as ``"fifo"``, until the queue has not been empty for
            *max_wait*; until it is, the newest goes first, and what has waited for a
            fifth of *max_wait* is refused with the next that comes or goes, whatever
            wait it names itself. Then the oldest makes room in a full queue. For
            overload that lasts; a pause is none.
        reserve: With ``order="fair"``, the part of the capacity, 0 to 1, that no key
            alone can take while another one was there within the last minute.
        enforce: ``False`` admits every request at once, but counts those that would
            have been refused or kept waiting, to try limits out on live traffic.
        name: For events, errors and metrics.
        observer: Called with each grant, release and refusal.
        clock: Monotonic seconds. Read only where a request waits or is refused, or
            where an observer or the fair order is set. Name one, as `time.monotonic`,
            for threads alone, where the default stands still, and for loops of both
            asyncio and trio, whose clocks differ.

    Attributes:
        name: The name that was given to the gate.
        closed: Whether `close` was called.
        order: As given.
        max_wait: As given.

    Raises:
        ValueError: A limit is negative or not a whole number; or *max_wait* is
            negative or NaN, or missing; or there is no such *order*.
        TypeError: Another option is of the wrong kind.
    """

    def __init__(
        self,
        _bare: None = None,
        /,
        *,
        slots: int | None = UNCHANGED,
        bytes: int | None = UNCHANGED,  # noqa: A002 - the unit is the name
        max_waiting: int | None = None,
        max_wait: float | None = None,
        order: Literal["fifo", "fair", "adaptive"] = "fifo",
        reserve: float = 0.0,
        enforce: bool = True,
        name: str = "gate",
        observer: Observer | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        check_order(order, reserve, max_wait)
        check(_bare is None, "a Gate takes its limits by name: Gate(slots=8)", _bare)
        check(isinstance(name, str), "name must be a string", name)
        check_callable(clock=clock)
        check_bool(enforce=enforce)
        super().__init__(name, observer)
        self.order = order
        self._clock = fallback_clock(clock)
        self._enforce = enforce
        self.max_wait = check_limit_or_none("max_wait", max_wait)
        self._max_waiting = check_capacity("max_waiting", max_waiting)
        limits = check_capacity("slots", slots), check_capacity("bytes", bytes)
        self._bytes_only = limits[0] == math.inf > limits[1]  # until it has warned
        self._queue = FifoQueue(*limits)
        if order == "fair":
            self._queue = FairQueue(*limits, self._clock, reserve)
        elif order == "adaptive" and self.max_wait is not None:
            # No cycle: a dropped gate is gone at once.
            stale = partial(Gate._refuse_stale, weakref.proxy(self))
            self._queue = AdaptiveQueue(
                *limits, self._clock, self.max_wait, self._max_waiting, stale
            )
        self._drain_rate = DrainRate()
        self._refused = self._timed_out = self._lost = self._over_limit = 0
        # Why waiting requests were refused, until their tasks run again.
        self._refusals: dict[Ticket, Refused] = {}
        if slots is UNCHANGED is bytes:
            self._warn_of_limits()

    async def admit(
        self,
        *,
        bytes: int = UNSTATED,  # noqa: A002 - the unit is the name
        slots: int = 1,
        key: str | None = None,
        priority: int = 0,
        max_wait: float | None = UNCHANGED,
    ) -> Lease:
        """Wait until the request fits and return the lease that holds its cost.

        All resources are granted together or not at all. A request that fits while
        none waits is admitted without yielding to the scheduler.

        Args:
            bytes: Estimated size of what is about to be created, by default 0.
            slots: Slots to take, 0 or more.
            key: Tenant or user; with ``order="fair"`` keys share the gate evenly.
            priority: A higher one goes before every lower one. Use few. (The fair
                order ignores it, and the others ignore the *key*.)
            max_wait: Longest wait in seconds, by default the gate's own;
                ``None`` waits without limit.

        Returns:
            A held lease. Its owner owes one `Lease.release`, which ``with`` pays.

        Raises:
            GateFull: The queue was full on arrival.
            AdmissionTimeout: *max_wait* went by, or the adaptive order refused it.
            GateClosed: The gate was closed, also during the wait.
            CostTooLarge: The request asks for more than the gate's capacity.
            RuntimeError: Waiting would be a deadlock: the task is inside a
                ``with lease:`` block of this gate.
            ValueError: A cost is negative, not a whole number, or all are zero;
                or *priority* is no whole number; or *max_wait* is NaN.

        Cancellation:
            A checkpoint only where it has to wait. It returns a lease or raises
            holding nothing; a lease granted in the same moment is passed on.
        """
        if max_wait is not UNCHANGED:
            max_wait = check_deadline_or_none("max_wait", max_wait)
        if bytes is UNSTATED:
            bytes = 0  # noqa: A001
            if self._bytes_only:
                self._warn_of_bytes()
        if type(slots) is not int or type(bytes) is not int or slots < 1 or bytes < 0:
            slots, bytes = check_cost(slots, bytes)  # noqa: A001
        lease = self._request(slots, bytes, key, priority, True)
        if lease.waiter is not None:
            longest = self.max_wait if max_wait is UNCHANGED else max_wait
            await self._wait(lease, longest)
        return lease

    def try_admit(
        self,
        *,
        bytes: int = UNSTATED,  # noqa: A002 - the unit is the name
        slots: int = 1,
        key: str | None = None,
        priority: int = 0,
    ) -> Lease:
        """Return a held lease now, or refuse. Any thread; needs no event loop.

        Arguments and refusals are those of `admit`; no waiting request is overtaken.

        Raises:
            GateFull: It does not fit, others wait, or this interrupts the gate itself.
        """
        if bytes is UNSTATED and self._bytes_only:
            self._warn_of_bytes()
        slots, bytes = check_cost(slots, bytes)  # noqa: A001
        return self._request(slots, bytes, key, priority, False)

    def resize(
        self,
        *,
        slots: int | None = UNCHANGED,
        bytes: int | None = UNCHANGED,  # noqa: A002 - the unit is the name
    ) -> None:
        """Change the capacity; what is not named stays. Any thread.

        Raising it grants every request that fits now. Lowering it takes nothing from
        live leases, but grants nothing until they are back below it, and refuses
        waiting requests that could never fit. Zero pauses: no request is admitted
        and none is refused.

        Raises:
            ValueError: A limit is negative or not a whole number.
        """
        capacity = {"slots": slots, "bytes": bytes}.items()
        checked = {
            name: check_capacity(name, value)
            for name, value in capacity
            if value is not UNCHANGED
        }
        self._apply(self._resize, checked)

    def close(self) -> None:
        """Refuse every waiting request and all that come. Idempotent. Any thread.

        Live leases stay valid until they are released.
        """
        self.closed = True  # already, where the rest is deferred
        self._apply(self._close)

    def statistics(self) -> GateStatistics:
        """Return the gate as it is now. Any thread.

        A signal handler that interrupts a change of this gate in its own thread sees
        half of it. So does a call that another thread's change held up for a second.
        """
        return self._ask(_lock.LONGEST_WAIT, self._read)

    def __repr__(self) -> str:
        if not hasattr(self, "_drain_rate"):  # its arguments were refused
            return "<Gate, not made>"
        now = self._read()  # without the lock: in an error's traceback it may be held
        return (
            f"<Gate {self.name!r}: {brief(now.slots_in_use)} of {brief(now.slots)} "
            f"slots, {brief(now.bytes_in_use)} of {brief(now.bytes)} bytes, "
            f"{now.waiting} waiting>"
        )

    # Changes, under the lock.

    def _request(
        self,
        slots: int,
        nbytes: int,
        key: str | None,
        priority: int,
        may_wait: bool,  # noqa: FBT001
    ) -> Lease:
        """Return a lease that is held already, or has a waiter to wait on."""
        if priority != 0:
            check_priority(priority)
        # `Lease(...)`, written out: every admission comes through here.
        lease: Lease = _new(Lease)
        lease.gate, lease.slots, lease.bytes = self, slots, nbytes
        lease.key, lease.owned_by_start = key, False
        lease.state, lease.waiter = DONE, None  # type: ignore[assignment]
        if (claim := owner.get()) is not None:
            claim(lease)
        lock = self._lock
        mutex, interrupted = lock.mutex, lock.interrupted
        if interrupted():
            raise self._refuse_busy(lease, "is interrupted by this very call")
        try:
            if not mutex.acquire(False) and not mutex.acquire(True, _lock.LONGEST_WAIT):
                raise self._refuse_busy(lease, "is held up by another thread")
            if lock.deferred:  # by this thread, perhaps: a release, or a `close`
                lock.catch_up()
            queue = self._queue
            ahead = queue.ahead if may_wait else queue.waiting
            if self.closed or not queue.admit(lease, ahead):
                self._enqueue(lease, priority, may_wait)
            elif self._emit is not None:
                self._note(LeaseGranted, lease, waited_s=0.0)
            return lease
        finally:
            try:
                mutex.release()
            except RuntimeError:
                pass
            if lock.deferred or self._events:
                self._flush()

    def _release(self, lease: Lease) -> None:
        # `_apply`, written out: every request comes through here.
        lock = self._lock
        mutex, interrupted = lock.mutex, lock.interrupted
        if interrupted():
            self._apply(self._take_back, lease)
            return
        try:
            if not mutex.acquire(False):
                lock.deferred.append((self._take_back, (lease,)))
            elif self._queue.release(lease) and self._emit is not None:
                self._note(LeaseReleased, lease, lost=False)
        finally:
            try:
                mutex.release()
            except RuntimeError:
                pass
            if lock.deferred or self._events:
                self._flush()

    def _enqueue(
        self,
        lease: Ticket,
        priority: int,
        may_wait: bool,  # noqa: FBT001
        waiter: Wakeable | None = None,  # by default, this task
    ) -> bool:
        """Let *lease* wait, or grant it after all, and return whether it waits."""
        hash(lease.key)  # raises here, where nothing is charged yet
        queue = self._queue
        if self.closed:
            raise self._refuse(lease, self._gate_closed())
        if not self._enforce:
            self._over_limit += 1
            queue.charge(lease)
            self._note(LeaseGranted, lease, waited_s=0.0)
            return False
        if queue.too_large(lease):
            raise self._refuse(lease, self._too_large(lease))
        must_wait = queue.must_wait(lease)
        if not may_wait:
            if must_wait:
                raise self._refuse(lease, self._retry_later(GateFull, "is full"))
            queue.charge(lease)  # those that wait have their share
            self._note(LeaseGranted, lease, waited_s=0.0)
            return False
        lease.priority = priority
        if must_wait:
            # It will really wait, not only until its task runs again.
            longest = self._max_waiting
            nested = waiter is None and inside_lease_of(self)
            if queue.waiting >= longest and (nested or not queue.make_room(lease)):
                why = (
                    f"its queue of {brief(longest)} is full"
                    if longest
                    else "max_waiting is 0"
                )
                refusal = self._retry_later(GateFull, f"is full, and {why}")
                raise self._refuse(lease, refusal)
            if nested:
                self._refuse(lease, GateFull("nested"))
                raise deadlock(self)
        lease.waiter = waiter or new_waiter()
        queue.enqueue(lease)
        return True

    def _refuse_busy(self, lease: Ticket, how: str) -> Refused:
        refusal = self._retry_in(1.0, GateFull, how)
        self._apply(self._refuse, lease, refusal)
        return refusal

    async def _wait(self, lease: Lease, max_wait: float | None) -> None:
        """Wait in the queue, and return with the lease held, or raise without it."""
        began = self._clock() if self._emit is not None else 0.0
        now, recheck_s = anyio.current_time, self._queue.seconds_to_recheck
        due = math.inf if max_wait is None else now() + max_wait
        try:
            while True:
                waiter: Any = lease.waiter
                until = min(due, now() + recheck_s(lease))
                if until == math.inf:
                    await waiter
                    break
                late = until == due
                await wait_until(waiter, until, last=late)
                # However long a thread takes: a task holds up no other gate.
                if self._ask(_lock.FOR_EVER, self._has_waited, lease, late, max_wait):
                    break
        except BaseException:
            self._apply(self._cancel, lease, began)
            raise
        finally:
            self._queue.ahead.pop()
        # Without the lock: what was decided before the wake-up does not change.
        if lease.state != HELD:
            raise self._refusals.pop(lease)
        if self._emit is not None:
            self._note(LeaseGranted, lease, waited_s=self._clock() - began)
            self._flush()

    def _has_waited(self, lease: Lease, late: bool, max_wait: float | None) -> bool:  # noqa: FBT001
        """Return whether *lease* need not wait again: it may fit by now, or is late."""
        if late:
            self._time_out(lease, max_wait)
        if late or lease.state != WAITING:
            return True
        lease.waiter = new_waiter()  # each is for one wait
        if self._queue.fits(lease):
            self._queue.grant()
        return lease.state != WAITING

    def _time_out(self, lease: Ticket, max_wait: float | None) -> None:
        # Where the grant came in the same moment, the grant wins.
        if lease.state != HELD and lease not in self._refusals:
            self._queue.withdraw(lease)
            self._timed_out += 1
            how = f"was full for {max_wait} s"
            refusal = self._retry_later(AdmissionTimeout, how)
            self._refusals[lease] = self._refuse(lease, refusal)

    def _cancel(self, lease: Ticket, began: float) -> None:
        if lease.state == HELD:
            self._note(LeaseGranted, lease, waited_s=self._clock() - began)
            self._take_back(lease)
        elif self._refusals.pop(lease, None) is None:
            self._queue.withdraw(lease)
            self._note(AdmissionCancelled, lease)

    def _take_back(self, lease: Ticket, lost: bool = False) -> None:  # noqa: FBT001, FBT002
        if self._queue.release(lease):
            self._lost += lost
            self._note(LeaseReleased, lease, lost=lost)

    def _settle_now(self, lease: Ticket, nbytes: int) -> None:
        if lease.state == HELD:
            estimate = lease.bytes
            self._queue.settle(lease, nbytes)
            self._note_settled(estimate, nbytes)

    def _resize(self, capacity: dict[str, float]) -> None:
        queue = self._queue
        queue.slots = capacity.get("slots", queue.slots)
        queue.nbytes = capacity.get("bytes", queue.nbytes)
        bytes_only = queue.slots == math.inf > queue.nbytes
        self._bytes_only = bytes_only and not self._has_warned
        misfits = [each for each in queue.tickets() if queue.too_large(each)]
        self._refuse_waiting({each: self._too_large(each) for each in misfits})

    def _close(self) -> None:
        waiting = self._queue.tickets()
        self._refuse_waiting({each: self._gate_closed() for each in waiting})

    def _refuse_waiting(self, refusals: dict[Ticket, Refused]) -> None:
        self._queue.discard(refusals)
        for ticket, refusal in refusals.items():
            self._refusals[ticket] = self._refuse(ticket, refusal)
            ticket.waiter.wake()

    def _refuse_stale(self, tickets: list[Ticket]) -> None:
        how = f"has had a queue for {self.max_wait} s, and now refuses who waits long"
        why = {each: self._retry_later(AdmissionTimeout, how) for each in tickets}
        self._refuse_waiting(why)

    def _held_seconds(self, lease: Lease) -> float | None:
        charged = getattr(lease, "charged", None)
        return None if charged is None else self._clock() - charged[0]

    def _read(self) -> GateStatistics:
        queue = self._queue
        return GateStatistics(
            slots=finite(queue.slots),
            slots_in_use=queue.slots_in_use,
            bytes=finite(queue.nbytes),
            bytes_in_use=queue.bytes_in_use,
            waiting=queue.waiting,
            max_waiting=finite(self._max_waiting),
            admitted=queue.admitted,
            refused=self._refused,
            cancelled=queue.withdrawn - self._timed_out,
            released=queue.released,
            lost=self._lost,
            over_limit=self._over_limit,
        )

    # Refusals and events.

    def _refuse(self, ticket: Ticket, refusal: Refused) -> Refused:
        self._refused += 1
        return super()._refuse(ticket, refusal)

    def _retry_later(
        self, refused: type[GateFull | AdmissionTimeout], how: str
    ) -> Refused:
        ahead, released = self._queue.waiting + 1, self._queue.released
        seconds = self._drain_rate.retry_after(ahead, released, self._clock())
        return self._retry_in(seconds, refused, how)

    def _too_large(self, ticket: Ticket) -> Refused:
        queue, asked, capacity = self._queue, list[str](), list[str]()
        for amount, most, unit in (
            (ticket.slots, queue.slots, "slots"),
            (ticket.bytes, queue.nbytes, "bytes"),
        ):
            if 0 < most < amount:
                asked.append(f"{brief(amount)} {unit}")
                capacity.append(f"{brief(most)} {unit}")
        return CostTooLarge(
            f"a request of {' and '.join(asked)} can never pass gate {self.name!r} "
            f"of {' and '.join(capacity)}; make it smaller"
        )


def finite(limit: float) -> int | None:
    """Return a capacity as it was given: ``None`` for none."""
    return None if limit == math.inf else int(limit)
