"""The searches: what they cover, and what they find."""

from __future__ import annotations

import ast

import anyio
import anyio.lowlevel
import pytest
import scenarios
from exploration import explore, explore_trio
from reentrancy import reenter_everywhere

from lifecycle import Gate, _gate, _lease, _lock, _queues
from lifecycle.testing import (
    Deadlock,
    cancel_everywhere,
)

BOTH = pytest.mark.parametrize("search", [explore, explore_trio])


async def reads_too_early():
    """The reader is right as long as the writer happens to run before it."""
    written = False

    async def write():
        nonlocal written
        await anyio.lowlevel.checkpoint()
        written = True

    async def read():
        await anyio.lowlevel.checkpoint()
        assert written

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        tasks.start_soon(read)


@BOTH
@pytest.mark.parametrize("scenario", scenarios.EXPLORED, ids=lambda s: s.__name__)
def test_keeps_its_promise_in_every_order(search, scenario):
    """Each small program holds in every schedule with two departures (N15)."""
    assert search(scenario, delays=2, max_schedules=400).schedules >= 1


@pytest.mark.parametrize("scenario", scenarios.CANCELLED, ids=lambda s: s.__name__)
def test_keeps_its_promise_at_every_cancellation(scenario):
    """Cut early or late, by scope or natively, once or twice (B1, peers-34, fault-8)."""
    cancel_everywhere(scenario, double=True)


@pytest.mark.parametrize("scenario", scenarios.REENTERED, ids=lambda s: s.__name__)
def test_keeps_its_promise_at_every_bytecode(scenario):
    """A finaliser may release a lease in the middle of any change of its gate."""
    modules = (_gate, _lease, _lock, _queues)
    assert reenter_everywhere(scenario, modules) > 100


@BOTH
def test_finds_the_one_order_that_fails(search):
    """A race is found, and its schedule alone fails again."""
    with pytest.raises(ExceptionGroup) as failure:
        search(reads_too_early)
    assert search(reads_too_early, delays=0).complete
    note = failure.value.__notes__[-1]
    schedule = ast.literal_eval(note.partition("schedule=")[2])
    with pytest.raises(ExceptionGroup) as again:
        search(reads_too_early, schedule=schedule)
    assert "schedule 1;" in again.value.__notes__[-1]


@BOTH
def test_tells_whether_it_saw_everything(search):
    """A search that was stopped does not claim to be complete."""

    async def pair():
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(anyio.lowlevel.checkpoint)

    whole = search(pair)
    assert whole.complete
    part = search(pair, max_schedules=3)
    assert (part.schedules, part.complete) == (3, False)
    assert search(pair, delays=0).schedules == 1
    assert search(pair, schedule=[1]).schedules == 1


@BOTH
def test_finds_a_hang(search):
    """An order in which a signal comes before a task waits for it."""

    async def main():
        woken = anyio.Event()
        waiting = False

        async def wait():
            nonlocal waiting
            waiting = True
            await woken.wait()

        async def signal():
            await anyio.lowlevel.checkpoint()
            if waiting:
                woken.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(signal)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(wait)

    with pytest.raises(Deadlock, match="nothing is ready"):
        search(main)


def test_lets_a_deadline_meet_a_wake_up():
    """On asyncio a short timer may fall due before what is ready has run."""
    seen = set()

    async def main():
        with anyio.move_on_after(0.01) as scope:
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        seen.add(scope.cancelled_caught)

    explore(main)
    assert seen == {True, False}
    seen.clear()
    explore(main, early_timers=0)
    assert seen == {False}


def test_interrupts_every_bytecode(monkeypatch):
    """The hook runs between two halves of a change, and the place is named."""
    monkeypatch.setattr(_lock, "LONGEST_WAIT", None)  # to wait is an error
    gate = Gate(slots=1)

    def scenario(arm):
        half_way = []

        def look():
            now = gate.statistics()
            half_way.append(now.admitted - now.released != now.slots_in_use)

        arm(look)
        gate.try_admit().release()
        assert not any(half_way), "half-way"

    with pytest.raises(AssertionError, match=r"boundary \d+, .* line \d+.*half-way"):
        reenter_everywhere(scenario, [_gate, _queues])


def test_counts_the_boundaries_and_gives_up_beyond_its_limit():
    """The result is how many boundaries there were; too many are an error."""

    def scenario(arm):
        arm(lambda: None)
        Gate(slots=1).try_admit().release()

    tried = reenter_everywhere(scenario, [_gate])
    assert tried > 50
    with pytest.raises(AssertionError, match="more than 10 boundaries"):
        reenter_everywhere(scenario, [_gate], most=10)
