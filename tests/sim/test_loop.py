"""The seeded loops: the same seed is the same run, and a hang is found at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Gate
from lifecycle.testing import Deadlock, SimLoop, simulate, simulate_trio

BOTH = pytest.mark.parametrize("run", [simulate, simulate_trio])

PROGRAM = """
import anyio
from lifecycle.testing import simulate, simulate_trio

async def main():
    async def work(i, scope):
        with scope:
            for _ in range(3):
                await anyio.sleep(0.001 * (i % 2))
    async with anyio.create_task_group() as tasks:
        scopes = {anyio.CancelScope() for _ in range(6)}
        for i, scope in enumerate(scopes):
            tasks.start_soon(work, i, scope)
        await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()

for run in simulate, simulate_trio:
    print([(r.steps, r.digest) for r in (run(main, seed=s) for s in range(20))])
"""


def test_repeats_itself_in_every_process():
    """Steps and digests do not depend on hash seeds or addresses."""
    outputs = set()
    for hash_seed in ("1", "2", "3"):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(result.stdout)
    assert len(outputs) == 1


async def race():
    """Two tasks append; which is first is not promised."""
    order = []

    async def append(name):
        await anyio.lowlevel.checkpoint()
        order.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append, "a")
        tasks.start_soon(append, "b")
    return "".join(order)


@BOTH
def test_tries_both_orders_of_a_race(run):
    """Twenty seeds see either task win."""
    assert {run(race, seed=seed).value for seed in range(20)} == {"ab", "ba"}


def test_keeps_the_stock_order_on_request():
    """With ``order="fifo"`` callbacks run as they were queued."""
    assert {simulate(race, seed=s, order="fifo").value for s in range(20)} == {"ab"}


@BOTH
def test_lets_time_pass_only_on_the_clock(run):
    """An hour of sleep takes no time, and is an hour by every clock."""

    async def main():
        await anyio.sleep(3600)
        return anyio.current_time()

    assert run(main).value == 3600 == run(main).seconds


def test_lets_a_timer_fall_due_while_there_is_work():
    """A timeout can meet the very step of the wake-up, in a share of the seeds."""

    async def main():
        with anyio.move_on_after(0.01) as scope:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
        return scope.cancelled_caught

    found = {simulate(main, seed=seed).value for seed in range(60)}
    assert found == {True, False}
    assert {simulate(main, seed=s, early_timers=0).value for s in range(60)} == {False}


def test_skips_a_timer_that_was_cancelled():
    """One that is due with another, but cancelled, does not run."""
    rung = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_at(1, rung.append, "first")
        loop.call_at(1, rung.append, "second").cancel()
        loop.call_at(1, rung.append, "third")
        await asyncio.sleep(2)

    simulate(main)
    assert sorted(rung) == ["first", "third"]


@BOTH
def test_reports_a_hang_at_once_with_the_tasks(run):
    """A state without a runnable event fails the run and names the waiting tasks (law 10)."""

    async def forgotten():
        await anyio.Event().wait()

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(forgotten)

    with pytest.raises(Deadlock, match=r"nothing is ready[\s\S]*forgotten"):
        run(main)


@BOTH
def test_takes_sleep_without_an_end_for_a_hang(run):
    """A timer that is never due is none, and others fall due beside it."""

    async def main():
        with anyio.move_on_after(3):
            await anyio.sleep_forever()
        assert anyio.current_time() == 3
        await anyio.sleep_forever()

    with pytest.raises(Deadlock, match=r"nothing is ready[\s\S]*main"):
        run(main)


@BOTH
def test_reports_a_program_that_runs_in_circles(run):
    """A step limit ends what never ends."""

    async def main():
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(Deadlock, match="no end after 500 steps"):
        run(main, max_steps=500)


def test_reports_a_cancelled_scope_that_cannot_be_left():
    """Deliveries go on for ever there, which is a hang all the same."""

    async def main():
        with anyio.CancelScope() as outer:
            outer.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.Event().wait()

    with pytest.raises(Deadlock, match="nothing is ready"):
        simulate(main)


@BOTH
def test_lets_time_pass_inside_a_shield(run):
    """A cancelled scope that spins does not keep a shielded sleep from its end."""

    async def main():
        with anyio.CancelScope() as outer:
            outer.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)
        return anyio.current_time()

    assert run(main, seed=1).value == 5


@BOTH
def test_injects_a_fault_at_its_step(run):
    """A fault at a step happens there, once, and the note of a failure says so."""
    struck = []

    async def main():
        for _ in range(10):
            await anyio.lowlevel.checkpoint()

    run(main, faults={4: lambda: struck.append(4)})
    assert struck == [4]

    def fail():
        raise KeyError("fault")

    with pytest.raises(KeyError) as failure:
        run(main, seed=3, faults={4: fail})
    assert "simulation of seed 3: step 4" in failure.value.__notes__[0]


@BOTH
def test_checks_after_every_step(run):
    """A law that is broken for one step only is seen."""
    gate = Gate(slots=2)

    async def main():
        await anyio.lowlevel.checkpoint()
        with gate.try_admit():
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()

    def check():
        assert not gate.statistics().slots_in_use, "in use"

    with pytest.raises(AssertionError, match="in use"):
        run(main, check=check)


def test_fails_a_program_that_leaves_a_task():
    """What is still running when the program returns is named (law 7)."""

    async def main():
        main.kept = asyncio.create_task(asyncio.sleep(1), name="stray")
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="tasks left behind: stray"):
        simulate(main)


def test_fails_a_program_that_failed_in_a_callback():
    """An error in a callback is not lost (law 7)."""

    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.1)

    with pytest.raises(AssertionError, match=r"in the background.*ZeroDivisionError"):
        simulate(main)


def test_serves_as_the_loop_factory_of_others():
    """asyncio.Runner and anyio.run take the loop as it is."""

    async def main():
        assert isinstance(asyncio.get_running_loop(), SimLoop)
        await anyio.sleep(100)
        return await race()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        assert runner.run(main()) in {"ab", "ba"}
    assert anyio.run(main, backend_options={"loop_factory": SimLoop}) in {"ab", "ba"}


@BOTH
def test_raises_what_the_program_raised(run):
    """Errors come out as they are, never in a group of the runner's own."""

    async def main():
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main)
