"""What a client costs that waits to be let in, having sent as much as it may."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from asgi_kit import serving
from http_kit import ENV, make_engine, running, user
from PIL import Image

from lifecycle import Gate
from lifecycle_engine import AppSettings, http_protocol

pytestmark = pytest.mark.asyncio
_LENGTH = 2**20
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
_SERVER = """
import sys
from lifecycle import Gate
from lifecycle_engine.server.app import create_app
from lifecycle_engine.sim import SimProcessor
from lifecycle_engine.server import run as serve
from lifecycle_zmq import ZmqEngine

config = serve.uvicorn.Config
serve.uvicorn.Config = lambda *args, **named: config(*args, loop=sys.argv[1], **named)
gate = Gate(bytes=2**28, name="payloads")
work = [sys.executable, "-m", "lifecycle_engine.worker", "--runner", "sim"]
app = create_app(ZmqEngine(work), SimProcessor(), gate=gate)
full = next(g for g in app.state.service.gates if g.name == sys.argv[2])
held = full.try_admit(bytes=full.statistics().bytes)
serve.run(app, host="127.0.0.1", port=0, announce=lambda at: print(at, flush=True))
"""


@asynccontextmanager
async def full(loop: str, gate: str) -> AsyncIterator[tuple[psutil.Process, int]]:
    """A server in a process, one of whose gates has no room, and its port."""
    argv = [sys.executable, "-c", _SERVER, loop, gate]
    server = await asyncio.create_subprocess_exec(
        *argv, env=ENV, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        line = await asyncio.wait_for(server.stdout.readline(), 60)
        yield psutil.Process(server.pid), int(line.rpartition(b":")[2])
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 20)


async def pour(port: int, count: int, body: bytes) -> list[asyncio.StreamWriter]:
    """Clients that send a body for as long as the server reads it."""
    made = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_HEAD % len(body) + body)
        made.append(writer)
    return made


async def resting(process: psutil.Process) -> int:
    """Bytes of a process, once it has come to rest."""
    seen = [-1]
    async with asyncio.timeout(120):
        while seen[-4:] != seen[-1:] * 4:
            await asyncio.sleep(0.2)
            times = process.cpu_times()
            seen.append(round(10 * (times.user + times.system)))
    return int(process.memory_info().rss)


async def cost(loop: str, gate: str, body: bytes) -> float:
    """Bytes that each of many clients makes a server hold that wait at a gate."""
    async with full(loop, gate) as (process, port):
        writers = await pour(port, 64, body)
        before = await resting(process)
        writers += await pour(port, 256, body)
        each = (await resting(process) - before) / 256
        for writer in writers:
            writer.transport.abort()
    return each


def gate_of_bodies(server: Any) -> Gate:
    """The gate of bodies that arrive."""
    gates: tuple[Gate, ...] = server.service.gates
    return next(gate for gate in gates if gate.name == "admission-bodies")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_waits_with_little_of_each_body(loop: str) -> None:
    """Of a body that waits for admission only a few KiB are read."""
    assert await cost(loop, "admission-bodies", b" " * _LENGTH) < 100 * 1024


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_waits_with_one_copy_of_each_picture(loop: str) -> None:
    """A request that waits for its payload's admission keeps one copy of its file."""
    data = random.Random(1).randbytes(3 * 128 * 128)
    out = io.BytesIO()
    Image.frombytes("RGB", (128, 128), data).save(out, "PNG")
    document = {"model": "lifecycle", "messages": user(out.getvalue())}
    body = json.dumps(document).encode()
    assert await cost(loop, "payloads", body) < len(data) + 64 * 1024


async def test_reads_whole_body_once_it_is_let_in() -> None:
    """What was left in the socket meanwhile comes when there is room for it."""
    settings = AppSettings(model="sim", text_chars=2 * _LENGTH)
    async with running(engine=make_engine(), settings=settings) as server:
        bodies = gate_of_bodies(server)
        held = bodies.try_admit(bytes=bodies.statistics().bytes or 0)
        document = {"model": "sim", "max_tokens": 1, "messages": user("a")}
        body = json.dumps(document).encode().ljust(_LENGTH)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(_HEAD % _LENGTH + body)
        await server.until(lambda: bodies.statistics().waiting)
        held.release()
        async with asyncio.timeout(120):
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        writer.transport.abort()


async def test_takes_little_behind_a_large_body() -> None:
    """The next body of an admitted client waits like any other."""
    come, first = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if first:
            await come.wait()
        message = await receive()
        first.append(len(message["body"]))
        while message.get("more_body"):
            message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with (
        asyncio.timeout(120),
        serving(app, http=http_protocol(), ws="none", lifespan="off") as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(_HEAD % _LENGTH + b" " * _LENGTH)
            await asyncio.sleep(0.3)  # for as much as would come
            come.set()
            await reader.readuntil(b"\r\n0\r\n\r\n")
            come.clear()
        writer.transport.abort()
    assert max(first) <= 2 * 16384


async def test_detects_a_disconnect_while_a_short_body_waits() -> None:
    """A body that came whole is no reason to be deaf while it waits for room."""
    async with running(engine=make_engine()) as server:
        bodies = gate_of_bodies(server)
        with bodies.try_admit(bytes=bodies.statistics().bytes or 0):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(_HEAD % 40_000 + b" " * 40_000)
            await server.until(lambda: bodies.statistics().waiting)
            writer.transport.abort()
            await server.until(lambda: not bodies.statistics().waiting)
