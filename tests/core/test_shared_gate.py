"""SharedGate: what a `Gate` does, over workers that are all in this process."""

import contextlib
import gc
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from shared_kit import Workers, follows, leads, queued, stalled, until, wait_until

from lifecycle import (
    AdmissionTimeout,
    CostTooLarge,
    Gate,
    GateClosed,
    GateFull,
)
from lifecycle.events import (
    AdmissionCancelled,
    AdmissionRefused,
    LeaseGranted,
    LeaseReleased,
    LeaseSettled,
)
from lifecycle.lowlevel import owner
from lifecycle.shared import (
    SharedGate,
    gate as gate_module,
    leader as leader_module,
    member as member_module,
)
from lifecycle.testing import RecordingObserver

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="OFD locks"),
]


@pytest.fixture
def workers(tmp_path, monkeypatch):
    # However busy the machine is, nobody is deposed, but where a test asks for it.
    monkeypatch.setattr(member_module, "_PATIENCE", 600)
    monkeypatch.setattr(leader_module, "SILENT", 60.0)
    monkeypatch.setattr(leader_module, "GRACE", 60.0)
    made = Workers(tmp_path / "gate")
    yield made
    made.close()


@pytest.fixture(params=["leader", "follower"])
def role(request):
    return request.param


class Queue:
    """Requests in tasks, and the order in which they got in."""

    def __init__(self, tasks, workers):
        self.tasks, self.workers = tasks, workers
        self.order, self.leases, self.refused = [], {}, {}

    async def come(self, gate, name, **cost):
        before = queued(self.workers)
        self.tasks.start_soon(self.enter, gate, name, cost)
        done = self.leases, self.refused
        await until(
            lambda: queued(self.workers) > before or any(name in it for it in done)
        )

    async def enter(self, gate, name, cost):
        try:
            self.leases[name] = await gate.admit(**cost)
        except (GateFull, GateClosed, CostTooLarge, AdmissionTimeout) as refusal:
            self.refused[name] = refusal.with_traceback(None)
        else:
            self.order.append(name)

    async def got_in(self, *names):
        await until(lambda: len(self.order) >= len(names))
        assert self.order == list(names)

    def leave(self, name):
        self.leases[name].release()


async def test_shares_one_capacity(workers) -> None:
    """What one worker holds, the other cannot have; what it releases, it can."""
    a, b = workers.two(slots=2)
    with await a.admit(), await b.admit():
        for gate in (a, b):
            assert gate.statistics().slots_in_use == 2
            with pytest.raises(GateFull, match="is full; retry in"):
                gate.try_admit()
    await until(lambda: b.statistics().slots_in_use == 0)
    with await b.admit(slots=2):
        assert a.statistics().slots_in_use == 2


async def test_lets_one_request_take_all(workers, role) -> None:
    """One request of any worker may use the whole budget."""
    gate = workers.one(role, slots=None, bytes=2**40)
    with await gate.admit(bytes=2**40):
        assert gate.statistics().bytes_in_use == 2**40
    await until(lambda: a_free(gate))


def a_free(gate):
    return gate.statistics().bytes_in_use == gate.statistics().slots_in_use == 0


async def test_keeps_the_order_over_workers(workers) -> None:
    """Requests of two workers get in as they came."""
    a, b = workers.two(slots=1)
    first = await a.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        for i, gate in enumerate((a, b, b, a, b)):
            await queue.come(gate, i)
        assert b.statistics().waiting == 5
        first.release()
        for i in range(5):
            await queue.got_in(*range(i + 1))
            queue.leave(i)


async def test_lets_the_newest_go_first_where_a_queue_stands(workers) -> None:
    """The adaptive order counts over workers, and refuses who waits long in each."""
    a, b = workers.two(slots=1, order="adaptive", max_wait=0.001)
    first = await a.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        for name, gate in (("a", a), ("b", b)):
            tasks.start_soon(queue.enter, gate, name, {"max_wait": None})

        def both_are_refused() -> bool:
            a.resize(slots=1)  # as whatever may let somebody in
            return len(queue.refused) == 2

        await until(both_are_refused)
        for refusal in queue.refused.values():
            assert isinstance(refusal, AdmissionTimeout)
            assert "has had a queue for 0.001 s" in str(refusal)
        first.release()
        await queue.come(b, "late", max_wait=None)
        await queue.got_in("late")
        queue.leave("late")


async def test_lets_a_higher_priority_go_first(workers) -> None:
    """Priorities count over workers."""
    a, b = workers.two(slots=1)
    first = await b.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        await queue.come(a, "late")
        await queue.come(b, "early", priority=1)
        first.release()
        await queue.got_in("early")
        queue.leave("early")
        await queue.got_in("early", "late")
        queue.leave("late")


async def test_shares_evenly_between_keys(workers) -> None:
    """The fair order counts what keys have in all workers."""
    a, b = workers.two(slots=2, order="fair", reserve=0.5)
    one = await a.admit(key="x")
    two = await b.admit(key="y")
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        await queue.come(b, "x2", key="x")
        await queue.come(a, "z", key="z")
        two.release()
        await queue.got_in("z")
        one.release()
        await queue.got_in("z", "x2")
        queue.leave("z")
        queue.leave("x2")


async def test_refuses_for_every_reason(workers, role) -> None:
    """Refusals of a follower are those of the gate, with their reasons and seconds."""
    gate = workers.one(role, slots=1, max_waiting=0)
    with pytest.raises(CostTooLarge, match="2 slots can never pass"):
        await gate.admit(slots=2)
    with await gate.admit():
        with pytest.raises(GateFull, match="max_waiting is 0") as full:
            with anyio.fail_after(60):
                await anyio.to_thread.run_sync(partial(anyio.run, gate.admit))
        assert full.value.retry_after >= 1
    await until(lambda: a_free(gate))


async def test_refuses_at_its_deadline(workers, role) -> None:
    """A request that waits for its *max_wait* is refused by the gate, and leaves it."""
    gate = workers.one(role, slots=1, max_wait=0.01)
    with await gate.admit():
        before = gate.statistics().refused
        async with anyio.create_task_group() as tasks:
            queue = Queue(tasks, workers)
            await queue.come(gate, "late")
            await until(lambda: "late" in queue.refused)
        assert type(queue.refused["late"]) is AdmissionTimeout
        assert queue.refused["late"].retry_after >= 1
        assert gate.statistics().refused == before + 1
    await until(lambda: a_free(gate))


async def test_refuses_at_its_deadline_though_nobody_leads(workers) -> None:
    """Without a leader, the worker itself refuses at last."""
    a, b = workers.two(slots=1)
    with stalled(a), stalled(b):
        for gate in (a, b):
            lease = a.try_admit() if gate is a else None
            with pytest.raises((AdmissionTimeout, GateFull), match=r"retry in 1\.0 s"):
                await gate.admit(max_wait=0.01)
            if lease:
                lease.release()
        with pytest.raises(GateFull, match="has no leader"):
            b.try_admit()
    assert b.statistics().waiting == 0


async def test_forgets_a_request_that_is_cancelled(workers, role) -> None:
    """A cancelled request leaves the queue, and the next one goes."""
    gate = workers.one(role, slots=1)
    lease = await gate.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        scope = anyio.CancelScope()
        tasks.start_soon(gone, gate, scope)
        await until(lambda: gate.statistics().waiting)
        await queue.come(gate, "next")
        scope.cancel()
        await until(lambda: gate.statistics().waiting == 1)
        lease.release()
        await queue.got_in("next")
        queue.leave("next")
    assert gate.statistics().cancelled >= 1
    await until(lambda: a_free(gate))


async def gone(gate, scope):
    with scope:
        (await gate.admit()).release()


async def test_gives_back_a_grant_to_who_was_cancelled_just_then(workers, role) -> None:
    """A grant and a cancellation in one moment: nothing is held afterwards."""
    gate = workers.one(role, slots=1)
    lease = await gate.admit()
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gone, gate, scope)
        await until(lambda: gate.statistics().waiting)
        lease.release()
        admitted = gate.statistics().admitted
        wait_until(lambda: gate.statistics().admitted > admitted - 1)
        wait_until(lambda: not gate.statistics().waiting)
        scope.cancel()
    await until(lambda: a_free(gate))


async def test_detects_that_a_task_would_wait_for_itself(workers, role) -> None:
    """Inside a block of its own lease, a task is refused instead of hanging."""
    gate = workers.one(role, slots=1)
    with await gate.admit():
        with pytest.raises(RuntimeError, match="deadlock"):
            await gate.admit()
    await until(lambda: a_free(gate))
    with await gate.admit():
        gate.resize(slots=2)
        await until(lambda: gate.statistics().slots == 2)
        with anyio.fail_after(60):
            while True:
                try:
                    lease = await gate.admit()
                except RuntimeError:  # the leader has not heard of it
                    await checkpoint()
                else:
                    break
        lease.release()
        with pytest.raises(CostTooLarge):
            await gate.admit(slots=3)


async def test_settles_in_both_directions(workers, role) -> None:
    """An estimate is replaced in the row and at the leader."""
    gate = workers.one(role, bytes=100)
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        lease = await gate.admit(bytes=90)
        await queue.come(gate, "next", bytes=40)
        lease.settle(bytes=60)
        await until(lambda: lease.bytes == 60)  # at once, or by the thread of the gate
        await queue.got_in("next")
        queue.leave("next")
        lease.settle(bytes=130)
        assert gate.statistics().bytes_in_use in (130, 170)
        await until(lambda: gate.statistics().bytes_in_use == 130)
        lease.release()
        lease.settle(bytes=1)
        lease.release()
    await until(lambda: a_free(gate))


async def test_serves_threads(workers) -> None:
    """Threads without a loop get a lease or a refusal, and may release any lease."""
    a, b = workers.two(slots=1)
    found = []

    def work():
        for gate in (a, b):
            lease = gate.try_admit()
            with pytest.raises(GateFull):
                gate.try_admit()
            found.append(lease)
            lease.release()
            wait_until(partial(a_free, gate))
            with pytest.raises(RuntimeError, match="event loop"):
                gate.admit().send(None)

    thread = threading.Thread(target=work)
    thread.start()
    await until(lambda: not thread.is_alive())
    assert len(found) == 2
    lease = await b.admit()
    thread = threading.Thread(target=lease.release)
    thread.start()
    await until(lambda: a_free(b))
    thread.join()


def has_slots(gate, slots):
    return gate.statistics().slots == slots


async def test_resizes_for_all_workers(workers) -> None:
    """A new capacity counts in every worker, whichever named it."""
    a, b = workers.two(slots=1)
    for gate, slots in ((b, 3), (a, 2), (b, 4)):
        gate.resize(slots=slots)
        for each in (a, b):
            await until(partial(has_slots, each, slots))
        for each in (a, b):
            with await each.admit(slots=slots):
                pass
            await until(lambda: a_free(a))
    b.resize(bytes=7)
    await until(lambda: a.statistics().bytes == 7)
    assert a.statistics().slots == 4
    with pytest.raises(ValueError, match="slots must be 0 or more"):
        a.resize(slots=-1)


async def test_warns_of_other_limits_where_it_is_called(workers) -> None:
    """The warning names the line that made the worker join, whichever call that was."""
    workers(slots=1).try_admit().release()
    calls = (
        lambda gate: gate.statistics(),
        lambda gate: gate.resize(slots=7),
        lambda gate: gate.try_admit().release(),
    )
    for slots, call in enumerate(calls, 20):
        with pytest.warns(RuntimeWarning, match=f"changes that to {slots}") as caught:
            call(workers(slots=slots))
        line = caught[0].filename, caught[0].lineno
        assert line == (__file__, call.__code__.co_firstlineno)


async def test_takes_the_capacity_of_who_comes_last(workers) -> None:
    """A worker with other limits says so and changes them, also after a take-over."""
    a, b = workers.two(slots=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        c = workers(slots=5, bytes=9)
        (await c.admit(slots=5)).release()
    assert "had 1 slots and any bytes, and this worker changes that to 5" in str(
        caught[0].message
    )
    assert caught[0].filename == __file__
    await until(lambda: a.statistics().slots == b.statistics().slots == 5)
    a.close()
    await until(lambda: leads(b) or leads(c))
    assert b.statistics().slots == c.statistics().slots == 5


async def test_goes_on_when_its_leader_leaves(workers) -> None:
    """Another worker leads; leases count on, and waiting requests keep their order."""
    a, b = workers.two(slots=2)
    c = workers(slots=2)
    one, two = await b.admit(), await c.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        for i, gate in enumerate((b, c, c, b)):
            await queue.come(gate, i)
        a.close()
        await until(lambda: leads(b) or leads(c))
        assert b.statistics().slots_in_use == 2
        await checkpoint()
        assert queue.order == []
        one.release()
        await queue.got_in(0)
        two.release()
        await queue.got_in(0, 1)
        for i in range(4):
            queue.leave(i)
            # The next two are in different workers, whose threads know no order.
            await until(partial(queue.leases.get, min(i + 2, 3)))
        assert queue.order == [0, 1, 2, 3]
    await until(lambda: a_free(b))
    assert b.statistics().admitted == b.statistics().released


async def test_keeps_its_leases_when_it_is_closed(workers, role) -> None:
    """`close` refuses requests of this worker; its leases stay until they are released."""
    gate = workers.one(role, slots=1)
    lease = await gate.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        await queue.come(gate, "waits")
        gate.close()
        gate.close()
        await until(lambda: queue.refused)
    assert type(queue.refused["waits"]) is GateClosed
    with pytest.raises(GateClosed):
        gate.try_admit()
    assert gate.statistics().slots_in_use == 1
    lease.release()
    await until(lambda: not gate._member.is_in)
    now = gate.statistics()
    assert now.slots_in_use == 0 and now.released == now.admitted
    gate.resize(slots=1)


async def test_leaves_when_nobody_refers_to_it(tmp_path) -> None:
    """A gate that a program forgets ends its thread."""
    gate = SharedGate(tmp_path / "gate", slots=1)
    (await gate.admit()).release()
    thread = gate._member.loop._thread
    del gate
    gc.collect()
    await until(lambda: not thread.is_alive())


async def test_finds_a_lease_that_was_lost(workers, role) -> None:
    """A lease that nobody releases is released by the collector, and counted."""
    gate = workers.one(role, slots=1)
    lost = gate.statistics().lost
    lease = await gate.admit()
    with pytest.warns(ResourceWarning, match="never released"):  # noqa: PT031
        del lease  # which the thread of the gate may hold for a moment more
        await until(lambda: a_free(gate))
    assert gate.statistics().lost == lost + 1
    await until(lambda: a_free(gate))


async def test_is_claimed_by_the_owner_of_its_context(workers) -> None:
    """A lease of a shared gate belongs to its request, as any other; no more of it is."""
    gate, claimed = workers(slots=1), []
    token = owner.set(claimed.append)
    try:
        lease = await gate.admit()
    finally:
        owner.reset(token)
    assert claimed == [lease]
    assert gate._held_seconds(lease) is None
    lease.release()


async def test_closes_everything_in_a_forked_child(tmp_path, monkeypatch) -> None:
    """The hook closes what a child has of its parent, and the child joins anew."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    gate = SharedGate(tmp_path / "gate", slots=1)
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    gate._join_now()
    member = gate._member
    member._turn()
    assert member.leader and len(list(files.iterdir())) > before + 3
    monkeypatch.setattr(gate_module, "_gates", {gate, SharedGate(gate.folder, slots=1)})
    gate_module._leave_to_parent()
    assert gate._member is None
    # Left to the collector: the bell, and the file of the mapping, which has no lock.
    assert len(list(files.iterdir())) <= before + 2


async def test_tells_its_observer(workers, role) -> None:
    """Each worker reports the requests that it made, with the events of a gate."""
    seen = RecordingObserver()
    gate = workers.one(role, slots=1, observer=seen)
    lease = await gate.admit()
    with pytest.raises(GateFull):
        gate.try_admit()
    lease.settle(bytes=5)
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gone, gate, scope)
        await until(lambda: gate.statistics().waiting)
        scope.cancel()
    lease.release()
    # What came while the gate's thread was at work is told with the next call.
    await until(lambda: a_free(gate))
    kinds = [type(each) for each in seen.events]
    assert kinds == [
        LeaseGranted,
        AdmissionRefused,
        LeaseSettled,
        AdmissionCancelled,
        LeaseReleased,
    ]


async def test_tells_with_the_next_call_what_came_during_a_change(workers) -> None:
    """A release while the gate's thread holds the lock waits for neither; it is told."""
    seen = RecordingObserver()
    gate = workers(slots=1, observer=seen)
    lease = await gate.admit()
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with gate._member.locked():
            locked.set()
            assert go_on.wait(60)

    gate._member.loop.call(hold)
    assert locked.wait(60)
    lease.release()
    assert [type(each) for each in seen.events] == [LeaseGranted]
    go_on.set()
    await until(lambda: a_free(gate))
    assert [type(each) for each in seen.events] == [LeaseGranted, LeaseReleased]


async def test_admits_all_in_shadow(workers) -> None:
    """With ``enforce=False``, all are admitted, and counted where a gate would not."""
    a, b = workers.two(slots=1, enforce=False)
    leases = [await a.admit(), await b.admit(), b.try_admit()]
    await until(lambda: b.statistics().over_limit == 2)
    for each in leases:
        each.release()
    await until(lambda: a_free(a))


async def test_refuses_what_a_finaliser_asks_in_the_middle_of_a_change(workers) -> None:
    """A call that interrupts a change of this very gate is refused, not half made."""
    gate = workers(slots=2)
    (await gate.admit()).release()
    with gate._member.locked():
        with pytest.raises(GateFull, match="interrupted"):
            gate.try_admit()
        gate.statistics()
    lease = gate.try_admit()
    with gate._member.locked():
        lease.release()
        assert lease.held  # left to who holds the lock
    assert not lease.held


def test_wakes_a_thread_without_a_lock_that_it_holds_itself(workers) -> None:
    """A signal handler may use the gate wherever it interrupts a thread that waits."""
    a, b = workers.two(slots=1)
    asked, held, stuck = threading.Event(), [], []

    def trace(frame, event, arg):
        condition = getattr(frame.f_locals.get("self"), "_cond", None)
        if event == "line" and condition and condition._lock.locked() and not stuck:
            asked.set()  # as a handler that runs within the wait itself
            wait_until(lambda: not b._member.waiting)
            stuck.append(not b._lock.mutex.acquire(timeout=5))
            if not stuck[0]:
                b._lock.mutex.release()
        return trace

    def ask():
        sys.settrace(trace)
        try:
            held.append(b.try_admit())
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=ask)
    with stalled(a):
        thread.start()
        wait_until(lambda: b._member.waiting)
        asked.wait(0.2)  # a wait without such a lock never says so
    thread.join(60)
    assert True not in stuck
    held[0].release()


async def test_checks_what_it_is_given(tmp_path, monkeypatch) -> None:
    """Mistakes are told at once, with the words of a gate."""
    folder = tmp_path / "gate"
    with pytest.raises(ValueError, match="order must be"):
        SharedGate(folder, slots=1, order="lifo")
    with pytest.raises(ValueError, match="slots must be 0 or more"):
        SharedGate(folder, slots=-1)
    with pytest.raises(ValueError, match="max_wait"):
        SharedGate(folder, slots=1, max_wait=-1)
    with pytest.warns(RuntimeWarning, match="no limit") as caught:
        SharedGate(folder)
    assert caught[0].filename == __file__
    gate = SharedGate(folder, bytes=5, name="mine")
    assert repr(gate) == f"<SharedGate 'mine' of {folder}: open>"
    with pytest.raises(TypeError, match="key must be a string or None, not int"):
        await gate.admit(bytes=1, key=5)
    with pytest.raises(ValueError, match="below 7"):
        await gate.admit(bytes=2**60)
    with pytest.raises(ValueError, match="priority"):
        gate.try_admit(bytes=1, priority="high")
    with pytest.raises(ValueError, match="NaN"):
        await gate.admit(bytes=1, max_wait=float("nan"))
    with pytest.raises(ValueError, match="at least one"):
        gate.try_admit(bytes=0, slots=0)
    assert list(folder.iterdir()) == []  # it has not joined
    with pytest.warns(RuntimeWarning, match="named no bytes") as caught:
        (await gate.admit()).release()
    assert caught[0].filename == __file__
    (await gate.admit(max_wait=5)).release()
    with contextlib.closing(SharedGate(tmp_path / "other", bytes=5)) as other:
        with pytest.warns(RuntimeWarning, match="named no bytes") as caught:
            other.try_admit().release()
        assert caught[0].filename == __file__
    gate.close()
    assert "closed" in repr(gate)
    unused = SharedGate(folder, slots=1)
    unused.close()
    assert unused.statistics().slots == 1
    unused.resize(slots=4)
    with pytest.raises(GateClosed):
        await unused.admit()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="needs Linux, not darwin"):
        SharedGate(folder, slots=1)


async def test_has_the_methods_of_a_gate() -> None:
    """Whatever takes a gate by its public methods takes this one."""
    public = {name for name in vars(Gate) if not name.startswith("_")}
    assert public <= {name for name in vars(SharedGate) if not name.startswith("_")}


async def test_refuses_a_folder_that_others_may_enter(tmp_path) -> None:
    """What is wrong with the folder is said at once, or by the first request."""
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        SharedGate(folder, slots=1)
    folder.chmod(0o700)
    gate = SharedGate(folder, slots=1)
    folder.chmod(0o755)
    for _ in range(2):
        assert gate.statistics().slots_in_use == 0
        with pytest.raises(PermissionError, match="chmod 700"):
            await gate.admit()


async def test_admits_no_more_when_its_folder_is_gone(workers) -> None:
    """Without its folder, a gate refuses: newcomers would get another one."""
    a, b = workers.two(slots=1)
    lease = await a.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        await queue.come(b, "waits")
        workers.folder.rename(workers.folder.with_name("old"))
        await until(lambda: queue.refused)
    assert "was removed or replaced; restart" in str(queue.refused["waits"])
    await until(lambda: a._member.cut_off)
    for gate in (a, b):
        with pytest.raises(GateClosed, match="removed"):
            await gate.admit()
    lease.release()
    await until(lambda: not lease.held)


async def test_refuses_after_an_error_in_its_thread(workers, monkeypatch) -> None:
    """An error of its thread ends it with words, and no request hangs."""
    a, b = workers.two(slots=1)
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda it: told.append(it.exc_value))

    def break_it():
        raise ArithmeticError("a mistake of ours")

    lease = await a.admit()
    async with anyio.create_task_group() as tasks:
        queue = Queue(tasks, workers)
        await queue.come(b, "waits")
        b._member.loop.call(break_it)
        await until(lambda: queue.refused)
    assert "ended by an error" in str(queue.refused["waits"])
    await until(lambda: told)
    assert "a mistake of ours" in str(told[0])
    with pytest.raises(GateClosed):
        await b.admit()
    lease.release()
    (await a.admit()).release()
    assert follows(b) is not None
