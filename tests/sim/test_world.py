"""The real core, in a simulated world, under every fault and in many orders."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import soak
import world

from lifecycle.testing import simulate, simulate_trio

CORES = os.cpu_count() or 1

# As many as are worth waiting for at each run, and as a release is held to.
QUICK = {"asyncio": 500, "trio": 100}
FULL = 50_000
WORLDS = 20
# So that each test ends in minutes, also on a busy machine.
PARTS = 10


def assert_clean(jobs):
    """Run *jobs* on every core; return how many schedules that were."""
    began, schedules = time.perf_counter(), 0
    for verdict in soak.every(jobs, CORES):
        assert verdict.failure is None, verdict.failure
        schedules += verdict.schedules
    elapsed = time.perf_counter() - began
    print(f"{schedules} schedules in {elapsed:.1f} s: {schedules / elapsed:.0f}/s")
    return schedules


@pytest.mark.parametrize("backend", QUICK)
def test_keeps_the_laws_in_seeded_schedules(backend):
    """Clients come, leave and are cut in hundreds of orders; no law is broken.

    Waiting and being admitted: peers-6, peers-7, peers-12, peers-13, peers-45, B1,
    B2, B5, B6, B7, B13, B21, fault-1. Around the start: peers-16, peers-17,
    peers-18, peers-20, peers-40, fault-2, fault-3, fault-4, fault-60. While it
    streams and ends: peers-19, peers-21, peers-29, peers-31, peers-42, peers-43,
    peers-48, B4, fault-5, fault-6, fault-7, fault-8, fault-61, fault-63. Ids that
    are used again: peers-23, peers-27, peers-28, fault-20. A link of two
    directions that loses and doubles: fault-40, fault-41, fault-42. A loop that
    stands still while deadlines pass: fault-58. Both backends: fault-64.
    """
    assert_clean(soak.seeds(backend, 0, QUICK[backend]))


def test_keeps_the_laws_under_each_fault_at_many_steps():
    """One fault of every kind, to every client, at every fourth step (B4, fault-9)."""
    assert_clean(iter([soak.Job("asyncio", 0, 1, sweep=4)]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_keeps_the_laws_in_as_many_schedules_as_a_release_needs(part):
    """Every single fault in twenty worlds, and fifty thousand seeds (N1)."""
    first, count = part * FULL // PARTS, FULL // PARTS

    def jobs():
        for seed in range(part, WORLDS, PARTS):
            yield soak.Job("asyncio", seed, 1, sweep=1)
        yield from soak.seeds("asyncio", first, count)
        yield from soak.seeds("trio", first, count // 25)

    assert assert_clean(jobs()) > count


@pytest.mark.parametrize("seed", range(10))
def test_ends_alike_on_asyncio_and_trio(seed):
    """Without faults and races, both give the same outcomes (fault-64, N14)."""
    outcomes = []
    for run in (partial(simulate, early_timers=0.0), simulate_trio):
        one = world.World(seed, [])
        for plan in one.plans:
            plan.arrives, plan.patience = plan.number * 1.0, None
        run(one.main, seed=seed, check=one.check)
        outcomes.append(one.outcomes)
    assert outcomes[0] == outcomes[1]


def test_names_a_failing_seed_and_replays_it(monkeypatch, capsys):
    """A broken law is reported with a command that breaks it again, alone."""

    def broken(self):
        assert self.step < 10, "a law is broken"

    monkeypatch.setattr(
        world.World,
        "check",
        lambda self: setattr(self, "step", self.step + 1) or broken(self),
    )
    failure = soak.attempt(5, [(3, ("die", 0))], "asyncio")
    assert failure is not None
    assert "a law is broken" in failure
    assert "seed 5: step 10" in failure
    assert "digest" in failure
    command = failure.splitlines()[-1].removeprefix("replay: python ").split()
    monkeypatch.setattr("sys.argv", command)
    assert soak.main() == 1
    assert "a law is broken" in capsys.readouterr().out
