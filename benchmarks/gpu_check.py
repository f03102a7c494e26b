"""Check the engine on a CUDA device: identity, speed, memory.

Builds a random checkpoint in a temporary folder and needs nothing that is not
there: torch, transformers, numpy and pillow. Run by ``make gpu-check``; without
a CUDA device it says so and succeeds. ``--device cpu`` walks the same lines.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engine_rig import Rig, Timed, agreement, best, picture

if TYPE_CHECKING:
    from lifecycle_engine.runner import Runner

RESULTS = Path(__file__).parent / "results"
TOKENS = 48
Row = tuple[str, str]


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
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options, Path(folder))
        report = check.run()
    path = options.out or RESULTS / f"gpu_check-{_slug(report['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0 if check.identical or options.dtype != "float32" else 1


_NEEDED = ("torch", "transformers", "numpy", "PIL")
_SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    # About 0.8 B parameters.
    "mid": {
        "hidden_size": 2048,
        "layers": 24,
        "heads": 16,
        "vocab_size": 4096,
        "vision_hidden_size": 256,
    },
}


class Check:
    """One run: a model on a device, and what was measured of it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.identical = False
        self.rig = Rig(
            folder,
            sizes=_SIZES[options.model],
            device=options.device,
            dtype=options.dtype,
            slots=options.batch,
            tokens=TOKENS,
        )
        self.cuda = options.device == "cuda"

    def run(self) -> dict[str, Any]:
        """Measure everything, printing a line for each result."""
        report: dict[str, Any] = self._machine()
        for name, measure in (
            ("identity", self.identity),
            ("decode", self.decode),
            ("prefill", self.prefill),
            ("memory", self.memory),
            ("arena", self.arena),
            ("scheduler", self.scheduler),
        ):
            report[name], rows = measure()
            for label, value in rows:
                print(f"  {label:<46} {value}", flush=True)
        return report

    def identity(self) -> tuple[dict[str, Any], list[Row]]:
        """Greedy tokens alone and batched against `generate` on the same device."""
        prepared = [
            self.rig.prepare("Hello there."),
            self.rig.prepare("Tell a long story about a heap, a queue and a stack."),
            self.rig.prepare("What is this?", picture(90, 120, seed=1)),
            self.rig.prepare("And this?", picture(640, 480, seed=2)),
            self.rig.prepare("Compare.", picture(64, 64), picture(130, 90, seed=4)),
        ]
        wanted = [self.rig.generate(each) for each in prepared]
        single = [self.rig.stream([each])[0] for each in prepared]
        batched = self.rig.stream(prepared)
        agree = {
            "single": agreement(single, wanted),
            "batched": agreement(batched, wanted),
        }
        self.identical = single == wanted and batched == wanted
        return agree, [
            (f"tokens as of generate(), {how}", f"{share:.1%} of {TOKENS} x 5")
            for how, share in agree.items()
        ]

    def decode(self) -> tuple[dict[str, Any], list[Row]]:
        """Tokens a second in one lane and in a full batch."""
        rates = {lanes: self._decode_rate(lanes) for lanes in (1, self.options.batch)}
        ratio = rates[self.options.batch] / rates[1]
        rows = [
            (f"decode, {lanes} lanes", f"{rate:.0f} tokens/s")
            for lanes, rate in rates.items()
        ]
        rows.append(("decode, full batch to one lane", f"{ratio:.2f} x"))
        return {"tokens_per_second": rates, "ratio": ratio}, rows

    def prefill(self) -> tuple[dict[str, Any], list[Row]]:
        """Seconds until the first token of a text and of a large picture."""
        seconds: dict[str, float] = {}
        for label, each in (
            ("text", self.rig.prepare("word " * 400)),
            ("picture", self.rig.prepare("?", picture(1280, 784))),
        ):
            prompt = self.rig.prompt(each)
            run = functools.partial(self._prefill_once, prompt)
            seconds[f"{label} of {each.prompt_tokens} tokens"] = best(run)
        return seconds, [
            (f"prefill, {label}", f"{value * 1e3:.1f} ms")
            for label, value in seconds.items()
        ]

    def memory(self) -> tuple[dict[str, Any], list[Row]]:
        """Device memory, and the process's, before and after many image requests."""
        each = self.rig.prepare("?", picture(640, 480))
        self._serve_image(each)
        before = self._memory()
        for _ in range(self.options.requests):
            self._serve_image(each)
        after = self._memory()
        rows = [
            (
                f"{name}, {self.options.requests} image requests",
                f"{before[name] / 1e6:.1f} -> {after[name] / 1e6:.1f} MB",
            )
            for name in before
        ]
        return {"before": before, "after": after}, rows

    def arena(self) -> tuple[dict[str, Any], list[Row]]:
        """Whether the arena can be pinned, and how fast it is copied from."""
        import arena_device
        import torch

        return arena_device.measure(torch.device(self.options.device))

    def scheduler(self) -> tuple[dict[str, Any], list[Row]]:
        """What the scheduler adds to a decode step."""
        if importlib.util.find_spec("zmq") is None:
            return {"skipped": "pyzmq"}, [
                ("scheduler", "left out: pyzmq is not installed (pip install pyzmq)")
            ]
        from lifecycle_engine.scheduler import Scheduler

        runner = Timed(self.rig.runner)
        scheduler = Scheduler(cast("Runner", runner))
        request = self.rig.prepare("Hello there.").request | {"max_tokens": 100}
        for lane in range(self.options.batch):
            scheduler.start(str(lane), request, {})
        begin = time.perf_counter()
        steps = 0
        while scheduler.busy:
            scheduler.step()
            steps += 1
        added = (time.perf_counter() - begin - runner.seconds) / steps
        return {"seconds_per_step": added, "lanes": self.options.batch}, [
            (
                f"scheduler, a step of {self.options.batch} lanes",
                f"{added * 1e6:.0f} us",
            )
        ]

    def _decode_rate(self, lanes: int) -> float:
        prompt = self.rig.prompt(self.rig.prepare("Hello there."))
        slots = list(range(lanes))
        for slot in slots:
            self.rig.prefill(slot, prompt)
        steps = 100

        def run() -> None:
            for _ in range(steps):
                self.rig.decode(slots)

        rate = lanes * steps / best(run)
        for slot in slots:
            self.rig.runner.free(slot)
        return rate

    def _prefill_once(self, prompt: Any) -> None:
        self.rig.prefill(0, prompt)
        self.rig.runner.free(0)

    def _serve_image(self, prepared: Any) -> None:
        from lifecycle import strip

        prompt = self.rig.prompt(prepared)
        self.rig.prefill(0, prompt)
        strip(prompt.tensors, keep=self.rig.runner.keep)
        for _ in range(4):
            self.rig.decode([0])
        self.rig.runner.free(0)

    def _memory(self) -> dict[str, int]:
        import torch

        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        memory = {"process": pages * 4096}
        if self.cuda:
            torch.cuda.synchronize()
            memory["device"] = torch.cuda.memory_allocated()
        return memory

    def _machine(self) -> dict[str, Any]:
        import torch
        import transformers

        device = torch.cuda.get_device_name() if self.cuda else platform.machine()
        parameters = sum(each.numel() for each in self.rig.runner.model.parameters())
        facts = {
            "device": device,
            "model": f"{self.options.model}, {parameters / 1e6:.1f} M parameters",
            "dtype": self.options.dtype,
            "batch": self.options.batch,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "kv_bytes": self.rig.runner.cache.nbytes,
        }
        print(
            f"{device}: {facts['model']}, {facts['dtype']}; torch {facts['torch']}, "
            f"transformers {facts['transformers']}"
        )
        return facts


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check the engine on a CUDA device.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=sorted(_SIZES), default="tiny")
    parser.add_argument("--dtype", default="float32", help="torch dtype")
    parser.add_argument("--batch", type=int, default=8, help="lanes of a full batch")
    parser.add_argument("--requests", type=int, default=1000, help="for the memory")
    parser.add_argument("--out", type=Path, help="the JSON; default: beside this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
