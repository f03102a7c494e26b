"""HTTP/1.0, and several requests at once on one connection."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from asgi_kit import ANNOUNCES_CLOSE, serving
from http_kit import running, user
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lifecycle_engine import http_protocol

pytestmark = pytest.mark.asyncio
ASK = {"model": "sim", "max_tokens": 5, "messages": user("go")}


async def heard(port: int, *said: bytes) -> tuple[list[str], bytes]:
    """Send, and read until the server closes: the lines of the head, and the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in said:
        writer.write(part)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.decode().lower().split("\r\n"), rest


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_http_1_0_without_chunks(stream: bool) -> None:
    """A client of HTTP/1.0 knows none: a stream ends where the connection does."""
    body = json.dumps({**ASK, "stream": stream}).encode()
    request = "POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\nconnection: keep-alive"
    head = f"{request}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with asyncio.timeout(120), running(http=http_protocol()) as server:
        lines, rest = await heard(server.port, head, body)
        assert lines[0].endswith(" 200 ok")
        assert ("connection: close" in lines) is ANNOUNCES_CLOSE
        assert not any(line.startswith("transfer-encoding") for line in lines)
        assert any(line.startswith("content-length") for line in lines) is not stream
        if stream:
            events = rest.decode().strip().split("\n\n")
            assert all(event.startswith("data: ") for event in events)
            assert events[-1] == "data: [DONE]"
        else:
            assert json.loads(rest)["usage"]["completion_tokens"] == 5
        await server.quiet()


async def test_tells_http_1_0_of_nothing_but_the_answer() -> None:
    """An answer before the answer is news to its clients (RFC 9110, 10.1.1)."""
    body = json.dumps(ASK).encode()
    request = "POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\nexpect: 100-continue"
    head = f"{request}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with asyncio.timeout(120), running(http=http_protocol()) as server:
        lines, _ = await heard(server.port, head, body)
        assert lines[0].endswith(" 200 ok")
        await server.quiet()


async def test_keeps_one_body_behind_the_one_that_is_read() -> None:
    """Of what is piped no more is read: no gate knows of it yet (N12)."""
    begun, go = asyncio.Event(), asyncio.Event()
    sizes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        sizes.append(size)
        await go.wait()
        length = (b"content-length", b"0")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b""})

    whole = (
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b"x" * 60_000
    )
    async with (
        asyncio.timeout(120),
        serving(app, http=http_protocol(), ws="none", lifespan="off") as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(9):
            writer.write(whole)
        writer.write(whole.replace(b"host: x", b"host: x\r\nconnection: close"))
        await begun.wait()
        await asyncio.sleep(0.3)
        # Those of other tests, if any are left, have nothing in their pipelines.
        (here,) = (
            it
            for it in gc.get_objects()
            if issubclass(type(it), HttpToolsProtocol) and it.pipeline
        )
        kept = [len(cycle.body) for cycle, _ in here.pipeline]
        # What one look at the socket brings is all there at once.
        assert sum(kept) < 300_000
        go.set()
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 ") == 10
        assert sizes == [60_000] * 10
        writer.close()
