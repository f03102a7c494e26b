"""What stands between the parts of a body and behind it, and what is no HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import select
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgi_kit import ANNOUNCES_CLOSE, serving
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lifecycle_asgi import LifecycleMiddleware
from lifecycle_engine import ConnectionLimits, http_protocol

pytestmark = pytest.mark.asyncio
LIMITS = ConnectionLimits(head_bytes=2000)
HEAD = b"POST /%b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b"5\r\nhello\r\n0\r\n\r\n"
MEGABYTES = 8
JUNK = [
    b"\0",
    b"POST / HTTP/1.1\r\nno field\r\n\r\n",
    b"POST http://nowhere HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /\xc3\xa4 HTTP/1.1\r\nhost: x\r\n\r\n",
]


class Listener:
    """An application that tells what it was asked, and notes who left."""

    def __init__(self) -> None:
        self.gone, self.asked, self.go = (asyncio.Event() for _ in range(3))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, at ``/beside`` before the body is there, at ``/slow`` on a signal."""
        start = {"type": "http.response.start", "status": 200, "headers": []}
        beside = scope["path"] == "/beside"
        if beside:
            await send(start)
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            more = message["more_body"]
        names = sorted(name.decode() for name, _ in scope["headers"])
        self.asked.set()
        if scope["path"] == "/slow":
            await self.go.wait()
        if not beside:
            await send(start)
        await send({"type": "http.response.body", "body": json.dumps(names).encode()})


@contextlib.asynccontextmanager
async def talking(
    *parts: bytes,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Listener]]:
    """A client that has sent *parts*, and the application that it asks."""
    app = Listener()
    async with (
        asyncio.timeout(120),
        serving(
            LifecycleMiddleware(app), http=http_protocol(LIMITS), ws="none"
        ) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in parts:
                writer.write(part)
            yield reader, writer, app
        finally:
            writer.transport.abort()


async def test_believes_no_field_behind_a_body() -> None:
    """Proxies ignore trailers, so these may not name a client or a key."""
    trailers = b"x-forwarded-for: 10.0.0.1\r\nauthorization: somebody\r\n\r\n"
    sent = HEAD % b"" + BODY[:-2] + trailers
    async with talking(sent) as (reader, _, _app):
        answer = await reader.readuntil(b"]")
        assert json.loads(answer[answer.index(b"[") :]) == ["host", "transfer-encoding"]


@pytest.mark.parametrize(
    "endless",
    [(b"0\r\nx: ", b"y" * 500), (b"0\r\n", b"x: y\r\n" * 80), (b"1;x=", b"y" * 500)],
    ids=["a-trailer", "trailers", "an-extension"],
)
async def test_bounds_what_is_no_body(endless: tuple[bytes, bytes]) -> None:
    """What is neither head nor body is bounded as a head is (fault-16)."""
    begun, more = endless
    async with talking(HEAD % b"", b"5\r\nhello\r\n" + begun) as (reader, writer, app):
        for _ in range(20):
            writer.write(more)
            await writer.drain()
            await asyncio.sleep(0.005)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        await app.gone.wait()


async def test_counts_no_body_as_what_stands_between_its_parts() -> None:
    """A body of many parts may be as long as it likes."""
    part = b"5\r\nhello\r\n"
    async with talking(HEAD % b"", *[part] * 2000, BODY) as (reader, _, _app):
        assert (await reader.readuntil(b"]")).startswith(b"HTTP/1.1 200 ")


async def test_counts_no_body_behind_a_longer_one_as_a_head() -> None:
    """What is read with a head is body also where the last one had more of it."""
    head = b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    async with talking(head % (b"", 5000), bytes(5000)) as (reader, writer, _app):
        await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(head % (b"beside", 4000) + bytes(LIMITS.head_bytes))
        await reader.readuntil(b"\r\na\r\n")  # so that this much was read
        writer.write(bytes(4000 - LIMITS.head_bytes))
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("junk", [*JUNK, HEAD % b"" + b"no chunk\r\n"])
@pytest.mark.parametrize("requests", [1, 3])
async def test_answers_what_stands_before_junk(requests: int, junk: bytes) -> None:
    """An extra byte, as of a C string, loses no answer and ends the connection."""
    sent = (HEAD % b"" + BODY) * requests
    async with talking(sent + junk, junk) as (reader, _, app):
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 ") == answers.count(b'"host"') == requests
        assert b"HTTP/1.1 400 " not in answers
        assert answers.count(b"\r\nconnection: close\r\n") == ANNOUNCES_CLOSE
        assert not app.gone.is_set()


async def test_answers_a_client_that_is_still_sending_junk() -> None:
    """No reset takes the answer from a body that is longer than it was said to be."""
    async with talking(HEAD % b"" + BODY + b"\0") as (reader, writer, _app):
        for _ in range(MEGABYTES):
            writer.write(bytes(2**20))
            await writer.drain()
        assert (await reader.read()).endswith(b"]\r\n0\r\n\r\n")


async def test_keeps_nothing_of_a_head_without_end() -> None:
    """Also behind a long-running request, whose answer is not lost."""
    begun = HEAD % b"slow" + BODY + b"GET / HTTP/1.1\r\n"
    async with talking(begun) as (reader, writer, app):
        await app.asked.wait()
        for _ in range(2000):
            writer.write(b"x: " + b"y" * 45 + b"\r\n")
            await writer.drain()
        (here,) = (
            it
            for it in gc.get_objects()
            if issubclass(type(it), HttpToolsProtocol) and not it.transport.is_closing()
        )
        unread = here.transport.get_extra_info("socket")
        async with asyncio.timeout(120):
            while (
                writer.transport.get_write_buffer_size()
                or select.select([unread], [], [], 0)[0]
            ):
                await asyncio.sleep(0)
        assert len(here.headers) < 1000  # of one look at the socket
        app.go.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_writes_no_refusal_into_an_answer() -> None:
    """Where an answer has begun, what is wrong with its request ends it with a cut."""
    async with talking(HEAD % b"beside") as (reader, writer, app):
        begun = await reader.readuntil(b"\r\na\r\n")
        writer.write(b"no chunk\r\n")
        assert begun.startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""
        await app.gone.wait()


@pytest.mark.parametrize("bad", [*JUNK, HEAD % b"" + b"no chunk\r\n"])
async def test_reports_what_is_wrong_to_a_client_that_is_still_sending(
    bad: bytes,
) -> None:
    """It is heard out, not reset: it may send all before it reads why (RFC 9112, 9.6)."""
    async with talking(bad) as (reader, writer, app):
        for _ in range(MEGABYTES):
            writer.write(bytes(2**20))
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        if bad.startswith(HEAD % b""):
            await app.gone.wait()


async def test_invites_no_body_behind_a_refusal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A client with ``Expect: 100-continue`` that sends garbage causes no error log."""
    head = HEAD[:-2] % b"" + b"expect: 100-continue\r\n\r\n"
    async with talking(head + b"no chunk\r\n") as (reader, _, app):
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        await app.gone.wait()
    assert "Exception in ASGI application" not in capsys.readouterr().err
