"""While no engine is to be had: everybody is told so at once, in their protocol."""

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
    """No body is waited for, no picture looked at; and the proxy is told, too."""
    engine = make_engine(max_crashes=0, broken_for=60.0)
    async with asyncio.timeout(60), running(engine=engine) as server:
        await breaking(server)
        for stream in (False, True):
            body = json.dumps({**ASK, "stream": stream}).encode()
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                async with asyncio.timeout(5):  # a body has ten seconds
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
