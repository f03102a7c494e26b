"""The gate of one worker that all workers share."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, Literal, TypeVar, TypeVarTuple, final

import anyio

from lifecycle._eventloop import new_waiter, wait_until
from lifecycle._exceptions import AdmissionTimeout, GateFull, Refused
from lifecycle._gate import Gate, finite
from lifecycle._gate_statistics import GateStatistics
from lifecycle._lease import (
    Grantor,
    Lease,
    deadlock,
    inside_lease_of,
    new_lease,
    warn,
)
from lifecycle._lock import FOR_EVER, LONGEST_WAIT
from lifecycle._queues import DONE, HELD, WAITING, Wakeable
from lifecycle._validation import (
    UNCHANGED,
    UNSTATED,
    brief,
    check,
    check_capacity,
    check_cost,
    check_deadline_or_none,
    check_limit_or_none,
    check_priority,
)
from lifecycle.events import (
    AdmissionCancelled,
    LeaseGranted,
    LeaseReleased,
    Observer,
)

from . import rows
from .member import Member
from .request import Request
from .rows import Capacity

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Sums of these fit a word of a row.
_MOST: Final = 2**56
# Seconds that a request whose `max_wait` went by waits for the leader to say so.
_ANSWER: Final = 0.25
# Of a file system, of a process and of a host.
_NO_ROOM: Final = (errno.ENOSPC, errno.EFBIG, errno.EMFILE, errno.ENFILE)


class _ThreadWaiter:
    """A thread that waits for an answer.

    A bare lock: an Event has one that its waiter takes as well, and a signal handler
    that came then, and used the gate, would wait for the thread that wakes.
    """

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.wait = partial(self._asleep.acquire, True)

    def wake(self) -> bool:
        self._asleep.release()
        return True


@final
class SharedGate(Grantor):
    """A `lifecycle.Gate` that all worker processes of a host share.

    Each worker makes one of the same *folder*. One serves the gate to the others, from
    a thread; when it ends or is stopped, another one goes on. What a worker held comes
    back when it dies, however that happens, and no request that waits is lost but its
    own. On Linux only.

    A worker joins with its first request. A forked child joins as a worker of its own,
    and holds nothing of what its parent does. Limits are those of the worker that came
    last, which warns where it changes them; of all other options, those of the worker
    that serves count.

    Args:
        folder: Of this user alone, where nothing cleans up, on a file system of this
            host: below ``/run``, for example, or below ``/dev/shm``, where systemd
            removes what is of an ordinary user at the last logout. Made if there is
            none.
        slots: As of `lifecycle.Gate`, for all workers together.
        bytes: Likewise.
        max_waiting: Likewise.
        max_wait: As of `lifecycle.Gate`.
        order: Likewise. The oldest request of all workers comes first; what keys have
            had, and how long there was a queue, is forgotten when another worker goes
            on.
        reserve: Likewise.
        enforce: Likewise.
        name: Likewise.
        observer: Likewise; called for the requests of this worker. What happens while
            the gate's own thread is at work is reported with the next call.

    Attributes:
        folder: Its path.
        name: As given.
        closed: Whether `close` was called.
        order: As given.
        max_wait: As given.

    Raises:
        ValueError: As from `lifecycle.Gate`.
        TypeError: Likewise.
        PermissionError: The folder is another user's, or open to others.
        OSError: It cannot be made.
        NotImplementedError: The system is not Linux: no other has locks that belong to
            open files and can be asked for.
    """

    # ruff: noqa: SLF001 - the hook for forks is of this module

    def __init__(
        self,
        folder: str | os.PathLike[str],
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
    ) -> None:
        if sys.platform != "linux":
            what = f"a SharedGate needs Linux, not {sys.platform}"
            raise NotImplementedError(f"{what}; use a Gate in each worker")
        super().__init__(name, observer)
        if slots is UNCHANGED is bytes:
            self._warn_of_limits()
        self._engine = partial(
            _engine,
            max_waiting=max_waiting,
            max_wait=max_wait,
            order=order,
            reserve=reserve,
            enforce=enforce,
            name=name,
        )
        self._capacity = _capacity(slots, bytes)
        self._engine(self._capacity)  # checks them
        self.max_wait = check_limit_or_none("max_wait", max_wait)
        self.folder, self.order = os.path.abspath(folder), order  # noqa: PTH100 - and no more
        rows.Folder(self.folder).close()  # raises here, and not at the first request
        self._max_waiting = max_waiting
        self._bytes_only = self._capacity.slots is None is not self._capacity.bytes
        self._numbers = count(1)
        self._member: Member | None = None
        _gates.add(self)

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

        Arguments are those of `Gate.admit`; *key* is a string or ``None``.

        Raises:
            Refused: As from `Gate.admit`, and so are all other errors; `GateClosed`
                also where the folder was removed, or another version leads.
            OSError: This worker cannot join: it has no descriptors left, no space, or
                no right to.

        Cancellation:
            A checkpoint only where it has to wait, which it always has in a worker that
            does not serve the gate. It returns a lease or raises holding nothing.
        """
        if bytes is UNSTATED and self._bytes_only:
            self._warn_of_bytes()
        longest = self.max_wait
        if max_wait is not UNCHANGED:
            longest = check_deadline_or_none("max_wait", max_wait)
        waiter, nested = new_waiter(), inside_lease_of(self)
        request = self._request(slots, bytes, key, priority, not nested, waiter)
        try:
            if not self._enter(request):
                await self._wait(request, longest)
        except GateFull:
            if nested:
                raise deadlock(self) from None
            raise
        return request.lease

    def try_admit(
        self,
        *,
        bytes: int = UNSTATED,  # noqa: A002 - the unit is the name
        slots: int = 1,
        key: str | None = None,
        priority: int = 0,
    ) -> Lease:
        """Return a held lease now, or refuse. Any thread; needs no event loop.

        A worker that does not serve the gate asks, and this thread waits for the
        answer: a tenth of a millisecond, and one second at most.

        Raises:
            GateFull: It does not fit, others wait, no leader answers, or this
                interrupts the gate itself.
        """
        if bytes is UNSTATED and self._bytes_only:
            self._warn_of_bytes()
        waiter = _ThreadWaiter()
        request = self._request(slots, bytes, key, priority, False, waiter)
        try:
            if not self._enter(request):
                waiter.wait(LONGEST_WAIT)
                refusal = self._retry_in(1.0, GateFull, "has no leader")
                self._ask(FOR_EVER, self._give_up, request, refusal)
                self._decided(request)
        except BaseException:
            self._apply(self._cancel, request)
            raise
        return request.lease

    def resize(
        self,
        *,
        slots: int | None = UNCHANGED,
        bytes: int | None = UNCHANGED,  # noqa: A002 - the unit is the name
    ) -> None:
        """Change the capacity for all workers, as `Gate.resize` does. Any thread.

        It holds until the next one, or until a worker joins that was given another.

        Raises:
            ValueError: A limit is negative or not a whole number.
        """
        _capacity(slots, bytes)  # checks them
        self._join(4)
        self._apply(self._resize, slots, bytes)

    def close(self) -> None:
        """Refuse every waiting request of this worker and all that come. Idempotent.

        Live leases stay valid until they are released. Then this worker leaves; the
        others go on without it. Any thread.
        """
        self.closed = True
        self._apply(self._close)

    def statistics(self) -> GateStatistics:
        """Return the gate as it is now, over all live workers. Any thread.

        Each worker is read at its own moment. Counts include what dead workers counted.
        Where this worker cannot join, nothing is known; a request says why.
        """
        with suppress(OSError):
            self._join(4)
        return self._ask(FOR_EVER, self._read)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<SharedGate {self.name!r} of {self.folder}: {state}>"

    # Changes, under the lock.

    def _join(self, stacklevel: int) -> None:
        """Become a worker of the folder, if this is none yet."""
        if self._member is None and not self._lock.interrupted():
            found = self._ask(FOR_EVER, self._join_now)
            if found is not None and found.limits != self._capacity.limits:
                had, now = _limits(found), _limits(self._capacity)
                what = f"gate {self.name!r} had {had}, and this worker changes that"
                how = "start all workers with the same limits"
                warn(f"{what} to {now}; {how}", stacklevel)

    def _join_now(self) -> Capacity | None:
        if self._member is not None or self.closed:
            return None
        self._capacity = Capacity(time.monotonic_ns(), *self._capacity.limits)
        try:
            member = Member(
                self.folder, self.name, self._capacity, self._lock, self._engine
            )
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            what = f"{error.strerror}; this worker cannot join the shared gate"
            how = "it needs a file and a few descriptors"
            raise OSError(error.errno, f"{what}: {how}", self.folder) from None
        try:
            member.loop.start()
        except BaseException:  # no more threads: the next request tries again
            member.close()
            raise
        self._member = member
        weakref.finalize(self, member.leave).atexit = False
        return member.found

    def _request(
        self,
        slots: int,
        nbytes: int,
        key: str | None,
        priority: int,
        may_wait: bool,  # noqa: FBT001
        waiter: Wakeable,
    ) -> Request:
        slots, nbytes = check_cost(slots, nbytes)
        check_priority(priority)
        check(key is None or isinstance(key, str), "key must be a string or None", key)
        if max(slots, nbytes) >= _MOST:
            given = brief(max(slots, nbytes))
            raise ValueError(f"a cost must be below {_MOST}, not {given}")
        self._join(5)
        lease = new_lease(self, slots, nbytes, key)
        lease.priority, lease.number = priority, next(self._numbers)
        lease.waiter, lease.state = waiter, WAITING
        since, number = time.monotonic(), lease.number
        return Request(number, since, slots, nbytes, key, priority, may_wait, lease)

    def _enter(self, request: Request) -> bool:
        """Return whether *request* is held at once; if not, its waiter is woken."""
        if self._lock.interrupted():
            how = "is interrupted by this very call"
            raise self._refuse(request.lease, self._retry_in(1.0, GateFull, how))
        held = self._ask(FOR_EVER, self._submit, request)
        if held and self._emit:
            self._note(LeaseGranted, request.lease, waited_s=0.0)
            self._flush()
        return held

    def _submit(self, request: Request) -> bool:
        member = self._member
        try:
            if member is None or self.closed:
                raise self._gate_closed()
            return member.submit(request)
        except Refused as refusal:
            if member is not None:
                member.row.words[rows.REFUSED] += 1
            request.lease.state = DONE
            raise self._refuse(request.lease, refusal) from None

    async def _wait(self, request: Request, max_wait: float | None) -> None:
        now, lease, asked = anyio.current_time, request.lease, False
        due = math.inf if max_wait is None else now() + max_wait
        try:
            while True:
                waiter: Any = lease.waiter
                if due == math.inf:
                    await waiter
                    break
                await wait_until(waiter, due, last=asked)
                if self._ask(FOR_EVER, self._has_waited, request, asked, max_wait):
                    break
                asked, due = True, now() + _ANSWER
        except BaseException:
            self._apply(self._cancel, request)
            raise
        self._decided(request)

    def _has_waited(
        self,
        request: Request,
        asked: bool,  # noqa: FBT001
        max_wait: float | None,
    ) -> bool:
        """Return whether *request* need not wait for an answer to its deadline."""
        if request.lease.state != WAITING:
            return True
        if asked or self._member is None:  # there is no leader
            how = f"was full for {max_wait} s"
            self._give_up(request, self._retry_in(1.0, AdmissionTimeout, how))
            return True
        request.lease.waiter = new_waiter()  # each is for one wait
        self._member.expire(request, max_wait)
        return False

    def _give_up(self, request: Request, refusal: Refused) -> None:
        if self._member and self._member.withdraw(request, rows.REFUSED):
            request.refusal = refusal

    def _cancel(self, request: Request) -> None:
        member = self._member
        if member is not None and member.withdraw(request):
            self._note(AdmissionCancelled, request.lease)
        elif request.lease.state == HELD:
            self._note_granted(request)
            self._take_back(request.lease)

    def _decided(self, request: Request) -> None:
        # Without the lock: what was decided before the wake-up does not change.
        if request.lease.state != HELD:
            refusal = request.refusal or self._gate_closed()
            self._refuse(request.lease, refusal)
            self._flush()
            raise refusal
        self._note_granted(request)
        self._flush()

    def _take_back(self, lease: Lease, lost: bool = False) -> None:  # noqa: FBT001, FBT002
        member = self._member
        if member is not None and member.release(lease, lost=lost):
            self._note(LeaseReleased, lease, lost=lost)
            if self.closed and not member.held:
                member.leave()

    def _settle_now(self, lease: Lease, nbytes: int) -> None:
        estimate, member, nbytes = lease.bytes, self._member, min(nbytes, _MOST)
        if member is not None and member.settle(lease, nbytes):
            self._note_settled(estimate, nbytes)

    def _resize(self, slots: int | None, nbytes: int | None) -> None:
        member = self._member
        if member is not None:
            old = member.capacity
            slots = old.slots if slots is UNCHANGED else slots
            nbytes = old.bytes if nbytes is UNCHANGED else nbytes
            self._capacity = Capacity(time.monotonic_ns(), slots, nbytes)
            member.resize(self._capacity)

    def _close(self) -> None:
        member = self._member
        if member is not None:
            for request in list(member.waiting.values()):
                self._give_up(request, self._gate_closed())
                request.lease.waiter.wake()
            member.leave()

    def _read(self) -> GateStatistics:
        member, words = self._member, [0] * (rows.PROCESS + 1)
        if member is not None:
            words = member.folder.totals() if member.is_in else [*member.row.words]
        capacity = member.capacity if member is not None else self._capacity
        return GateStatistics(
            slots=capacity.slots,
            slots_in_use=words[rows.SLOTS],
            bytes=capacity.bytes,
            bytes_in_use=words[rows.BYTES],
            waiting=words[rows.WAITING],
            max_waiting=self._max_waiting,
            admitted=words[rows.ADMITTED],
            refused=words[rows.REFUSED],
            cancelled=words[rows.CANCELLED],
            released=words[rows.RELEASED],
            lost=words[rows.LOST],
            over_limit=words[rows.OVER_LIMIT],
        )

    # Refusals and events.

    def _note_granted(self, request: Request) -> None:
        waited_s = time.monotonic() - request.since
        self._note(LeaseGranted, request.lease, waited_s=waited_s)


def _engine(capacity: Capacity, **options: Any) -> Gate:
    """Return the gate that is served to all."""
    slots, nbytes = capacity.limits
    return Gate(slots=slots, bytes=nbytes, clock=time.monotonic, **options)


def _capacity(slots: int | None, nbytes: int | None) -> Capacity:
    checked = (check_capacity("slots", slots), check_capacity("bytes", nbytes))
    return Capacity(0, *map(finite, checked))


def _limits(capacity: Capacity) -> str:
    slots, nbytes = ("any" if it is None else it for it in capacity.limits)
    return f"{slots} slots and {nbytes} bytes"


# To close descriptors after a fork.
_gates: weakref.WeakSet[SharedGate] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close what a child has of its parent, which would seem to live for as long."""
    for gate in list(_gates):
        member, gate._member = gate._member, None
        gate._events.clear()
        if member is not None:
            member.close()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_leave_to_parent)
