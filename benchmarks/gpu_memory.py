"""Memory of the engine over many image requests, and the speed of copies."""

from __future__ import annotations

import argparse
import gc
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from arena_device import Shared
from engine_rig import Rig, best, picture

Row = tuple[str, str]
_COPY_BYTES = 256 * 2**20


def flatness(options: argparse.Namespace, rig: Rig) -> tuple[dict[str, Any], list[Row]]:
    """Memory over many image requests, the payload dropped after prefill or not."""
    figures: dict[str, Any] = {}
    rows = []
    for label, runner in (("on", rig.runner), ("off", _Keeping(rig.runner))):
        seen = _serve(rig, runner, options)
        figures[f"strip_{label}"] = seen
        for name, values in seen.items():
            low, high = min(values), max(values)
            rows.append(
                (
                    f"{name}, {options.requests} image requests, strip {label}",
                    f"{low / 1e6:.1f} to {high / 1e6:.1f} MB ({high / low - 1:.1%})",
                )
            )
    return figures, rows


def bandwidth(device: str) -> tuple[dict[str, Any], list[Row]]:
    """Bytes a second to the device: pageable, pinned by torch, a registered memfd."""
    import torch

    from lifecycle_engine.model.device_copies import pin, unpin

    cuda = device == "cuda"
    sources: dict[str, Any] = {"pageable": torch.ones(_COPY_BYTES, dtype=torch.uint8)}
    if cuda:
        sources["pinned by torch"] = sources["pageable"].pin_memory()
    shared = Shared.make(_COPY_BYTES)
    shared.array[:] = 1
    pinned = cuda and pin(cast("Any", shared))
    sources["registered memfd" if pinned else "memfd"] = torch.from_numpy(shared.array)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    rates = {}
    for name, source in sources.items():

        def copy(source: Any = source) -> None:
            target.copy_(source, non_blocking=True)
            if cuda:
                torch.cuda.synchronize()

        rates[name] = _COPY_BYTES / best(copy)
    if pinned:
        unpin(cast("Any", shared))
    return dict(rates), [
        (f"copy to the device, {name}", f"{rate / 1e9:.1f} GB/s")
        for name, rate in rates.items()
    ]


def _serve(
    rig: Rig, runner: Any, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Keep many image requests in flight; memory after each round of them."""
    each = rig.prepare("?", picture(640, 480))
    seen: dict[str, list[float]] = {}
    rounds = max(options.requests // options.concurrent, 2)
    for number in range(rounds + 1):
        peak = _round(rig, runner, each, options.concurrent)
        if number:  # the first one warms up
            for name, value in peak.items():
                seen.setdefault(name, []).append(value)
    return seen


def _round(rig: Rig, runner: Any, prepared: Any, concurrent: int) -> dict[str, float]:
    """Prefill a round of requests, run some steps, and sample the memory."""
    from lifecycle import strip

    slots = range(concurrent)
    for slot in slots:
        prompt = rig.prompt(prepared)
        runner.prefill(slot, prompt, 0, len(prompt.input_ids))
        strip(prompt.tensors, keep=runner.keep)
    for _ in range(4):
        runner.decode(list(slots))
    memory = _memory(rig)
    for slot in slots:
        runner.free(slot)
    return memory


def _memory(rig: Rig) -> dict[str, float]:
    import torch

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    memory = {"process": float(pages * mmap.PAGESIZE)}
    if rig.runner.model.device.type == "cuda":
        torch.cuda.synchronize()
        memory["device"] = float(torch.cuda.memory_allocated())
        memory["device, with what torch keeps"] = float(torch.cuda.memory_reserved())
    return memory


class _Keeping:
    """A runner whose payloads stay on the device until their request ends."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._kept: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def prefill(self, slot: int, prompt: Any, start: int, stop: int) -> Any:
        """Prefill, and keep a copy of the pixels."""
        import torch

        pixels = np.array(prompt.tensors["pixel_values"])
        self._kept[slot] = torch.from_numpy(pixels).to(self._runner.model.device)
        return self._runner.prefill(slot, prompt, start, stop)

    def free(self, slot: int) -> None:
        """Free the slot and the copy of the pixels."""
        self._kept.pop(slot, None)
        self._runner.free(slot)


def seconds_until(done: Callable[[], bool], *, within: float) -> float:
    """Return how long it takes until *done*; look every millisecond."""
    begin = time.perf_counter()
    while not done():
        if time.perf_counter() - begin > within:
            raise TimeoutError(f"not within {within:g} s")
        time.sleep(1e-3)
    return time.perf_counter() - begin
