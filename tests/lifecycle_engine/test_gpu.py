from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lifecycle_engine import Scheduler, TransformersRunner  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> TransformersRunner:
    """The tiny checkpoint on the device, in full float32."""
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


def test_cuda_memory_is_freed(runner: TransformersRunner, prepared: list[Any]) -> None:
    """After the requests device memory is what it was before."""
    run_all(Scheduler(runner), prepared)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run_all(Scheduler(runner), prepared)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
