"""Many seeded schedules of the shared gate, until one breaks a law.

    python tests/sim/shared_soak.py 1000 [--first SEED] [--seconds 300] [--processes 2]
    python tests/sim/shared_soak.py --seed 4711       # replays one, and tells all of it

Prints how far it is, and in the end what was run, as one line of JSON. Exits with 1 if a
schedule failed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from shared_world import Broken, World

# Schedules that a process runs before it reports: less than a second.
CHUNK = 20
# Chunks that a process runs.
ROUND = 50


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of some schedules.

    Attributes:
        schedules: How many were run.
        steps: Of all of them.
        failure: Of the last one.
        broken: Whether that is a law that does not hold, and no error.
    """

    schedules: int
    steps: int
    failure: str | None = None
    broken: bool = False


def die_with_parent() -> None:
    """Leave nothing behind that runs, whatever kills the soak."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work(first: int, count: int, until: float, folder: str) -> Verdict:
    """Run schedules, as long as there is time."""
    gc.disable()  # nothing here is to be found by the collector
    logging.disable()
    steps = 0
    for done in range(count):
        if time.monotonic() > until:
            return Verdict(done, steps)
        world = World(first + done, folder)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - the verdict says which
            replay = f"python tests/sim/shared_soak.py --seed {first + done}"
            story = f"{traceback.format_exc()}\nreplay: {replay}"
            broken = isinstance(error, Broken)
            return Verdict(done + 1, steps + world.steps, story, broken)
        steps += world.steps
        if done % 25 == 0:
            gc.collect()
    return Verdict(count, steps)


def every(
    first: int, count: int, until: float, processes: int, folder: str
) -> Iterator[Verdict]:
    """Yield the verdicts on so many schedules, run in processes of their own."""
    firsts = range(first, first + count, CHUNK)
    for at in range(0, len(firsts), ROUND * processes):
        if time.monotonic() > until:
            return
        batch = firsts[at : at + ROUND * processes]
        counts = [min(CHUNK, first + count - each) for each in batch]
        # Others each time: what a killed worker had open is closed with its process.
        with ProcessPoolExecutor(
            processes, get_context("spawn"), die_with_parent
        ) as pool:
            yield from pool.map(work, batch, counts, repeat(until), repeat(folder))


def soak(first: int, count: int, until: float, processes: int, folder: str) -> Verdict:
    """Run schedules until the first failure."""
    schedules = steps = 0
    for each in every(first, count, until, processes, folder):
        schedules, steps = schedules + each.schedules, steps + each.steps
        print(f"{schedules} schedules", flush=True)
        if each.failure is not None:
            return Verdict(schedules, steps, each.failure, each.broken)
    return Verdict(schedules, steps)


def memory() -> str:
    """Return where files are fast."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def run(options: argparse.Namespace, folder: str) -> Verdict:
    """Replay one schedule, or run many."""
    if options.seed is None:
        until = time.monotonic() + options.seconds
        return soak(options.first, options.count, until, options.processes, folder)
    world = World(options.seed, folder, keep=None)
    try:
        world.run()
    finally:
        print(world.story())
    return Verdict(1, world.steps)


def end(*_: object) -> None:
    """End with what a shell says of SIGTERM; told again, go on removing files."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> int:
    """Run the command line; 1 if a schedule failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--folder", default=memory(), help="for what is removed")
    options = parser.parse_args()
    # Whatever kills its processes, this one removes what they leave, also if told to go.
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory(
        prefix="lifecycle-shared-", dir=options.folder
    ) as folder:
        verdict = run(options, folder)
    if verdict.failure is not None:
        print(verdict.failure)
    print(json.dumps(asdict(verdict)))
    return verdict.failure is not None


if __name__ == "__main__":
    sys.exit(main())
