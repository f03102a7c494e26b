"""Many seeded schedules of the world, on every core, until one breaks a law.

python tests/sim/soak.py 1000000 [--first SEED] [--backend trio]
python tests/sim/soak.py --seed 4711          # replays one, with its story
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from world import Fault, World, run

# Schedules a process runs before it reports: about half a second.
CHUNK = 250


@dataclass(frozen=True, slots=True)
class Job:
    """Seeds to run without faults of our own, or one world with single faults."""

    backend: str
    first: int
    count: int
    sweep: int = 0  # single faults at every so many steps, if not 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a job."""

    schedules: int
    failure: str | None = None


def work(job: Job) -> Verdict:
    """Run *job*; runs in a process of the pool."""
    logging.disable()  # it would tell of each END that fails on purpose
    gc.disable()  # a payload must die without the collector
    gc.freeze()
    try:
        return _sweep(job) if job.sweep else _seeds(job)
    finally:
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.enable()
        gc.collect()


def _seeds(job: Job) -> Verdict:
    for seed in range(job.first, job.first + job.count):
        failure = attempt(seed, None, job.backend)
        if failure is not None:
            return Verdict(seed - job.first + 1, failure)
        if seed % 25 == 0:
            gc.collect()
    return Verdict(job.count)


def _sweep(job: Job) -> Verdict:
    """Each fault at steps of one world, from the first on."""
    steps = run(job.first, [], backend=job.backend).steps
    faults = World(job.first, []).possible_faults()
    done = 1
    for step in range(1, steps + 1, job.sweep):
        for fault in faults:
            done += 1
            failure = attempt(job.first, [(step, fault)], job.backend)
            if failure is not None:
                return Verdict(done, failure)
        gc.collect()
    return Verdict(done)


def attempt(
    seed: int, faults: list[tuple[int, Fault]] | None, backend: str
) -> str | None:
    """Run one world; return how it failed and how to replay it, or ``None``."""
    try:
        run(seed, faults, backend=backend)
    except Exception as error:  # noqa: BLE001 - any failure is a find
        # Anyio's task groups wrap; the law that was broken is at the bottom.
        lowest: BaseException = error
        while isinstance(lowest, BaseExceptionGroup):
            lowest = lowest.exceptions[0]
        story = "".join(traceback.format_exception(lowest))
        story += "\n".join(getattr(error, "__notes__", ()))
        return f"{story}\nreplay: {replay(seed, faults, backend)}"
    return None


def replay(seed: int, faults: list[tuple[int, Fault]] | None, backend: str) -> str:
    """The command that runs one world alone."""
    command = f"python tests/sim/soak.py --seed {seed} --backend {backend}"
    if faults is None:
        return command
    return command + "".join(f" --fault {s}:{kind}:{n}" for s, (kind, n) in faults)


def every(jobs: Iterator[Job], processes: int) -> Iterator[Verdict]:
    """Yield the verdict of each job, run by so many processes."""
    with ProcessPoolExecutor(processes, max_tasks_per_child=None) as pool:
        yield from pool.map(work, jobs)


def seeds(backend: str, first: int, count: int) -> Iterator[Job]:
    """Cut a range of seeds into jobs."""
    for start in range(first, first + count, CHUNK):
        yield Job(backend, start, min(CHUNK, first + count - start))


def _fault(text: str) -> tuple[int, Fault]:
    step, kind, number = text.split(":")
    return int(step), (kind, int(number))


def main() -> int:
    """Run the command line; 1 if a law was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=50_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--fault", type=_fault, action="append", help="STEP:KIND:N")
    options = parser.parse_args()
    if options.seed is not None:
        failure = attempt(options.seed, options.fault, options.backend)
        print(failure or "no law was broken")
        return failure is not None
    began = time.monotonic()
    schedules = 0
    for verdict in every(
        seeds(options.backend, options.first, options.count), options.processes
    ):
        schedules += verdict.schedules
        if verdict.failure is not None:
            print(verdict.failure)
            return 1
    elapsed = time.monotonic() - began
    print(
        f"{schedules} schedules in {elapsed:.1f} s, {schedules / elapsed:.0f}/s: clean"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
