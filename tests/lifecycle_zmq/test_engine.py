"""The engine in another process: streams, ends, and the numbers it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import Payload
from lifecycle_zmq import EngineFailed, RequestRejected, ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

MakeEngine = Callable[..., ZmqEngine]


async def _collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


async def test_stream_delivers_every_item_in_order(make_engine: MakeEngine) -> None:
    """64 streams at a time each get their own items, in order, and end."""
    results: dict[str, list[Any]] = {}

    async def one(key: str, count: int) -> None:
        results[key] = await _collect(await engine.start(key, {"count": count}))
        await engine.end(key)

    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(64):
                    tasks.start_soon(one, f"s#{number}", number)
        status = await engine.status()
    assert results == {f"s#{n}": [[i] for i in range(n)] for n in range(64)}
    assert status["backend"]["live"] == []
    assert (status["starts"], status["ends"], status["live"]) == (64, 64, 0)
    assert (status["duplicate_ends"], status["ends_before_start"]) == (0, 0)
