"""Lease: released once, from any task and thread."""

import asyncio
import copy
import gc
import pickle
import traceback
import tracemalloc
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from contextvars import copy_context

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Gate, GateFull, Lease
from lifecycle.events import LeaseReleased, LeaseSettled
from lifecycle.testing import RecordingObserver, assert_quiescent

pytestmark = pytest.mark.anyio


async def test_gives_back_once() -> None:
    """However often a lease is released, it gives back what it held once (B6)."""
    gate = Gate(slots=2, bytes=10)
    with await gate.admit(bytes=4) as lease, await gate.admit(bytes=4):
        for _ in range(3):
            lease.release()
        now = gate.statistics()
        assert (now.slots_in_use, now.bytes_in_use, now.released) == (1, 4, 1)
    assert_quiescent(gate)


async def test_is_released_by_its_block() -> None:
    """The end of the block gives back, also by an error and by a cancellation (B4)."""
    gate = Gate(slots=1)
    with pytest.raises(OSError, match="no"):
        with await gate.admit():
            raise OSError("no")
    with anyio.move_on_after(0):
        with await gate.admit():
            await anyio.sleep_forever()
    assert gate.statistics().released == 2
    assert_quiescent(gate)


async def test_may_end_in_another_task() -> None:
    """A lease may be passed on: another task may release or enter it."""
    gate = Gate(slots=1)

    async def finish(lease: Lease) -> None:
        with lease:
            assert lease.held

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(finish, await gate.admit())
    assert_quiescent(gate)


async def test_is_kept_by_no_block_when_two_tasks_enter_it() -> None:
    """A lease that is passed on, and entered by both, is forgotten by the gate."""
    gate = Gate(slots=1)
    lease = await gate.admit()
    known = weakref.ref(lease)

    async def work(lease: Lease) -> None:
        with lease:
            await checkpoint()

    async with anyio.create_task_group() as group:
        with lease:
            group.start_soon(work, lease)
            await anyio.wait_all_tasks_blocked()
    del lease
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_is_never_two(copied: Callable[[Lease], object]) -> None:
    """A lease cannot be copied: each copy would give back what was granted once."""
    gate = Gate(slots=1)
    with gate.try_admit() as lease, pytest.raises(TypeError, match="pass it on"):
        copied(lease)
    assert_quiescent(gate)


async def test_says_what_it_holds() -> None:
    """A lease shows its cost and whether it is held, and nothing else."""
    gate = Gate(slots=None)
    lease = await gate.admit(bytes=7, slots=2)
    assert (lease.slots, lease.bytes, lease.held) == (2, 7, True)
    assert repr(lease) == "<Lease of gate 'gate': 2 slots, 7 bytes, held>"
    lease.release()
    assert not lease.held
    assert repr(lease) == "<Lease of gate 'gate': 2 slots, 7 bytes, not held>"


async def test_settles_down_and_wakes_requests_that_fit() -> None:
    """An estimate that was too high lets the next one in before the release."""
    seen = RecordingObserver()
    gate = Gate(bytes=10, observer=seen)
    lease = await gate.admit(bytes=9)
    async with anyio.create_task_group() as tasks:

        async def other() -> None:
            with await gate.admit(bytes=6):
                assert lease.held

        tasks.start_soon(other)
        await anyio.wait_all_tasks_blocked()
        assert gate.statistics().waiting == 1
        lease.settle(bytes=4)
        assert (lease.bytes, gate.statistics().bytes_in_use) == (4, 10)
    lease.release()
    [settled] = seen.of(LeaseSettled)
    assert (settled.estimated_bytes, settled.actual_bytes) == (9, 4)
    assert seen.of(LeaseReleased)[-1].bytes == 4
    assert_quiescent(gate)


async def test_settles_up_without_waiting() -> None:
    """An estimate that was too low overdraws, and no bytes are granted until repaid."""
    gate = Gate(bytes=10)
    first, second = await gate.admit(bytes=5), await gate.admit(bytes=5)
    first.settle(bytes=12)
    assert gate.statistics().bytes_in_use == 17
    second.release()
    with pytest.raises(GateFull):
        gate.try_admit(bytes=1)
    gate.try_admit(slots=1, bytes=0).release()  # slots are another matter
    first.settle(bytes=9)
    gate.try_admit(bytes=1).release()
    first.release()
    assert_quiescent(gate)


async def test_ignores_a_settlement_after_release() -> None:
    """What is not held cannot be corrected."""
    gate = Gate(bytes=10)
    lease = await gate.admit(bytes=5)
    lease.release()
    lease.settle(bytes=8)
    assert_quiescent(gate)


@pytest.mark.parametrize("actual", [-1, 0.5, "1"], ids=repr)
async def test_refuses_odd_settlements(actual: object) -> None:
    """An actual size is a whole number of bytes (B14)."""
    gate = Gate(bytes=10)
    with await gate.admit(bytes=5) as lease:
        with pytest.raises(ValueError, match="bytes must be"):
            lease.settle(bytes=actual)
        assert lease.bytes == 5


async def test_settles_by_integers_of_any_kind() -> None:
    """The size that an array library gives is kept as a plain number."""

    class Int64:
        def __index__(self) -> int:
            return 3

    gate = Gate(bytes=10)
    with await gate.admit(bytes=5) as lease:
        lease.settle(bytes=Int64())
        assert type(lease.bytes) is int
        assert gate.statistics().bytes_in_use == 3
    assert_quiescent(gate)


async def test_comes_back_when_it_is_lost() -> None:
    """A lease that was never released goes with its last reference, and is reported."""
    seen = RecordingObserver()
    gate = Gate(slots=1, bytes=5, observer=seen, name="photos")
    with pytest.warns(ResourceWarning, match="1 slots and 5 bytes of gate 'photos'"):
        await gate.admit(bytes=5)
    assert gate.statistics().lost == 1
    assert [event.lost for event in seen.of(LeaseReleased)] == [True]
    with await gate.admit(bytes=5):
        pass
    assert [event.lost for event in seen.of(LeaseReleased)] == [True, False]
    assert_quiescent(gate)


async def test_says_where_a_lost_lease_was_granted() -> None:
    """Under tracemalloc the warning knows the line that asked for the lease."""
    tracemalloc.start(25)
    try:
        gate = Gate(slots=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await gate.admit()
        [warning] = [w for w in caught if w.category is ResourceWarning]
        frames = tracemalloc.get_object_traceback(warning.source)
        assert any(frame.filename == __file__ for frame in frames)
    finally:
        tracemalloc.stop()


async def test_is_quiet_when_it_was_released() -> None:
    """A lease that was given back is dropped without a word."""
    gate = Gate(slots=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (await gate.admit()).release()
    assert gate.statistics().lost == 0


def test_is_released_by_an_exit_stack_that_never_entered_it() -> None:
    """ExitStack.push leaves what it did not enter."""
    gate = Gate(slots=1)
    with ExitStack() as stack:
        stack.push(gate.try_admit())
    assert_quiescent(gate)


def test_enters_a_released_lease_without_effect() -> None:
    """A block of a lease that was released before holds nothing and blocks no task."""
    gate = Gate(slots=1)
    lease = gate.try_admit()
    lease.release()
    with lease:
        gate.try_admit().release()
    assert_quiescent(gate)


class Stack:
    """A handler that keeps its lease open across methods, and is dropped."""

    def __init__(self, lease: Lease) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(lease)


async def by_exit_stack(gate: Gate) -> None:
    """An exit stack is dropped before it is closed."""
    Stack(await gate.admit())


async def by_cycle(gate: Gate) -> None:
    """So is one that only refers to itself."""
    handler = Stack(await gate.admit())
    handler.stack.callback(lambda: handler)


async def by_object(gate: Gate) -> None:
    """A lease is entered by hand, and nothing leaves it."""
    (await gate.admit()).__enter__()


async def by_task(gate: Gate) -> None:
    """A task ends, and its result is thrown away with the stack inside."""
    stacks: list[Stack] = []

    async def request() -> None:
        stacks.append(Stack(await gate.admit()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request)


async def by_traceback(gate: Gate) -> None:
    """The frame of an error is all that keeps it, until that is cleared."""

    async def request() -> None:
        handler = Stack(await gate.admit())
        raise ValueError(len(vars(handler)))

    try:
        await request()
    except ValueError as error:
        kept = error
    gc.collect()
    assert gate.statistics().slots_in_use == 1
    traceback.clear_frames(kept.__traceback__)


@pytest.mark.parametrize(
    "lose", [by_exit_stack, by_cycle, by_object, by_task, by_traceback]
)
async def test_comes_back_when_it_is_lost_inside_its_block(
    lose: Callable[[Gate], Awaitable[None]],
) -> None:
    """An entered lease is lost like any other, once, with a warning."""
    gate = Gate(slots=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await lose(gate)
        gc.collect()
    assert len([w for w in caught if "of gate 'gate'" in str(w.message)]) == 1
    assert gate.statistics().lost == 1
    assert_quiescent(gate)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_comes_back_from_a_block_that_is_suspended_for_ever() -> None:
    """A generator or a coroutine that is dropped in its block leaves it."""

    def generate(gate: Gate) -> Iterator[None]:
        with gate.try_admit():
            yield

    async def stream(gate: Gate) -> AsyncIterator[None]:
        with await gate.admit():
            yield

    async def work(gate: Gate) -> None:
        with await gate.admit():
            await asyncio.get_running_loop().create_future()

    gate = Gate(slots=4)

    async def main() -> None:
        next(generate(gate))
        await anext(stream(gate))
        tasks.append(asyncio.ensure_future(work(gate)))
        await asyncio.sleep(0)
        assert gate.statistics().slots_in_use >= 1

    tasks: list[asyncio.Future[None]] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # a task was destroyed
    loop.run_until_complete(main())
    loop.close()  # as on a crash: neither tasks nor generators are ended
    tasks.clear()
    gc.collect()
    assert_quiescent(gate)


async def test_keeps_no_trace_of_released_leases_that_never_left_their_blocks() -> None:
    """A task that enters blocks for ever, and leaves none, collects nothing."""
    gate = Gate(slots=1)
    for _ in range(100):
        (await gate.admit()).__enter__().release()
    entered = {var.name: value for var, value in copy_context().items()}["entered"]
    assert len(entered) <= 1
    assert_quiescent(gate)
