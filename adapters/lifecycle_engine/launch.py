"""What a server is started with: its engine's command line, checkpoint, processor."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lifecycle_ray import RayEngine

    from .processor import Empty, Processor


class RunnerName(StrEnum):
    """What runs the requests."""

    torch = "torch"
    sim = "sim"


class Device(StrEnum):
    """Where torch computes."""

    cpu = "cpu"
    cuda = "cuda"


class SamplingDefaults(StrEnum):
    """Whose defaults requests get that do not say how they draw."""

    model = "model"
    openai = "openai"


class EngineOn(StrEnum):
    """Where the engine runs."""

    process = "process"
    ray = "ray"


def worker_argv(
    runner: RunnerName,
    folder: Path | None,
    *,
    device: Device = Device.cpu,
    max_batch: int = 8,
    kv_slots: int | None = None,
    max_length: int | None = None,
    chunk: int = 512,
    dtype: str | None = None,
) -> list[str]:
    """The command line of the engine process."""
    argv = [sys.executable, "-m", "lifecycle_engine.worker"]
    argv += ["--runner", runner.value, "--max-batch", str(max_batch)]
    argv += ["--chunk", str(chunk)]
    if kv_slots is not None:
        argv += ["--slots", str(kv_slots)]
    if max_length is not None:
        argv += ["--max-length", str(max_length)]
    if dtype is not None:
        argv += ["--dtype", dtype]
    if folder is not None:
        argv += ["--checkpoint", str(folder), "--device", device.value]
    return argv


def on_ray(
    argv: Sequence[str],
    *,
    address: str | None,
    replicas: int,
    gpus: float,
    stalled_after: float,
) -> RayEngine:
    """The engine of a command line, on actors of a Ray cluster.

    Args:
        argv: As of `worker_argv`.
        address: Of the cluster; ``None`` starts one on this machine.
        replicas: How many engines.
        gpus: Of each.
        stalled_after: Seconds that one step may take.
    """
    from lifecycle_ray import Placement, RayEngine

    from .worker import make_backend

    _python, _m, _module, *arguments = argv
    return RayEngine(
        partial(make_backend, arguments),
        replicas=replicas,
        placement=Placement(num_gpus=gpus),
        address=address,
        stalled_after=stalled_after,
    )


def make_processor(folder: Path | None, empty: Empty | None = None) -> Processor:
    """The processor of a checkpoint; of the simulated model if there is none.

    Args:
        folder: Of the checkpoint.
        empty: Makes the buffers of pixels; ``None``: in ordinary memory.
    """
    if folder is None:
        from .chats.sim_processor import SimProcessor

        return SimProcessor(empty=empty)
    from .chats.chat_processor import ChatProcessor
    from .models._hf import hf

    hf("set_verbosity_error", "utils.logging")()
    return ChatProcessor(folder, empty=empty)


def default_checkpoint(cache: Path | None = None) -> Path:
    """The tiny checkpoint in the cache folder, built there if it is missing.

    Args:
        cache: Defaults to ``~/.cache/anyio-lifecycle``.
    """
    from .models.checkpoint import build

    cache = cache or Path.home() / ".cache" / "anyio-lifecycle"
    folder = cache / "tiny-qwen2_5_vl"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Built beside it and moved, so that nobody ever loads half of one.
        fresh = Path(tempfile.mkdtemp(dir=cache))
        try:
            build(fresh / "checkpoint")
            (fresh / "checkpoint").replace(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder
