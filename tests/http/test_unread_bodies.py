"""The bundled server and clients that leave while their body waits in line."""

from __future__ import annotations

import asyncio

import pytest
from http_kit import running

from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio
BODY = 4 * 2**20
# A sixteenth of them is room in the kernel: for the bodies of all four.
BYTES = 16 * 5 * BODY
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"


async def test_client_that_leaves_behind_its_body_frees_the_line() -> None:
    """Its body is not read, as another one has all the bytes for bodies."""
    settings = AppSettings(model="sim", body_bytes=BYTES)
    async with asyncio.timeout(120), running(settings=settings) as server:
        bodies = server.service.admission.gates[1]
        free = bodies.statistics().bytes
        assert free is not None
        lease = await bodies.admit(bytes=free)
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(HEAD % BODY + b"{" * BODY)
            writers.append(writer)
        await server.until(lambda: bodies.statistics().waiting == 4)
        for writer in writers:
            writer.transport.abort()
        await server.until(lambda: not bodies.statistics().waiting)
        assert bodies.statistics().refused == 0  # they left, and waited less
        lease.release()
        await server.quiet()
