"""A worker of a shared gate on a simulated host, and what its application does.

Its member and its leader are the real ones, with steps between their statements.
Imitated is what `SharedGate` does with a member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared_host import Host, Process
from statements import Statements

from lifecycle import Gate, Refused
from lifecycle._queues import DONE, HELD, WAITING

if TYPE_CHECKING:
    from shared_world import World

MODULES = ("rows", "wire", "leader", "member")
# These have no steps of their own; what they call may have some. Two are called in the
# middle of a change of the leader's gate, which has none either; the third looks at the
# time of files, which no schedule draws; and what is closed at the end of a schedule
# must not have been closed before it was killed.
WHOLE = ("ring", "wake", "_look_for_rows", "close")
statements = Statements(lambda: Host.running.interrupt())  # noqa: PLW0108 - none yet
statements.load([f"lifecycle.shared.{name}" for name in MODULES], whole=WHOLE)

from lifecycle.shared import rows  # noqa: E402 - with steps, from here on
from lifecycle.shared.member import Member  # noqa: E402
from lifecycle.shared.request import Request  # noqa: E402
from lifecycle.shared.rows import Capacity  # noqa: E402


@dataclass(eq=False)
class Lease:
    """What a request holds; the waiter of that request as well."""

    number: int
    slots: int
    bytes: int
    state: int = WAITING
    uses: tuple[int, int] = (0, 0)
    cancelled: bool = False
    asked: bool = False
    woken: int = 0
    known: bool = False  # it was decided in a call that says so: nothing to wake up for

    @property
    def waiter(self) -> Lease:
        return self

    def wake(self) -> bool:
        self.woken += 1
        return not self.cancelled


@dataclass(eq=False)
class Worker:
    """One process, and what its application does."""

    world: World
    process: Process
    member: Member | None = None
    gate: Gate | None = None  # that it serves, or has served
    leases: dict[int, tuple[Lease, Request]] = field(default_factory=dict)
    jobs: deque[Callable[[], object]] = field(default_factory=deque)
    closing: bool = False  # as it will be asked to
    closed: bool = False
    numbers: int = 0

    def run(self) -> None:
        """Join, and do one job after the other, in a thread of its own."""
        process, world = self.process, self.world
        self.lock = process.new_lock()
        capacity = Capacity(world.tick(), *world.limits)
        self.member = Member(
            world.path,
            "gate",
            capacity,
            self.lock,
            self.engine,
            clock=world.host.clock,
            sleep=world.host.sleep,
            new_socket=process.new_socket,
            new_loop=process.new_loop,
            lock_row=process.lock_row,
            draw=world.rng.getrandbits,
        )
        self.member.loop.start()
        while True:
            process.host.wait(lambda: bool(self.jobs))
            self.jobs.popleft()()

    def engine(self, capacity: Capacity) -> Gate:
        slots, nbytes = capacity.limits
        order = self.world.order
        clock = self.world.host.clock
        self.gate = Gate(slots=slots, bytes=nbytes, clock=clock, order=order)
        return self.gate

    @property
    def uses(self) -> tuple[int, int]:
        """What its application uses now, of slots and of bytes."""
        held = [each for each, _ in self.leases.values() if each.state == HELD]
        return sum(each.uses[0] for each in held), sum(each.uses[1] for each in held)

    # What `SharedGate` does, in the same order.

    def ask(self, slots: int, nbytes: int, may_wait: bool, priority: int) -> None:
        if self.closed:
            return
        self.numbers += 1
        lease = Lease(self.numbers, slots, nbytes, uses=(slots, nbytes))
        now, key = self.world.host.now, f"k{self.numbers % 2}"
        request = Request(
            lease.number, now, slots, nbytes, key, priority, may_wait, lease
        )
        self.leases[lease.number] = lease, request
        try:
            lease.known = self.lock.ask(-1, self.member.submit, request)
        except Refused:
            lease.state, lease.known = DONE, True

    def apply(self, change: Callable[..., object], *args: object) -> None:
        self.lock.deferred.append((change, args))
        self.lock.make_deferred_changes()

    def release(self, lease: Lease) -> None:
        lease.uses = 0, 0
        self.apply(self._take_back, lease)

    def _take_back(self, lease: Lease) -> None:
        if self.member.release(lease) and self.closed and not self.member.held:
            self.member.leave()

    def cancel(self, lease: Lease, request: Request) -> None:
        self.apply(self._cancel, lease, request)

    def _cancel(self, lease: Lease, request: Request) -> None:
        if self.member.withdraw(request):
            lease.known = True
        elif lease.state == HELD:
            lease.uses = 0, 0
            self._take_back(lease)

    def give_up(self, request: Request) -> None:
        if self.lock.ask(-1, self.member.withdraw, request, rows.REFUSED):
            request.lease.known = True

    def expire(self, lease: Lease, request: Request) -> None:
        def now() -> None:
            if lease.state == WAITING:
                self.member.expire(request, 1.0)

        self.lock.ask(-1, now)

    def settle(self, lease: Lease, nbytes: int) -> None:
        if lease.state == HELD and any(lease.uses):
            # Never upwards: that may exceed the capacity, as in a `Gate`.
            nbytes = min(nbytes, lease.uses[1])
            lease.uses = lease.uses[0], nbytes
            self.apply(self.member.settle, lease, nbytes)

    def resize(self, capacity: Capacity) -> None:
        self.apply(self.member.resize, capacity)

    def close(self) -> None:
        self.closed = True
        self.apply(self._close)

    def _close(self) -> None:
        for request in list(self.member.waiting.values()):
            request.lease.known = self.member.withdraw(request, rows.REFUSED)
        self.member.leave()
