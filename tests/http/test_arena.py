"""Payloads in the engine's arena: the gate counts what the arena counts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_kit import (
    GatedProcessor,
    Server,
    answer_to,
    make_engine,
    png,
    post,
    running,
    user,
)

from lifecycle import Gate
from lifecycle_asgi import estimate_memory
from lifecycle_engine import (
    MediaLimits,
    SimProcessor,
    in_arena,
    read_image_size,
)

pytestmark = pytest.mark.asyncio

# Its tensor takes whole pages: the arena counts those, the gate bytes.
IMAGE = png(256, 256)
TENSOR = 256 * 256 * 24
CHARGE = estimate_memory([read_image_size(IMAGE, MediaLimits(), param="")]).total
# Room for one that is being made beside one that was, or for two that were.
SIZE = 3 * TENSOR
# Prefill of an image takes a fifth of a second, so that the engine is what is slow.
SLOW = ("--sim-prefill-pixel=0.000005", "--max-batch=1")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing here may need the collector."""
    gc.disable()
    yield
    gc.enable()


def body(*content: str | bytes, **fields: Any) -> bytes:
    """A request body."""
    ask = {"model": "sim", "messages": user(*content), "max_tokens": 2, **fields}
    return json.dumps(ask).encode()


def served(*options: str, processor: Any = SimProcessor, **settings: Any) -> Any:
    """A server whose payloads are made in an arena of that size."""
    engine = make_engine(*options, arena_bytes=SIZE, **settings)
    gate = Gate(bytes=SIZE, max_waiting=1000, name="payloads")
    made = processor(empty=in_arena(engine))
    return running(engine=engine, processor=made, gate=gate)


def books(server: Server) -> Any:
    """The arena's."""
    return server.service.engine.arena.statistics()  # type: ignore[attr-defined]


async def leave(writer: asyncio.StreamWriter) -> None:
    """Hang up without a word."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_waits_at_the_gate_for_the_arena() -> None:
    """A full arena is waited for in line: no error, and nothing is sent instead (law 3)."""
    async with served(*SLOW) as server:
        asking = [
            asyncio.create_task(answer_to(server.port, body("see", IMAGE)))
            for _ in range(16)
        ]
        most = waited = 0
        while not all(task.done() for task in asking):
            now, gate = books(server), server.service.payloads.statistics()
            assert now.used <= gate.bytes_in_use <= SIZE
            most, waited = max(most, now.used), max(waited, gate.waiting)
            await asyncio.sleep(0.002)
        assert [task.result()[0] for task in asking] == [200] * 16
        await server.quiet()
        now = books(server)
        assert (now.refused, now.spilled, now.used) == (0, 0, 0)
        # Whoever stood in line did so because the engine had the arena.
        assert SIZE - most < CHARGE
        assert waited > 8


async def test_charges_what_the_engine_holds_until_it_gives_it_back() -> None:
    """Handed over is not gone: the lease ends with the region, not with the start."""
    async with served("--sim-prefill-pixel=0.00001") as server:
        asking = asyncio.create_task(answer_to(server.port, body("see", IMAGE)))
        await server.until(lambda: books(server).leases)
        gate = server.service.payloads
        assert gate.statistics().bytes_in_use == books(server).used == TENSOR
        await server.until(lambda: not gate.statistics().bytes_in_use)
        assert books(server).used == 0
        assert (await asking)[0] == 200
        await server.quiet()


async def test_frees_the_gate_whatever_goes_wrong() -> None:
    """An image that cannot be decoded, and clients that leave at any moment."""
    async with served(*SLOW[:1]) as server:
        broken = IMAGE[:-30] + b"x" * 30
        status, _, _ = await answer_to(server.port, body("see", broken))
        assert status == 400
        await server.quiet()
        for number in range(24):
            _, writer = await post(server.port, body("see", IMAGE))
            await asyncio.sleep(0.01 * number)
            await leave(writer)
        await server.quiet()
        assert books(server).used == 0
        assert server.service.payloads.statistics().lost == 0


async def test_keeps_the_charge_while_a_thread_prepares() -> None:
    """A client who left has a thread still: its memory is not given to another (fault-2)."""
    processors: list[GatedProcessor] = []

    class Gated(GatedProcessor):
        def __init__(self, *, empty: Any) -> None:
            super().__init__()
            self._empty = empty
            processors.append(self)

    async with served(processor=Gated) as server:
        _, writer = await post(server.port, body("see", IMAGE))
        (processor,) = processors
        await asyncio.to_thread(processor.entered.acquire)
        await leave(writer)
        await server.until(lambda: not server.service.sessions.statistics().live)
        assert server.service.payloads.statistics().bytes_in_use == CHARGE
        processor.release.set()
        await server.quiet()
        assert books(server).used == 0


async def test_frees_the_gate_when_the_engine_dies() -> None:
    """What the dead engine had is free once it is reaped, here and at the gate."""
    async with served(*SLOW, backoff=0.05) as server, server.client() as client:
        asking = [
            asyncio.create_task(
                client.chat.completions.create(
                    model="sim", messages=user("see", IMAGE), max_tokens=2
                )
            )
            for _ in range(3)
        ]
        await server.until(lambda: books(server).leases)
        os.kill(server.service.engine.pid or 0, signal.SIGKILL)
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert any(isinstance(it, openai.APIStatusError) for it in results)
        await server.until(lambda: server.service.engine.ready)
        await server.quiet()
        assert books(server).used == 0
