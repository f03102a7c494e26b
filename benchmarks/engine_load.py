"""Cost of the link per step, and latency of first tokens and cancels.

Run as a program it is an engine process whose model takes ten milliseconds a step
and no processor time at all: whatever its thread uses, scheduler and link have used.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from engine_rig import Free

from lifecycle_zmq import EngineServer, ZmqEngine

STEP = 10e-3
LANES = 32
Row = tuple[str, str]


class Paced(Free):
    """A model whose step takes its time asleep."""

    def decode(self, slots: Sequence[int]) -> list[Any]:
        """Sleep for a step."""
        time.sleep(STEP)
        return super().decode(slots)


def linked(options: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    """Processor time of a step of 32 requests over the link, and steps of a cancel."""
    figures = anyio.run(_linked, options.steps)
    loop, rest = figures["loop_seconds"], figures["socket_seconds"]
    cancels = f"{figures['cancel_steps']:.0f}, {figures['cancel_steps_at_most']:.0f}"
    return figures, [
        (
            f"scheduler and link, a step of {LANES} requests",
            f"{loop * 1e6:.0f} us, {loop / STEP:.1%} of a 10 ms step",
        ),
        ("of the same step, beside it in the socket's threads", f"{rest * 1e6:.0f} us"),
        ("cancel over the link, steps until it is confirmed, median and most", cancels),
    ]


async def _linked(steps: int) -> dict[str, float]:
    command = [sys.executable, __file__]
    async with ZmqEngine(command) as engine, anyio.create_task_group() as tasks:
        await engine.wait_ready()
        seen = [0]
        for number in range(LANES - 1):
            tasks.start_soon(_read, engine, f"s{number}", seen if not number else [0])
        while (await engine.status())["backend"]["running"] < LANES - 1:  # noqa: ASYNC110
            await anyio.sleep(STEP)
        cancels = [await _cancel(engine, seen) for _ in range(20)]
        tasks.start_soon(_read, engine, "last", [0])
        begin = await _spent(engine)
        while (now := await _spent(engine))["steps"] - begin["steps"] < steps:  # noqa: ASYNC110
            # Rarely, so that being asked costs the engine nothing to speak of.
            await anyio.sleep(1.0)
        tasks.cancel_scope.cancel()
    taken = {name: now[name] - begin[name] for name in now}
    loop = taken["loop"] / taken["steps"]
    return {
        "loop_seconds": loop,
        "of_10_ms": loop / STEP,
        "socket_seconds": (taken["all"] - taken["loop"]) / taken["steps"],
        "steps": taken["steps"],
        "cancel_steps": statistics.median(cancels),
        "cancel_steps_at_most": max(cancels),
    }


async def _read(engine: ZmqEngine, key: str, seen: list[int]) -> None:
    stream = await engine.start(key, {"input_ids": [1], "max_tokens": 8000})
    async for item in stream:
        seen[0] += len(item)


async def _cancel(engine: ZmqEngine, seen: list[int]) -> int:
    """Return how many steps another stream took while this one was being cancelled."""
    stream = await engine.start("short", {"input_ids": [1], "max_tokens": 8000})
    await anext(stream)
    before = seen[0]
    engine.cancel("short")
    async for _ in stream:
        pass
    after = seen[0]
    await engine.end("short")
    return after - before


async def _spent(engine: ZmqEngine) -> dict[str, float]:
    """Steps of the engine, and seconds of a processor that its threads have used."""
    steps = (await engine.status())["backend"]["steps"]
    tasks = Path(f"/proc/{engine.pid}/task")
    used = {
        task.name: int((task / "schedstat").read_text("ascii").split()[0]) / 1e9
        for task in tasks.iterdir()  # noqa: ASYNC240  # it is no disk
    }
    return {"steps": steps, "loop": used[str(engine.pid)], "all": sum(used.values())}


def first_tokens(
    options: argparse.Namespace,
) -> tuple[dict[str, dict[str, list[float]]], list[Row]]:
    """Time to the first token by load, in the scheduler's own time.

    The simulated model runs on a virtual clock, so that the figures are the scheduler's
    alone, and the same on every machine. One prompt of
    twenty has 4,096 tokens, the others up to 256; each is answered with 64 tokens.
    """
    loads = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9]
    figures: dict[str, dict[str, list[float]]] = {"load": {"share": loads}}
    count = options.arrivals
    most = Arrivals(512, count, rate=math.inf).most
    for label, chunk in (("chunks of 512", 512), ("whole prompts", 8192)):
        runs = [Arrivals(chunk, count, rate=load * most) for load in loads]
        figures[label] = {
            "first_median": [statistics.median(each.first) for each in runs],
            "first_p99": [_percentile(each.first, 99) for each in runs],
            "gap_p99": [_percentile(each.gaps, 99) for each in runs],
        }
    rows = []
    for label, each in figures.items():
        if label != "load":
            first, late, gap = (each[name][4] * 1e3 for name in each)
            figure = f"{first:.0f}, {late:.0f}; {gap:.0f} ms"
            what = f"80 % load, {label}, first token p50, p99; gap p99"
            rows.append((what, figure))
    return figures, rows


class Arrivals:
    """Requests that come at random, on the scheduler's own clock.

    Args:
        chunk: Of the scheduler.
        count: Of requests.
        rate: Of them, a second.

    Attributes:
        first: Seconds to the first token of each short prompt.
        gaps: Seconds between tokens of all streams.
        most: Requests per second in total.
    """

    def __init__(self, chunk: int, count: int, *, rate: float) -> None:
        from lifecycle_engine import Scheduler, SimRunner

        self._rng, self._rate = random.Random(1), rate
        self._now = 0.0
        runner = SimRunner(
            slots=32, max_length=8192, kv_bytes_per_token=0, sleep=self._pass
        )
        self._scheduler = Scheduler(runner, chunk=chunk, clock=lambda: self._now)
        self._came: dict[str, float] = {}
        self._spoke: dict[str, float] = {}
        self.first: list[float] = []
        self.gaps: list[float] = []
        self._run(count)
        self.most = count / self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds

    def _run(self, count: int) -> None:
        at, number = 0.0, 0
        while number < count or self._scheduler.busy:
            while number < count and at <= self._now:
                self._start(number, at)
                at, number = at + self._rng.expovariate(self._rate), number + 1
            if not self._scheduler.busy:
                self._now = at
                continue
            for output in self._scheduler.step():
                self._note(output.key)

    def _start(self, number: int, at: float) -> None:
        long = number % 20 == 10
        length = 4096 if long else self._rng.randint(16, 256)
        key = f"{'long' if long else 'short'}{number}"
        request = {"input_ids": [1] * length, "max_tokens": 64, "stop_ids": []}
        self._scheduler.start(key, request, {})
        self._came[key] = at

    def _note(self, key: str) -> None:
        came, spoke = self._came.pop(key, None), self._spoke.get(key)
        self._spoke[key] = self._now
        if spoke is not None:
            self.gaps.append(self._now - spoke)
        elif came is not None and key.startswith("short"):
            self.first.append(self._now - came)


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw time to the first token by load, and steps of a cancel by its phase.

    Needs matplotlib: ``pip install --group bench``.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    figures = report["first_token"]
    loads = [100 * load for load in figures["load"]["share"]]
    for label, each in figures.items():
        if label != "load":
            (line,) = left.plot(loads, each["first_p99"], label=f"{label}, p99")
            color, median = line.get_color(), each["first_median"]
            left.plot(loads, median, "--", color=color, label=f"{label}, median")
            middle.plot(loads, each["gap_p99"], label=f"{label}, p99")
    for axes, what in ((left, "to the first token"), (middle, "between two tokens")):
        axes.set_xlabel("load, % of what the simulated model can do")
        axes.set_ylabel(f"seconds {what}")
        axes.set_yscale("log")
        axes.legend()
    for label, name in (("slot free", "free"), ("stream ended", "finished")):
        right.step(range(40), report["cancel"][name], where="mid", label=label)
    right.axhline(2, color="grey", linewidth=0.5)
    right.set_xlabel("steps before the cancel: queue, prefill, decode")
    right.set_ylabel("steps from the cancel")
    right.set_ylim(-0.1, 3)
    right.legend()
    figure.suptitle(f"The engine's scheduler ({report['machine']})")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Be an engine process."""
    from lifecycle_engine import Scheduler

    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    options = parser.parse_args()
    scheduler = Scheduler(Paced(slots=LANES), merge="concatenate")
    EngineServer(options.endpoint, scheduler, incarnation=options.incarnation).run()


if __name__ == "__main__":
    main()
