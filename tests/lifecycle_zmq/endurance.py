"""The numeric goals of the link, by as many real faults as you like; run as a script.

python tests/lifecycle_zmq/endurance.py kills --count 1000 [--ballast BYTES]  # N4, N5
python tests/lifecycle_zmq/endurance.py orphans --count 500                   # N7
python tests/lifecycle_zmq/endurance.py stops --count 50                      # N6
python tests/lifecycle_zmq/endurance.py holds --minutes 60 [--engines 12]     # N6

Each ends with an error where a guarantee was broken: a request failed twice or not at
all, a false verdict, something left. Times are printed beside their goals; on a busy
machine they say more of the machine. `disconnects.py` and `fuzz.py` are N3 and N8.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

import shared_memory

from lifecycle import EngineLost
from lifecycle_zmq import ZmqEngine

HERE = Path(__file__).parent
ENGINE = [sys.executable, str(HERE / "scripted_engine.py")]
API = [sys.executable, str(HERE / "scripted_api.py")]
STREAMS = 128
HOLD_SECONDS = 5.0


def report(what: str, seconds: Sequence[float], goal: float) -> None:
    """Print the median, the 99th percentile and the worst, beside the goal."""
    ms = sorted(1e3 * it for it in seconds)
    late = sum(it > goal * 1e3 for it in ms)
    print(
        f"{what}: n={len(ms)}, median {statistics.median(ms):.1f} ms, "
        f"p99 {ms[int(0.99 * (len(ms) - 1))]:.1f}, worst {ms[-1]:.1f}; "
        f"goal {goal * 1e3:.0f}, {late} later than that",
        flush=True,
    )


def left_here() -> tuple[int, int]:
    """How many descriptors this process has, and how many children, zombies too."""
    me = psutil.Process()
    return me.num_fds(), len(me.children())


async def kills(count: int, ballast: int = 0) -> tuple[list[float], list[float]]:
    """Kill that many engines under 128 streams; each stream fails once.

    Returns:
        Seconds until the last stream failed, and until the next engine was ready.
    """
    argv = [*ENGINE, "--step", "0.01", "--ballast", str(ballast)]
    options: dict[str, Any] = {"backoff": 0.01, "max_backoff": 0.01}
    reported, again = [], []
    async with ZmqEngine(argv, max_crashes=None, **options) as engine:
        await engine.wait_ready()
        before = left_here()
        for number in range(1, count + 1):
            assert engine.incarnation == number
            with anyio.fail_after(60):
                begin, last = await _kill(engine)
                await engine.wait_ready()
            reported.append(last - begin)
            again.append(time.monotonic() - begin)
        assert left_here() == before, "descriptors or processes are left"
    return reported, again


async def _kill(engine: ZmqEngine) -> tuple[float, float]:
    reported: Counter[str] = Counter()
    live: set[str] = set()
    last = 0.0

    async def read(key: str) -> None:
        nonlocal last
        try:
            async for _ in await engine.start(key, {"forever": True}):
                live.add(key)
        except EngineLost as lost:
            assert lost.reason == "killed", lost.reason
            reported[key] += 1
            last = time.monotonic()

    async with anyio.create_task_group() as tasks:
        for index in range(STREAMS):
            tasks.start_soon(read, str(index))
        while len(live) < STREAMS:
            await anyio.sleep(0.002)
        begin = time.monotonic()
        os.kill(engine.pid or 0, signal.SIGKILL)
    assert reported == Counter(map(str, range(STREAMS)))
    return begin, last


def orphans(count: int, *, seed: int = 1) -> tuple[list[float], list[float], int]:
    """Kill that many API processes at any moment until a little after they serve.

    Every other one has forked, so that the pipe of its engine stays open. Where the
    machine has become slower, and most were killed before they had an engine, more
    follow, each later than it was.

    Returns:
        Seconds until the engine was gone, where its own code ran already, and where the
        interpreter still began; and how often an empty directory or file was left: of a
        socket, for the next start to sweep, or of Python's search for a place for such.
    """
    draw = random.Random(seed)
    bound: list[float] = []
    loose: list[float] = []
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        before = shared_memory.names()
        longest = 1.5 * _start_seconds(Path(folder))
        for number in range(4 * count):
            if number >= count:
                if len(bound) + len(loose) >= count // 3:
                    break
                longest *= 1.2
            moment = draw.uniform(0.0, longest)
            _orphan(Path(folder), moment, bool(number % 2), bound, loose)
            left += _remove_stale(Path(folder))
        assert shared_memory.names() == before
    return bound, loose, left


def _start_seconds(folder: Path) -> float:
    """How long an API process takes until its engine serves, here and now."""
    begin = time.monotonic()
    with _api(folder) as api:
        assert api.stdout is not None
        api.stdout.readline()
        api.kill()
    return time.monotonic() - begin


def _api(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "TMPDIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([*API, *flags, *ENGINE], env=env, **pipes)


def _remove_stale(folder: Path) -> int:
    """Remove what was left, which is never more than an empty file; say how often."""
    names = list(folder.iterdir())
    for path in names:
        if path.is_dir():
            assert path.name.startswith("lifecycle-zmq-")
            (path / "engine").unlink(missing_ok=True)
            path.rmdir()
        else:
            assert not path.stat().st_size
            path.unlink()
    return len(names)


def _orphan(
    folder: Path,
    moment: float,
    forked: bool,
    bound: list[float],
    loose: list[float],
) -> None:
    with _api(folder, *["--forked"] * forked) as api:
        time.sleep(moment)
        for engine in _engines(api.pid):
            descriptor = os.pidfd_open(engine.pid)
            # From then on it is bound to its parent: the thread that watches is there.
            begun = engine.num_threads() > 1
            begin = time.monotonic()
            api.kill()
            select.select([descriptor], [], [], 20)
            (bound if begun else loose).append(time.monotonic() - begin)
            os.close(descriptor)
        api.kill()
        begin = time.monotonic()
        # One may have been spawned between the look and the kill.
        while left := _of(folder):
            if time.monotonic() - begin > 20:
                for engine in left:
                    engine.kill()  # not left to the machine
                raise AssertionError(f"{len(left)} engines outlive their parent")
            time.sleep(0.01)


def _engines(api: int) -> list[psutil.Process]:
    # Not those between fork and exec, nor a fork that serves as none.
    children = psutil.Process(api).children()
    return [it for it in children if "--endpoint" in it.cmdline()]


def _of(folder: Path) -> list[psutil.Process]:
    """The engines of servers that were given the folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "--endpoint" in (process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(folder):
                    found.append(process)
    return found


async def stops(count: int) -> tuple[list[float], list[float]]:
    """Stop that many engines under streams.

    Returns:
        Seconds until no requests were taken, and until the next engine served.
    """
    seen, again = [], []
    options: dict[str, Any] = {"backoff": 0.01, "max_backoff": 0.01}
    async with ZmqEngine(ENGINE, max_crashes=None, **options) as engine:
        for number in range(1, count + 1):
            with anyio.fail_after(60):
                await engine.wait_ready()
                assert engine.incarnation == number
                stream = await engine.start("one", {"forever": True})
                await anext(stream)
                begin = time.monotonic()
                os.kill(engine.pid or 0, signal.SIGSTOP)
                while engine._supervisor.accepting:
                    await anyio.sleep(0.001)
                seen.append(time.monotonic() - begin)
                try:
                    async for _ in stream:
                        pass
                except EngineLost as lost:
                    assert lost.reason == "stopped"
                await engine.wait_ready()
            again.append(time.monotonic() - begin)
    return seen, again


async def holds(seconds: float, engines: int, *, hold: float = HOLD_SECONDS) -> int:
    """Hold the lock in the engines and block our own loop, in turns and at once.

    Returns:
        How many holds were survived; an engine that was replaced is an error.
    """
    until = time.monotonic() + seconds
    survived = 0

    async def one() -> None:
        nonlocal survived
        # A stop is noticed far sooner than a hold takes, so they would be confused.
        async with ZmqEngine(ENGINE, stopped_after=0.5) as engine:
            await engine.wait_ready()
            number = 0
            while not number or time.monotonic() < until:
                number += 1
                request = {"count": 3, "hold_at": 1, "seconds": hold}
                stream = await engine.start(f"held{number}", request)
                idle = await engine.start(f"idle{number}", {"hold": True})
                items = [item async for item in stream]
                assert [it for item in items for it in item] == [0, 1, 2]
                await engine.end(f"idle{number}")
                await idle.aclose()
                assert (engine.incarnation, engine.health) == (1, "serving")
                survived += 1

    async def block() -> None:
        draw = random.Random(1)
        while time.monotonic() < until:
            time.sleep(hold)  # noqa: ASYNC251 - the fault
            await anyio.sleep(draw.uniform(0, 2 * hold))

    async with anyio.create_task_group() as tasks:
        for _ in range(engines):
            tasks.start_soon(one)
        tasks.start_soon(block)
    return survived


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kills", "orphans", "stops", "holds"))
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--ballast", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--engines", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("lifecycle_zmq").setLevel(logging.ERROR)
    if options.what == "kills":
        reported, again = anyio.run(kills, options.count, options.ballast)
        report(f"SIGKILL, last of {STREAMS} reported", reported, 0.05)
        report("SIGKILL, serving again", again, 0.3)
    elif options.what == "orphans":
        bound, loose, left = orphans(options.count)
        report("SIGKILL of the server, engine gone", bound, 0.1)
        report("likewise while its interpreter began", loose, 1.0)
        print(f"{left} of {options.count} left an empty file or directory")
    elif options.what == "stops":
        seen, again = anyio.run(stops, options.count)
        report("SIGSTOP, no requests taken", seen, 0.15)
        report("SIGSTOP, reported and replaced", again, 3.0)
    else:
        survived = anyio.run(holds, 60 * options.minutes, options.engines)
        hours = options.minutes * options.engines / 60
        print(f"{survived} holds in {hours:.2f} hours of engines, no false verdict")


if __name__ == "__main__":
    main()
