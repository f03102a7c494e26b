"""Heads that proxies could read in another way, and clients that only finish sending."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from asgi_kit import serving

from lifecycle_asgi import LifecycleMiddleware
from lifecycle_engine import ConnectionLimits, http_protocol

pytestmark = pytest.mark.asyncio


class Slow:
    """Answers once it is released, unless its client has left."""

    def __init__(self) -> None:
        self.asked, self.go, self.left = (asyncio.Event() for _ in range(3))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with two bytes."""
        self.asked.set()
        try:
            if scope["path"] == "/slow":
                await self.go.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    """A server over the bundled protocol."""
    app = LifecycleMiddleware(Slow())
    async with serving(app, http=http_protocol(), ws="none") as port:
        yield port


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET / HTTP/1.1\r\nhost: a\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhOST: b\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n", b"200"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n", b"400"),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n", b"200"),
        (b"GET / HTTP/0.9\r\n", b"400"),
        (b"GET /\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nhost: a\r\n", b"400"),
    ],
)
async def test_answers_only_heads_with_one_meaning(
    port: int, head: bytes, expected: bytes
) -> None:
    """Any other gets a 400, and its connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b"0\r\n\r\n" if b"chunked" in head else b""
    writer.write(head + b"connection: close\r\n\r\n" + body)
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert answer.split()[1] == expected
    writer.close()


@pytest.mark.parametrize("answered", [True, False])
async def test_answers_half_closed_clients_by_option(*, answered: bool) -> None:
    """A client that has finished sending counts as gone, unless it is to be answered."""
    app = Slow()
    protocol = http_protocol(ConnectionLimits(half_closed=answered))
    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(app), http=protocol, ws="none") as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n")
        await app.asked.wait()
        writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
        if answered:
            await asyncio.sleep(0.2)  # time to see the end of what is sent
        else:
            await app.left.wait()
        app.go.set()
        answer = await reader.read()  # to the end: the connection is not kept alive
        assert answer.endswith(b"ok") is answered
        writer.close()


async def test_half_closed_client_gets_an_answer_that_is_ready_at_once() -> None:
    """Written in the turn of the event loop in which the end is read."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    protocol = http_protocol(ConnectionLimits(half_closed=True))
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 70000\r\n\r\n"
    answers = []
    async with asyncio.timeout(120), serving(app, http=protocol, ws="none") as port:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + bytes(70_000))
            writer.write_eof()
            answers.append((await reader.read())[-2:])
            writer.close()
    assert answers == [b"ok"] * 20
