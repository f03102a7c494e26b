"""The engine's model on a device: correctness and speed of its tokens."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from engine_rig import Rig, Timed, agreement, best, picture

Row = tuple[str, str]
Measured = tuple[dict[str, Any], list[Row]]
_TEXT_ONLY = ("llama", "qwen3")
_STEPS = 100


def identity(on: Rig, family: str) -> float:
    """Return the fraction of tokens equal to `generate`: alone, batched and resumed."""
    prepared = [
        on.prepare("Hello there."),
        on.prepare("Tell a long story about a heap, a queue and a stack."),
    ]
    if family not in _TEXT_ONLY:
        prepared += [
            on.prepare("What is this?", picture(90, 120, seed=1)),
            on.prepare("And this?", picture(320, 240, seed=2)),
            on.prepare("Compare.", picture(64, 64), picture(130, 90, seed=4)),
        ]
    wanted = [on.generate(each) for each in prepared]
    single = [on.stream([each])[0] for each in prepared]
    chunked = on.stream(prepared, chunk=24)
    resumed = [on.resume(each) for each in prepared]
    return min(agreement(each, wanted) for each in (single, chunked, resumed))


def decode(
    make: Callable[[str], AbstractContextManager[Rig]],
    modes: tuple[str, ...],
    batch: int,
) -> Measured:
    """Tokens a second in one lane and in a full batch, for each way of graphs."""
    rates: dict[str, dict[int, float]] = {}
    for mode in modes:
        with make(mode) as on:
            rates[mode] = {lanes: _rate(on, lanes) for lanes in (1, batch)}
    rows = [
        (f"decode, graphs {mode}, {lanes} lanes", f"{rate:.0f} tokens/s")
        for mode, each in rates.items()
        for lanes, rate in each.items()
    ]
    return dict(rates), rows


def prefill(on: Rig) -> Measured:
    """Seconds until the first token of a text and of a large picture."""
    seconds: dict[str, float] = {"parameters": on.parameters}
    rows = [("parameters", f"{on.parameters / 1e9:.2f} B")]
    for label, each in (
        ("text", on.prepare("word " * 400)),
        ("picture", on.prepare("?", picture(1280, 784))),
    ):
        value = best(functools.partial(_prefill_once, on, each))
        name = f"{label} of {each.prompt_tokens} tokens"
        seconds[name] = value
        rows.append((f"prefill, {name}", f"{value * 1e3:.1f} ms"))
    return seconds, rows


def scheduler(batch: int, on: Rig) -> Measured:
    """Return the overhead of the scheduler per decode step."""
    if importlib.util.find_spec("zmq") is None:
        return {"skipped": "pyzmq"}, [
            ("scheduler", "left out: pyzmq is not installed; see --wheels")
        ]
    from lifecycle_engine import Scheduler

    runner: Any = Timed(on.runner)
    serving = Scheduler(runner)
    request = on.prepare("Hello there.").request | {"max_tokens": _STEPS}
    for lane in range(batch):
        serving.start(str(lane), request, {})
    begin = time.perf_counter()
    steps = 0
    while serving.busy:
        serving.step()
        steps += 1
    added = (time.perf_counter() - begin - runner.seconds) / steps
    return {"seconds_per_step": added, "lanes": batch}, [
        (f"scheduler, a step of {batch} lanes", f"{added * 1e6:.0f} us")
    ]


def _rate(on: Rig, lanes: int) -> float:
    each = on.prepare("Hello there.")
    slots = list(range(lanes))
    for slot in slots:
        on.prefill(slot, on.prompt(each))

    def run() -> None:
        for _ in range(_STEPS):
            on.decode(slots)

    rate = lanes * _STEPS / best(run)
    for slot in slots:
        on.runner.free(slot)
    return rate


def _prefill_once(on: Rig, prepared: Any) -> None:
    on.prefill(0, on.prompt(prepared))
    on.runner.free(0)
