"""Clients that hang up, in both forms, in every phase: noticed, and all released."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_kit import GatedProcessor, Server, make_engine, png, post, running, user

from lifecycle import Gate

pytestmark = pytest.mark.asyncio
Phase = Callable[[Server, asyncio.StreamReader], Awaitable[None]]
IMAGE = png(400, 300)


def ask(*, stream: bool) -> bytes:
    """A request with an image for an answer that takes long."""
    fields = {"model": "sim", "messages": user("go", IMAGE), "max_tokens": 3000}
    return json.dumps({**fields, "stream": stream}).encode()


def hang_up(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close the connection, politely or by a reset."""
    if reset:
        sock = writer.get_extra_info("socket")
        linger = struct.pack("ii", 1, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort() if reset else writer.close()


async def gone(server: Server, *, started: bool) -> None:
    """Everything is released, and the one request is counted as client_gone."""
    status = await server.quiet()
    outcomes = server.service.sessions.statistics().outcomes
    assert {name: n for name, n in outcomes.items() if n} == {"client_gone": 1}
    assert status["starts"] == status["ends"] == started


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", ["payloads", "in_flight"])
async def test_leaves_the_line_of_a_gate(which: str, stream: bool, reset: bool) -> None:
    """Gone while queued: out of the line, the engine never asked (fault-1)."""
    gates = {
        name: Gate(bytes=10**9, slots=1, name=name)
        for name in ("payloads", "in_flight")
    }
    full = gates[which]
    async with running(gate=gates["payloads"], in_flight=gates["in_flight"]) as server:
        with full.try_admit():
            _, writer = await post(server.port, ask(stream=stream))
            await server.until(lambda: full.statistics().waiting)
            hang_up(writer, reset=reset)
            await server.until(lambda: not full.statistics().waiting)
        await gone(server, started=False)
        assert full.statistics().cancelled == 1


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_withholds_start_when_gone_in_preprocessing(
    stream: bool, reset: bool
) -> None:
    """Gone while preprocessed: bytes stay charged until the thread ends (fault-2)."""
    processor = GatedProcessor()
    async with running(processor=processor) as server:
        service = server.service
        _, writer = await post(server.port, ask(stream=stream))
        await server.until(lambda: processor.entered.acquire(blocking=False))
        hang_up(writer, reset=reset)
        await server.until(lambda: not service.sessions.statistics().live)
        assert service.payloads.statistics().bytes_in_use > len(IMAGE)
        processor.release.set()
        await gone(server, started=False)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_ends_engine_session_when_gone_before_first_token(
    stream: bool, reset: bool
) -> None:
    """Gone during prefill: the engine forgets it at the next step (fault-5)."""
    async with running("--sim-prefill-token=0.01") as server:
        service = server.service
        _, writer = await post(server.port, ask(stream=stream))
        await server.until(
            lambda: any(s.phase == "started" for s in service.sessions.live())
        )
        assert service.payloads.statistics().bytes_in_use  # it is not read yet
        hang_up(writer, reset=reset)
        await gone(server, started=True)
        assert not service.payloads.statistics().bytes_in_use


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 10])
async def test_ends_engine_session_when_gone_mid_stream(
    tokens: int, reset: bool
) -> None:
    """Gone mid stream: the engine stops and frees the slot (fault-6)."""
    async with running("--sim-decode-step=0.01") as server:
        reader, writer = await post(server.port, ask(stream=True))
        for _ in range(tokens + 1):
            await reader.readuntil(b"\n\n")
        hang_up(writer, reset=reset)
        await gone(server, started=True)


@pytest.mark.parametrize("reset", [False, True])
async def test_ends_engine_session_when_gone_while_collected(reset: bool) -> None:
    """Gone while an answer that is not streamed is made: it is made no further."""
    async with running("--sim-decode-step=0.01") as server:
        service = server.service
        _, writer = await post(server.port, ask(stream=False))
        async with asyncio.timeout(120):
            while (await service.engine.status())["backend"]["steps"] < 5:
                pass
        hang_up(writer, reset=reset)
        await gone(server, started=True)


async def test_drops_request_without_the_rest_of_its_body() -> None:
    """Gone in the middle of the body: the engine never heard of it (fault-15)."""
    async with running() as server:
        whole = ask(stream=False)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(whole) + whole[:-9])
        await writer.drain()
        writer.close()
        now = server.service.sessions.statistics
        await server.until(lambda: now().outcomes["client_gone"])
        assert (await server.quiet())["backend"]["started"] == 0


async def test_counts_every_request_once_under_load() -> None:
    """Sixty requests, a third hung up at points spread over their life: all booked."""
    engine = make_engine("--sim-decode-step=0.002")
    async with running(engine=engine) as server, server.client() as client:

        async def finish(i: int) -> None:
            await client.chat.completions.create(
                model="sim",
                messages=user(f"{i}", png(200 + i, 200)),
                max_tokens=20,
                stream=bool(i % 2),
            )

        async def leave(i: int) -> None:
            reader, writer = await post(server.port, ask(stream=True))
            for _ in range(i % 7):
                await reader.readuntil(b"\n\n")
            hang_up(writer, reset=bool(i % 2))

        async def stream_whole(i: int) -> None:
            stream: Any = await client.chat.completions.create(
                model="sim", messages=user(f"{i}"), max_tokens=20, stream=True
            )
            async for _ in stream:
                pass

        jobs = [leave(i) for i in range(20)]
        jobs += [finish(2 * i) for i in range(20)]
        jobs += [stream_whole(i) for i in range(20)]
        await asyncio.gather(*jobs)
        await server.quiet()
        outcomes = server.service.sessions.statistics().outcomes
        assert outcomes["completed"] == 40
        # Whoever left before the server had read the request never was a session.
        assert outcomes["client_gone"] <= 20
        assert sum(outcomes.values()) == 40 + outcomes["client_gone"]
