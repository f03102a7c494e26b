"""Payload bytes stay admitted while a payload lies in the engine's line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_kit import GatedProcessor, Server, answer_to, png, post, running, user

from lifecycle import Gate

pytestmark = pytest.mark.asyncio
# One request runs at a time, and for long: whoever comes second is in the line.
BUSY = ("--max-batch=1", "--sim-decode-step=0.02")
SIDE = 64
PAYLOAD = SIDE * SIDE * 24  # six float32 a pixel, as the simulated model takes them


def body(**fields: Any) -> bytes:
    """A request about a picture."""
    ask = {"model": "sim", "messages": user(png(SIDE, SIDE)), "ignore_eos": True}
    return json.dumps({**ask, "stream": True, **fields}).encode()


async def in_line(server: Server, count: int) -> None:
    """Wait until so many requests wait in the engine."""
    async with asyncio.timeout(120):
        while (await server.service.engine.status())["backend"]["waiting"] != count:
            await asyncio.sleep(0.002)


def admitted(server: Server) -> int:
    """Payload bytes that are admitted now."""
    return server.service.payloads.statistics().bytes_in_use


async def test_counts_a_payload_until_its_first_token() -> None:
    """Handed off and not yet read is still in memory; with the first token it is not."""
    async with running(*BUSY) as server:
        _, first = await post(server.port, body(max_tokens=2000))
        await server.until(server.service.sessions.live)
        await server.until(lambda: admitted(server) == 0)
        reader, second = await post(server.port, body(max_tokens=100))
        await in_line(server, 1)
        assert admitted(server) == PAYLOAD
        first.close()
        await reader.readuntil(b'"content":"')
        assert admitted(server) == 0
        assert server.service.sessions.statistics().live >= 1
        second.close()
        await server.quiet()


async def test_gives_the_bytes_back_when_a_client_leaves_the_line() -> None:
    """A disconnect in the engine's queue admits the next payload."""
    async with running(*BUSY) as server:
        _, first = await post(server.port, body(max_tokens=2000))
        await server.until(server.service.sessions.live)
        await server.until(lambda: admitted(server) == 0)
        _, second = await post(server.port, body(max_tokens=100))
        await in_line(server, 1)
        second.close()
        await server.until(lambda: admitted(server) == 0)
        first.close()
        await server.quiet()


async def test_counts_a_payload_until_all_its_answers_are_read() -> None:
    """Two answers to one request are made from one payload each, and counted so."""
    async with running(*BUSY) as server:
        _, first = await post(server.port, body(max_tokens=2000, n=2))
        await in_line(server, 1)
        assert admitted(server) == 2 * PAYLOAD
        first.close()
        await server.until(lambda: admitted(server) == 0)
        await server.quiet()


async def test_gives_the_bytes_back_when_the_engine_refuses() -> None:
    """A request that the engine does not take holds nothing."""
    async with running("--max-length=64") as server:
        status, _, _ = await answer_to(server.port, body(max_tokens=2000, stream=False))
        assert status == 400
        assert admitted(server) == 0
        await server.quiet()


async def test_never_has_more_payloads_than_fit_the_gate() -> None:
    """However many ask, no more bytes lie in both processes than were admitted."""
    gate = Gate(slots=2, bytes=10**9, name="payloads")
    async with running("--max-batch=1", "--sim-decode-step=0.01", gate=gate) as server:
        text = json.dumps({**json.loads(body(max_tokens=5000)), "messages": user("x")})
        reader, first = await post(server.port, text.encode())
        await reader.readuntil(b'"content":"')  # from here on all others are in line
        asking = [
            asyncio.create_task(
                answer_to(server.port, body(max_tokens=2, stream=False))
            )
            for _ in range(12)
        ]
        await server.until(lambda: gate.statistics().waiting == 10)
        await in_line(server, 2)
        most = (await server.service.engine.status())["backend"]["payload_bytes"]
        assert most == 2 * PAYLOAD
        first.close()
        while not all(task.done() for task in asking):
            backend = (await server.service.engine.status())["backend"]
            most = max(most, backend["payload_bytes"])
        assert [(await task)[0] for task in asking] == [200] * 12
        assert most == 2 * PAYLOAD
        await server.quiet()


async def test_gives_the_bytes_back_when_a_client_leaves_while_it_is_prepared() -> None:
    """Bytes in the making stay admitted until the thread that makes them is done."""
    processor = GatedProcessor()
    async with running(processor=processor) as server:
        _, writer = await post(server.port, body(max_tokens=2))
        await asyncio.to_thread(processor.entered.acquire, timeout=20)
        writer.close()
        await server.until(lambda: not server.service.sessions.live())
        assert admitted(server) > 0
        processor.release.set()
        await server.until(lambda: admitted(server) == 0)
        await server.quiet()
