from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lifecycle_engine import Scheduler, TransformersRunner  # noqa: E402
from lifecycle_engine.model.cuda_graphs import (  # noqa: E402
    FixedShapeSteps,
    Lane,
    StepInputs,
)

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


def test_cuda_failed_capture_leaves_torch_as_it_was() -> None:
    """Memory goes back to the device, two streams may share it, numbers are drawn."""
    device = torch.device("cuda")
    weights = torch.ones(64, 64, device=device)

    def forward(inputs: StepInputs) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            inputs.ids.sum().item()  # synchronises, which no capture survives
        return inputs.ids[:, None] + torch.rand(1, 64, device=device) @ weights

    def left() -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def on_two_streams() -> None:
        block = torch.ones(2**24, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        block.record_stream(side)
        del block
        torch.cuda.synchronize()
        torch.empty(1, device=device)  # the allocator looks at what others used

    steps = FixedShapeSteps(
        forward, slots=2, max_length=256, device=device, capture=True
    )
    steps.run([Lane(0, 1, 5, 0)], 1)
    assert steps.captured == 0
    on_two_streams()
    before = left()
    for _ in range(3):
        on_two_streams()
    assert left() == before
    assert steps.run([Lane(0, 1, 5, 0)], 1).shape == (1, 64)
    sound = FixedShapeSteps(
        lambda inputs: inputs.ids[:, None] + weights[:1],
        slots=2,
        max_length=256,
        device=device,
        capture=True,
    )
    sound.prepare()
    assert sound.captured == 2
