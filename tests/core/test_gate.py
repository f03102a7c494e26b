"""Gate: which requests are admitted, in which order, and the statistics meanwhile."""

import gc
import math
from collections import OrderedDict
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import (
    CostTooLarge,
    Gate,
    GateClosed,
    GateFull,
    Lease,
    LifecycleError,
    Refused,
)
from lifecycle.testing import RecordingObserver, assert_quiescent

pytestmark = pytest.mark.anyio


class Crowd:
    """Requests at one gate, each in a task, and the order in which they got in."""

    def __init__(self, gate: Gate, tasks: anyio.abc.TaskGroup) -> None:
        self.gate = gate
        self.tasks = tasks
        self.order: list[object] = []
        self.leases: dict[object, Lease] = {}
        self.refused: dict[object, Refused] = {}

    def got_in(self, *together: object) -> bool:
        """Whether *together* got in last: trio runs what is due in any order."""
        last, self.order = set(self.order), []
        return last == set(together)

    async def come(self, name: object, **cost: int) -> None:
        self.tasks.start_soon(self._enter, name, cost)
        await anyio.wait_all_tasks_blocked()

    async def leave(self, name: object) -> None:
        self.leases.pop(name).release()
        await anyio.wait_all_tasks_blocked()

    async def _enter(self, name: object, cost: dict[str, int]) -> None:
        try:
            lease = await self.gate.admit(**cost)
        except Refused as refusal:
            self.refused[name] = refusal.with_traceback(None)
        else:
            self.order.append(name)
            self.leases[name] = lease


async def test_admits_in_the_order_of_arrival() -> None:
    """Requests are admitted in the order in which they came."""
    gate = Gate(slots=1)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(6):
            await crowd.come(name)
        for name in range(6):
            assert crowd.order == list(range(name + 1))
            await crowd.leave(name)
    assert_quiescent(gate)


async def test_admits_without_yielding_where_there_is_room() -> None:
    """A free gate costs no trip through the scheduler."""
    gate = Gate(slots=2)
    admitting = gate.admit(bytes=3)
    with pytest.raises(StopIteration) as done:
        admitting.send(None)
    done.value.value.release()
    assert_quiescent(gate)


async def test_grants_all_resources_or_none() -> None:
    """A request that fits in slots but not in bytes takes neither (B5)."""
    gate = Gate(slots=4, bytes=10)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        await crowd.come("big", bytes=8)
        await crowd.come("next", bytes=4)
        now = gate.statistics()
        assert (now.slots_in_use, now.bytes_in_use, now.waiting) == (1, 8, 1)
        await crowd.leave("big")
        now = gate.statistics()
        assert (now.slots_in_use, now.bytes_in_use, now.waiting) == (1, 4, 0)
        await crowd.leave("next")
    assert_quiescent(gate)


async def test_never_lets_small_requests_starve_a_large_one() -> None:
    """Small ones that would fit stand behind the large one that came first (B12)."""
    gate = Gate(bytes=10)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        await crowd.come("held", bytes=5)
        await crowd.come("large", bytes=10)
        for name in ("small", "smaller"):
            await crowd.come(name, bytes=1)
        with pytest.raises(GateFull):
            gate.try_admit(bytes=1)
        assert crowd.got_in("held")
        await crowd.leave("held")
        assert crowd.got_in("large")
        await crowd.leave("large")
        assert crowd.got_in("small", "smaller")
        for name in ("small", "smaller"):
            await crowd.leave(name)
    assert_quiescent(gate)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_never_lets_a_newcomer_overtake_a_granted_waiter() -> None:
    """A request that comes between grant and resumption runs after the granted.

    On trio both are due in the same batch, which trio runs in any order.
    """
    gate = Gate(slots=2)
    holder = await gate.admit(slots=2)
    order: list[str] = []

    async def request(name: str) -> None:
        with await gate.admit():
            order.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, "waiter")
        await anyio.wait_all_tasks_blocked()
        holder.release()
        await request("later")
    assert order == ["waiter", "later"]
    assert_quiescent(gate)


async def test_gives_no_slot_twice_in_the_hand_off() -> None:
    """Between grant and resumption the slot is taken for all others (B2)."""
    gate = Gate(slots=1)
    holder = await gate.admit()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        await crowd.come("waiter")
        holder.release()
        assert gate.statistics().slots_in_use == 1
        with pytest.raises(GateFull):
            gate.try_admit()
        await anyio.wait_all_tasks_blocked()
        await crowd.leave("waiter")
    assert_quiescent(gate)


async def test_refuses_at_once_what_can_never_fit() -> None:
    """A request above capacity is refused as such at once, not as if the gate were full (B13)."""
    gate = Gate(slots=2, bytes=10, name="photos")
    for cost in ({"bytes": 11}, {"slots": 3}):
        with pytest.raises(
            CostTooLarge, match="'photos' of (10 bytes|2 slots)"
        ) as refusal:
            await gate.admit(**cost)
        assert refusal.value.reason == "too_large"
        assert refusal.value.retry_after is None
        with pytest.raises(CostTooLarge):
            gate.try_admit(**cost)
    unbounded = Gate(bytes=10)
    with pytest.raises(CostTooLarge, match="of 10 bytes; make"):
        await unbounded.admit(bytes=11)
    unbounded.try_admit(bytes=0, slots=10**9).release()
    assert_quiescent(gate)


@pytest.mark.parametrize("cost", [-1, 0.5, math.nan, "1"], ids=repr)
async def test_refuses_odd_costs_at_the_door(cost: object) -> None:
    """Negative, fractional and NaN costs leave no trace in the statistics (B14)."""
    gate = Gate(slots=2, bytes=10)
    for request in ({"slots": cost}, {"bytes": cost}, {"slots": 0, "bytes": 0}):
        with pytest.raises(ValueError, match="must"):
            await gate.admit(**request)
        with pytest.raises(ValueError, match="must"):
            gate.try_admit(**request)
    assert gate.statistics().received == 0


@pytest.mark.parametrize("limit", [-1, 0.5, math.nan], ids=repr)
async def test_refuses_odd_limits(limit: float) -> None:
    """A gate cannot be made or resized with limits that are not whole numbers."""
    for name in ("slots", "bytes", "max_waiting"):
        with pytest.raises(ValueError, match=name):
            Gate(**{name: limit})
    gate = Gate(slots=1, bytes=1)
    for name in ("slots", "bytes"):
        with pytest.raises(ValueError, match=name):
            gate.resize(**{name: limit})
    assert (gate.statistics().slots, gate.statistics().bytes) == (1, 1)


def test_tells_its_limits() -> None:
    """Statistics have the maximum length of the queue, so that a full one is seen."""
    assert Gate(slots=2, max_waiting=3).statistics().max_waiting == 3
    assert Gate(slots=None).statistics().max_waiting is None


async def test_refuses_a_wait_that_is_no_number() -> None:
    """NaN is a mistake, not a deadline, and would upset the loop's timers (B14)."""
    with pytest.raises(ValueError, match="max_wait must be"):
        Gate(slots=None, max_wait=math.nan)
    gate = Gate(slots=None)
    with pytest.raises(ValueError, match="max_wait must be"):
        await gate.admit(max_wait=math.nan)
    assert gate.statistics().received == 0


async def test_tries_without_waiting() -> None:
    """try_admit returns a held lease or refuses, and owes nothing then (B7)."""
    gate = Gate(slots=1, name="photos")
    lease = gate.try_admit()
    assert lease.held
    with pytest.raises(GateFull, match="'photos' is full; retry") as refusal:
        gate.try_admit()
    assert refusal.value.reason == "full"
    assert isinstance(refusal.value, LifecycleError)
    lease.release()
    now = gate.statistics()
    assert (now.received, now.admitted, now.refused, now.slots_in_use) == (2, 1, 1, 0)


async def test_bounds_its_line() -> None:
    """A request beyond the maximum queue is refused at once, and the queue stays."""
    gate = Gate(slots=1, max_waiting=2, name="photos")
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(4):
            await crowd.come(name)
        assert set(crowd.refused) == {3}
        assert isinstance(crowd.refused[3], GateFull)
        assert "its queue of 2 is full" in str(crowd.refused[3])
        assert gate.statistics().waiting == 2
        for name in range(3):
            await crowd.leave(name)
    assert crowd.order == [0, 1, 2]
    assert_quiescent(gate)


async def test_lets_no_request_wait_without_a_queue() -> None:
    """max_waiting=0 admits at once or refuses, also behind a granted waiter."""
    gate = Gate(slots=1, max_waiting=0)
    with await gate.admit():
        with pytest.raises(GateFull):
            await gate.admit()
    assert_quiescent(gate)


async def test_wakes_requests_that_fit_when_limits_rise() -> None:
    """Raising a limit admits at once all requests that fit, and no more (B21)."""
    gate = Gate(slots=1, bytes=100)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(5):
            await crowd.come(name, bytes=10)
        assert crowd.got_in(0)
        gate.resize(slots=3)
        await anyio.wait_all_tasks_blocked()
        assert crowd.got_in(1, 2)
        gate.resize(slots=None, bytes=40)
        await anyio.wait_all_tasks_blocked()
        assert crowd.got_in(3)
        gate.resize(bytes=None)
        await anyio.wait_all_tasks_blocked()
        assert crowd.got_in(4)
        now = gate.statistics()
        assert (now.slots, now.bytes) == (None, None)
        for name in range(5):
            await crowd.leave(name)
    assert_quiescent(gate)


async def test_grants_nothing_after_a_shrink_until_below() -> None:
    """Lowering a limit takes nothing away, and admits no request until repaid (B2)."""
    gate = Gate(slots=4)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(5):
            await crowd.come(name)
        gate.resize(slots=2)
        for name in range(2):
            await crowd.leave(name)
            assert crowd.order == [0, 1, 2, 3]
        gate.resize(slots=2)
        assert crowd.order == [0, 1, 2, 3]
        await crowd.leave(2)
        assert crowd.order == [0, 1, 2, 3, 4]
        await crowd.leave(3)
        await crowd.leave(4)
    assert_quiescent(gate)


async def test_refuses_waiters_that_a_shrink_makes_impossible() -> None:
    """A waiter above the new capacity is refused, and those behind it get on."""
    gate = Gate(bytes=10)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        await crowd.come("held", bytes=4)
        await crowd.come("large", bytes=9)
        await crowd.come("small", bytes=2)
        gate.resize(bytes=8)
        await anyio.wait_all_tasks_blocked()
        assert isinstance(crowd.refused["large"], CostTooLarge)
        assert crowd.order == ["held", "small"]
        for name in crowd.order:
            await crowd.leave(name)
    assert gate.statistics().refused == 1
    assert_quiescent(gate)


async def test_pauses_at_zero() -> None:
    """A capacity of zero admits no request and refuses none."""
    gate = Gate(slots=0)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(2):
            await crowd.come(name, slots=2 - name)
        assert crowd.order == []
        assert crowd.refused == {}
        with pytest.raises(GateFull):
            gate.try_admit()
        gate.resize(slots=3)
        await anyio.wait_all_tasks_blocked()
        assert crowd.got_in(0, 1)
        for name in range(2):
            await crowd.leave(name)
    assert_quiescent(gate)


async def test_closes_for_good() -> None:
    """Closing refuses waiting and later requests, and leaves live leases alone."""
    gate = Gate(slots=1, name="photos")
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(3):
            await crowd.come(name)
        assert not gate.closed
        gate.close()
        gate.close()
        assert gate.closed
        await anyio.wait_all_tasks_blocked()
        assert {type(r) for r in crowd.refused.values()} == {GateClosed}
        assert crowd.leases[0].held
        with pytest.raises(GateClosed, match="'photos' is closed") as refusal:
            await gate.admit()
        assert refusal.value.retry_after is None
        assert refusal.value.reason == "closed"
        await crowd.leave(0)
        with pytest.raises(GateClosed):
            gate.try_admit()
    assert gate.statistics().refused == 4
    assert_quiescent(gate)


async def test_says_how_it_stands() -> None:
    """Statistics and repr tell limits, use and line."""
    gate = Gate(slots=2, bytes=10, name="photos")
    with await gate.admit(bytes=3):
        now = gate.statistics()
        assert (now.slots, now.slots_in_use, now.bytes, now.bytes_in_use) == (
            2,
            1,
            10,
            3,
        )
        assert repr(gate) == "<Gate 'photos': 1 of 2 slots, 3 of 10 bytes, 0 waiting>"
    assert (now.admitted, now.released, now.lost) == (1, 0, 0)
    assert gate.statistics().released == 1


async def test_balances_its_books_at_every_moment() -> None:
    """Each request is in exactly one of the counts, whatever moment one looks at.

    Every request is counted by the test itself, and compared after each event
    and each step.
    """
    asked = 0
    gate: Gate

    def compare(_event: object = None) -> None:
        now = gate.statistics()
        assert now.received == asked, now
        assert (now.admitted - now.released == 0) is (now.slots_in_use == 0)
        assert min(now.cancelled, now.refused, now.waiting, now.lost) >= 0

    gate = Gate(slots=2, max_waiting=3, observer=compare)

    scopes: list[anyio.CancelScope] = []

    async def request(kind: str) -> None:
        nonlocal asked
        asked += 1
        try:
            with anyio.CancelScope() as scope:
                if kind == "cancelled":
                    scopes.append(scope)
                wait = 0 if kind == "impatient" else None
                with await gate.admit(max_wait=wait, slots=3 if kind == "huge" else 1):
                    compare()
                    for _ in range(3):
                        await checkpoint()
                        compare()
        except Refused:
            compare()

    kinds = ["plain", "cancelled", "impatient", "huge"]
    async with anyio.create_task_group() as tasks:
        asked += 1
        with gate.try_admit(slots=2):
            async with anyio.create_task_group() as first:
                for kind in ("cancelled", "impatient"):
                    first.start_soon(request, kind)
                await anyio.wait_all_tasks_blocked()
                scopes.pop().cancel()
            for i in range(60):
                tasks.start_soon(request, kinds[i % 4])
                if i % 5 == 0:
                    await checkpoint()
                    compare()
            await anyio.wait_all_tasks_blocked()
            for scope in scopes:
                scope.cancel()
            await anyio.wait_all_tasks_blocked()
        compare()
    gate.close()
    await request("plain")
    now = gate.statistics()
    assert now.received == asked == 64
    assert now.admitted and now.refused and now.cancelled
    assert_quiescent(gate)


async def test_tells_its_observer_what_its_books_say() -> None:
    """Events add up to the statistics: grants, releases, refusals, departures."""
    seen = RecordingObserver()
    gate = Gate(slots=1, max_waiting=1, observer=seen, name="photos")
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in range(3):
            await crowd.come(name)
        await crowd.leave(0)
        with anyio.move_on_after(0):
            await gate.admit()
        await crowd.leave(1)
    assert seen.names() == [
        "LeaseGranted",
        "AdmissionRefused",
        "LeaseReleased",
        "LeaseGranted",
        "AdmissionCancelled",
        "LeaseReleased",
    ]
    assert {event.gate for event in seen.events} == {"photos"}
    refused = seen.events[1]
    assert (refused.reason, refused.slots, refused.bytes) == ("full", 1, 0)
    assert seen.events[0].waited_s == 0.0
    assert seen.events[3].waited_s >= 0.0


async def test_tells_of_a_lease_once_that_is_released_twice() -> None:
    """The second release gives nothing back, and is no event."""
    seen = RecordingObserver()
    lease = Gate(slots=1, observer=seen).try_admit()
    lease.release()
    lease.release()
    assert seen.names() == ["LeaseGranted", "LeaseReleased"]


async def test_remembers_no_priority_that_no_request_has() -> None:
    """Priorities that never come again, such as times, do not pile up."""
    gate = Gate(slots=1)
    before = len([o for o in gc.get_objects() if type(o) is OrderedDict])
    for priority in range(200):
        with gate.try_admit():
            async with anyio.create_task_group() as tasks:
                await Crowd(gate, tasks).come(priority, priority=priority)
                tasks.cancel_scope.cancel()
    after = len([o for o in gc.get_objects() if type(o) is OrderedDict])
    assert after - before < 100
    assert_quiescent(gate)


async def test_refuses_a_priority_that_cannot_be_sorted() -> None:
    """It does no harm to requests after it."""
    gate = Gate(slots=1)
    lease = gate.try_admit()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        await crowd.come("before")
        for priority in ("1", None, 1.0, 1.5):
            with pytest.raises(ValueError, match="priority"):
                Gate(slots=1).try_admit(priority=priority)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="priority"):
                await gate.admit(priority=priority)  # type: ignore[arg-type]
        await crowd.come("after", priority=5)
        lease.release()
        await anyio.wait_all_tasks_blocked()
        assert crowd.order == ["after"]
        crowd.leases["after"].release()
        await anyio.wait_all_tasks_blocked()
        crowd.leases["before"].release()
    assert_quiescent(gate)


async def test_refuses_a_key_that_is_none() -> None:
    """One that cannot be looked up is charged with nothing."""
    gate = Gate(slots=1, order="fair")
    key: Any = ["tenant"]
    with pytest.raises(TypeError, match="unhashable"):
        gate.try_admit(key=key)
    with gate.try_admit(), pytest.raises(TypeError, match="unhashable"):
        await gate.admit(key=key)
    assert gate.statistics().admitted == 1
    assert_quiescent(gate)
