"""The adaptive order of a gate: newest first, and no long waits, while overload lasts."""

import random
import statistics
import weakref
from functools import partial

import anyio
import pytest

from lifecycle import AdmissionTimeout, Gate, GateFull
from lifecycle.testing import assert_quiescent, simulate, simulate_trio

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Crowd:
    """Requests by name, which of them were admitted, and what refused the others."""

    def __init__(self, gate: Gate, tasks: anyio.abc.TaskGroup) -> None:
        self.gate, self._tasks = gate, tasks
        self.admitted: list[str] = []
        self.refused: dict[str, str] = {}

    async def ask(self, name: str, **cost: int) -> None:
        self._tasks.start_soon(self._ask, name, cost)
        await anyio.wait_all_tasks_blocked()

    async def _ask(self, name: str, cost: dict[str, int]) -> None:
        try:
            lease = await self.gate.admit(max_wait=None, **cost)
        except (AdmissionTimeout, GateFull) as refusal:
            assert refusal.retry_after is not None
            assert 1 <= refusal.retry_after <= 60
            self.refused[name] = str(refusal)
        else:
            self.admitted.append(name)
            self.held = lease

    async def release(self) -> None:
        self.held.release()
        await anyio.wait_all_tasks_blocked()


async def test_turns_with_a_queue_that_stands() -> None:
    """Old ones first for as long as the longest wait; then the newest, and few wait."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=10.0, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "abcd":
            await crowd.ask(name)
        clock.now = 10.0
        await crowd.release()
        assert crowd.admitted == ["a", "b"]
        clock.now = 10.5
        await crowd.ask("e")  # the queue stands: c and d have waited for too long
        assert {*crowd.refused} == {"c", "d"}
        assert "has had a queue for 10.0 s" in crowd.refused["c"]
        await crowd.ask("f")
        clock.now = 12.5  # e and f have waited for a fifth, and no longer
        await crowd.release()
        assert crowd.admitted == ["a", "b", "f"]
        await crowd.release()
        assert crowd.admitted == ["a", "b", "f", "e"]
        for name in "gh":  # the queue was empty: it is first in, first out again
            await crowd.ask(name)
        clock.now = 20.0
        for _ in range(3):
            await crowd.release()
    assert crowd.admitted == [*"abfegh"]
    assert {*crowd.refused} == {"c", "d"}
    found = gate.statistics()
    assert (found.admitted, found.refused, found.cancelled) == (6, 2, 0)
    assert_quiescent(gate)


async def test_refuses_nobody_for_whom_there_is_a_place() -> None:
    """Who has waited for too long is admitted all the same where no newer one waits."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=1.0, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "abc":
            await crowd.ask(name)
        clock.now = 9.0
        await crowd.release()
        await crowd.release()
    assert crowd.admitted == ["a", "c"]
    assert [*crowd.refused] == ["b"]


async def test_keeps_nobody_out_of_a_queue_for_those_who_wait_long() -> None:
    """A full queue refuses them, and not the newcomer, who is to be served first."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=1.0, max_waiting=2, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "abc":
            await crowd.ask(name)
        clock.now = 9.0
        await crowd.ask("new")
        assert {*crowd.refused} == {"b", "c"}
        await crowd.ask("newer")
        with pytest.raises(GateFull):  # which does not wait, and takes no place
            gate.try_admit()
        await crowd.ask("low", priority=-1)
        assert {*crowd.refused} == {"b", "c", "low"}
        await crowd.ask("newest")
        assert {*crowd.refused} == {"b", "c", "low", "new"}
        for _ in range(3):
            await crowd.release()
    assert crowd.admitted == ["a", "newest", "newer"]
    found = gate.statistics()
    assert (found.admitted, found.refused, found.waiting) == (3, 5, 0)
    assert_quiescent(gate)


async def test_gives_the_only_place_in_the_queue_to_the_newest() -> None:
    """As often as one comes: a queue that was emptied by a refusal stands."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=1.0, max_waiting=1, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "ab":
            await crowd.ask(name)
        clock.now = 1.1
        for name in ("new", "newer", "newest"):
            await crowd.ask(name)
        for _ in range(2):
            await crowd.release()
    assert crowd.admitted == ["a", "newest"]
    assert {*crowd.refused} == {"b", "new", "newer"}
    assert_quiescent(gate)


async def test_costs_nobody_the_place_that_a_mistake_could_not_take() -> None:
    """A task that waits for itself is refused, and the oldest waits on."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=1.0, max_waiting=1, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        with gate.try_admit():
            await crowd.ask("old")
            clock.now = 1.1
            await crowd.ask("new")
            with pytest.raises(GateFull):
                await gate.admit()
            await anyio.wait_all_tasks_blocked()
            assert {*crowd.refused} == {"old"}
        await anyio.wait_all_tasks_blocked()
        assert crowd.admitted == ["new"]
        await crowd.release()
    assert_quiescent(gate)


async def test_keeps_a_full_queue_in_order_until_it_stands() -> None:
    """Before that, the newcomer is refused, as by any gate."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=1.0, max_waiting=1, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "ab":
            await crowd.ask(name)
        clock.now = 0.9
        with pytest.raises(GateFull, match="queue of 1 is full"):
            await gate.admit()
        for _ in range(2):
            await crowd.release()
    assert crowd.admitted == ["a", "b"]
    assert_quiescent(gate)


async def test_stands_though_refusals_have_emptied_the_queue() -> None:
    """Overload goes on where nobody is left to wait; grants and a pause end it."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=10.0, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "ab":
            await crowd.ask(name)
        clock.now = 20.0
        gate.resize(slots=1)  # whatever may let somebody in
        await anyio.wait_all_tasks_blocked()
        assert [*crowd.refused] == ["b"]
        for name in "cd":
            await crowd.ask(name)
        await crowd.release()
        assert crowd.admitted == ["a", "d"]
        clock.now = 25.0
        gate.resize(slots=1)
        await anyio.wait_all_tasks_blocked()
        assert [*crowd.refused] == ["b", "c"]
        clock.now = 100.0  # and nobody comes for long
        for name in "ef":
            await crowd.ask(name)
        for _ in range(3):
            await crowd.release()
    assert crowd.admitted == [*"adef"]
    assert_quiescent(gate)


async def test_keeps_priorities_and_sizes() -> None:
    """A higher priority goes first all the same; the next one blocks the others."""
    clock = Clock()
    gate = Gate(slots=2, order="adaptive", max_wait=1.0, clock=clock)
    both, old = gate.try_admit(), gate.try_admit()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        await crowd.ask("old")
        clock.now = 1.15
        await crowd.ask("urgent", priority=1)
        await crowd.ask("small")
        await crowd.ask("large", slots=2)
        clock.now = 1.25
        old.release()
        await anyio.wait_all_tasks_blocked()
        assert crowd.admitted == ["urgent"]
        assert [*crowd.refused] == ["old"]
        await crowd.release()
        assert crowd.admitted == ["urgent"]  # the large one is next, and does not fit
        both.release()
        await anyio.wait_all_tasks_blocked()
        assert crowd.admitted == ["urgent", "large"]
        await crowd.release()
        assert crowd.admitted == ["urgent", "large", "small"]
        await crowd.release()
    assert_quiescent(gate)


async def test_takes_the_place_of_one_that_is_less_urgent() -> None:
    """In a full queue, where overload lasts; one that is more urgent keeps it."""
    clock = Clock()
    gate = Gate(slots=1, order="adaptive", max_wait=1.0, max_waiting=2, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in ("first", "old", "older"):
            await crowd.ask(name)
        clock.now = 1.15
        await crowd.ask("urgent", priority=2)
        await crowd.ask("low")
        assert {*crowd.refused} == {"old", "older"}
        await crowd.ask("high", priority=1)
        assert [*crowd.refused][2:] == ["low"]
        with pytest.raises(GateFull):
            await gate.admit()  # less urgent than both
        for _ in range(3):
            await crowd.release()
    assert crowd.admitted == ["first", "urgent", "high"]
    assert_quiescent(gate)


async def test_refuses_nobody_for_the_sake_of_one_that_it_refuses() -> None:
    """A large one that waited for too long blocks nobody: its refusal is due as well."""
    clock = Clock()
    gate = Gate(slots=2, order="adaptive", max_wait=1.0, clock=clock)
    other, lease = gate.try_admit(), gate.try_admit()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in ("older", "old"):
            await crowd.ask(name)
        await crowd.ask("large", slots=2)
        await crowd.ask("urgent", slots=2, priority=1)
        clock.now = 9.0
        lease.release()
        await anyio.wait_all_tasks_blocked()
        assert crowd.admitted == ["old"]
        assert {*crowd.refused} == {"older", "large", "urgent"}
        await crowd.release()
        other.release()
    assert_quiescent(gate)


async def test_takes_no_pause_for_overload() -> None:
    """While it is paused it refuses nobody, and counts from the end of the pause."""
    clock = Clock()
    gate = Gate(slots=0, order="adaptive", max_wait=1.0, clock=clock)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(gate, tasks)
        for name in "abc":
            await crowd.ask(name)
            clock.now += 9.0
        gate.resize(slots=1)
        await anyio.wait_all_tasks_blocked()
        assert (crowd.admitted, crowd.refused) == (["a"], {})
        clock.now += 1.0
        await crowd.release()
        assert crowd.admitted == ["a", "b"]
        await crowd.ask("d")
        clock.now += 0.1
        await crowd.release()
        assert crowd.admitted == ["a", "b", "d"]
        assert [*crowd.refused] == ["c"]
        await crowd.release()
    assert_quiescent(gate)


def test_is_gone_with_its_last_reference() -> None:
    """No cycle keeps a gate, and what its observer holds, until the collector comes."""
    gate = Gate(slots=1, order="adaptive", max_wait=1.0)
    gate.try_admit().release()
    gone = weakref.ref(gate)
    del gate
    assert gone() is None


@pytest.mark.parametrize("max_wait", [0.0, 0.5])
def test_needs_the_longest_wait(max_wait: float) -> None:
    """Without it, nothing says how long a queue may stand."""
    Gate(slots=1, order="adaptive", max_wait=max_wait)
    with pytest.raises(ValueError, match="order='adaptive' needs the longest wait"):
        Gate(slots=1, order="adaptive")


class Load:
    """Clients that come at random, at a multiple of what eight places can serve.

    Each is served for a second, and leaves after ten.
    """

    def __init__(self, times: float, **options: object) -> None:
        self._times, self._draw = times, random.Random(7)
        self._options = options
        self.waits: list[float] = []

    async def run(self) -> None:
        gate = Gate(slots=8, **self._options)  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            while anyio.current_time() < 120:
                tasks.start_soon(self._be_served, gate)
                await anyio.sleep(self._draw.expovariate(8 * self._times))
        assert_quiescent(gate)

    async def _be_served(self, gate: Gate) -> None:
        began = anyio.current_time()
        with anyio.move_on_after(10):
            try:
                lease = await gate.admit()
            except AdmissionTimeout:
                return
            with lease:
                waited = anyio.current_time() - began
                await anyio.sleep(1.0)
            if began > 20:
                self.waits.append(waited)


ON_ASYNCIO = partial(simulate, order="fifo", early_timers=0.0)


@pytest.mark.parametrize("run", [ON_ASYNCIO, simulate_trio])
@pytest.mark.parametrize("times", [2.0, 10.0])
def test_serves_soon_under_overload(run, times: float) -> None:
    """As many are served as first come, first served, after a tenth of their wait."""
    served = {}
    for order in ("fifo", "adaptive"):
        load = Load(times, order=order, max_wait=5.0)
        run(load.run, seed=1)
        served[order] = load.waits
    assert len(served["adaptive"]) >= 0.97 * len(served["fifo"]) >= 0.9 * 800
    waits = {order: statistics.median(each) for order, each in served.items()}
    assert waits["fifo"] > 4.0
    assert waits["adaptive"] < 0.1 * waits["fifo"]


def test_is_first_in_first_out_without_overload() -> None:
    """Bursts that end are served as they came."""
    waits = {}
    for order in ("fifo", "adaptive"):
        load = Load(0.8, order=order, max_wait=5.0)
        ON_ASYNCIO(load.run)
        waits[order] = load.waits
    assert waits["adaptive"] == waits["fifo"]
