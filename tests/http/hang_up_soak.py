"""Clients that hang up at random moments, for as long as you like.

python tests/http/hang_up_soak.py [--minutes 60] [--clients 32] [--seed 1]

A real server in a process of its own; each client asks any endpoint for anything, and
mostly leaves somewhere in between. Every ten seconds memory and descriptors of both
processes are looked at. In the end nothing may be left, and nothing have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

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
    read_answer,
    request_of,
)

_GETS = ("health", "ready", "metrics", "v1/models", "v1/models/sim", "nothing")
_MANNERS = {
    "leaves": 60,
    "reads": 20,
    "looks": 8,
    "stops": 4,
    "reads-nothing": 2,
    "lies": 4,
}
_EVERY = 10.0


class Soak:
    """One run: its server, its clients, and what was seen."""

    def __init__(self, port: int, pid: int, seed: int) -> None:
        self._port, self._draw = port, random.Random(seed)
        self._api = psutil.Process(pid)
        self._engine = self._api.children()[0]
        self.fates: Counter[str] = Counter()
        self.samples: list[dict[str, int]] = []

    async def client(self, until: float) -> None:
        """One client after the other, until it is time."""
        while time.monotonic() < until:
            manner = self._draw.choices([*_MANNERS], [*_MANNERS.values()])[0]
            self.fates[manner] += 1
            with contextlib.suppress(OSError):
                await self._client(manner)

    async def _client(self, manner: str) -> None:
        port, draw = self._port, self._draw
        path, stream = draw.choice(PATHS), draw.random() < 0.5
        tokens = 1 + int(draw.expovariate(1 / 100))
        body = body_of(draw, path, tokens, stream=stream)
        if manner == "leaves":
            await ask_and_leave(port, path, body, draw)
        elif manner == "reads":
            answer = Answer()
            async with asyncio.timeout(60):
                await ask(port, path, body, answer)
            assert answer.told, answer
        elif manner == "looks":
            async with connected(port) as (reader, writer):
                path = draw.choice(_GETS)
                writer.write(f"GET /{path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                await read_answer(reader, Answer())
        elif manner == "lies":
            junk = draw.randbytes(draw.randrange(200))
            await begin_and_stop(port, request_of(path, junk), Answer())
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0, 3)):
                    if manner == "stops":
                        whole = request_of(path, body)
                        cut = draw.randrange(len(whole))
                        await begin_and_stop(port, whole[:cut], Answer())
                    await ask_and_never_read(
                        port, path, body_of(draw, path, 4000, stream=True)
                    )

    async def look(self, until: float) -> None:
        """Take a sample now and then."""
        while time.monotonic() < until:
            self.samples.append(self.sample())
            await asyncio.sleep(_EVERY)

    def sample(self) -> dict[str, int]:
        """Memory and descriptors of both processes; of the arena, what was ever used.

        Its pages are shared, and stay: as many of them as payloads ever lay beside each
        other, at most those of the gate.
        """
        seen = {}
        for name, process in (("api", self._api), ("engine", self._engine)):
            memory = process.memory_info()
            seen[f"{name} own MiB"] = (memory.rss - memory.shared) >> 20
            seen[f"{name} shared MiB"] = memory.shared >> 20
            seen[f"{name} descriptors"] = process.num_fds()
        return seen

    def status(self) -> dict[str, Any]:
        """What the server shows of itself."""
        url = f"http://127.0.0.1:{self._port}/_lifecycle/status"
        with urllib.request.urlopen(url, timeout=10) as answer:
            shown: dict[str, Any] = json.load(answer)
        return shown

    async def left(self) -> dict[str, Any]:
        """What is left of it all, once it is quiet; empty if it is nothing."""
        for _ in range(300):
            status = await asyncio.to_thread(self.status)
            if not (found := _left(status)):
                break
            await asyncio.sleep(0.1)
        if self._engine.pid != status["engine"]["pid"]:
            found["engine"] = "is another one"
        return found


def _left(status: dict[str, Any]) -> dict[str, Any]:
    sessions, engine = status["sessions"], status["engine"]["status"] or {"live": -1}
    found = {
        name: sessions[name] for name in ("live", "closing", "payloads", "ends_failed")
    }
    found["unaccounted"] = sessions["opened"] - sum(sessions["outcomes"].values())
    found["engine sessions"] = engine["live"]
    for name in ("bodies", "in_flight", "payloads"):
        gate = status[name]
        found[f"{name} not given back"] = gate["admitted"] - gate["released"]
        for what in ("bytes_in_use", "slots_in_use", "waiting", "lost"):
            found[f"{name} {what}"] = gate[what]
    return {name: value for name, value in found.items() if value}


async def soak(seconds: float, clients: int, seed: int) -> tuple[Soak, dict[str, Any]]:
    """Run it; returns what was seen, and what was left."""
    argv = [sys.executable, "-m", "lifecycle_engine.cli", "serve", "--runner", "sim"]
    argv += ["--port", "0", "--payload-bytes", str(2**28), "--slots", "64"]
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, env={**ENV, "TMPDIR": folder}
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            run = Soak(int(line.split(":")[-1]), process.pid, seed)
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.look(until))
                for _ in range(clients):
                    tasks.create_task(run.client(until))
            left = await run.left()
            await asyncio.sleep(min(6, seconds / 10))  # idle connections are closed
            run.samples.append(run.sample())
            process.terminate()
            async with asyncio.timeout(20):
                if status := await process.wait():
                    left["exit status"] = status
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return run, left


def drift(samples: list[dict[str, int]]) -> dict[str, tuple[float, float]]:
    """Medians of the second fifth of a run, when it is warm, and of the last."""
    fifth = max(len(samples) // 5, 1)
    return {
        name: (
            statistics.median(each[name] for each in samples[fifth : 2 * fifth]),
            statistics.median(each[name] for each in samples[-fifth:]),
        )
        for name in samples[0]
    }


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    run, left = asyncio.run(soak(60 * options.minutes, options.clients, options.seed))
    print(f"{sum(run.fates.values()):,} clients: {dict(run.fates)}")
    for name, (early, late) in drift(run.samples[:-1]).items():
        print(f"{name}: {early:g} when warm, {late:g} at the end", end="")
        print(f", {run.samples[0][name]} before, {run.samples[-1][name]} after")
    print("nothing is left" if not left else f"left: {left}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
