"""Many seeded schedules of the shared gate, until one breaks a law.

    python tests/sim/shared_soak.py 1000 [--first SEED] [--seconds 300] [--processes 2]
    python tests/sim/shared_soak.py --seed 4711       # replays one, and tells all of it

Prints what was run as one line of JSON, and exits with 1 if a law was broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from shared_world import World

# Schedules that a process runs before it reports: a second or two.
CHUNK = 50
# Chunks that a process runs.
ROUND = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of some schedules."""

    schedules: int
    steps: int
    failure: str | None = None


def work(first: int, count: int, until: float = math.inf) -> Verdict:
    """Run schedules, as long as there is time."""
    gc.disable()  # nothing here is to be found by the collector
    logging.disable()
    steps = 0
    for done in range(count):
        if time.monotonic() > until:
            return Verdict(done, steps)
        world = World(first + done)
        try:
            world.run()
        except Exception:  # noqa: BLE001 - any failure is a find
            replay = f"python tests/sim/shared_soak.py --seed {first + done}"
            story = f"{traceback.format_exc()}\nreplay: {replay}"
            return Verdict(done + 1, steps + world.steps, story)
        steps += world.steps
        if done % 25 == 0:
            gc.collect()
    return Verdict(count, steps)


def every(
    first: int, count: int, until: float = math.inf, processes: int = 1
) -> Iterator[Verdict]:
    """Yield the verdicts on so many schedules, run in processes of their own."""
    firsts = range(first, first + count, CHUNK)
    for at in range(0, len(firsts), ROUND * processes):
        if time.monotonic() > until:
            return
        batch = firsts[at : at + ROUND * processes]
        counts = [min(CHUNK, first + count - each) for each in batch]
        # Others each time: what a killed worker had open is closed with its process.
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            yield from pool.map(work, batch, counts, repeat(until))


def soak(
    first: int, count: int, until: float = math.inf, processes: int = 1
) -> Verdict:
    """Run schedules until the first failure."""
    schedules = steps = 0
    for each in every(first, count, until, processes):
        schedules, steps = schedules + each.schedules, steps + each.steps
        if each.failure is not None:
            return Verdict(schedules, steps, each.failure)
    return Verdict(schedules, steps)


def main() -> int:
    """Run the command line; 1 if a law was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, help="replay this one")
    options = parser.parse_args()
    if options.seed is not None:
        world = World(options.seed, keep=None)
        try:
            world.run()
        finally:
            print(world.story())
        verdict = Verdict(1, world.steps)
    else:
        until = time.monotonic() + options.seconds
        verdict = soak(options.first, options.count, until, options.processes)
    if verdict.failure is not None:
        print(verdict.failure)
    print(json.dumps(asdict(verdict)))
    return verdict.failure is not None


if __name__ == "__main__":
    sys.exit(main())
