"""What one request shares among its answers: preprocessing, and the lease of its bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle import Gate, Payload
from lifecycle_asgi import RequestScope
from lifecycle_engine import SimProcessor, create_app
from lifecycle_engine.server.generate import (
    LeaseUntilFirstToken,
    PreprocessingFailed,
    SharedPreprocessing,
)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops."""
    return str(request.param)


def shared(
    pixels: list[Any], seed: int | None, choices: int
) -> tuple[SharedPreprocessing, list[int]]:
    """A request of some pixels, which are handed over, and how often it was prepared."""
    calls: list[int] = []

    async def prepare() -> Any:
        calls.append(1)
        await anyio.lowlevel.checkpoint()
        request = {"input_ids": [1], "seed": seed}
        return request, Payload({"pixels": pixels.pop()})

    return SharedPreprocessing(prepare, choices=choices), calls


@pytest.mark.anyio
async def test_prepares_once_for_all_answers() -> None:
    """The first request preprocesses; the others get the same tensors in other maps."""
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


@pytest.mark.anyio
async def test_answers_get_seeds_of_their_own() -> None:
    """The i-th answer has the seed and i more, also at the end of the range."""
    made, _ = shared([np.ones(4)], 2**63 - 2, 3)
    seeds = [(await made.take(index))[0]["seed"] for index in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, 0]


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_failed_preparation_is_not_tried_again() -> None:
    """The first hears its own error, the others that a sibling failed."""
    made, calls = shared([], None, 2)
    with pytest.raises(IndexError):
        await made.take(0)
    with pytest.raises(PreprocessingFailed):
        await made.take(1)
    assert calls == [1]


class Answers:
    """Two answers made from one payload, and the gate that it passed."""

    def __init__(self) -> None:
        self.gate = Gate(bytes=10)
        self.lease = LeaseUntilFirstToken(self.gate.try_admit(bytes=8), 2)
        self.pairs = [self.lease.wrap(i, self._open, self._end) for i in (0, 1)]

    async def _open(self) -> AsyncIterator[Any]:
        async def items() -> AsyncIterator[int]:
            yield 1
            yield 2

        return items()

    async def _end(self, items: Any) -> None:
        if items is not None:
            await items.aclose()

    @property
    def bytes(self) -> int:
        return self.gate.statistics().bytes_in_use


@pytest.mark.asyncio
async def test_releases_with_the_last_first_item() -> None:
    """Both answers have to be read; what follows the first item changes nothing."""
    answers = Answers()
    first, second = [await open_() for open_, _ in answers.pairs]
    assert [item async for item in first] == [1, 2]
    assert answers.bytes == 8
    assert await anext(second) == 1
    assert answers.bytes == 0
    assert await anext(second) == 2
    for (_, end), items in zip(answers.pairs, (first, second), strict=True):
        await end(items)


@pytest.mark.asyncio
async def test_releases_what_never_began_when_the_starts_fail() -> None:
    """Of two starts one never began, and the other is over when its END is done."""
    answers = Answers()
    with pytest.raises(TimeoutError), answers.lease:
        await answers.pairs[0][0]()
        raise TimeoutError
    assert answers.bytes == 8
    await answers.pairs[0][1](None)
    assert answers.bytes == 0


@pytest.mark.asyncio
async def test_keeps_what_began_when_the_starts_succeed() -> None:
    """Leaving without an error gives nothing back: nothing has been read yet."""
    answers = Answers()
    with answers.lease:
        opened = [await open_() for open_, _ in answers.pairs]
    assert answers.bytes == 8
    for (_, end), items in zip(answers.pairs, opened, strict=True):
        await end(items)
    assert answers.bytes == 0


@pytest.mark.asyncio
async def test_closes_what_its_items_come_from() -> None:
    """A reader that stops closes the source, as without it."""
    answers = Answers()
    items = await answers.pairs[0][0]()
    assert await anext(items) == 1
    await items.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(items)
    await answers.pairs[1][1](None)
    assert answers.bytes == 0


@pytest.mark.anyio
async def test_drops_request_after_an_unheard_disconnect() -> None:
    """A disconnect that arrives as a message ends the request in silence."""
    engine: Any = SimpleNamespace(ready=True)
    app = create_app(engine, SimProcessor(), gate=Gate(bytes=1))
    app.state.service.started = True  # as by its lifespan
    server = ScriptedServer()
    server.messages.clear()
    server.gone.set()
    scope = http_scope(lifecycle=RequestScope())
    await app.state.service.admission(scope, server.receive, server.send)
    assert server.sent == []
