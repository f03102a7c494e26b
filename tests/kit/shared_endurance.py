"""Workers of a shared gate under random kills and stops, and a checker of their logs.

python tests/kit/shared_endurance.py --count 2000 [--mode kills|stops] [--seed N]

Each worker logs a grant before it uses it, and a release after: whatever the checker
finds over capacity was. It ends with an error where the capacity was exceeded, where a
request that nobody killed got no answer, or where a worker failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count as counter
from pathlib import Path
from typing import Any

import anyio

from lifecycle.shared import SharedGate

WORKERS, TASKS, SLOTS, BYTES = 4, 8, 16, 2000
LONGEST = 120.0


async def _request(
    gate: SharedGate, log: Any, rng: random.Random, ids: Iterator[int], stop: Path
) -> None:
    while not stop.exists():
        number, slots, nbytes = next(ids), rng.randint(1, 2), rng.randint(1, 400)
        log("W", number)
        with anyio.move_on_after(rng.uniform(0, 0.03) if rng.random() < 0.1 else None):
            lease = await gate.admit(slots=slots, bytes=nbytes)
            log("G", number, slots, nbytes)  # before it is used
            try:
                await anyio.sleep(min(rng.expovariate(100), 0.1))
            finally:
                log("R", number)  # after that
                lease.release()
            continue
        log("X", number)


async def _work(folder: str, path: str, seed: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def log(*what: object) -> None:
        line = f"{time.monotonic():.6f} {' '.join(map(str, what))}\n"
        os.write(descriptor, line.encode())

    rng, ids, stop = random.Random(seed), counter(), Path(path).parent / "stop"
    gate = SharedGate(folder, slots=SLOTS, bytes=BYTES)
    with anyio.fail_after(LONGEST * 100):
        async with anyio.create_task_group() as tasks:
            for _ in range(TASKS):
                tasks.start_soon(_request, gate, log, rng, ids, stop)
    log("E", gate._member.epoch if gate._member else 0)
    gate.close()


class _Crowd:
    """The worker processes, and what was done to them."""

    def __init__(self, root: Path, seed: int) -> None:
        self.folder, self.logs = root / "shared", root / "logs"
        self.logs.mkdir()
        self.rng, self._serial = random.Random(seed), counter(seed * 100_000)
        self.live: dict[Path, subprocess.Popen[bytes]] = {}
        self.deaths: dict[Path, float] = {}

    def fill(self) -> None:
        while len(self.live) < WORKERS:
            seed = next(self._serial)
            log = self.logs / str(seed)
            argv = [sys.executable, __file__, "--work", str(self.folder), str(log)]
            self.live[log] = subprocess.Popen([*argv, "--seed", str(seed)])

    def grants(self) -> int:
        return sum(
            each.read_bytes().count(b" G ") for each in self.live if each.exists()
        )

    def let_run(self) -> None:
        """Let all go on until some requests were granted."""
        before, ends = self.grants(), time.monotonic() + LONGEST
        while self.grants() < before + 20 and time.monotonic() < ends:
            time.sleep(0.02)

    def pick(self) -> Path:
        """Choose a worker: the leader, as often as not."""
        names = [int(it.name[7:]) for it in self.folder.glob("leader.*")]
        leader = self.folder / f"leader.{max(names, default=0)}"
        if self.rng.random() < 0.6 and leader.exists():
            process = int.from_bytes(leader.read_bytes()[120:128], sys.byteorder)
            for log, each in self.live.items():
                if each.pid == process:
                    return log
        return self.rng.choice(list(self.live))

    def kill(self, log: Path) -> None:
        # From now on others may get what it held. Noted after the kill, this would come
        # too late on a busy machine.
        self.deaths[log] = time.monotonic()
        self.live[log].kill()
        self.live.pop(log).wait()

    def stop(self, log: Path) -> None:
        self.live[log].send_signal(signal.SIGSTOP)
        time.sleep(self.rng.choice((0.05, 0.7, 0.8, 1.2)))
        if self.rng.random() < 0.1:
            self.kill(log)
        else:
            self.live[log].send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Let all end, and return how many did not end well."""
        (self.logs / "stop").touch()
        failed = 0
        for each in self.live.values():
            try:
                failed += each.wait(LONGEST) != 0
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
                failed += 1
        return failed


def run(root: Path, count: int, seed: int, mode: str = "both") -> dict[str, int]:
    """Send *count* signals to workers, and return what the checker found."""
    crowd = _Crowd(root, seed)
    part_of_kills = {"kills": 1.0, "stops": 0.1, "both": 0.5}[mode]
    for _ in range(count):
        crowd.fill()
        crowd.let_run()
        log = crowd.pick()
        if crowd.rng.random() < part_of_kills:
            crowd.kill(log)
        else:
            crowd.stop(log)
    crowd.fill()
    crowd.let_run()
    failed = crowd.end()
    return {"failed": failed, **check(crowd)}


def check(crowd: _Crowd) -> dict[str, int]:
    """Return what the logs say: grants, lost requests, and times over capacity."""
    found: Counter[str] = Counter(grants=0, lost=0, over=0, epoch=0)
    changes: list[tuple[float, int, int, int]] = []
    for log in crowd.logs.iterdir():
        waiting, held = set(), {}
        for line in log.read_text().splitlines():
            at, kind, number, *cost = line.split()
            if kind == "W":
                waiting.add(number)
            elif kind == "G":
                waiting.discard(number)
                held[number] = slots, nbytes = int(cost[0]), int(cost[1])
                changes.append((float(at), 1, slots, nbytes))
                found["grants"] += 1
            elif kind == "R":
                slots, nbytes = held.pop(number)
                changes.append((float(at), 0, -slots, -nbytes))
            elif kind == "X":
                waiting.discard(number)
            else:
                found["epoch"] = max(found["epoch"], int(number))
        if log in crowd.deaths:
            died = crowd.deaths[log]
            changes += [(died, 0, -slots, -nbytes) for slots, nbytes in held.values()]
        elif waiting or held:
            found["lost"] += len(waiting) + len(held)
    slots = nbytes = 0
    for _, _, more_slots, more_bytes in sorted(changes):
        slots, nbytes = slots + more_slots, nbytes + more_bytes
        found["over"] += slots > SLOTS or nbytes > BYTES
    return dict(found)


def main() -> None:
    """Run as a script: a worker, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--mode", choices=("kills", "stops", "both"), default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", nargs=2, metavar=("FOLDER", "LOG"))
    options = parser.parse_args()
    if options.work:
        anyio.run(_work, *options.work, options.seed)
        return
    with tempfile.TemporaryDirectory() as root:
        result = run(Path(root), options.count, options.seed, options.mode)
    print(json.dumps(result))
    if result["over"] or result["lost"] or result["failed"]:
        sys.exit("a promise was broken")


if __name__ == "__main__":
    main()
