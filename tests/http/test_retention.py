"""The payload is dead in this process when hand-off returns, collector or not.

The test finds every block of memory above 400,000 bytes, whatever holds it (the
buffer of the link to the engine is smaller):
request body, base64, image file, decoded pixels and tensors are all larger.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any, Self

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope, serving
from http_kit import GatedProcessor, Quiet, data_url, make_engine, post, running
from PIL import Image

from lifecycle import Gate
from lifecycle_engine import AppSettings, create_app

pytestmark = pytest.mark.asyncio
LARGE = 400_000
SIDE = 400


def image(cut: int = 0) -> bytes:
    """An image of noise: what cannot be compressed is large in every form."""
    noise = random.Random(1).randbytes(SIDE * SIDE * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), noise).save(out, "PNG")
    return out.getvalue()[: -cut or None]


def body(cut: int = 0, **fields: Any) -> bytes:
    """A request with that image."""
    part = {"type": "image_url", "image_url": {"url": data_url(image(cut))}}
    messages = [{"role": "user", "content": [part]}]
    ask = {"model": "sim", "messages": messages, "max_tokens": 50, **fields}
    return json.dumps(ask).encode()


@pytest.fixture
def large() -> Iterator[Any]:
    """Where the large blocks of memory come from that were made since, by line."""
    gc.collect()
    gc.disable()
    tracemalloc.start(8)

    def blocks() -> list[str]:
        traces = tracemalloc.take_snapshot().traces
        return [
            f"{trace.size}: {trace.traceback.format()}"
            for trace in traces
            if trace.size > LARGE
        ]

    try:
        yield blocks
    finally:
        tracemalloc.stop()
        gc.enable()


class World:
    """The application in process, with a gate on preprocessing."""

    def __init__(self) -> None:
        self.processor = GatedProcessor()
        self.app = create_app(
            make_engine("--sim-decode-step=0.005"),
            self.processor,
            gate=Gate(bytes=10**9, name="payloads"),
            settings=AppSettings(model="sim"),
        )
        self.service = self.app.state.service

    async def __aenter__(self) -> Self:
        self._life = self.app.router.lifespan_context(self.app)
        await self._life.__aenter__()
        await self.service.engine.wait_ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.processor.release.set()
        await self._life.__aexit__(*exc)

    async def until(self, what: Any) -> None:
        """Wait until *what* holds."""
        with anyio.fail_after(120):
            while not what():
                await anyio.sleep(0.002)

    def call(self, server: ScriptedServer) -> asyncio.Task[None]:
        """Call the application as *server* in a task."""
        scope = http_scope("/v1/chat/completions")
        return asyncio.create_task(self.app(scope, server.receive, server.send))


async def test_detects_a_payload_that_is_held(large: Any) -> None:
    """The detector itself: one held body is found, and not found once dropped."""
    held = [body()]
    assert len(large()) == 1
    held.clear()
    assert large() == []


async def test_holds_nothing_while_streaming(large: Any) -> None:
    """At the first token there is no copy of the payload left in any form (N10)."""
    async with World() as world:
        world.processor.release.set()
        seen = []
        server = ScriptedServer(body(stream=True))

        def look(message: Any) -> None:
            if b'"content":"' in message.get("body", b"") and len(seen) < 3:
                seen.append(large())

        server.on_send = look
        await world.call(server)
        assert server.status == 200
        assert seen == [[], [], []]


async def test_holds_nothing_while_collecting(large: Any) -> None:
    """While an answer that is not streamed is made, nothing is held either (N10)."""
    async with World() as world:
        world.processor.release.set()
        server = ScriptedServer(body())
        call = world.call(server)
        service = world.service
        await world.until(
            lambda: any(s.phase == "started" for s in service.sessions.live())
        )
        assert large() == []
        assert service.sessions.statistics().payload_bytes == 0
        await call
        assert server.status == 200


async def test_holds_one_copy_while_it_waits(large: Any) -> None:
    """In line at the gate a request is its image file and nothing else."""
    async with World() as world:
        gate = world.service.payloads
        with gate.try_admit(bytes=10**9):
            call = world.call(ScriptedServer(body()))
            await world.until(lambda: gate.statistics().waiting)
            assert len(large()) == 1
            assert world.service.sessions.statistics().payload_bytes == len(image())
            call.cancel()
            await asyncio.wait([call])
            assert large() == []


@pytest.mark.parametrize(
    ("request_body", "status"),
    [
        (lambda: body(max_tokens=10**6), 400),  # the engine refuses it
        (lambda: body(cut=40), 400),  # the image is damaged
        (lambda: body()[:-1], 400),  # the JSON is damaged
        (lambda: body(seed="x"), 400),  # the schema refuses it
        (lambda: body(model="other"), 404),  # there is no such model
    ],
    ids=["engine", "image", "json", "schema", "model"],
)
async def test_holds_nothing_while_refusing(
    large: Any, request_body: Any, status: int
) -> None:
    """Not even the error that is being sent holds on to what it is about."""
    async with World() as world:
        world.processor.release.set()
        server, seen = ScriptedServer(request_body()), []
        server.on_send = lambda message: seen.append(large())
        await world.call(server)
        assert server.status == status
        assert seen == [[], []]


@pytest.mark.parametrize("phase", ["queued", "preprocessing", "streaming"])
async def test_holds_nothing_after_cancellation(large: Any, phase: str) -> None:
    """Cancelled in any phase, the payload is gone when everything is quiet."""
    async with World() as world:
        gate, streaming = world.service.payloads, []
        server = ScriptedServer(body(stream=True))
        server.on_send = streaming.append
        lease = gate.try_admit(bytes=10**9) if phase == "queued" else None
        call = world.call(server)
        if lease is not None:
            await world.until(lambda: gate.statistics().waiting)
        elif phase == "preprocessing":
            entered = world.processor.entered
            await world.until(lambda: entered.acquire(blocking=False))
        else:
            world.processor.release.set()
            await world.until(lambda: len(streaming) > 3)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        world.processor.release.set()
        if lease is not None:
            lease.release()
        await Quiet(world.service).reached()
        assert large() == []


async def test_holds_nothing_where_engine_is_lost(large: Any) -> None:
    """A request that found no engine leaves nothing, while the 503 is being sent."""
    async with World() as world:
        world.processor.release.set()
        world.service.engine._client.mark_failed("killed")
        server, seen = ScriptedServer(body()), []
        server.on_send = lambda message: seen.append(large())
        await world.call(server)
        assert server.status == 503
        assert seen == [[], []]


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_holds_nothing_in_a_real_server(large: Any, http: str) -> None:
    """Under uvicorn as well: neither server nor framework keeps the body."""
    async with running("--sim-decode-step=0.005") as server:
        async with serving(server.app, http=http, lifespan="off") as port:
            reader, writer = await post(port, body(stream=True))
            for _ in range(3):
                await reader.readuntil(b"\n\n")
            assert large() == []
            writer.close()
            await writer.wait_closed()
        await server.quiet()
