"""Check the engine on a CUDA device: identity, speed, memory, death.

Builds random checkpoints in a temporary folder and needs nothing that is not
there: torch, transformers, numpy and pillow; what needs pyzmq is left out without
it. Run by ``make gpu-check``; without a CUDA device it says so and succeeds.
``--device cpu`` walks the same lines, with the graphs' shapes but no capture.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from arena_device import arena
from engine_rig import Rig, Timed, agreement, best, picture, rig
from gpu_memory import bandwidth, flatness
from gpu_process import death

RESULTS = Path(__file__).parent / "results"
TOKENS = 48
Row = tuple[str, str]
Measured = tuple[dict[str, Any], list[Row]]
_PARTS = ("identity", "decode", "prefill", "memory", "scheduler", "copies", "death")
_NEEDED = ("torch", "transformers", "numpy", "PIL")
_SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    # About 1.7 B parameters.
    "mid": {
        "hidden_size": 2560,
        "layers": 32,
        "heads": 20,
        "vocab_size": 4096,
        "vision_hidden_size": 512,
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; exit status 1 if a stream is not what `generate` makes of it."""
    options = _parser().parse_args(argv)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu-check: skipped, {', '.join(missing)} is not installed")
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu-check: skipped, torch {torch.__version__} sees no CUDA device; "
            "--device cpu walks the same lines on the CPU"
        )
        return 0
    if options.device == "cpu":
        torch.set_num_threads(1)
    _fill_in(options)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options, Path(folder))
        report = check.run()
    path = options.out or RESULTS / f"gpu_check-{_slug(report['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0 if check.identical or "identity" not in report else 1


class Check:
    """One run on a device, and what was measured of it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.identical = False
        self.cuda = options.device == "cuda"
        self.modes = ("off", "fake", "on") if self.cuda else ("off", "fake")

    def run(self) -> dict[str, Any]:
        """Measure everything, printing a line for each result."""
        report = self._machine()
        device, options = self.options.device, self.options
        self._say(report, "identity", self.identity)
        self._say(report, "decode", self.decode)
        on_rig: dict[str, Callable[[Rig], Measured]] = {
            "prefill": prefill,
            "memory": functools.partial(flatness, options),
            "scheduler": functools.partial(scheduler, options.batch),
        }
        if any(self._wants(name) for name in on_rig):
            with self._rig(graphs=self.modes[-1]) as made:
                for name, measure in on_rig.items():
                    self._say(report, name, functools.partial(measure, made))
        self._say(report, "copies", functools.partial(bandwidth, device))
        self._say(report, "arena", functools.partial(arena, device))
        self._say(report, "death", functools.partial(death, device))
        return report

    def _wants(self, name: str) -> bool:
        return not self.options.only or name in self.options.only

    def identity(self) -> tuple[dict[str, Any], list[Row]]:
        """Greedy tokens of every family, alone and together, against `generate`."""
        from lifecycle_engine.models.checkpoint import FAMILIES

        shares = {}
        for family in FAMILIES:
            for mode in self.modes:
                with self._rig(family=family, tiny=True, graphs=mode) as made:
                    shares[f"{family}, graphs {mode}"] = _identity(made, family)
        self.identical = all(share == 1 for share in shares.values())
        return shares, [
            (f"tokens as of generate(), {how}", f"{share:.1%}")
            for how, share in shares.items()
        ]

    def decode(self) -> tuple[dict[str, Any], list[Row]]:
        """Tokens a second in one lane and in a full batch, for each way of graphs."""
        rates: dict[str, dict[int, float]] = {}
        for mode in self.modes:
            with self._rig(graphs=mode) as made:
                lanes = (1, self.options.batch)
                rates[mode] = {count: _decode_rate(made, count) for count in lanes}
        rows = [
            (f"decode, graphs {mode}, {lanes} lanes", f"{rate:.0f} tokens/s")
            for mode, each in rates.items()
            for lanes, rate in each.items()
        ]
        return rates, rows

    def _say(
        self,
        report: dict[str, Any],
        name: str,
        measure: Callable[[], Measured],
    ) -> None:
        if not self._wants(name):
            return
        begin = time.perf_counter()
        report[name], rows = measure()
        for label, value in rows:
            print(f"  {label:<58} {value}", flush=True)
        report[name]["took_seconds"] = time.perf_counter() - begin

    def _rig(
        self, *, graphs: str, family: str = "qwen2_5_vl", tiny: bool = False
    ) -> AbstractContextManager[Rig]:
        options = self.options
        model = "tiny" if tiny else options.model
        dtype = "float32" if tiny else options.dtype
        return rig(
            # Built once, and read again for each way of running it.
            self.folder / f"{family}-{model}-{dtype}",
            family=family,
            sizes=_SIZES[model],
            device=options.device,
            dtype=dtype,
            slots=8 if tiny else max(options.batch, options.concurrent),
            max_length=512 if tiny else 2048,
            tokens=TOKENS,
            graphs=graphs,
        )

    def _machine(self) -> dict[str, Any]:
        import torch
        import transformers

        options = self.options
        device = torch.cuda.get_device_name() if self.cuda else platform.machine()
        facts = {
            "device": device,
            "model": options.model,
            "dtype": options.dtype,
            "batch": options.batch,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        print(
            f"{device}: {facts['model']} in {facts['dtype']}; torch {facts['torch']}, "
            f"transformers {facts['transformers']}"
        )
        return facts


def prefill(on: Rig) -> tuple[dict[str, Any], list[Row]]:
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


def scheduler(batch: int, on: Rig) -> tuple[dict[str, Any], list[Row]]:
    """What the scheduler adds to a decode step."""
    if importlib.util.find_spec("zmq") is None:
        return {"skipped": "pyzmq"}, [
            ("scheduler", "left out: pyzmq is not installed (pip install pyzmq)")
        ]
    from lifecycle_engine.scheduler import Scheduler

    runner: Any = Timed(on.runner)
    serving = Scheduler(runner)
    request = on.prepare("Hello there.").request | {"max_tokens": 100}
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


def _identity(on: Rig, family: str) -> float:
    prepared = [
        on.prepare("Hello there."),
        on.prepare("Tell a long story about a heap, a queue and a stack."),
    ]
    if family not in ("llama", "qwen3"):
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


def _decode_rate(on: Rig, lanes: int) -> float:
    each = on.prepare("Hello there.")
    slots = list(range(lanes))
    for slot in slots:
        on.prefill(slot, on.prompt(each))
    steps = 100

    def run() -> None:
        for _ in range(steps):
            on.decode(slots)

    rate = lanes * steps / best(run)
    for slot in slots:
        on.runner.free(slot)
    return rate


def _prefill_once(on: Rig, prepared: Any) -> None:
    on.prefill(0, on.prompt(prepared))
    on.runner.free(0)


def _fill_in(options: argparse.Namespace) -> None:
    """Defaults that depend on the device."""
    cuda = options.device == "cuda"
    options.model = options.model or ("mid" if cuda else "tiny")
    options.dtype = options.dtype or ("bfloat16" if cuda else "float32")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check the engine on a CUDA device.")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--model", choices=sorted(_SIZES), help="for speed; default: mid on cuda")
    add("--dtype", help="torch dtype, for speed; default: bfloat16 on cuda")
    add("--batch", type=int, default=32, help="lanes of a full batch")
    add("--concurrent", type=int, default=64, help="image requests at a time")
    add("--requests", type=int, default=1000, help="image requests, for the memory")
    add("--only", choices=_PARTS, action="append", help="a part; may be repeated")
    add("--out", type=Path, help="the JSON; default: beside this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
