"""Our connection class under a user's uvicorn, with TLS."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from asgi_kit import serving
from certificates import certificate

from lifecycle_asgi import LifecycleMiddleware
from lifecycle_engine import ConnectionLimits, http_protocol

pytestmark = pytest.mark.asyncio
HEAD = b"POST /%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


class Digest:
    """Answers with the digest of what it was sent; `/endless` answers for ever."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        digest, more = hashlib.sha256(), True
        while more:
            message = await receive()
            digest.update(message["body"])
            more = message["more_body"]
        said = digest.hexdigest().encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while scope["path"] == "/endless":
                part = {"type": "http.response.body", "body": b"x" * 100_000}
                await send({**part, "more_body": True})
        finally:
            self.left.set()
        await send({"type": "http.response.body", "body": said})


class Site:
    """A server, and how to connect to it."""

    def __init__(self, app: Digest, port: int, trust: ssl.SSLContext) -> None:
        self.app, self.port, self.trust = app, port, trust

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust)


@pytest_asyncio.fixture
async def site(tmp_path: Any) -> AsyncIterator[Site]:
    """A server that drops in a third of a second who reads nothing."""
    app, path = Digest(), certificate(tmp_path, "127.0.0.1")
    settings = {
        "http": http_protocol(ConnectionLimits(reader=0.3)),
        "ssl_certfile": path,
        "ws": "none",
    }
    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(app), **settings) as port,
    ):
        yield Site(app, port, ssl.create_default_context(cafile=str(path)))


@pytest.mark.parametrize("size", [0, 5, 16384, 2**20, 3_000_001])
async def test_body_comes_as_it_was_sent(site: Site, size: int) -> None:
    """Whole and in order, however it is cut into records, twice on one connection."""
    body = random.Random(size).randbytes(size)
    reader, writer = await site.connect()
    for _ in range(2):
        writer.write(HEAD % (b"", size) + body)
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert hashlib.sha256(body).hexdigest().encode() in answer
    writer.transport.abort()


async def test_drops_a_client_that_reads_nothing(site: Site) -> None:
    """As without TLS."""
    _, writer = await site.connect()
    writer.transport.pause_reading()
    writer.write(HEAD % (b"endless", 0))
    assert await site.app.left.wait()
    writer.transport.abort()
