"""The engine's model on a device: correctness and speed of its tokens."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from engine_rig import Rig, Timed, best, first_difference, picture

Row = tuple[str, str]
Measured = tuple[dict[str, Any], list[Row]]
_TEXT_ONLY = ("llama", "qwen3")
_STEPS = 100
# Standard deviations of the logits; float32 rounds to about 1e-6 of one.
TIE = 1e-3


@dataclass(frozen=True)
class Identity:
    """The share of tokens before the first difference of each answer from the oracle's.

    And the widest gap there, in standard deviations of the logits.
    """

    equal: float
    widest: float

    @property
    def holds(self) -> bool:
        """Whether no answer differs but by a tie."""
        return self.widest <= TIE

    def __str__(self) -> str:
        """Name the share, and the gap where there is a difference."""
        if not self.widest:
            return f"{self.equal:.1%}"
        word = "a tie" if self.holds else "WRONG"
        return f"{self.equal:.1%}, then a gap of {self.widest:.1e}: {word}"


def identity(on: Rig, family: str) -> Identity:
    """Compare greedy tokens with `generate`: alone, batched and resumed."""
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
    ways = [
        [on.stream([each])[0] for each in prepared],
        on.stream(prepared, chunk=24),
        [on.resume(each) for each in prepared],
    ]
    return _judge(on, prepared, wanted, ways)


def _judge(
    on: Rig,
    prepared: Sequence[Any],
    wanted: Sequence[Sequence[int]],
    ways: Sequence[Sequence[Sequence[int]]],
) -> Identity:
    equal, widest = 0, 0.0
    for way in ways:
        for prompt, made, oracle in zip(prepared, way, wanted, strict=True):
            at = first_difference(made, oracle)
            equal += at
            if at < len(oracle):
                gap = on.preference(prompt, oracle[:at], oracle[at], made[at])
                widest = max(widest, abs(gap))
    return Identity(equal / (len(ways) * sum(map(len, wanted))), widest)


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
