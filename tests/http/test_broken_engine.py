"""Without an engine, each API refuses at once in its own format."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from http_kit import Server, make_engine, running, user

pytestmark = pytest.mark.asyncio
ASK = {"model": "sim", "max_tokens": 2, "messages": user("hi"), "input": "hi"}


async def asked(port: int, path: str, body: bytes | None) -> tuple[bytes, bytes]:
    """The head and the body of an answer; without *body*, to a head alone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = 10**7 if body is None else len(body)
    asking = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (
        path.encode(),
        length,
    )
    writer.write(asking + b"connection: close\r\n\r\n" + (body or b""))
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.transport.abort()
    return head, answer


async def breaking(server: Server) -> None:
    """Kill the engine, and wait for the verdict."""
    pid = server.service.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await server.until(lambda: server.service.engine.health == "broken")  # type: ignore[attr-defined]


@pytest.mark.parametrize("sent", ["body", "head alone"])
async def test_refuses_at_once_while_engine_is_broken(sent: str) -> None:
    """No body is read and no picture examined; ``/ready`` fails as well."""
    engine = make_engine(max_crashes=0, broken_for=60.0)
    async with asyncio.timeout(120), running(engine=engine) as server:
        await breaking(server)
        for stream in (False, True):
            body = json.dumps({**ASK, "stream": stream}).encode()
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                async with asyncio.timeout(9):  # a body has ten seconds
                    head, answer = await asked(
                        server.port, path, body if sent == "body" else None
                    )
                error = json.loads(answer)["error"]
                if path == "/v1/messages":
                    assert head.startswith(b"HTTP/1.1 529 ")
                    assert error["type"] == "overloaded_error"
                else:
                    assert head.startswith(b"HTTP/1.1 503 ")
                    assert error["code"] == "engine_lost"
                assert b"\r\nretry-after: " in head
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()
        statistics = server.service.sessions.statistics()
        assert statistics.opened == statistics.live == 0


async def test_names_the_remedy_without_lifespan() -> None:
    """Served with lifespan off there is no engine; each API and `/ready` say so."""
    async with (
        asyncio.timeout(120),
        running(lifespan="off", wait=False) as server,
    ):
        body = json.dumps(ASK).encode()
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            head, answer = await asked(server.port, path, body)
            assert head.startswith(b"HTTP/1.1 5")
            assert b"serve with lifespan on" in answer
            assert b"x-should-retry: false" in head
        assert await server.service.engine_status() is None
        for path in ("/ready", "/_lifecycle/status"):
            port = server.port if path == "/ready" else server.admin_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            get = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            writer.write(get.encode())
            answer = await reader.read()
            writer.close()
            assert not answer.startswith(b"HTTP/1.1 500 ")
            assert path != "/ready" or b"serve with lifespan on" in answer
