"""A gate that is re-entered: by threads, finalisers, signal handlers and forks."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
import trio
from anyio.lowlevel import checkpoint

import lifecycle
from lifecycle import (
    AdmissionTimeout,
    Gate,
    GateClosed,
    GateFull,
    Lease,
    Refused,
    _lock,
)
from lifecycle.events import AdmissionRefused, Event, LeaseGranted, LeaseReleased
from lifecycle.testing import RecordingObserver, assert_quiescent

HOME = str(Path(lifecycle.__file__).parent)


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs an answer waits a moment for another thread, not a second."""
    monkeypatch.setattr(_lock, "LONGEST_WAIT", 0.001)


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for another thread: to wait for ``None`` is a TypeError."""
    monkeypatch.setattr(_lock, "LONGEST_WAIT", None)


class Interruption:
    """Calls something at the n-th bytecode that the core executes in this thread.

    This is what a finaliser or a signal handler does, but on purpose.
    """

    def __init__(self, at: int, call: Callable[[], object]) -> None:
        self.at = at
        self.count = 0
        self.call = call
        self.struck = False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename.startswith(HOME):
            frame.f_trace = self._step  # first, for CPython 3.13
            frame.f_trace_opcodes = True
            return self._step
        return None

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and not self.struck:
            self.count += 1
            if self.count == self.at:
                self.struck = True
                self.call()
        return self._step

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)


def every_bytecode(
    backend: str, scenario: Callable[[int], Awaitable[bool]], *, stride: int = 1
) -> int:
    """Run *scenario* for the first bytecode, the second, … until none is struck."""

    async def main() -> int:
        # CPython 3.12 tells of bytecodes only after it was asked.
        await scenario(sys.maxsize)
        at = 1
        while await scenario(at):
            at += stride
        return at - 1

    return anyio.run(main, backend=backend)


@pytest.mark.usefixtures("no_waits")
def test_answers_a_key_that_asks_the_gate_while_it_is_hashed() -> None:
    """User code that runs under the lock reads statistics; it is refused admission."""

    class Key(str):
        __slots__ = ()

        def __hash__(self) -> int:
            seen.append(gate.statistics().slots_in_use)
            with pytest.raises(GateFull):
                gate.try_admit()
            return super().__hash__()

    gate = Gate(slots=1)
    seen: list[int] = []
    lease = gate.try_admit()
    with pytest.raises(GateFull):
        gate.try_admit(key=Key("tenant"))
    assert seen == [1]
    lease.release()
    assert_quiescent(gate)


@pytest.mark.usefixtures("brief_waits")
def test_times_out_after_a_long_change_of_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait that ends while another thread holds the lock is settled after its change."""
    gate = Gate(slots=1)
    lease = gate.try_admit()
    ask = gate._ask

    def let_go(*args: Any, **options: Any) -> object:
        # Later than what needs an answer waits.
        threading.Timer(0.02, over.set).start()
        return ask(*args, **options)

    monkeypatch.setattr(gate, "_ask", let_go)
    held, over = threading.Event(), threading.Event()

    def change() -> None:
        with gate._lock.mutex:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=change)

    async def hold() -> None:
        thread.start()
        assert held.wait(20)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            with pytest.raises(AdmissionTimeout):
                await gate.admit(max_wait=0.001)

    anyio.run(main)
    thread.join()
    lease.release()
    assert_quiescent(gate)


def test_reports_nothing_in_the_middle_of_a_change() -> None:
    """A release that interrupts a change leaves its events to the holder of the lock."""
    seen: list[bool] = []
    gate = Gate(slots=2, observer=lambda _: seen.append(gate._lock.mutex._is_owned()))
    first, second = gate.try_admit(), gate.try_admit()
    first.release()
    seen.clear()
    with gate._lock.mutex:
        gate._note(LeaseReleased, first, lost=False)  # by the change so far
        second.release()
        assert seen == []
    gate.statistics()
    assert seen == [False, False]
    assert_quiescent(gate)


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_answers_code_that_interrupts_it(order: Literal["fifo", "fair"]) -> None:
    """What interrupts a change gets its answer at once, at every bytecode (sigstall).

    A request that is refused there is counted like every other.
    """

    async def scenario(at: int) -> bool:
        seen = RecordingObserver()
        gate = Gate(slots=4, order=order, observer=seen)
        got: list[Lease] = []
        spare = gate.try_admit()

        def ask() -> None:
            assert "Gate" in repr(gate)
            assert gate.statistics().slots == 4
            spare.release()
            with suppress(Refused):
                got.append(gate.try_admit())

        interruption = Interruption(at, ask)
        with interruption.armed():
            lease = gate.try_admit()
            lease.settle(bytes=1)
            assert gate.statistics().waiting == 0
            lease.release()
        for extra in (spare, *got):
            extra.release()
        now = gate.statistics()
        assert now.received == 2 + interruption.struck
        assert now.admitted == 2 + len(got)
        assert len(seen.of(AdmissionRefused)) == now.refused
        assert_quiescent(gate)
        return interruption.struck

    assert every_bytecode("asyncio", scenario) > 100


@pytest.mark.usefixtures("no_waits")
def test_releases_beside_a_change_of_another_thread() -> None:
    """A release waits for no thread: the one that is busy makes it."""
    busy, released = Busy(), threading.Event()
    gate = Gate(slots=2, clock=busy)
    lease, other = gate.try_admit(), gate.try_admit()
    busy.begin(gate, go_on=released.is_set)
    lease.release()
    assert lease.held  # so the other thread was still busy
    released.set()
    busy.end()
    assert not lease.held
    other.release()
    assert_quiescent(gate)


@pytest.mark.usefixtures("brief_waits")
def test_makes_no_release_in_the_middle_of_a_change() -> None:
    """Statistics that wait for a slow thread no longer leave the release to it."""
    busy, told = Busy(), threading.Event()
    gate = Gate(slots=2, clock=busy)
    lease, other = gate.try_admit(), gate.try_admit()
    busy.begin(gate, go_on=told.is_set)
    lease.release()
    assert gate.statistics().slots_in_use == 2
    told.set()
    busy.end()
    assert gate.statistics().slots_in_use == 1
    other.release()
    assert_quiescent(gate)


@contextmanager
def beside_a_change(gate: Gate) -> Iterator[None]:
    """Another thread holds the lock, and stops between unlocking and what is deferred."""
    held, over = threading.Event(), threading.Event()

    def change() -> None:
        with gate._lock.mutex:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=change)
    thread.start()
    assert held.wait(20)
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("no_waits")
def test_answers_after_all_that_a_thread_did_before() -> None:
    """What was released beside another thread's change is there for the next request."""
    gate = Gate(slots=1)
    lease = gate.try_admit()
    with beside_a_change(gate):
        lease.release()
    gate.try_admit().release()

    lease = gate.try_admit()
    with beside_a_change(gate):
        lease.release()
        gate.resize(slots=7)
    now = gate.statistics()
    assert (now.slots, now.slots_in_use) == (7, 0)
    assert_quiescent(gate)


@pytest.mark.anyio
@pytest.mark.usefixtures("no_waits")
async def test_takes_no_deferred_release_for_a_deadlock() -> None:
    """A task that released inside of its block may be admitted there."""
    gate = Gate(slots=1)
    with await gate.admit() as lease:
        with beside_a_change(gate):
            lease.release()
        (await gate.admit()).release()
    assert_quiescent(gate)


@pytest.mark.usefixtures("no_waits")
def test_is_closed_at_once_beside_a_change() -> None:
    """No request is admitted after `close`, however late that refuses those before it."""
    gate = Gate(slots=1)
    with beside_a_change(gate):
        gate.close()
        assert gate.closed
    with pytest.raises(GateClosed):
        gate.try_admit()
    assert_quiescent(gate)


@pytest.mark.usefixtures("brief_waits")
def test_looks_at_half_a_change_of_a_thread_that_takes_too_long() -> None:
    """Statistics wait for another thread, but not for ever."""
    busy, seen = Busy(), threading.Event()
    gate = Gate(slots=2, clock=busy)
    with gate.try_admit():
        busy.begin(gate, go_on=seen.is_set)
        assert gate.statistics().admitted == 1
        seen.set()
        busy.end()
    assert_quiescent(gate)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_decides_once_where_a_thread_grants_as_time_is_up(backend: str) -> None:
    """A timeout that lands inside of another thread's grant is one or the other (B11).

    The releasing thread is held up at each of its bytecodes in turn until the
    waiter's time is up.
    """

    async def main(at: int) -> bool:
        seen = RecordingObserver()
        gate = Gate(slots=1, observer=seen)
        holder = gate.try_admit()
        go_on = threading.Event()

        def hold_up() -> None:
            go_on.wait(0.006)  # bounded: the loop's thread may wait for this one

        interruption = Interruption(at, hold_up)

        def release() -> None:
            with interruption.armed():
                holder.release()

        async def request() -> None:
            try:
                with await gate.admit(max_wait=0.002):
                    pass
            except Refused:
                pass
            go_on.set()

        thread = threading.Thread(target=release)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(request)
                await anyio.wait_all_tasks_blocked()
                thread.start()
            await anyio.to_thread.run_sync(thread.join)
        gate.try_admit().release()
        now = gate.statistics()
        assert (now.received, now.lost, now.cancelled) == (3, 0, 0), now
        assert_quiescent(gate)
        names = seen.names()
        assert names.count("LeaseGranted") == now.admitted
        assert names.count("AdmissionRefused") == now.refused
        return interruption.struck

    assert every_bytecode(backend, main) > 50


@pytest.mark.anyio
async def test_takes_releases_from_other_threads() -> None:
    """A release in a thread wakes the waiter in its loop, whatever the loop does."""
    gate = Gate(slots=1)
    for _ in range(20):
        holder = await gate.admit()
        thread = threading.Timer(0.0005, holder.release)
        thread.start()
        with anyio.fail_after(5), await gate.admit():
            pass
        await anyio.to_thread.run_sync(thread.join)
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_passes_over_a_waiter_that_another_thread_finds_cancelled() -> None:
    """Cancelled, but not run since, a waiter gets nothing from a thread (B1)."""
    gate = Gate(slots=1)
    holder = await gate.admit()
    scope = anyio.CancelScope()
    served = []

    async def request(name: str) -> None:
        with await gate.admit():
            served.append(name)

    async def leave() -> None:
        with scope:
            await request("cancelled")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(request, "next")
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            thread = threading.Thread(target=holder.release)
            thread.start()
            thread.join(5)  # while the loop stands still
            now = gate.statistics()
            assert (now.waiting, now.cancelled, now.slots_in_use) == (0, 1, 1)
    assert served == ["next"]
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_serves_loops_in_several_threads() -> None:
    """Loops of several threads share one gate, and never more than fits is held."""
    gate = Gate(slots=2)
    inside, most = 0, 0
    lock = threading.Lock()

    async def request() -> None:
        nonlocal inside, most
        with await gate.admit():
            with lock:
                inside += 1
                most = max(most, inside)
            await checkpoint()
            with lock:
                inside -= 1

    async def crowd() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(request)

    errors: list[BaseException] = []

    def loop(backend: str) -> None:
        try:
            anyio.run(crowd, backend=backend)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [
        threading.Thread(target=loop, args=(backend,))
        for backend in ("asyncio", "trio", "asyncio")
    ]
    for thread in threads:
        thread.start()
    with anyio.fail_after(20):
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    assert errors == []
    assert most <= 2
    assert gate.statistics().admitted == 120
    assert_quiescent(gate)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_wakes_a_sleeping_loop_from_a_signal_handler(backend: str) -> None:
    """A release in a signal handler wakes a waiter of a loop that does nothing else."""
    gate = Gate(slots=1)

    async def main() -> None:
        holder = await gate.admit()
        before = signal.signal(signal.SIGUSR1, lambda *_: holder.release())
        thread = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
        try:
            thread.start()
            began = anyio.current_time()
            with anyio.move_on_after(3), await gate.admit():
                pass
            assert anyio.current_time() - began < 2
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)

    anyio.run(main, backend=backend)
    assert_quiescent(gate)


def test_passes_over_waiters_of_a_dead_loop() -> None:
    """A waiter whose loop ended without it does not swallow a grant."""
    gate = Gate(slots=1)
    holder = gate.try_admit()
    waiting = []

    async def abandon() -> None:
        waiting.append(gate.admit())
        waiting[-1].send(None)

    asyncio.run(abandon())
    trio.run(abandon)
    assert gate.statistics().waiting == 2
    holder.release()
    now = gate.statistics()
    assert (now.waiting, now.cancelled, now.slots_in_use) == (0, 2, 0)
    for coroutine in waiting:
        coroutine.close()
    assert gate.statistics() == now
    assert_quiescent(gate)


@pytest.mark.anyio
async def test_takes_leases_back_from_the_collector() -> None:
    """Leases lost in cycles come back with the collector, wherever it runs."""
    gate = Gate(slots=4)

    async def careless() -> None:
        lease = await gate.admit()
        cycle: list[object] = [lease]
        cycle.append(cycle)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(careless)
            await anyio.to_thread.run_sync(gc.collect)
    assert gate.statistics().lost == 40
    assert len([w for w in caught if "of gate" in str(w.message)]) == 40
    assert_quiescent(gate)


class Interrupter:
    """A clock that does something when it is read: in the middle of a change."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actions: list[Callable[[], object]] = []

    def __call__(self) -> float:
        while self.actions:
            self.actions.pop()()
        return self.now


def test_makes_changes_that_come_in_the_middle_of_another() -> None:
    """What interrupts a refusal, such as a release, is made right after it (B6)."""
    clock = Interrupter()
    gate = Gate(slots=2, clock=clock)
    first, second = gate.try_admit(), gate.try_admit()
    clock.actions = [first.release, first.release, lambda: second.settle(bytes=7)]
    with pytest.raises(GateFull):
        gate.try_admit()
    now = gate.statistics()
    assert (now.slots_in_use, now.bytes_in_use, now.released) == (1, 7, 1)
    second.release()
    assert_quiescent(gate)


def test_makes_changes_that_come_in_the_middle_of_a_release() -> None:
    """The same where it is a release that is interrupted."""
    clock = Interrupter()
    gate = Gate(slots=2, order="fair", clock=clock)
    first, second = gate.try_admit(), gate.try_admit()
    clock.actions = [second.release]
    first.release()
    assert gate.statistics().released == 2
    assert_quiescent(gate)


@pytest.mark.usefixtures("no_waits")
def test_refuses_admission_in_the_middle_of_a_change() -> None:
    """What interrupts a change gets statistics, and no admission."""
    clock = Interrupter()
    gate = Gate(slots=1, clock=clock)
    seen: list[str] = []

    def ask() -> None:
        seen.append(repr(gate))
        with pytest.raises(GateFull, match="interrupted by this very call"):
            gate.try_admit()

    with gate.try_admit():
        clock.actions = [ask]
        with pytest.raises(GateFull, match="is full; retry"):
            gate.try_admit()
    assert seen == ["<Gate 'gate': 1 of 1 slots, 0 of None bytes, 0 waiting>"]
    assert_quiescent(gate)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_outlives_interrupts() -> None:
    """A KeyboardInterrupt in the middle of a change stops no later request."""
    struck = 0

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal struck
        # Nowhere else, or it would end the tests.
        if frame is not None and frame.f_code.co_filename.startswith(HOME):
            struck += 1
            raise KeyboardInterrupt

    gate = Gate(slots=None)
    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        # One in ten hits the moment after a call that takes the pen, if there is one.
        while struck < 200:
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
                while struck < 200:
                    lease = gate.try_admit()
                    lease.settle(bytes=1)
                    lease.release()
                    gate.statistics()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            gate.try_admit().release()  # a lock that stays locked would refuse it
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    gc.collect()  # what was cut off is lost here, where that is expected


class Busy:
    """A thread in the middle of a change of a gate, for as long as it is wanted.

    The gate needs this as its clock: a refusal reads it half-way.
    """

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go_on: Callable[[], bool] = lambda: True
        self.thread = threading.Thread()

    def __call__(self) -> float:
        if threading.current_thread() is self.thread:
            self.inside.set()
            deadline = time.monotonic() + 5
            while not self.go_on() and time.monotonic() < deadline:
                time.sleep(0.001)
        return 0.0

    def begin(self, gate: Gate, go_on: Callable[[], bool]) -> None:
        self.go_on = go_on

        def refuse() -> None:
            with pytest.raises(GateFull):
                gate.try_admit(slots=2)

        self.thread = threading.Thread(target=refuse)
        self.thread.start()
        assert self.inside.wait(5)

    def end(self) -> None:
        self.thread.join(5)
        assert not self.thread.is_alive()


def soon() -> Callable[[], bool]:
    """Return what becomes true in a moment."""
    at = time.monotonic() + 0.05
    return lambda: time.monotonic() > at


def test_waits_for_a_slow_thread() -> None:
    """Admission and statistics are not refused because a thread sleeps in a change."""
    for ask in (Gate.try_admit, Gate.statistics):
        busy = Busy()
        gate = Gate(slots=2, clock=busy)
        with gate.try_admit():
            busy.begin(gate, go_on=soon())
            answer = ask(gate)
            busy.end()
        if isinstance(answer, Lease):
            answer.release()
        now = gate.statistics()
        assert (now.refused, now.received - now.admitted) == (1, 1)
        assert_quiescent(gate)


def test_lets_an_observer_wait_for_another_thread() -> None:
    """An observer is not in the middle of a change, and is not refused as if it were."""
    busy = Busy()
    extra: list[Lease] = []

    def observe(event: Event) -> None:
        if isinstance(event, LeaseGranted) and not busy.inside.is_set():
            busy.begin(gate, go_on=soon())
            extra.append(gate.try_admit())

    gate = Gate(slots=2, clock=busy, observer=observe)
    gate.try_admit().release()
    busy.end()
    extra.pop().release()
    assert gate.statistics().refused == 1
    assert_quiescent(gate)


@pytest.mark.usefixtures("brief_waits")
def test_waits_for_no_other_gate_in_the_middle_of_a_change() -> None:
    """Two threads that did, each in the middle of the other's gate, would wait for ever."""
    busy, clock = Busy(), Interrupter()
    seen: list[bool] = []
    one, other = Gate(slots=1, clock=clock), Gate(slots=2, clock=busy)

    def ask() -> None:
        busy.begin(other, go_on=lambda: bool(seen))
        with pytest.raises(GateFull, match="held up by another thread") as refused:
            other.try_admit()
        assert refused.value.retry_after == 1.0
        seen.append(True)

    with one.try_admit(), other.try_admit():
        clock.actions = [ask]
        with pytest.raises(GateFull, match="is full; retry"):
            one.try_admit()
        busy.end()
    now = other.statistics()
    assert (now.admitted, now.refused) == (1, 2)
    assert_quiescent(one, other)


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_keeps_books_where_no_loop_tells_the_time(order: str) -> None:
    """Any thread may try and release, also where nothing can say what time it is."""
    gate = Gate(slots=1, order=order)
    gate.try_admit().release()
    errors: list[BaseException] = []

    async def main() -> None:
        holder = await gate.admit()

        def release() -> None:
            try:
                holder.release()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=release)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use, gate)
            await anyio.wait_all_tasks_blocked()
            thread.start()
        thread.join()

    async def use(gate: Gate) -> None:
        with anyio.fail_after(2), await gate.admit():
            pass

    for backend in ("asyncio", "trio"):
        anyio.run(main, backend=backend)
    assert errors == []
    assert_quiescent(gate)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_takes_a_release_while_a_waiter_parks(backend: str) -> None:
    """A release that interrupts the very task that goes to wait wakes it."""

    async def main(at: int) -> bool:
        gate = Gate(slots=1)
        holder = gate.try_admit()
        interruption = Interruption(at, holder.release)

        async def rescue() -> None:
            await anyio.wait_all_tasks_blocked()
            if not interruption.struck:
                holder.release()

        with anyio.fail_after(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rescue)
                with interruption.armed():
                    lease = await gate.admit()
        lease.release()
        assert_quiescent(gate)
        return interruption.struck

    assert every_bytecode(backend, main) > 100


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "order"), [("asyncio", "fifo"), ("trio", "fifo"), ("asyncio", "fair")]
)
def test_takes_a_release_at_every_bytecode(backend: str, order: str) -> None:
    """A finaliser that releases in the middle of any change strands no request."""

    async def main(at: int) -> bool:
        gate = Gate(slots=3, bytes=10, order=order)
        spare, first, second = (gate.try_admit(bytes=n) for n in (3, 3, 4))
        served = []

        async def request(nbytes: int) -> None:
            with await gate.admit(bytes=nbytes):
                served.append(nbytes)
                now = gate.statistics()
                assert now.slots_in_use <= 3
                assert now.bytes_in_use <= 11
                await checkpoint()

        interruption = Interruption(at, spare.release)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                scope = anyio.CancelScope()

                async def impatient() -> None:
                    with scope:
                        await request(8)

                tasks.start_soon(impatient)
                await anyio.wait_all_tasks_blocked()
                for nbytes in (2, 3, 1):
                    tasks.start_soon(request, nbytes)
                await anyio.wait_all_tasks_blocked()
                with interruption.armed():
                    scope.cancel()
                    first.release()
                    second.settle(bytes=5)
                    await checkpoint()
                    second.release()
                    gate.resize(bytes=11)
                    await checkpoint()
                if not interruption.struck:
                    spare.release()
        assert sorted(served) in ([1, 2, 3], [1, 2, 3, 8])
        assert_quiescent(gate)
        return interruption.struck

    # The fair order has several times the bytecodes; every third must do.
    tried = every_bytecode(backend, main, stride=3 if order == "fair" else 1)
    assert tried > 150


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_serves_the_child_of_a_fork_in_the_middle_of_a_change() -> None:
    """A fork while another thread holds the lock leaves the child a gate that works."""
    busy, forked = Busy(), threading.Event()
    gate = Gate(slots=2, clock=busy)
    lease = gate.try_admit()
    busy.begin(gate, go_on=forked.is_set)
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child:
            children.append(child)
            return
        # In the child, from here on; it must not go on with the tests.
        try:
            signal.alarm(60)  # where it hangs
            lease.release()
            gate.try_admit(slots=2).release()
            os._exit(gate.statistics().slots_in_use)
        finally:
            os._exit(9)

    forking = threading.Thread(target=fork)
    forking.start()
    forking.join()
    _pid, status = os.waitpid(children.pop(), 0)
    forked.set()
    busy.end()
    lease.release()
    assert os.waitstatus_to_exitcode(status) == 0
    assert_quiescent(gate)


def test_frees_the_lock_of_a_thread_that_a_fork_left_behind() -> None:
    """What runs in the child frees what this thread holds, and what another does."""
    mine, other = _lock.ChangeLock(), _lock.ChangeLock()
    thread = threading.Thread(target=other.mutex.acquire)
    thread.start()
    thread.join()
    with mine.mutex:
        _lock._free_after_fork()
        assert not mine.mutex._is_owned()
    assert other.mutex.acquire(blocking=False)
