"""Engines on Ray compared with Ray's own mechanisms, in one run.

128 streams at 50 tokens a second: `RayEngine`, a streaming generator for each stream,
and a remote call for each chunk. All CPU is counted: of this process, of the actor and
of Ray's own processes. Then 32 MiB handed over, beside a plain call with the tensor.

Run it: python benchmarks/on_ray.py [--rounds 3] [--seconds 4] [--streams 128]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import numpy as np
import psutil
import ray
from link_load import Readings, Steps, token

from lifecycle import Payload
from lifecycle_ray import Placement, RayEngine

RATE = 50
WARM = 2.0
MIB = 2**20
_M_MMAP_THRESHOLD = -3
Figures = dict[str, float]


class Plain:
    """An actor as one writes it: a step loop, and a queue for each stream."""

    def __init__(self) -> None:
        self._queues: dict[str, list[int]] = {}
        self._at: dict[str, int] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._loop: asyncio.Task[None] | None = None

    def _begin(self, key: str) -> None:
        self._queues[key], self._at[key] = [], 0
        self._news[key] = asyncio.Event()
        if self._loop is None:
            self._loop = asyncio.create_task(self._steps())

    async def _steps(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + 1 / RATE, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for key, queue in self._queues.items():
                queue.append(token(self._at[key]))
                self._at[key] += 1
                self._news[key].set()

    async def _next(self, key: str) -> list[int]:
        # All that there is: else a reader that fell behind once stays behind.
        await self._news[key].wait()
        self._news[key].clear()
        tokens, self._queues[key] = self._queues[key], []
        return tokens

    async def stream(self, key: str, count: int) -> AsyncIterator[list[int]]:
        """Yield the tokens of a stream as they come."""
        self._begin(key)
        sent = 0
        while sent < count:
            tokens = (await self._next(key))[: count - sent]
            sent += len(tokens)
            yield tokens
        await self.end(key)

    async def begin(self, key: str) -> None:
        """Start a stream whose tokens are asked for."""
        self._begin(key)

    async def next(self, key: str) -> list[int]:
        """Return the tokens since the last call."""
        return await self._next(key)

    async def end(self, key: str) -> None:
        """Forget a stream."""
        del self._queues[key], self._at[key], self._news[key]

    async def take(self, tensor: Any) -> int:
        """Receive a tensor and drop it."""
        return int(tensor.nbytes)


class Ours:
    """`RayEngine`."""

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine

    async def read(self, key: str, count: int, readings: Readings) -> None:
        """Read one stream."""
        source = await self.engine.start(key, {"count": count, "rate": RATE})
        await readings.read(source, count)
        await self.engine.end(key)


class Generator:
    """A streaming generator for each stream."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def read(self, key: str, count: int, readings: Readings) -> None:
        """Read one stream."""
        method = self.actor.stream.options(num_returns="streaming")

        async def items() -> AsyncIterator[list[int]]:
            async for reference in method.remote(key, count):
                yield await reference

        await readings.read(items(), count)


class Calls(Generator):
    """A remote call for each chunk."""

    async def read(self, key: str, count: int, readings: Readings) -> None:
        """Read one stream."""
        await self.actor.begin.remote(key)

        async def items() -> AsyncIterator[list[int]]:
            left = count
            while left:
                tokens = (await self.actor.next.remote(key))[:left]
                left -= len(tokens)
                yield tokens

        await readings.read(items(), count)
        await self.actor.end.remote(key)


@asynccontextmanager
async def way(name: str) -> AsyncIterator[Any]:
    """Make the actor of one way."""
    if name == "RayEngine":
        async with RayEngine(Steps, placement=Placement(num_cpus=0.5)) as engine:
            await engine.wait_ready()
            yield Ours(engine)
        return
    remote: Any = ray.remote
    actor = remote(num_cpus=0.5)(Plain).remote()
    await actor.take.remote(np.ones(1))
    yield {"generator": Generator, "call a chunk": Calls}[name](actor)
    ray.kill(actor)


def cpu() -> float:
    """Return the CPU seconds of this process and all below it."""
    used = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            used += times.user + times.system
    return used


async def paced(name: str, *, streams: int, seconds: float) -> Figures:
    """Stream at a fixed rate; CPU and latency of the middle part."""
    readings = Readings(measuring=False)
    count = int(RATE * (WARM + seconds + 0.5))
    async with way(name) as it, anyio.create_task_group() as tasks:
        for number in range(streams):
            tasks.start_soon(it.read, f"s#{number}", count, readings)
        await anyio.sleep(WARM)
        used, tokens, items = cpu(), readings.tokens, readings.items
        readings.measuring = True
        await anyio.sleep(seconds)
        readings.measuring = False
        used, tokens = cpu() - used, readings.tokens - tokens
        items = readings.items - items
    assert readings.streams == streams
    cuts = statistics.quantiles(readings.ages, n=100)
    return {
        "CPU ms / 1000 tokens": used * 1e6 / tokens,
        "latency p50 ms": cuts[49] * 1e3,
        "latency p99 ms": cuts[98] * 1e3,
        "tokens / item": tokens / items,
    }


class Peak:
    """The most anonymous memory that this process had, looked at all the time."""

    def __init__(self) -> None:
        self.most = 0
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.before = _anonymous()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        self.after = _anonymous()

    def _run(self) -> None:
        while not self._over:
            self.most = max(self.most, _anonymous())
            time.sleep(0.0005)


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


async def hand_over(name: str, *, times: int = 8) -> Figures:
    """Hand 32 MiB over, again and again; the median, and the memory of the caller."""
    if name == "RayEngine":
        async with way(name) as it:

            async def ours(number: int, make: Callable[[], Any]) -> float:
                box = Payload({"x": make()})
                begin = time.perf_counter()
                key = f"h#{number}"
                await it.engine.start(key, {"count": 0, "rate": 0}, box)
                taken = time.perf_counter() - begin
                await it.engine.end(key)
                return taken

            return await _hand_over(ours, times, np.ones)
    import torch

    async with way("call a chunk") as it:

        async def plain(_: int, make: Callable[[], Any]) -> float:
            tensor = make()
            begin = time.perf_counter()
            await it.actor.take.remote(tensor)
            return time.perf_counter() - begin

        return await _hand_over(plain, times, torch.ones)


async def _hand_over(one: Any, times: int, ones: Any) -> Figures:
    taken, extra, kept = [], [], []
    for number in range(times):
        tensor = [ones(8 * MIB // 2)]
        if tensor[0].nbytes != 32 * MIB:
            tensor = [ones(8 * MIB)]
        with Peak() as peak:
            taken.append(await one(number, tensor.pop))
        extra.append(peak.most - peak.before)
        # The tensor itself was there before, and is gone after.
        kept.append(peak.after - peak.before + 32 * MIB)
    return {
        "hand-off of 32 MiB, ms": statistics.median(taken[2:]) * 1e3,
        "extra peak, MiB": max(0.0, statistics.median(extra[2:]) / MIB),
        "kept after, MiB": max(0.0, statistics.median(kept[2:]) / MIB),
    }


async def run(rounds: int, seconds: float, streams: int) -> None:
    """Measure everything and print it."""
    ways = ["RayEngine", "generator", "call a chunk"]
    print(f"{streams} streams x {RATE} tokens/s, {rounds} rounds")
    report(
        ways,
        [
            {it: await paced(it, streams=streams, seconds=seconds) for it in ways}
            for _ in range(rounds)
        ],
    )
    plain = ["RayEngine", "actor.method.remote(tensor)"]
    report(plain, [{it: await hand_over(it) for it in plain} for _ in range(rounds)])


def report(ways: list[str], results: list[dict[str, Figures]]) -> None:
    """Print each figure; ratios are made within a round."""
    for figure in results[0][ways[0]]:
        for name in ways:
            values = [it[name][figure] for it in results]
            line = f"  {figure:<24} {name:<28} {statistics.median(values):9.2f}"
            base = [it[ways[0]][figure] for it in results]
            if name != ways[0] and all(it > 0.5 for it in base):
                ratio = statistics.median(map(float.__truediv__, values, base))
                line += f"   {ratio:6.2f} x {ways[0]}"
            print(line)


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--streams", type=int, default=128)
    options = parser.parse_args()
    # Otherwise the allocator learns, from copies of the plain call, to retain freed
    # memory of that size, which would be counted as held.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=512 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        anyio.run(run, options.rounds, options.seconds, options.streams)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
