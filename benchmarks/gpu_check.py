"""Check the engine on a CUDA device: identity, speed, memory, crashes.

Builds random checkpoints in a temporary folder and needs nothing that is not
there: torch, transformers, numpy, pillow and anyio; what needs pyzmq is left out
without it, or finds it in wheels that were carried along (``--wheels``). Run by
``make gpu-check``; without a CUDA device it says so and succeeds. ``--device cpu``
walks the same lines, with the graphs' shapes but no capture.

The parts come in the order of their weight, and none begins when the budget is
spent. The report is written after each, so that one that is killed leaves the rest.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arena_device import arena
from engine_rig import Rig, rig
from gpu_memory import bandwidth, flatness
from gpu_model import Identity, Measured, decode, identity, prefill, scheduler
from gpu_process import death

RESULTS = Path(__file__).parent / "results"
TOKENS = 48
_NEEDED = ("torch", "transformers", "numpy", "PIL", "anyio")
# In the order in which they are run; the last three share a model.
_PARTS: tuple[str, ...] = ("identity", "decode", "copies", "arena", "death")
_PARTS += ("memory", "prefill", "scheduler")
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
    """Run the check; exit status 1 if a part fails or a token is wrong."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.wheels is not None:
            _unpack(options.wheels, Path(folder, "unpacked"))
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            print(f"gpu-check: skipped, {', '.join(missing)} is not installed")
            return 0
        import torch

        if options.device == "cuda" and not torch.cuda.is_available():
            print(
                f"gpu-check: skipped, torch {torch.__version__} sees no CUDA device; "
                "--device cpu runs the same checks on the CPU"
            )
            return 0
        if options.device == "cpu":
            torch.set_num_threads(1)
        # Tokens are compared in float32; cuDNN would round a picture's to ten bits.
        torch.backends.cudnn.allow_tf32 = False
        _fill_in(options)
        return Check(options, Path(folder)).run()


class Check:
    """One run on a device, and its measurements."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.began = time.monotonic()
        self.identical = True
        self.failed: list[str] = []
        self.cuda = options.device == "cuda"
        self.modes = ("off", "fake", "on") if self.cuda else ("off", "fake")
        self.report = self._machine()
        name = f"gpu_check-{_slug(self.report['device'])}.json"
        self.out: Path = options.out or RESULTS / name

    def run(self) -> int:
        """Measure everything, printing a line for each result."""
        left_out = []
        with ExitStack() as stack:
            shared: list[Rig] = []

            def on(measure: Callable[[Rig], Measured]) -> Measured:
                if not shared:
                    shared.append(stack.enter_context(self._rig(graphs=self.modes[-1])))
                return measure(shared[0])

            parts = self._parts(on)
            for name in filter(self._wants, _PARTS):
                if self._spent < self.options.budget:
                    self._measure(name, parts[name])
                else:
                    left_out.append(name)
        if left_out:
            self.report["left_out"] = left_out
            self._write()
            budget = f"the budget of {self.options.budget:g} s is spent"
            again = " ".join(f"--only {name}" for name in left_out)
            print(f"left out, as {budget}: {', '.join(left_out)}; run {again}")
        print(f"{self._spent:.0f} s in all; written to {self.out}")
        if self.failed:
            print(f"failed: {', '.join(self.failed)}; see above")
        return 0 if self.identical and not self.failed else 1

    def _parts(
        self, on: Callable[[Callable[[Rig], Measured]], Measured]
    ) -> dict[str, Callable[[], Measured]]:
        device, options = self.options.device, self.options
        make = functools.partial(self._rig, family="qwen2_5_vl")
        return {
            "identity": self._identity,
            "decode": lambda: decode(
                lambda mode: make(graphs=mode), self.modes, options.batch
            ),
            "copies": lambda: bandwidth(device),
            "arena": lambda: arena(device),
            "death": lambda: death(device),
            "memory": lambda: on(functools.partial(flatness, options)),
            "prefill": lambda: on(prefill),
            "scheduler": lambda: on(functools.partial(scheduler, options.batch)),
        }

    def _identity(self) -> Measured:
        """Compare greedy tokens of every family, alone and batched, with `generate`."""
        from tiny_checkpoint import FAMILIES

        found: dict[str, Identity] = {}
        for family in FAMILIES:
            for mode in self.modes:
                with self._rig(family=family, tiny=True, graphs=mode) as made:
                    found[f"{family}, graphs {mode}"] = identity(made, family)
            self._progress(f"identity of {family} is known")
        self.identical = all(each.holds for each in found.values())
        return {how: asdict(each) for how, each in found.items()}, [
            (f"tokens as of generate(), {how}", str(each))
            for how, each in found.items()
        ]

    def _wants(self, name: str) -> bool:
        options = self.options
        return name not in options.skip and (not options.only or name in options.only)

    def _measure(self, name: str, measure: Callable[[], Measured]) -> None:
        self._progress(name)
        begin = self._spent
        try:
            figures, rows = measure()
        except Exception as error:  # noqa: BLE001  # the next part may well run
            traceback.print_exc()
            self.failed.append(name)
            figures, rows = {"failed": type(error).__name__}, [(name, "FAILED")]
        for label, value in rows:
            print(f"  {label:<58} {value}", flush=True)
        self.report[name] = {**figures, "took_seconds": self._spent - begin}
        self._write()

    def _write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.report, indent=2)
        self.out.write_text(text + "\n", encoding="utf-8")

    @property
    def _spent(self) -> float:
        return time.monotonic() - self.began

    def _progress(self, what: str) -> None:
        print(f"[{self._spent:5.0f} s] {what}", flush=True)

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


def _unpack(wheels: Path, folder: Path) -> None:
    """Make packages of wheels importable, here and in processes that are started.

    Where nothing may be installed; what is installed goes before them.
    """
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _fill_in(options: argparse.Namespace) -> None:
    """Defaults that depend on the device."""
    cuda = options.device == "cuda"
    options.model = options.model or ("mid" if cuda else "tiny")
    options.dtype = options.dtype or ("bfloat16" if cuda else "float32")
    options.concurrent = options.concurrent or (64 if cuda else 16)
    options.requests = options.requests or (1000 if cuda else 160)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check the engine on a CUDA device.")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--model", choices=sorted(_SIZES), help="for speed; default: mid on cuda")
    add("--dtype", help="torch dtype, for speed; default: bfloat16 on cuda")
    add("--batch", type=int, default=32, help="lanes of a full batch")
    add("--concurrent", type=int, help="image requests at a time; 64 on cuda")
    add("--requests", type=int, help="image requests, for the memory; 1000 on cuda")
    repeated: dict[str, Any] = {"choices": _PARTS, "action": "append", "default": []}
    add("--only", help="a part; may be repeated", **repeated)
    add("--skip", help="leave a part out; may be repeated", **repeated)
    add(
        "--budget",
        type=float,
        default=420,
        metavar="SECONDS",
        help="seconds after which no further part starts; default: 420",
    )
    add(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="wheels of packages that cannot be installed here",
    )
    add("--out", type=Path, help="the JSON; default: beside this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
