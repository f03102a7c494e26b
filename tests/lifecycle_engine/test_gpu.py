from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lifecycle_engine.models.transformers_runner import TransformersRunner  # noqa: E402
from lifecycle_engine.models.uploads import (  # noqa: E402
    TorchDevice,
    Uploads,
    pin,
    unpin,
)
from lifecycle_engine.scheduler import Scheduler  # noqa: E402
from lifecycle_zmq import Arena, ArenaView  # noqa: E402
from lifecycle_zmq.protocol.wire import Place  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> TransformersRunner:
    """The tiny checkpoint on the device, in whole float32."""
    torch.backends.cudnn.allow_tf32 = False
    return TransformersRunner.load(
        checkpoint, device="cuda", slots=4, max_length=512, graphs="on"
    )


def run_all(scheduler: Scheduler, prepared: list[Any]) -> list[list[int]]:
    """Stream all prompts together."""
    tokens: dict[str, list[int]] = {}
    for index, each in enumerate(prepared):
        tokens[str(index)] = []
        scheduler.start(str(index), each.request, dict(each.tensors))
    while scheduler.busy:
        for output in scheduler.step():
            for item in output.items:
                tokens[output.key] += item if type(item) is list else []
    return [tokens[str(index)] for index in range(len(prepared))]


def test_cuda_matches_generate(
    runner: TransformersRunner, prepared: list[Any], generate: Callable[..., Any]
) -> None:
    """On CUDA, batched and padded, the tokens are those of `generate` on CUDA."""
    expected = [generate(each, 24, model=runner.model) for each in prepared]
    assert run_all(Scheduler(runner), prepared) == expected


def test_cuda_reads_a_pinned_arena_and_tells_when_it_has() -> None:
    """The device takes the arena as pinned memory; free means read (`design 4`)."""
    uploads = Uploads(TorchDevice(torch.device("cuda")))
    arena = Arena(64 * 2**20)
    assert arena.descriptor is not None
    view = ArenaView(os.dup(arena.descriptor), writable=True)
    assert pin(view)
    array = arena.empty(32 * 2**20, np.uint8)
    for number in range(8):
        array[:] = number
        found: dict[str, Any] = {"x": Place(0, "B", [array.size])}
        view.lodge((b"", number), found)
        copy = uploads.begin(np.asarray(found.pop("x")))
        assert view.loans == 1
        uploads.finish()
        assert view.ended() == [(b"", number)]
        array[:] = 255  # as the next request would
        assert bool((copy == number).all())
    unpin(view)
    arena.close()


def test_cuda_memory_returns(runner: TransformersRunner, prepared: list[Any]) -> None:
    """After the requests are gone, the device holds what it held before them."""
    run_all(Scheduler(runner), prepared)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run_all(Scheduler(runner), prepared)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
