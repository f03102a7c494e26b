"""The engine link beside no transport at all, in one run.

Each cell is a process of its own, so that none inherits another's warm caches; cells
of one round follow each other, and ratios are made within a round. While it measures,
every reader checks that its tokens are all there, in order, and end once.

Run it: python benchmarks/link.py [--rounds 3] [--seconds 4] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
from link_load import Readings, Transport
from link_ways import Sessions, way

Figures = dict[str, float]
WARM = 1.0
BACKENDS = {"link-trio": "trio"}


async def paced(it: Transport, *, streams: int, rate: int, seconds: float) -> Figures:
    """Stream at a fixed rate; CPU and latency of the middle part."""
    readings = Readings(measuring=False)
    count = int(rate * (WARM + seconds + 0.5))
    figures: Figures = {}

    async def one(key: str) -> None:
        source = await it.start(key, {"count": count, "rate": rate})
        await readings.read(source, count)
        await it.end(key)

    async with anyio.create_task_group() as tasks:
        for number in range(streams):
            tasks.start_soon(one, f"s#{number}")
        await anyio.sleep(WARM)
        api, engine = time.process_time(), await it.cpu()
        tokens, items = readings.tokens, readings.items
        readings.measuring = True
        await anyio.sleep(seconds)
        readings.measuring = False
        api, engine = time.process_time() - api, await it.cpu() - engine
        tokens, items = readings.tokens - tokens, readings.items - items
        figures["CPU ms / 1000 tokens"] = (api + engine) * 1e6 / tokens
        figures["  of it, engine"] = engine * 1e6 / tokens
        figures["tokens / item"] = tokens / items
    cuts = statistics.quantiles(readings.ages, n=100)
    assert readings.streams == streams
    return figures | {
        "latency p50 ms": cuts[49] * 1e3,
        "latency p99 ms": cuts[98] * 1e3,
    }


async def flood(it: Transport, *, streams: int, seconds: float) -> Figures:
    """Stream as fast as the engine can."""
    readings = Readings(measuring=False)
    count = int(4000 * seconds)

    async def one(key: str) -> None:
        source = await it.start(key, {"count": count, "rate": 0})
        await readings.read(source, count)
        await it.end(key)

    begin = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(streams):
            tasks.start_soon(one, f"s#{number}")
    taken = time.perf_counter() - begin
    assert readings.streams == streams
    return {
        "items/s": readings.items / taken,
        "tokens/s": readings.tokens / taken,
        "tokens / item": readings.tokens / readings.items,
    }


async def starts(it: Transport, *, at_once: int, seconds: float) -> Figures:
    """Start, read to the end and end streams without items, many at a time."""
    done = 0
    request = {"count": 0, "rate": 0}
    engine, api = await it.cpu(), time.process_time()
    until = time.perf_counter() + seconds

    async def one(worker: int) -> None:
        nonlocal done
        number = 0
        while time.perf_counter() < until:
            number += 1
            key = f"w{worker}#{number}"
            if isinstance(it, Sessions):
                await it.whole(key, request)
            else:
                async for _ in await it.start(key, request):
                    raise AssertionError("an unexpected item")
                await it.end(key)
            done += 1

    async with anyio.create_task_group() as tasks:
        for worker in range(at_once):
            tasks.start_soon(one, worker)
    used = time.process_time() - api + await it.cpu() - engine
    return {"starts/s": done / seconds, "CPU us / start": used * 1e6 / done}


async def distinct(it: Transport) -> Figures:
    """One stream of 256 objects that nothing may merge, read slowly."""
    request = {"count": 256, "rate": 0, "distinct": True, "merge": "never"}
    source = await it.start("s#1", request)
    got = []
    async for item in source:
        got += item if isinstance(item, list) else [item]
        await anyio.lowlevel.checkpoint()
    await it.end("s#1")
    in_order = got == [{"number": number} for number in range(256)]
    return {"objects": float(len(got)), "in order": float(in_order)}


async def idle(it: Transport, *, seconds: float) -> Figures:
    """Do nothing."""
    await anyio.sleep(0.5)
    begin, api = await it.cpu(), time.process_time()
    await anyio.sleep(seconds)
    api = time.process_time() - api
    return {
        "API % of a core": 100 * api / seconds,
        "engine % of a core": 100 * (await it.cpu() - begin) / seconds,
    }


Cell = Callable[[Transport, float], Awaitable[Figures]]
CELLS: dict[str, tuple[Cell, str]] = {
    "128 x 50/s": (
        lambda it, s: paced(it, streams=128, rate=50, seconds=s),
        "link generators link-ipc link-trio floor",
    ),
    "512 x 20/s": (
        lambda it, s: paced(it, streams=512, rate=20, seconds=s),
        "link link-ipc floor",
    ),
    "128 x 160/s": (
        lambda it, s: paced(it, streams=128, rate=160, seconds=s),
        "link link-ipc floor",
    ),
    "flood, 128": (
        lambda it, s: flood(it, streams=128, seconds=s),
        "link link-ipc floor",
    ),
    "starts, 64": (
        lambda it, s: starts(it, at_once=64, seconds=s),
        "link link-ipc session floor session-floor",
    ),
    "starts, 1": (
        lambda it, s: starts(it, at_once=1, seconds=s),
        "link link-ipc session floor session-floor",
    ),
    "256 objects": (lambda it, _: distinct(it), "link"),
    "idle": (lambda it, s: idle(it, seconds=s), "link"),
}


def run_cell(cell: str, name: str, seconds: float) -> None:
    """Measure one cell in this process and print its figures."""

    async def main() -> Figures:
        async with way(name) as transport:
            # What was made so far is not looked through again while it measures.
            gc.collect()
            gc.freeze()
            return await CELLS[cell][0](transport, seconds)

    print(json.dumps(anyio.run(main, backend=BACKENDS.get(name, "asyncio"))))


def measure(cell: str, name: str, seconds: float) -> Figures:
    """Measure one cell in a fresh process."""
    argv = [sys.executable, __file__, "--cell", cell, name, "--seconds", str(seconds)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=240, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def report(cell: str, rounds: dict[str, list[Figures]]) -> None:
    """Print a line for each figure: the median of each way, its spread, the ratios."""
    print(f"\n{cell}")
    ours = rounds["link"]
    for figure in ours[0]:
        for name, seen in rounds.items():
            values = [it[figure] for it in seen]
            line = f"  {figure:22} {name:10} {statistics.median(values):12.3f}"
            line += f"  [{min(values):.3f} .. {max(values):.3f}]"
            if name != "link":
                ratios = [
                    it[figure] / mine[figure]
                    for it, mine in zip(seen, ours, strict=True)
                    if mine[figure]
                ]
                if ratios:
                    line += f"  {statistics.median(ratios):8.2f} x link"
            print(line)


def main() -> None:
    """Measure every cell, or one of them for the process that does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", nargs=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", nargs="*", default=list(CELLS), choices=list(CELLS))
    options = parser.parse_args()
    if options.cell:
        cell, name = options.cell
        run_cell(cell, name, options.seconds)
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for cell in options.only:
        rounds: dict[str, list[Figures]] = {}
        for _ in range(options.rounds):
            for name in CELLS[cell][1].split():
                seen = measure(cell, name, options.seconds)
                rounds.setdefault(name, []).append(seen)
        report(cell, rounds)


if __name__ == "__main__":
    main()
