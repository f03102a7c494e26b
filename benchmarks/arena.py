"""Cost of handing a large tensor to the engine, compared with a copy in memory.

In one run, alternating: a plain copy into warm memory; a hand-off of one byte, which is
the messages alone; of a tensor written to the arena in place, one copied into it by the
hand-off, and one sent without an arena. Then the latency of 16 streams of the same
engine meanwhile, compared with a copy in a thread without a hand-off, and the client's
peak memory.

Run it: python benchmarks/arena.py [--rounds 15] [--mib 32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from lifecycle import Payload
from lifecycle_zmq import EngineServer, Finish, Output, ZmqEngine

MIB = 2**20
STREAMS, RATE = 16, 50
BESIDE_SECONDS = 5
HandOff = Callable[[], Awaitable[float]]


class Stepper:
    """Emits the time at a fixed rate for each stream, and drops tensors at END."""

    def __init__(self) -> None:
        self._tensors: dict[str, dict[str, memoryview]] = {}
        self._ticking: dict[str, Any] = {}
        self._next = time.monotonic()

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> None:
        """Accept a stream of ticks, or tensors to hold; read their two ends."""
        if not tensors:
            self._ticking[key] = None
            return
        flat = tensors["x"].cast("B")
        assert flat[0] == flat[-1] == request["byte"]
        self._tensors[key] = tensors

    def cancel(self, key: str) -> None:
        """Let the next step finish the stream."""
        self._ticking[key] = Finish("cancelled")

    def end(self, key: str) -> None:
        """Drop the stream and its tensors."""
        self._ticking.pop(key, None)
        self._tensors.pop(key, None)

    def step(self) -> list[Output]:
        """Wait at most a millisecond for the next tick, so that requests are read."""
        now = time.monotonic()
        if now < self._next:
            time.sleep(min(0.0005, self._next - now))
            return []
        self._next = max(self._next + 1 / RATE, now)
        stamp = [time.monotonic()]
        return [Output(key, stamp, finish) for key, finish in self._ticking.items()]

    @property
    def busy(self) -> bool:
        """Whether anything ticks."""
        return bool(self._ticking)

    def status(self) -> dict[str, Any]:
        """Return how many hold tensors."""
        return {"held": len(self._tensors)}


class Ways:
    """The ways to hand over, each returning the seconds until the engine holds it."""

    def __init__(self, arena: ZmqEngine, frames: ZmqEngine, nbytes: int) -> None:
        self.engines = {"arena": arena, "frames": frames}
        self._source = np.full(nbytes, 7, np.uint8)
        self._used = np.ones(nbytes, np.uint8)
        self._number = 0
        self.all: dict[str, HandOff] = {
            "memcpy": self.memcpy,
            "in thread": self.in_thread,
            "one byte": self.one_byte,
            "in place": self.in_place,
            "copied in": self.copied_in,
            "frame": self.frame,
        }

    async def memcpy(self) -> float:
        """Copy into used memory."""
        begin = time.perf_counter()
        np.copyto(self._used, self._source)
        return time.perf_counter() - begin

    async def in_thread(self) -> float:
        """Copy as `in_place` does, without a hand-off."""
        begin = time.perf_counter()
        await anyio.to_thread.run_sync(lambda: np.copyto(self._used, self._source))
        return time.perf_counter() - begin

    async def one_byte(self) -> float:
        """Hand over one byte: the cost of the messages."""
        return await self._hand_over("arena", Payload({"x": np.full(1, 7, np.uint8)}))

    async def in_place(self) -> float:
        """Hand over a tensor that preprocessing has written to the arena."""
        begin = time.perf_counter()
        held = [self.engines["arena"].arena.empty(self._source.shape, np.uint8)]
        made = time.perf_counter() - begin
        # Stands in for preprocessing, which belongs in a thread; not counted. A thread
        # drops its arguments only when it runs again, so the list is emptied.
        await anyio.to_thread.run_sync(lambda: np.copyto(held[0], self._source))
        box = Payload({"x": held.pop()})
        return made + await self._hand_over("arena", box)

    async def copied_in(self) -> float:
        """Hand over a tensor that is copied into the arena, in a thread."""
        return await self._hand_over("arena", Payload({"x": self._source}))

    async def frame(self) -> float:
        """Hand over a tensor without an arena, in sealed memory."""
        return await self._hand_over("frames", Payload({"x": self._source}))

    async def _hand_over(self, name: str, box: Payload[Any]) -> float:
        engine = self.engines[name]
        self._number += 1
        key = f"t#{self._number}"
        begin = time.perf_counter()
        await engine.start(key, {"byte": 7}, box)
        taken = time.perf_counter() - begin
        await engine.end(key)
        return taken


async def hand_offs(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Time every way once per round, alternating."""
    times: dict[str, list[float]] = {name: [] for name in ways.all}
    for number in range(rounds + 3):
        for name, way in ways.all.items():
            taken = await way()
            if number >= 3:  # the first ones meet pages that were never used
                times[name].append(taken)
    return times


async def peaks(ways: Ways, mib: int) -> dict[str, float]:
    """Return the growth of the client's peak memory, in payloads."""
    found = {}
    for name, way in ways.all.items():
        await way()
        _forget_peak()
        before = _memory("VmRSS")
        for _ in range(5):
            await way()
        found[name] = max(0.0, _memory("VmHWM") - before) / mib
    return found


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


async def beside(ways: Ways, name: str, engine: str) -> tuple[float, float]:
    """Return p99 of the latency of 16 streams, idle and during hand-offs, seconds."""
    ages: dict[bool, list[float]] = {False: [], True: []}
    busy = False

    async def read(key: str) -> None:
        async for stamp in await ways.engines[engine].start(key, {}):
            ages[busy].append(time.monotonic() - stamp)

    keys = [f"s#{number}" for number in range(STREAMS)]
    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(read, key)
        await anyio.sleep(0.5)
        ages[False].clear()
        for number in range(2 * BESIDE_SECONDS):
            busy = number % 2 == 1
            until = time.monotonic() + 1
            while busy and time.monotonic() < until:
                await ways.all[name]()
                await anyio.sleep(0.02)
            await anyio.sleep(max(0.0, until - time.monotonic()))
        for key in keys:
            await ways.engines[engine].end(key)
    return _p99(ages[False]), _p99(ages[True])


def _p99(ages: list[float]) -> float:
    return statistics.quantiles(ages, n=100)[98]


@asynccontextmanager
async def engines(nbytes: int) -> AsyncIterator[Ways]:
    """Start one engine with an arena for three payloads, and one without."""
    argv = [sys.executable, __file__, "--serve"]
    async with (
        ZmqEngine(argv, arena_bytes=3 * nbytes) as arena,
        ZmqEngine(argv) as frames,
    ):
        await arena.wait_ready()
        await frames.wait_ready()
        yield Ways(arena, frames, nbytes)


async def measure(rounds: int, mib: int) -> dict[str, Any]:
    """Run everything, print it, and return it."""
    async with engines(mib * MIB) as ways:
        times = await hand_offs(ways, rounds)
        grown = await peaks(ways, mib)
        noticed = {
            "in thread": await beside(ways, "in thread", "arena"),
            "in place": await beside(ways, "in place", "arena"),
            "copied in": await beside(ways, "copied in", "arena"),
            "frame": await beside(ways, "frame", "frames"),
        }
    print(f"{mib} MiB until the engine holds it, {rounds} rounds, taking turns")
    report: dict[str, Any] = {"mib": mib, "rounds": rounds}
    for name, taken in times.items():
        ratios = [one / base for one, base in zip(taken, times["memcpy"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        report[name] = {
            "ms": statistics.median(taken) * 1e3,
            "x memcpy": [low, middle, high],
            "peak, payloads": grown[name],
        }
        print(
            f"  {name:<10} {statistics.median(taken) * 1e3:7.2f} ms  {middle:6.2f} x "
            f"memcpy ({low:.2f} to {high:.2f})  peak + {grown[name]:.2f} payloads"
        )
    print(f"p99 latency of {STREAMS} streams of the same engine, ms: idle, beside")
    for name, (idle, busy) in noticed.items():
        report[name]["p99 ms idle, beside"] = [idle * 1e3, busy * 1e3]
        print(f"  {name:<10} {idle * 1e3:.2f}, {busy * 1e3:.2f}: {busy / idle:.1f} x")
    return report


def main() -> None:
    """Measure, or serve as the engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--endpoint")
    parser.add_argument("--incarnation", type=int)
    options = parser.parse_args()
    if options.serve:
        EngineServer(options.endpoint, Stepper(), incarnation=options.incarnation).run()
        return
    report = anyio.run(measure, options.rounds, options.mib)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
