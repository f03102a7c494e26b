"""Speed of the bundled engine compared with transformers itself, in one run.

Every figure is a ratio of two things that this run has measured on this machine,
or a count of steps. ``--device cuda`` runs the same on a GPU, with graphs.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_load import first_tokens, linked, plot
from engine_rig import Free, Rig, machine, picture, rig

if TYPE_CHECKING:
    from lifecycle_engine import Scheduler

BATCH = 8
Row = tuple[str, str]
_SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {"hidden_size": 512, "layers": 8, "heads": 8, "vocab_size": 2048},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line for each figure, and write them down if asked to."""
    options = _parser().parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.device == "cpu":
        import torch

        torch.set_num_threads(1)
    report: dict[str, Any] = {"model": options.model, "device": options.device}
    report["machine"] = machine()
    parts: dict[str, Callable[[argparse.Namespace], tuple[Any, list[Row]]]] = {
        "text": text,
        "images": images,
        "stall": stall,
        "overhead": overhead,
        "link": linked,
        "first_token": first_tokens,
        "cancel": cancel,
    }
    for name, measure in parts.items():
        report[name], rows = measure(options)
        for label, value in rows:
            print(f"  {label:<58} {value}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(report, options.plot)
    return 0


def text(options: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    """Tokens a second of eight texts: ours, and the three ways of transformers."""
    with _rig(options, "qwen3") as made:
        prepared = [
            made.prepare("word " * (20 + 5 * number), ignore_eos=True)
            for number in range(BATCH)
        ]
        ways = {
            "engine": lambda: _serve(made, prepared),
            "continuous batching": lambda: made.generate_continuously(prepared),
            "generate, one batch": lambda: made.generate_batch(prepared),
            "generate, one by one": lambda: [made.generate(each) for each in prepared],
        }
        rates = _rates(ways, BATCH * made.tokens, options.repeats)
    return _beside(rates, "texts")


def images(options: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    """Tokens a second of eight pictures: ours beside one `generate` after another."""
    with _rig(options, "qwen2_5_vl") as made:
        prepared = [
            made.prepare("What?", picture(90 + number, 120), ignore_eos=True)
            for number in range(BATCH)
        ]
        ways = {
            "engine": lambda: _serve(made, prepared),
            "generate, one by one": lambda: [made.generate(each) for each in prepared],
        }
        rates = _rates(ways, BATCH * made.tokens, options.repeats)
    return _beside(rates, "pictures")


def stall(options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Effect of a long prompt on running streams and on a short prompt behind it."""
    figures: dict[str, Any] = {}
    with _rig(options, "qwen3") as made:
        for label, chunk in (("whole", 4096), ("chunks of 64", 64)):
            figures[label] = _stalled(made, chunk)
    whole, chunks = figures["whole"], figures["chunks of 64"]
    rows = []
    for name, key in (
        ("longest gap of a running stream", "gap"),
        ("first token of a short prompt behind it", "short"),
    ):
        slow, quick = whole[key] * 1e3, chunks[key] * 1e3
        value = f"{slow:.0f} ms whole, {quick:.0f} ms in chunks: {slow / quick:.1f} x"
        rows.append((f"long prompt, {name}", value))
    return figures, rows


def overhead(options: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    """What a step of the scheduler costs with 32 running, without a model."""
    del options
    from lifecycle_engine import Scheduler

    scheduler = Scheduler(Free(slots=32))
    for number in range(32):
        scheduler.start(str(number), {"input_ids": [1], "max_tokens": 4000}, {})
    for _ in range(32):
        scheduler.step()
    seconds = []
    for _ in range(2000):
        begin = time.thread_time()  # stands still while another has the processor
        scheduler.step()
        seconds.append(time.thread_time() - begin)
    step = statistics.median(seconds)
    share = step / 10e-3
    return {"step_seconds": step, "of_10_ms": share}, [
        (
            "scheduler, a step of 32 requests",
            f"{step * 1e6:.0f} us, {share:.1%} of a 10 ms step",
        )
    ]


def cancel(options: argparse.Namespace) -> tuple[dict[str, list[int]], list[Row]]:
    """Count steps from a cancel until its slot is free and its stream has ended."""
    del options
    from lifecycle_engine import Scheduler

    free, finished = [], []
    for steps in range(40):
        scheduler = Scheduler(Free(slots=1), chunk=4)
        request = {"input_ids": [1] * 60, "max_tokens": 4000}
        scheduler.start("a", request, {})
        for _ in range(steps):
            scheduler.step()
        scheduler.cancel("a")
        free.append(_steps(scheduler, lambda s: s.status()["slots_free"] == 1))
        finished.append(free[-1] + _steps(scheduler, lambda s: not s.busy))
    return {"free": free, "finished": finished}, [
        (
            "cancel in any phase, steps until the slot is free",
            f"{max(free)}, until the stream has ended {max(finished)}",
        )
    ]


def _steps(scheduler: Scheduler, done: Callable[[Scheduler], bool]) -> int:
    steps = 0
    while not done(scheduler):
        scheduler.step()
        steps += 1
    return steps


def _stalled(on: Rig, chunk: int) -> dict[str, float]:
    """Four stream, then come a long prompt and a short one behind it."""
    from lifecycle_engine import Scheduler

    scheduler = Scheduler(on.runner, chunk=chunk)
    stream = on.prepare("Hello there.", ignore_eos=True).request
    for number in range(4):
        scheduler.start(f"s{number}", stream | {"max_tokens": 400}, {})
    while scheduler.status()["running"] < 4:
        scheduler.step()
    long = on.prepare("word " * 1500, ignore_eos=True).request
    scheduler.start("long", long | {"max_tokens": 1}, {})
    scheduler.start("short", stream | {"max_tokens": 1}, {})
    begin = last = time.perf_counter()
    gap = short = 0.0
    waiting = {"long", "short"}
    while waiting:
        keys = {output.key for output in scheduler.step() if output.items}
        now = time.perf_counter()
        if "s0" in keys:
            gap, last = max(gap, now - last), now
        if "short" in keys & waiting:
            short = now - begin
        waiting -= keys
    for number in range(4):
        scheduler.end(f"s{number}")
    return {"gap": gap, "short": short}


def _serve(on: Rig, prepared: Sequence[Any]) -> None:
    """Run requests through the scheduler, all of them there at once."""
    from lifecycle_engine import Scheduler

    scheduler = Scheduler(on.runner)
    for number, each in enumerate(prepared):
        scheduler.start(str(number), each.request, dict(each.tensors))
    while scheduler.busy:
        scheduler.step()


def _rates(
    ways: Mapping[str, Callable[[], object]], tokens: int, repeats: int
) -> dict[str, float]:
    """Tokens a second of each way, in turn, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for _ in range(repeats):
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: tokens / min(each) for name, each in seconds.items()}


def _beside(rates: dict[str, float], what: str) -> tuple[dict[str, float], list[Row]]:
    engine = rates["engine"]
    rows = [(f"{BATCH} {what}, the engine", f"{engine:.0f} tokens/s")]
    rows += [
        (f"{BATCH} {what}, beside {name}", f"{engine / rate:.2f} x of {rate:.0f}")
        for name, rate in rates.items()
        if name != "engine"
    ]
    return rates, rows


def _rig(options: argparse.Namespace, family: str) -> AbstractContextManager[Rig]:
    return rig(
        family=family,
        sizes=_SIZES[options.model],
        device=options.device,
        dtype="float32",
        slots=BATCH,
        tokens=options.tokens,
        graphs="on" if options.device == "cuda" else "off",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The engine beside transformers.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=sorted(_SIZES), default="tiny")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="the best one counts")
    parser.add_argument("--steps", type=int, default=1000, help="over the link")
    parser.add_argument("--arrivals", type=int, default=2000, help="for each load")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to draw some of them")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
