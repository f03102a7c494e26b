"""Ends of a real server at random moments, under every kind of client.

python tests/http/shutdowns.py [--count 500] [--seed 1] [--at-once 1]

Each run starts ``lifecycle serve``, lets good and bad clients at it, sends
SIGTERM or SIGINT, often a SIGINT behind it, some beside an engine that is stopped, and
checks: exit status, time, each request answered, nothing left and nothing logged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

import shared_memory
from http_kit import ENV
from rough_clients import (
    PATHS,
    Answer,
    ask,
    ask_and_leave,
    ask_and_never_read,
    begin_and_stop,
    body_of,
    connected,
    request_of,
)

# An exit may take so much longer than the drain, on a machine that does nothing else.
LIMIT = 2.0
# Of the log: whom it refused, and that it waits for streams after Ctrl-C.
_EXPECTED = re.compile(" refused with | left, for .* Ctrl-C again ")
_MANNERS = (
    "streams",
    "waits",
    "short",
    "leaves",
    "reads-nothing",
    "stalls",
    "half",
    "idle",
)


@dataclass(slots=True)
class Run:
    """One shutdown: what was tried, and what was wrong with it.

    Attributes:
        drain: Seconds that streams were given.
        first: The signal that was sent.
        again: Seconds until a SIGINT behind it; ``None`` for none.
        stopped: Whether the engine was stopped before.
        early: Whether the signal came before the server was ready.
        took: Seconds from the first signal to the exit.
        after_last: Seconds from the last signal to the exit.
        answered: How many requests were in flight and received their end.
        wrong: What broke a guarantee.
    """

    drain: float
    first: signal.Signals
    again: float | None
    stopped: bool
    early: bool
    took: float = 0.0
    after_last: float = 0.0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What distinguishes it, for the report."""
        if self.early:
            return "before it was ready"
        beside = ", beside a stopped engine" if self.stopped else ""
        return ("hurried" if self.again is not None else "drained") + beside


def planned(draw: random.Random) -> Run:
    """Draw what to try."""
    return Run(
        drain=draw.choice((0.0, 0.2, 0.5, 1.0)),
        first=draw.choice((signal.SIGTERM, signal.SIGINT)),
        again=draw.choice((None, None, 0.0, draw.uniform(0, 0.3), draw.uniform(0, 1))),
        stopped=draw.random() < 0.15,
        early=draw.random() < 0.05,
    )


async def shut_down(seed: int) -> Run:
    """Try one shutdown and look at what is left of it."""
    draw = random.Random(seed)
    run = planned(draw)
    with tempfile.TemporaryDirectory() as folder:
        async with _process(run, folder) as process:
            if run.early:
                await asyncio.sleep(draw.uniform(0, 1.5))
                await _end(run, process, [])
            else:
                await _under_load(run, process, draw)
        if left := _names(folder):
            run.wrong.append(f"files left: {left}")
    return run


def _busyness() -> float:
    """How many times longer than its processor time some work takes here and now."""
    began, worked = time.monotonic(), time.thread_time()
    while time.thread_time() - worked < 0.05:
        pass
    return max(1.0, (time.monotonic() - began) / 0.05)


def _names(folder: str) -> set[str]:
    # Semaphores of multiprocessing, which we do not use, are somebody else's.
    names = {path.name for path in Path(folder).iterdir()}
    return {name for name in names if not name.startswith("sem.mp-")}


@contextlib.asynccontextmanager
async def _process(run: Run, folder: str) -> AsyncIterator[Any]:
    argv = [sys.executable, "-m", "lifecycle_engine.cli", "serve", "--runner", "sim"]
    argv += ["--port", "0", "--drain", str(run.drain), "--bytes", str(2**28)]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**ENV, "TMPDIR": folder},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()


async def _under_load(run: Run, process: Any, draw: random.Random) -> None:
    async with asyncio.timeout(120):
        line = (await process.stdout.readline()).decode()
    if not line:
        said = (await process.stderr.read()).decode()
        run.wrong.append(f"it did not start: {said[-900:]}")
        return
    port = int(line.split(":")[-1])
    children = psutil.Process(process.pid).children(recursive=True)
    load = _Load(port, draw)
    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(load.client(it)) for it in load.manners]
        await asyncio.sleep(draw.uniform(0, 0.8))
        if run.stopped:
            children[0].suspend()
            await asyncio.sleep(draw.choice((0.0, 0.3)))
        load.stop()
        await _end(run, process, children)
        await asyncio.sleep(0.2)  # what was sent is read
        for task in working:
            task.cancel()
    run.answered = len(load.owed)
    run.wrong += [f"not answered: {owed}" for owed in load.owed if not owed.answered]


async def _end(run: Run, process: Any, children: list[psutil.Process]) -> None:
    process.send_signal(run.first)
    first = last = time.monotonic()
    exits = asyncio.ensure_future(process.wait())
    if run.again is not None and not run.early:
        await asyncio.wait([exits], timeout=run.again)
        if not exits.done():
            # Not by the process object: that would reap it, unseen by the loop.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
            last = time.monotonic()
    # It is waited for in vain only as long as its delay can be measured.
    await asyncio.wait([exits], timeout=run.drain + 30)
    run.took, run.after_last = time.monotonic() - first, time.monotonic() - last
    if not exits.done():
        run.wrong.append("it does not end")
        process.kill()
    status = await exits
    # Before its handlers are there, a signal is what it is anywhere.
    if status != 0 and not (run.early and status in (-run.first, 1, 130)):
        run.wrong.append(f"exit status {status}")
    limit = LIMIT * _busyness()
    if run.took > run.drain + limit or (
        run.again is not None and run.after_last > limit
    ):
        run.wrong.append(f"took {run.took:.2f} s of {run.drain} + {limit:.1f}")
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 1)
    if alive:
        run.wrong.append(f"left running: {alive}")
    text = (await process.stderr.read()).decode()
    said = [line for line in text.splitlines() if not _EXPECTED.search(line)]
    if said and not run.early:
        run.wrong.append(f"said: {text[-900:]}")


class _Load:
    """The clients of one run.

    Attributes:
        owed: Answers of requests that were admitted when the signal was sent, and whose
            clients read them.
    """

    def __init__(self, port: int, draw: random.Random) -> None:
        self._port, self._draw = port, draw
        self._stopping = False
        self.manners = draw.choices(_MANNERS, k=draw.randrange(0, 20))
        self.owed: list[Answer] = []
        self._all: list[Answer] = []

    def stop(self) -> None:
        """From now on a refused connection is right, too."""
        self._stopping = True
        self.owed = [it for it in self._all if it.status]

    async def client(self, manner: str) -> None:
        """One client until it is answered, or cancelled."""
        with contextlib.suppress(OSError):
            await self._client(manner)

    async def _client(self, manner: str) -> None:
        port, draw = self._port, self._draw
        path = draw.choice(PATHS)
        if manner == "short":
            while not self._stopping:
                await self._ask(path, draw.randrange(1, 20), stream=draw.random() < 0.5)
        elif manner == "leaves":
            while not self._stopping:
                body = body_of(draw, path, 2000, stream=draw.random() < 0.5)
                await ask_and_leave(port, path, body, draw)
        elif manner == "reads-nothing":
            body = body_of(draw, path, 4000, stream=True)
            await ask_and_never_read(port, path, body)
        elif manner == "stalls":
            whole = request_of(path, body_of(draw, path, 9, stream=True))
            await begin_and_stop(port, whole[: -draw.randrange(1, 40)], Answer())
        elif manner == "half":
            await begin_and_stop(port, b"POST / HTTP/1.1\r\nhost: x\r\nx", Answer())
        elif manner == "idle":
            async with connected(port) as (reader, _):
                await reader.read()
        else:
            await self._ask(path, 4000, stream=manner == "streams")

    async def _ask(self, path: str, tokens: int, *, stream: bool) -> None:
        answer = Answer()
        self._all.append(answer)
        body = body_of(self._draw, path, tokens, stream=stream)
        await ask(self._port, path, body, answer)


async def shut_down_often(count: int, seed: int, at_once: int) -> list[Run]:
    """Try *count* shutdowns and return them all."""
    runs: list[Run] = []
    left = iter(range(seed, seed + count))

    async def work() -> None:
        for each in left:
            run = await shut_down(each)
            runs.append(run)
            for wrong in run.wrong:
                print(f"seed {each} ({run.name}): {wrong}", flush=True)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())
    return runs


def report(runs: list[Run]) -> None:
    """Print how they went, by kind."""
    for name in sorted({run.name for run in runs}):
        mine = [run for run in runs if run.name == name]
        late = [run.took - run.drain for run in mine]
        if name.startswith("hurried"):
            late = [run.after_last for run in mine]
        since = "last signal" if name.startswith("hurried") else "limit"
        print(
            f"{name}: {sum(not run.wrong for run in mine)} of {len(mine)}; exit after "
            f"the {since} at most {max(late):.2f} s, median {statistics.median(late):.2f}"
        )
    answered = sum(run.answered for run in runs)
    right = sum(not run.wrong for run in runs)
    print(f"{right} of {len(runs)} right, {answered} requests in flight were answered")


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    shared = set(shared_memory.names())
    runs = asyncio.run(shut_down_often(options.count, options.seed, options.at_once))
    report(runs)
    if left := set(shared_memory.names()) - shared:
        print(f"shared memory left: {left}")
    sys.exit(any(run.wrong for run in runs) or bool(left))


if __name__ == "__main__":
    main()
