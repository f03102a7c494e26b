"""Pixels written where the engine reads them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import lifecycle
import lifecycle_zmq
from lifecycle import Payload
from lifecycle_engine import Chat, Message, SimProcessor, in_arena, payload_capacity
from lifecycle_zmq import Arena, ZmqEngine

SIZE = 4 * 2**20
WORKER = [sys.executable, "-m", "lifecycle_engine.worker", "--runner", "sim"]


class Holder:
    """Replaces a running engine."""

    def __init__(self) -> None:
        self.arena = Arena(SIZE)


@pytest.fixture(params=["sim", "qwen"])
def processors(request: pytest.FixtureRequest) -> Any:
    """A processor in ordinary memory, one in an arena, and the arena."""
    holder = Holder()
    empty = in_arena(holder, timeout=0.05)  # type: ignore[arg-type]
    if request.param == "sim":
        yield SimProcessor(), SimProcessor(empty=empty), holder.arena
    else:
        from lifecycle_engine import ChatProcessor

        plain = request.getfixturevalue("processor")
        checkpoint = request.getfixturevalue("checkpoint")
        yield plain, ChatProcessor(checkpoint, empty=empty), holder.arena
    holder.arena.close()


def chat(*pictures: bytes, max_tokens: int = 40) -> Chat:
    """A question about pictures."""
    return Chat([Message("user", [*pictures, "What?"])], max_tokens=max_tokens)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pixels_are_the_same_in_the_arena(
    processors: Any, picture: Callable[..., bytes], count: int
) -> None:
    """Same bytes and names; placed in the arena, and freed when they are dropped."""
    plain, placed, arena = processors
    pictures = [picture(130 + 30 * n, 150, seed=n) for n in range(count)]
    expected, prepared = plain.prepare(chat(*pictures)), placed.prepare(chat(*pictures))
    assert list(prepared.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert np.array_equal(prepared.tensors[name], tensor)
        assert prepared.tensors[name].dtype == tensor.dtype
    if count:
        largest = max(prepared.tensors.values(), key=lambda it: it.nbytes)
        assert arena.find(memoryview(largest)) is not None
        del largest
    assert prepared.request == expected.request
    del prepared
    assert arena.statistics().used == 0


def test_pixels_use_ordinary_memory_when_the_arena_is_full(
    processors: Any, picture: Callable[..., bytes]
) -> None:
    """A full arena costs a copy at hand-off, not the request."""
    plain, placed, arena = processors
    taken = arena.empty(SIZE, np.uint8)
    one = picture(200, 200)
    expected, prepared = plain.prepare(chat(one)), placed.prepare(chat(one))
    for name, tensor in expected.tensors.items():
        assert np.array_equal(prepared.tensors[name], tensor)
    assert arena.statistics().refused
    del taken


def test_pixels_wait_for_a_free_region(picture: Callable[..., bytes]) -> None:
    """The total fits, as the gate ensures, but no region is large enough yet."""
    holder = Holder()
    placed = SimProcessor(empty=in_arena(holder))  # type: ignore[arg-type]
    taken = [holder.arena.empty(SIZE, np.uint8)]
    threading.Timer(0.1, taken.clear).start()
    prepared = placed.prepare(chat(picture(200, 200)))
    assert holder.arena.find(memoryview(prepared.tensors["pixels"])) is not None
    assert holder.arena.statistics().refused
    del prepared
    holder.arena.close()


@pytest.mark.parametrize(
    ("payload_bytes", "arena_bytes", "expected"),
    [
        (None, 0, 2 * 2**30),
        (1000, 0, 1000),
        (None, 5000, 8192),
        (5000, 8192, 5000),
        (9000, 8192, 8192),
    ],
)
def test_gate_limit_is_at_most_the_arena(
    payload_bytes: int | None, arena_bytes: int, expected: int
) -> None:
    """A smaller limit is kept; a larger one would exceed the arena."""
    assert payload_capacity(payload_bytes, arena_bytes) == expected


@pytest.mark.anyio
async def test_worker_frees_pixels_after_prefill(
    tmp_path: Path, picture: Callable[..., bytes]
) -> None:
    """The arena and frames give the same tokens, and the arena is freed early."""
    packages = (lifecycle_zmq, lifecycle)
    roots = [str(Path(package.__file__ or "").parents[1]) for package in packages]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    texts = []
    for arena_bytes in (0, SIZE):
        engine = ZmqEngine(WORKER, env=env, directory=tmp_path, arena_bytes=arena_bytes)
        processor = SimProcessor(empty=in_arena(engine) if arena_bytes else None)
        with anyio.fail_after(120):
            async with engine:
                await engine.wait_ready()
                made = processor.prepare(chat(picture(200, 200)))
                box = Payload[Any](made.tensors, nbytes=made.nbytes)
                request = made.request
                del made
                stream = await engine.start("a", request, box)
                items = [await anext(stream)]
                if arena_bytes:
                    # It streams, and what it no longer needs is free.
                    assert (await engine.status())["leases"] == 0
                    assert engine.arena.statistics().used == 0
                items += [item async for item in stream]
                texts.append(items)
                await engine.end("a")
    assert texts[0] == texts[1]
    assert len(texts[0]) == 41
