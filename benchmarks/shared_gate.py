"""A gate of all worker processes, beside one of this process, in one run.

A request is admitted and released at once. `gate` is a `Gate` of the process, `leader`
the worker that serves the shared gate, `other` one of its clients. Then four workers at
32 slots, and the longest time that one of three workers is admitted nothing while the
leader is killed, or stopped.

Run it: python benchmarks/shared_gate.py [--count 5000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lifecycle import Gate
from lifecycle.shared import SharedGate

SLOTS = 32


async def admissions(gate: Any, count: int, tasks: int) -> dict[str, float]:
    """Admit *count* requests from *tasks* tasks; seconds of each, and in all."""
    took: list[float] = []

    async def admit() -> None:
        for _ in range(count // tasks):
            began = time.perf_counter()
            (await gate.admit()).release()
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(admit() for _ in range(tasks)))
    whole = time.perf_counter() - began
    took.sort()
    middle, late = took[len(took) // 2], took[int(len(took) * 0.99)]
    return {"p50": middle, "p99": late, "rate": len(took) / whole, "longest": took[-1]}


def work(folder: str, count: int, tasks: int) -> None:
    """Join, say so, and for each line on standard input admit *count* requests."""
    gate = SharedGate(folder, slots=SLOTS)
    asyncio.run(admissions(gate, 10, 1))
    print(flush=True)
    for _ in sys.stdin:
        print(json.dumps(asyncio.run(admissions(gate, count, tasks))), flush=True)


@contextlib.contextmanager
def workers(number: int, count: int, tasks: int = 1) -> Iterator[list[Any]]:
    """Run workers of one folder; the first of them leads."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, __file__, "--work", folder]
        command += ["--count", str(count), "--tasks", str(tasks)]
        found: list[subprocess.Popen[str]] = []
        try:
            for _ in range(number):
                pipe = subprocess.PIPE
                found.append(
                    subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
                )
                _read(found[-1])
            yield found
        finally:
            for process in found:
                process.kill()
                process.communicate()


def _read(process: Any) -> Any:
    line = process.stdout.readline()
    return json.loads(line) if line.strip() else None


def _begin(process: Any) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def outage(number: int) -> float:
    """Return the longest admission of a worker while the leader gets a signal."""
    with workers(3, 20_000) as (leader, worker, _):
        _begin(worker)
        time.sleep(0.3)
        os.kill(leader.pid, number)
        longest: float = _read(worker)["longest"]
        return longest


def measure(count: int) -> dict[str, float]:
    """Return all figures of one round: microseconds, milliseconds, a second's rate."""
    own = asyncio.run(admissions(Gate(slots=SLOTS), count, 1))
    with workers(2, count) as pair:
        found = []
        for worker in pair:
            _begin(worker)
            found.append(_read(worker))
    leader, other = found
    with workers(4, count, SLOTS // 2) as four:
        for worker in four:
            _begin(worker)
        rate = sum(_read(worker)["rate"] for worker in four)
    return {
        "gate p50 us": own["p50"] * 1e6,
        "leader p50 us": leader["p50"] * 1e6,
        "other p50 us": other["p50"] * 1e6,
        "other p99 us": other["p99"] * 1e6,
        "four workers /s": rate,
        "outage, killed, ms": outage(signal.SIGKILL) * 1e3,
        "outage, stopped, ms": outage(signal.SIGSTOP) * 1e3,
    }


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is not None:
        work(str(options.work), options.count, options.tasks)
        return
    rounds = [measure(options.count) for _ in range(options.rounds)]
    print(f"{options.rounds} rounds of {options.count}, {os.cpu_count()} cores")
    for name in rounds[0]:
        found = [each[name] for each in rounds]
        middle = statistics.median(found)
        print(f"{name:20} {middle:9.1f} ({min(found):.1f}-{max(found):.1f})")


if __name__ == "__main__":
    main(sys.argv[1:])
