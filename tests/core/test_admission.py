"""The ways out of a gate's line: granted, cancelled, timed out, sent away."""

import contextlib
import weakref
from collections.abc import Awaitable, Callable
from contextvars import copy_context

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import (
    AdmissionTimeout,
    CostTooLarge,
    Gate,
    GateClosed,
    GateFull,
    Lease,
    Refused,
)
from lifecycle.events import AdmissionCancelled, AdmissionRefused
from lifecycle.testing import (
    Attempt,
    RecordingObserver,
    assert_quiescent,
    cancel_everywhere,
)

virtual = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


def test_strands_no_request_when_cancelled_anywhere() -> None:
    """Cancelled at any point, in any way, a request passes its grant on (B1)."""

    async def scenario(attempt: Attempt) -> None:
        seen = RecordingObserver()
        gate = Gate(slots=1, bytes=10, observer=seen)
        served: list[int] = []
        holder = gate.try_admit(bytes=10)

        async def request(number: int, nbytes: int) -> None:
            with await gate.admit(bytes=nbytes):
                await checkpoint()
                served.append(number)

        async def let_go() -> None:
            await checkpoint()
            holder.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(request, 1, 3)
            await checkpoint()
            tasks.start_soon(let_go)
            outcome = await attempt(request(2, 10))
            tasks.start_soon(request, 3, 1)
        assert set(served) >= {1, 3}
        assert outcome == "cancelled" or 2 in served
        now = gate.statistics()
        assert now.received == 4
        assert_quiescent(gate)
        assert_told_as_booked(seen, gate)

    points = cancel_everywhere(scenario, double=True)
    assert min(points.values()) >= 2


def test_strands_no_request_when_cancelled_under_a_deadline() -> None:
    """The same holds for a request that waits under max_wait (B1)."""

    async def scenario(attempt: Attempt) -> None:
        seen = RecordingObserver()
        gate = Gate(slots=1, observer=seen)
        holder = gate.try_admit()

        async def request() -> None:
            with await gate.admit(max_wait=5):
                await checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checkpoint)
            tasks.start_soon(holder_leaves, holder)
            await attempt(request())
        with anyio.fail_after(1), await gate.admit():
            pass
        assert_quiescent(gate)
        assert_told_as_booked(seen, gate)

    async def holder_leaves(holder: object) -> None:
        await checkpoint()
        holder.release()

    cancel_everywhere(scenario, double=True)


def assert_told_as_booked(seen: RecordingObserver, gate: Gate) -> None:
    """Counting events gives the same numbers as the statistics of the gate."""
    now, names = gate.statistics(), seen.names()
    assert names.count("LeaseGranted") == now.admitted
    assert names.count("LeaseReleased") == now.released
    assert names.count("AdmissionRefused") == now.refused
    assert names.count("AdmissionCancelled") == now.cancelled


@pytest.mark.anyio
async def test_lets_those_behind_a_cancelled_head_in() -> None:
    """A large head that is cancelled lets the small requests in that it blocked (B5)."""
    gate = Gate(bytes=10)
    got = []

    async def request(nbytes: int, scope: anyio.CancelScope) -> None:
        with scope:
            got.append(await gate.admit(bytes=nbytes))

    with gate.try_admit(bytes=5):
        async with anyio.create_task_group() as tasks:
            scopes = [anyio.CancelScope() for _ in range(3)]
            for nbytes, scope in zip((9, 3, 2), scopes, strict=True):
                tasks.start_soon(request, nbytes, scope)
                await anyio.wait_all_tasks_blocked()
            assert got == []
            scopes[0].cancel()
            await anyio.wait_all_tasks_blocked()
            assert sorted(lease.bytes for lease in got) == [2, 3]
    for lease in got:
        lease.release()
    now = gate.statistics()
    assert (now.cancelled, now.waiting, now.admitted) == (1, 0, 3)
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_forgets_a_storm_of_cancelled_waiters() -> None:
    """Waiters that come and are cancelled leave neither places nor memory behind."""
    gate = Gate(slots=1)
    left: list[weakref.ref[object]] = []

    async def request() -> None:
        mark = Mark()
        left.append(weakref.ref(mark))
        await gate.admit()

    with gate.try_admit():
        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                for _ in range(200):
                    tasks.start_soon(request)
                await anyio.wait_all_tasks_blocked()
                assert gate.statistics().waiting == 200
                tasks.cancel_scope.cancel()
            assert gate.statistics().waiting == 0
    assert gate.statistics().cancelled == 1000
    assert_quiescent(gate)


class Mark:
    """Something that a weak reference can watch."""


async def try_it(gate: Gate) -> None:
    """Try, in a coroutine."""
    gate.try_admit()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "refuse",
    [
        lambda closed, _full: closed.admit(),
        lambda _closed, full: full.admit(bytes=1, max_wait=0),
        lambda _closed, full: full.admit(slots=2),
        lambda _closed, full: try_it(full),
    ],
    ids=["closed", "timeout", "too large", "full"],
)
async def test_holds_no_frame_after_a_refusal(
    no_collector: None, refuse: Callable[[Gate, Gate], Awaitable[object]]
) -> None:
    """A refusal that was caught keeps no payload of its caller alive."""
    full, closed = Gate(slots=1), Gate(slots=1)
    closed.close()
    holder = full.try_admit()

    async def caller(payload: object) -> None:
        try:
            await refuse(closed, full)
        except Refused:
            return
        pytest.fail("admitted")

    mark = Mark()
    watched = weakref.ref(mark)
    await caller(mark)
    del mark
    assert watched() is None
    holder.release()


@virtual
@pytest.mark.anyio
async def test_waits_as_long_as_it_may() -> None:
    """A request that is not admitted within its wait is refused, and leaves."""
    gate = Gate(slots=1, max_wait=7, name="photos")
    holder = gate.try_admit()
    began = anyio.current_time()
    with pytest.raises(AdmissionTimeout, match="'photos' was full for 7 s") as e:
        await gate.admit()
    assert anyio.current_time() - began == pytest.approx(7)
    assert isinstance(e.value, TimeoutError)
    assert e.value.reason == "timeout"
    assert 1 <= e.value.retry_after <= 60
    with pytest.raises(AdmissionTimeout, match="2 s"):
        await gate.admit(max_wait=2)
    assert anyio.current_time() - began == pytest.approx(9)
    with anyio.move_on_after(100) as scope:  # None outlasts the gate's default
        await gate.admit(max_wait=None)
    assert scope.cancelled_caught
    holder.release()
    now = gate.statistics()
    assert (now.refused, now.cancelled, now.waiting) == (2, 1, 0)
    assert_quiescent(gate)


@pytest.mark.anyio
@pytest.mark.parametrize("max_wait", [0, -1, 0.001])
async def test_gives_up_after_a_short_wait(max_wait: float) -> None:
    """A timeout of zero leaves the queue as it was, too."""
    seen = RecordingObserver()
    gate = Gate(slots=1, observer=seen)
    holder = gate.try_admit()
    with anyio.fail_after(5), pytest.raises(AdmissionTimeout):
        await gate.admit(max_wait=max_wait)
    holder.release()
    assert [event.reason for event in seen.of(AdmissionRefused)] == ["timeout"]
    assert_quiescent(gate)
    assert_told_as_booked(seen, gate)
    with await gate.admit(max_wait=max_wait):
        pass


@virtual
@pytest.mark.anyio
async def test_prefers_the_grant_to_the_timeout_of_the_same_moment() -> None:
    """Released exactly when the wait ends, the request gets in or leaves whole (B1)."""
    for _ in range(20):  # trio decides by chance which of the two comes first
        seen = RecordingObserver()
        gate = Gate(slots=1, observer=seen)
        holder = gate.try_admit()

        async def release(holder: object = holder) -> None:
            await anyio.sleep(1)
            holder.release()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            try:
                lease = await gate.admit(max_wait=1)
            except AdmissionTimeout:
                assert gate.statistics().refused == 1
            else:
                assert lease.held
                lease.release()
        gate.try_admit().release()
        assert_quiescent(gate)
        assert_told_as_booked(seen, gate)


@pytest.mark.anyio
async def test_prefers_the_grant_that_came_first() -> None:
    """Granted before its time was up, a request keeps its lease however late."""
    gate = Gate(slots=1)
    leases: list[Lease] = []
    began = 0.0

    async def request(max_wait: float) -> None:
        nonlocal began
        began = anyio.current_time()
        with contextlib.suppress(AdmissionTimeout):
            leases.append(await gate.admit(max_wait=max_wait))

    # On a busy machine, the time may be up before the release.
    for max_wait in (0.01, 0.1, 1.0, 10.0):
        async with anyio.create_task_group() as tasks:
            with gate.try_admit():
                tasks.start_soon(request, max_wait)
                await anyio.wait_all_tasks_blocked()
            in_time = anyio.current_time() < began + max_wait
            while in_time and anyio.current_time() <= began + max_wait:
                pass  # the loop is busy, and the deadline goes by
        if in_time:
            break
        for lease in leases:
            lease.release()
        leases.clear()
    assert leases[0].held
    leases[0].release()
    assert_quiescent(gate)


def test_leaves_once_when_sent_away_and_cancelled() -> None:
    """Refused and cancelled in the same moment, a request counts once, as refused."""

    async def scenario(attempt: Attempt) -> None:
        seen = RecordingObserver()
        gate = Gate(slots=1, observer=seen)
        holder = gate.try_admit()

        async def request() -> None:
            with contextlib.suppress(GateClosed):
                await gate.admit()

        async def close() -> None:
            gate.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await attempt(request())
        holder.release()
        now = gate.statistics()
        assert (now.refused + now.cancelled, now.received) == (1, 2)
        assert_quiescent(gate)
        assert_told_as_booked(seen, gate)

    cancel_everywhere(scenario, double=True)


@pytest.mark.anyio
async def test_detects_a_task_that_waits_for_itself() -> None:
    """A lease holder that would have to wait behind its own lease is refused (B18)."""
    seen = RecordingObserver()
    gate = Gate(slots=1, name="photos", observer=seen)
    with await gate.admit():
        with pytest.raises(RuntimeError, match="deadlock at gate 'photos'"):
            await gate.admit()
        now = gate.statistics()
        assert (now.received, now.refused) == (2, 1)
    with await gate.admit():
        pass
    assert_quiescent(gate)
    assert_told_as_booked(seen, gate)


@pytest.mark.anyio
async def test_admits_a_nested_request_that_need_not_wait() -> None:
    """Nested admission is an error only where it would wait (B18)."""
    gate = Gate(slots=2)
    with await gate.admit(), await gate.admit():
        with pytest.raises(RuntimeError):
            await gate.admit()
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_lets_a_task_wait_again_after_hand_off() -> None:
    """Inside its with block, but without its lease, a task may wait for others."""
    gate = Gate(slots=1)
    others = []

    async def other() -> None:
        lease = await gate.admit()
        await checkpoint()
        lease.release()
        others.append(lease)

    async with anyio.create_task_group() as tasks:
        with await gate.admit() as lease:
            tasks.start_soon(other)
            await anyio.wait_all_tasks_blocked()
            lease.release()  # hand-off; the block goes on
            with anyio.fail_after(5), await gate.admit():
                assert others
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_lets_others_wait_for_a_holder() -> None:
    """Only the task that holds is inside: its children and neighbours may wait."""
    gate = Gate(slots=1)

    async def child() -> None:
        with await gate.admit():
            pass

    async with anyio.create_task_group() as tasks:
        with await gate.admit():
            tasks.start_soon(child)
            await anyio.wait_all_tasks_blocked()
            assert gate.statistics().waiting == 1
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_forgets_a_task_that_entered_a_lease_twice() -> None:
    """A lease whose block is entered twice does not mark its task for ever."""
    gate = Gate(slots=1)
    lease = await gate.admit()
    with lease:
        with lease:
            pass
        assert not lease.held
    other = gate.try_admit()
    with anyio.move_on_after(0.01) as scope:
        await gate.admit()  # waits, and is not taken for its own holder
    assert scope.cancelled_caught
    other.release()
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_keeps_no_mark_of_each_block_that_was_left() -> None:
    """A task that enters block after block keeps the mark of the last one at most."""
    gate = Gate(slots=1)
    for _ in range(10):
        with await gate.admit():
            pass
    values = {variable.name: value for variable, value in copy_context().items()}
    assert len(values["entered"]) == 1
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_exempts_work_under_an_existing_lease() -> None:
    """A retry under a lease that is still held asks for nothing again (B15, peers-10).

    There is nothing to do for it: a lease is an object, not a place in a task, so
    its owner may pass it on to the retry.
    """
    gate = Gate(slots=1)
    lease = await gate.admit()

    async def attempt_once() -> None:
        assert lease.held
        raise OSError

    for _ in range(3):
        with pytest.raises(OSError, match=r"^$"):
            await attempt_once()
    lease.release()
    assert gate.statistics().admitted == 1
    assert_quiescent(gate)


def test_needs_no_loop_until_it_waits() -> None:
    """A gate is made, tried, released and closed where no loop runs at all."""
    gate = Gate(slots=1)
    with gate.try_admit():
        with pytest.raises(GateFull) as refusal:
            gate.try_admit()
        assert refusal.value.retry_after >= 1
        waiting = gate.admit()
        with pytest.raises(RuntimeError, match="event loop"):
            waiting.send(None)
    with pytest.raises(CostTooLarge):
        gate.try_admit(slots=2)
    gate.close()
    with pytest.raises(GateClosed):
        gate.try_admit()
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_is_left_by_a_coroutine_that_is_thrown_away() -> None:
    """A waiter whose coroutine is closed instead of cancelled leaves the queue."""
    seen = RecordingObserver()
    gate = Gate(slots=1, observer=seen)
    holder = gate.try_admit()
    waiting = gate.admit()
    waiting.send(None)
    assert gate.statistics().waiting == 1
    waiting.close()
    assert gate.statistics().waiting == 0
    holder.release()
    assert len(seen.of(AdmissionCancelled)) == 1
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_saturation_is_the_larger_share_in_use() -> None:
    """And at least 1 while requests wait, or where a limit is passed."""
    gate = Gate(slots=4, bytes=100)
    assert gate.statistics().saturation == 0
    with gate.try_admit(bytes=10):
        assert gate.statistics().saturation == 0.25
        with gate.try_admit(bytes=70) as lease:
            assert gate.statistics().saturation == 0.8
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: gate.admit(bytes=30))
                await anyio.wait_all_tasks_blocked()
                assert gate.statistics().saturation == 1
                tasks.cancel_scope.cancel()
            lease.settle(bytes=110)
            assert gate.statistics().saturation == 1.2
    assert Gate(slots=None).statistics().saturation == 0
    assert Gate(slots=0).statistics().saturation == 0
