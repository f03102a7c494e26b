"""Time to detect an engine's crash, stop or orphaning, and the cost of watching.

Deaths are detected in two ways, alternating: by the robust mutex that the kernel
releases before the memory, and by the end of the process alone.

    python benchmarks/liveness.py [--rounds 9] [--gib 4] [--starts 200] [--only NAME]
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import anyio

from lifecycle import EngineLost
from lifecycle_zmq import (
    EngineServer,
    Output,
    ZmqEngine,
    exit_with_parent,
    heartbeat as locks,
)

STREAMS = 128
STEP = 0.02
IDLE_SECONDS = 20.0


class Ticking:
    """A backend that gives every stream an item each step."""

    def __init__(self) -> None:
        self.live: dict[str, None] = {}

    @property
    def busy(self) -> bool:
        """Whether there is any stream."""
        return bool(self.live)

    def start(self, key: str, request: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Take a stream."""
        del request, tensors
        self.live[key] = None

    def cancel(self, key: str) -> None:
        """Stop a stream."""
        self.live.pop(key, None)

    end = cancel

    def step(self) -> list[Output]:
        """One item for each."""
        time.sleep(STEP)
        return [Output(key, [0]) for key in self.live]

    def status(self) -> dict[str, Any]:
        """Return how many there are."""
        return {"live": len(self.live)}


def run_engine(options: argparse.Namespace) -> None:
    """Run the engine, with so much memory in pages of 4 KiB."""
    exit_with_parent()
    size = int(options.ballast * 2**30)
    memory = mmap.mmap(-1, max(size, 1))
    if size:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = 1
    EngineServer(options.endpoint, Ticking(), incarnation=options.incarnation).run()


def engine(gib: float = 0.0) -> ZmqEngine:
    """An engine that comes back as often as it is killed."""
    argv = [sys.executable, __file__, "--engine", "--ballast", str(gib)]
    return ZmqEngine(argv, max_crashes=None, backoff=0.001, max_backoff=0.001)


class Kills:
    """Kills engines with running streams and records when the last stream failed."""

    def __init__(self) -> None:
        self.failed: list[float] = []
        self.again: list[float] = []
        self.records = 0

    async def one(self, it: ZmqEngine) -> None:
        """Kill once, and wait until another engine serves."""
        await it.wait_ready()
        seen: list[float] = []
        live: set[int] = set()

        async def read(number: int) -> None:
            try:
                async for _ in await it.start(f"{it.incarnation}.{number}", {}):
                    live.add(number)
            except EngineLost:
                seen.append(time.monotonic())

        async with anyio.create_task_group() as tasks:
            for number in range(STREAMS):
                tasks.start_soon(read, number)
            while len(live) < STREAMS:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            begin = time.monotonic()
            os.kill(it.pid or 0, signal.SIGKILL)
        assert len(seen) == STREAMS
        await it.wait_ready()
        self.failed.append(max(seen) - begin)
        self.again.append(time.monotonic() - begin)


async def kill(gib: float, rounds: int) -> None:
    """Kill with and without the mutex, alternating."""
    ways: dict[str, tuple[int | None, Kills]] = {
        "lock": (locks._FUTEX, Kills()),  # noqa: SLF001 - to do without it
        "pidfd only": (None, Kills()),
    }
    with Counting() as records:
        for _ in range(rounds):
            for futex, kills in ways.values():
                locks._FUTEX = futex  # noqa: SLF001
                async with engine(gib) as it:
                    await kills.one(it)
    locks._FUTEX = ways["lock"][0]  # noqa: SLF001
    for name, (_, kills) in ways.items():
        show(f"{gib:g} GiB, {name}: last of {STREAMS} failed", kills.failed)
    if not gib:
        both = [*ways["lock"][1].again, *ways["pidfd only"][1].again]
        show("serving again after SIGKILL", both)
    print(f"{'log records a death':<52}{records.count / rounds / 2:8.1f}")


class Counting(logging.Handler):
    """Counts log records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, _record: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger().removeHandler(self)


async def stop(rounds: int) -> None:
    """SIGSTOP with running streams: time until the engine refuses requests."""
    seconds = []
    async with engine() as it:
        await it.wait_ready()
        stream = await it.start("one", {})
        for _ in range(rounds):
            await anext(stream)
            begin = time.monotonic()
            os.kill(it.pid or 0, signal.SIGSTOP)
            while it._supervisor.accepting:  # noqa: ASYNC110, SLF001
                await anyio.sleep(0.001)
            seconds.append(time.monotonic() - begin)
            os.kill(it.pid or 0, signal.SIGCONT)
            while not it._supervisor.accepting:  # noqa: ASYNC110, SLF001
                await anyio.sleep(0.001)
    show("SIGSTOP until no requests are taken", seconds)


async def start(count: int) -> None:
    """Start engines while every core is busy with something else."""
    seconds = []
    busy = [sys.executable, "-c", "while True: pass"]
    cores = os.cpu_count() or 1
    with ExitStack() as burners:
        for _ in range(cores):
            burner = burners.enter_context(subprocess.Popen(busy))  # noqa: ASYNC220
            burners.callback(burner.kill)
        for _ in range(count):
            begin = time.monotonic()
            with suppress(EngineLost, TimeoutError):
                async with engine() as it:
                    with anyio.fail_after(30):
                        await it.wait_ready()
                        assert it.incarnation == 1
                        await anext(await it.start("one", {}))
                        seconds.append(time.monotonic() - begin)
    what = f"{cores} cores busy: {len(seconds)} of {count} starts"
    show(f"{what}, until the first item", seconds)


async def idle() -> None:
    """CPU time of both processes while nothing is asked, and while streams hold."""
    async with engine() as it:
        await it.wait_ready()
        pid = it.pid or 0
        await anyio.sleep(1.0)
        own, its = time.process_time(), _cpu_seconds(pid)
        await anyio.sleep(IDLE_SECONDS)
        own, its = time.process_time() - own, _cpu_seconds(pid) - its
    for name, used in (("server", own), ("engine", its)):
        share = 100 * used / IDLE_SECONDS
        print(f"{f'idle CPU, {name}':<52}{share:8.3f} % of a core")


def _cpu_seconds(pid: int) -> float:
    # In nanoseconds, where ticks would be too coarse.
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def orphan(rounds: int) -> None:
    """SIGKILL of the server: until its engine is gone."""
    seconds = []
    for _ in range(rounds):
        argv = [sys.executable, __file__, "--server"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            descriptor = os.pidfd_open(int(server.stdout.readline()))
            begin = time.monotonic()
            server.kill()
            select.select([descriptor], [], [], 30)
            seconds.append(time.monotonic() - begin)
            os.close(descriptor)
    show("SIGKILL of the server until its engine is gone", seconds)


async def run_server() -> None:
    """Run a server with an engine, and wait to be killed."""
    async with engine() as it:
        await it.wait_ready()
        print(it.pid, flush=True)
        await anyio.sleep_forever()


def show(what: str, seconds: Sequence[float]) -> None:
    """Print the median and the spread in milliseconds."""
    ms = sorted(1e3 * it for it in seconds)
    print(
        f"{what:<52}{statistics.median(ms):8.1f} ms"
        f"   {ms[0]:.1f} to {ms[-1]:.1f}, n={len(ms)}",
        flush=True,
    )


def run(options: argparse.Namespace) -> None:
    """Run the selected measurements."""
    cases: dict[str, Callable[[], object]] = {
        "kill": lambda: [
            anyio.run(kill, gib, options.rounds) for gib in (0.0, 0.2, options.gib)
        ],
        "stop": lambda: anyio.run(stop, options.rounds),
        "orphan": lambda: orphan(options.rounds),
        "start": lambda: anyio.run(start, options.starts),
        "idle": lambda: anyio.run(idle),
    }
    for name in options.only:
        cases[name]()


def main() -> None:
    """Run as a benchmark, as a server or as its engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gib", type=float, default=4.0, help="the larger engine")
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument(
        "--only", nargs="*", default=("kill", "stop", "orphan", "start", "idle")
    )
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--ballast", type=float, default=0.0)
    parser.add_argument("--endpoint")
    parser.add_argument("--incarnation", type=int)
    options = parser.parse_args()
    if options.engine:
        run_engine(options)
    elif options.server:
        anyio.run(run_server)
    else:
        run(options)


if __name__ == "__main__":
    main()
