from __future__ import annotations

import gc
import weakref
from typing import Any

import anyio
import numpy as np
import pytest

from lifecycle import Payload
from lifecycle_engine.routes.shared import Shared, SiblingFailed

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops."""
    return str(request.param)


def shared(
    pixels: list[Any], seed: int | None, choices: int
) -> tuple[Shared, list[int]]:
    """A request of some pixels, which are handed over, and how often it was prepared."""
    calls: list[int] = []

    async def prepare() -> Any:
        calls.append(1)
        await anyio.lowlevel.checkpoint()
        request = {"input_ids": [1], "seed": seed}
        return request, Payload({"pixels": pixels.pop()})

    return Shared(prepare, choices=choices), calls


async def test_prepares_once_for_all_answers() -> None:
    """Whoever comes first prepares; the others get the same tensors, in other maps."""
    made, calls = shared([np.ones(4)], None, 3)
    taken: list[Any] = []

    async def take(index: int) -> None:
        taken.append(await made.take(index))

    async with anyio.create_task_group() as tasks:
        for index in range(3):
            tasks.start_soon(take, index)
    assert calls == [1]
    assert len({id(tensors) for _, tensors in taken}) == 3
    assert len({id(tensors["pixels"]) for _, tensors in taken}) == 1
    assert all(request["seed"] is None for request, _ in taken)


async def test_answers_get_seeds_of_their_own() -> None:
    """The i-th answer has the seed and i more, also at the end of the range."""
    made, _ = shared([np.ones(4)], 2**63 - 2, 3)
    seeds = [(await made.take(index))[0]["seed"] for index in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, 0]


async def test_last_answer_leaves_nothing() -> None:
    """What was shared is gone when the last one has taken and dropped it."""
    pixels = [np.ones(4)]
    alive = weakref.ref(pixels[0])
    made, _ = shared(pixels, None, 2)
    gc.disable()
    try:
        for index in range(2):
            assert alive() is not None or index == 0
            request, tensors = await made.take(index)
            del request, tensors
        assert alive() is None
    finally:
        gc.enable()


async def test_failed_preparation_is_not_tried_again() -> None:
    """The first hears its own error, the others that a sibling failed."""
    made, calls = shared([], None, 2)
    with pytest.raises(IndexError):
        await made.take(0)
    with pytest.raises(SiblingFailed):
        await made.take(1)
    assert calls == [1]
