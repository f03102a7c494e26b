"""Clients that hang up at random moments, for as long as you like.

python tests/http/hang_ups.py [--minutes 60] [--clients 32] [--seed 1] [--every 30]

A real server in a process of its own. Most clients leave, at each moment of a request
and in each way; the others read to the end, look at what operators look at, or send
what is no request. Now and then both processes are measured, and the books compared.

It fails if something is left, if the books ever disagree, if a good client has no
answer, if the request of a client that left was kept, or if a line through the memory of
the second half of the run rises by more than so much until its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
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
from leavers import MOMENTS, WAYS, Stays, leave, on_the_wire, question
from rough_clients import Answer, begin_and_stop, connected, read_answer, request_of

_GETS = ("health", "ready", "metrics", "v1/models", "v1/models/sim", "nothing")
_MANNERS = {"leaves": 72, "reads": 16, "looks": 8, "lies": 4}
# By how many MiB a line may rise in half a run: what a heap does anyway.
MAY_RISE = 8.0
# What the server admits of payloads at a time. They lie in the arena, whose pages both
# processes share.
_PAYLOAD_BYTES = 2**27


class Soak:
    """One run: its server, its clients, and what was seen.

    Args:
        port: Of the server.
        admin: Port of the operator's pages.
        pid: Of the server, whose first child is the engine.
        seed: Of what clients do.
        patience: Seconds in which a client has its answer, or has left.

    Attributes:
        fates: How often clients did what.
        samples: What was measured, and when.
        wrong: What must not have been.
    """

    def __init__(
        self,
        port: int,
        pid: int,
        seed: int,
        *,
        admin: int = 0,
        patience: float = 60,
    ) -> None:
        self._port, self._draw = port, random.Random(seed)
        self._admin = admin
        self._patience = patience
        self._api = psutil.Process(pid)
        self._engine = self._api.children()[0]
        self.fates: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.wrong: Counter[str] = Counter()

    async def client(self, until: float) -> None:
        """One client after the other, until it is time."""
        while time.monotonic() < until:
            manner = self._draw.choices([*_MANNERS], [*_MANNERS.values()])[0]
            moment, way = self._draw.choice(MOMENTS), self._draw.choice(WAYS)
            name = f"{moment}, {way}" if manner == "leaves" else manner
            self.fates[name] += 1
            try:
                async with asyncio.timeout(self._patience):
                    await self._client(manner, moment, way)
            except Stays:
                self.wrong[f"kept: {name}"] += 1
            except TimeoutError:
                self.wrong[f"not answered: {name}"] += 1
            except OSError:
                # Whoever leaves may be cut off first; the others are to be heard.
                seen = self.fates if manner == "leaves" else self.wrong
                seen[f"cut off by the server: {manner}"] += 1

    async def _client(self, manner: str, moment: str, way: str) -> None:
        port, draw, answer = self._port, self._draw, Answer()
        if manner == "leaves":
            await leave(port, moment, way, draw)
        elif manner == "lies":
            junk = draw.randbytes(draw.randrange(200))
            await begin_and_stop(port, request_of("/v1/messages", junk), answer)
        else:
            sent = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % draw.choice(_GETS).encode()
            if manner == "reads":
                # Short, so that a minute is no matter of a busy machine.
                sent = b"".join(on_the_wire(draw, *question(draw, longest=30)))
            async with connected(port) as (reader, writer):
                writer.write(sent)
                await read_answer(reader, answer)
            good = answer.status == 200 and b'"error":{' not in answer.body
            if not answer.whole or (manner == "reads" and not good):
                told = answer.body[-200:] if answer.whole else "cut off"
                self.wrong[f"{manner}: {answer.status}, {told!r}"] += 1

    async def look(self, until: float, every: float) -> None:
        """Take a sample now and then."""
        began = time.monotonic()
        while (now := time.monotonic()) < until:
            self.samples.append({"s": now - began, **self.sample()})
            if off := await asyncio.to_thread(self.books):
                self.wrong[f"books: {off}"] += 1
            await asyncio.sleep(every)

    def sample(self) -> dict[str, float]:
        """Memory, threads and descriptors of both processes.

        Of PSS, the arena is a part: as many pages as payloads ever lay beside each other.
        """
        seen: dict[str, float] = {}
        for name, process in (("api", self._api), ("engine", self._engine)):
            memory = process.memory_full_info()
            seen[f"{name} RSS MiB"] = memory.rss / 2**20
            seen[f"{name} PSS MiB"] = memory.pss / 2**20
            seen[f"{name} own MiB"] = memory.uss / 2**20
            seen[f"{name} descriptors"] = process.num_fds()
            seen[f"{name} threads"] = process.num_threads()
        return seen

    def _get(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self._admin}/{path}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return bytes(answer.read())

    def books(self) -> dict[str, float]:
        """By how much started is not ended and live, of one scrape; empty if it is."""
        text = self._get("metrics").decode()
        sums: Counter[str] = Counter()
        for name, value in re.findall(r"(?m)^(\w+)(?:\{.*\})? (\S+)$", text):
            sums[name] += float(value)
        off = {
            what: sums[f"lifecycle_{what}_{began}_total"]
            - sums[f"lifecycle_{what}_ended_total"]
            - sums[f"lifecycle_{what}_live"]
            for what, began in (("requests", "started"), ("sessions", "opened"))
        }
        return {what: value for what, value in off.items() if value}

    async def left(self) -> dict[str, Any]:
        """What is left of it all, once it is quiet; empty if it is nothing."""
        for _ in range(300):
            status = json.loads(await asyncio.to_thread(self._get, "_lifecycle/status"))
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
    gates = {name: status[name] for name in ("in_flight", "payloads")}
    for name, gate in (gates | status["bodies"]).items():
        found[f"{name} not given back"] = gate["admitted"] - gate["released"]
        for what in ("bytes_in_use", "slots_in_use", "waiting", "lost"):
            found[f"{name} {what}"] = gate[what]
    return {name: value for name, value in found.items() if value}


def rise(samples: list[dict[str, float]], name: str) -> float:
    """How much a line through the second half of *samples* rises from its begin to its end."""
    half = samples[len(samples) // 2 :]
    times = [each["s"] for each in half]
    middle = sum(times) / len(times)
    spread = sum((time - middle) ** 2 for time in times)
    slope = sum((each["s"] - middle) * each[name] for each in half) / (spread or 1)
    return slope * (times[-1] - times[0])


def drifts(samples: list[dict[str, float]]) -> dict[str, float]:
    """Memory that rose by more than it may, and descriptors that are there at the end.

    During the run they are as many as there are clients. Own memory may not rise to the
    end and stay: a heap that still grows to what its clients need gives that back when
    they are gone. What the processes share is the arena: a page counts from its first
    payload on, so it rises for as long as ever more payloads lie beside each other, and
    no further.
    """
    during = samples[:-1]
    rises = {
        name: min(rise(during, name), samples[-1][name] - samples[0][name])
        for name in samples[0]
        if name.endswith("own MiB")
    }
    for name in (each for each in samples[0] if each.endswith("RSS MiB")):
        own = name.replace("RSS", "own")
        shared = [each[name] - each[own] for each in samples]
        over = max(shared) - shared[0] - _PAYLOAD_BYTES / 2**20
        rises[name.replace("RSS", "shared")] = over
    kept = {
        name: samples[-1][name] - samples[0][name]
        for name in samples[0]
        if name.endswith("descriptors")
    }
    found = {name: by for name, by in rises.items() if by > MAY_RISE}
    return found | {name: by for name, by in kept.items() if by > 0}


async def soak(
    seconds: float, clients: int, seed: int, every: float
) -> tuple[Soak, dict[str, Any]]:
    """Run it; returns what was seen, and what was left."""
    argv = [sys.executable, "-m", "lifecycle_engine.cli", "serve", "--runner", "sim"]
    argv += ["--port", "0", "--bytes", str(_PAYLOAD_BYTES * 16 // 12), "--slots", "64"]
    argv += ["--model", "sim", "--max-batch", "32"]
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, env={**ENV, "TMPDIR": folder}
        )
        try:
            assert process.stdout is not None
            port, admin = [
                int((await process.stdout.readline()).split(b":")[-1]) for _ in range(2)
            ]
            run = Soak(port, process.pid, seed, admin=admin)
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.look(until, every))
                for _ in range(clients):
                    tasks.create_task(run.client(until))
            left = await run.left()
            await asyncio.sleep(min(6, seconds / 10))  # idle connections are closed
            run.samples.append({"s": seconds, **run.sample()})
            process.terminate()
            async with asyncio.timeout(120):
                if status := await process.wait():
                    left["exit status"] = status
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        left |= {f"file {each.name}": 1 for each in Path(folder).iterdir()}
    return run, left


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=30)
    parser.add_argument("--samples", type=Path, help="write what was measured there")
    options = parser.parse_args()
    run, left = asyncio.run(
        soak(60 * options.minutes, options.clients, options.seed, options.every)
    )
    if options.samples:
        options.samples.write_text(json.dumps(run.samples))
    print(f"{sum(run.fates.values()):,} clients: {dict(run.fates.most_common())}")
    during = run.samples[:-1]
    for name in [name for name in during[0] if name != "s"]:
        middle, last = during[len(during) // 2][name], during[-1][name]
        first, after = during[0][name], run.samples[-1][name]
        print(f"{name}: {first:.1f}, {middle:.1f} in the middle, {last:.1f}", end="")
        print(
            f", {after:.1f} after; risen by {rise(during, name):+.2f} since the middle"
        )
    wrong = {**run.wrong, **left, **drifts(run.samples)}
    print("nothing is left, nothing drifts" if not wrong else f"WRONG: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: no verdict")
