"""What one connection may do: how slowly, how much, how many, and what it may offer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from asgi_kit import serving
from http_kit import Server, make_engine, running
from uvicorn.server import ServerState

from lifecycle_asgi import LifecycleMiddleware
from lifecycle_engine import ConnectionLimits, http_protocol

pytestmark = pytest.mark.asyncio
QUICK = ConnectionLimits(
    head=0.3, rest=0.3, reader=0.3, head_bytes=2000, connections=20
)
OFFER = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
)
HELLO = b"POST /here?a=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n%s\r\nhello"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with what was read; `/endless` answers for ever, `/early` at once.

    `/long` is one message that no buffer of a system holds.
    """
    if scope["path"] == "/long":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 * 2**20)})
        return
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            part = {"type": "http.response.body", "body": b"x" * 100_000}
            await send({**part, "more_body": True})
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    names = sorted(name.decode() for name, _ in scope["headers"])
    document = [scope["method"], scope["path"], names, body.decode()]
    document.append(scope["query_string"].decode())
    answer = json.dumps(document).encode()
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": answer})


@contextlib.asynccontextmanager
async def echoing(limits: ConnectionLimits = QUICK) -> AsyncIterator[int]:
    """A server that echoes; yields its port."""
    http = http_protocol(limits)
    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(echo), http=http, ws="none") as port,
    ):
        yield port


class Peer:
    """A client that sends scripted bytes."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, *parts: bytes) -> None:
        """Send *parts*, each in a packet of its own."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.02)

    async def answer(self) -> tuple[int, Any]:
        """Read one answer that declares its length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        body = await self.reader.readexactly(length)
        return int(head.split()[1]), json.loads(body or b"null")

    async def rest(self) -> bytes:
        """Read until the server closes."""
        with contextlib.suppress(ConnectionResetError):
            return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def peer(port: int) -> AsyncIterator[Peer]:
    """A connection, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "said",
    [(), (b"\r\n",), (b"GET",), (b"GET / HTTP/1.1\r\nhost:",)],
    ids=["nothing", "blank", "a-method", "half-a-head"],
)
async def test_closes_a_connection_with_an_unfinished_head(said: Any) -> None:
    """A head has its time, from the connection on (fault-15, S7)."""
    async with echoing() as port, peer(port) as client:
        await client.say(*said)
        ends = await client.rest()
        assert ends[:12] == (b"HTTP/1.1 408" if said and said[0] > b"\r\n" else b"")


async def until_closed(client: Peer, part: bytes) -> None:
    """Send *part* again and again, until the server has closed."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with contextlib.suppress(ConnectionError):
        while not client.reader.at_eof():
            await client.say(part)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.reader.read(100)
            assert loop.time() - began < 4


@pytest.mark.parametrize("part", [b"x-a: b\r\n", b"\r\n"])
async def test_closes_a_connection_that_sends_byte_by_byte(part: bytes) -> None:
    """More of a head, or of nothing, buys no more time (fault-15)."""
    async with echoing() as port, peer(port) as client:
        await client.say(b"GET / HTTP/1.1\r\n" if part != b"\r\n" else b"")
        await until_closed(client, part)


async def test_closes_a_connection_that_is_slow_between_requests() -> None:
    """A second head has the same time as the first one (fault-15)."""
    async with echoing() as port, peer(port) as client:
        await client.say(HELLO % b"")
        assert (await client.answer())[0] == 200
        await client.say(b"POST / HT")
        assert (await client.rest()).startswith(b"HTTP/1.1 408")


async def test_closes_a_connection_that_sends_for_ever_after_an_answer() -> None:
    """A response that is not read any more is not waited for (fault-15)."""
    async with echoing() as port, peer(port) as client:
        await client.say(
            b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\nx"
        )
        assert (await client.answer())[0] == 200
        await until_closed(client, b"x")


async def test_gives_time_to_a_request_in_service() -> None:
    """The time of a head is none of a body's: the application looks after that."""
    async with echoing() as port, peer(port) as client:
        await client.say((HELLO % b"")[:-2])
        await asyncio.sleep(0.6)
        await client.say(b"lo")
        assert (await client.answer())[1][3] == "hello"


@pytest.mark.parametrize("parts", [1, 5])
async def test_refuses_long_head(parts: int) -> None:
    """A head that is too long is refused before it is complete (fault-16)."""
    async with echoing(ConnectionLimits(head_bytes=2000)) as port, peer(port) as client:
        head = b"GET / HTTP/1.1\r\nx-a: " + b"x" * 2001
        size = len(head) // parts + 1
        await client.say(*(head[at : at + size] for at in range(0, len(head), size)))
        assert (await client.rest()).startswith(b"HTTP/1.1 431")


async def test_counts_no_body_as_head() -> None:
    """A body longer than any head, in one packet with the next head, is fine."""
    async with echoing() as port, peer(port) as client:
        body = b"y" * 5000
        whole = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + body
        await client.say(whole + b"GET / HTTP/1.1\r\n")
        await client.say(b"host: x\r\n\r\n")
        assert (await client.answer())[1][3] == body.decode()
        assert (await client.answer())[1][0] == "GET"


async def test_drops_a_client_that_reads_nothing() -> None:
    """A client that takes nothing of its answer is gone after a while (fault-13)."""
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await echo(scope, receive, send)
        finally:
            gone.set()

    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(app), http=http_protocol(QUICK)) as port,
    ):
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            await gone.wait()


async def read_slowly(port: int, size: int, *, times: int) -> None:
    """Read so much of a long answer now and then; raises where it is cut."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        # Small, so that what was read is soon what the server has got rid of.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(times):
            await asyncio.sleep(0.1)
            left = size
            while left > 0:
                part = await loop.sock_recv(client, left)
                if not part:
                    raise ConnectionResetError
                left -= len(part)


async def test_lets_slow_reader_read() -> None:
    """A client that reads 64 KiB in time is served on, however much remains."""
    limits = ConnectionLimits(reader=1.0)
    async with echoing(limits) as port:
        await read_slowly(port, 200_000, times=40)


async def test_has_few_enough_attributes_to_share_their_names() -> None:
    """CPython gives each object with over thirty attributes its own dict, of 1 KiB."""
    config = uvicorn.Config(echo, ws="none")
    config.load()
    protocol: Any = http_protocol()
    made = protocol(config=config, server_state=ServerState(), app_state={})
    assert len(vars(made._protocol)) <= 30


async def test_refuses_one_connection_too_many() -> None:
    """Beyond the limit it is 503 at once; connected clients are still served (S7)."""
    async with echoing(ConnectionLimits(connections=20)) as port:
        async with contextlib.AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(peer(port)) for _ in range(20)]
            async with peer(port) as late:
                answer = await late.rest()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1\r\n" in answer
            await idle[0].say(HELLO % b"")
            assert (await idle[0].answer())[0] == 200
        async with asyncio.timeout(120):  # they have left
            while True:
                async with peer(port) as late:
                    await late.say(HELLO % b"connection: close\r\n")
                    if (await late.rest()).startswith(b"HTTP/1.1 200"):
                        break


@pytest.mark.parametrize(
    "cuts", [(), (40,), (-5,), (-3,), (40, -6, -2)], ids=lambda cuts: str(len(cuts))
)
async def test_ignores_offers_of_another_protocol(cuts: tuple[int, ...]) -> None:
    """`Upgrade: h2c` with a body is an ordinary request, whatever packets it is in."""
    whole = HELLO % OFFER
    ends = [0, *(cut % len(whole) for cut in cuts), len(whole)]
    parts = [whole[a:b] for a, b in itertools.pairwise(ends)]
    async with echoing() as port, peer(port) as client:
        for _ in range(2):  # and the connection goes on
            await client.say(*parts)
            status, document = await client.answer()
            assert status == 200
            assert document == [
                "POST",
                "/here",
                ["content-length", "host"],
                "hello",
                "a=1",
            ]


async def test_ignores_offers_in_a_row() -> None:
    """Requests with an offer may stand one behind another, chunked or without body."""
    chunked = b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + OFFER
    chunked += b"\r\n5\r\nhello\r\n0\r\n\r\n"
    get = b"GET /g HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, upgrade\r\n"
    get += b"upgrade: websocket\r\n\r\n"
    async with echoing() as port, peer(port) as client:
        await client.say((HELLO % OFFER) + get + chunked + (HELLO % b""))
        seen = [(await client.answer())[1] for _ in range(4)]
    assert [each[1] for each in seen] == ["/here", "/g", "/c", "/here"]
    assert [each[3] for each in seen] == ["hello", "", "hello", "hello"]
    assert seen[1][2] == ["connection", "host", "upgrade"]  # of a WebSocket


async def test_refuses_connect() -> None:
    """This is no proxy."""
    async with echoing() as port, peer(port) as client:
        await client.say(b"CONNECT here:80 HTTP/1.1\r\nhost: here:80\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("protocol", ["ours", "httptools"])
async def test_hears_of_pipelined_requests_under_uvicorn_of_ones_own(
    protocol: str,
) -> None:
    """`http_protocol` hears who leaves with requests in the pipe (fault-14)."""
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    http = http_protocol() if protocol == "ours" else "httptools"
    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(app), http=http, lifespan="off") as port,
    ):
        async with peer(port) as client:
            await client.say(HELLO % b"", HELLO % b"")
        with contextlib.suppress(TimeoutError):
            # An application that has not asked for its body has half a second.
            async with asyncio.timeout(60 if protocol == "ours" else 1):
                await ended.wait()
        assert ended.is_set() == (protocol == "ours")


async def test_serves_whole_application_under_uvicorn_of_ones_own() -> None:
    """`create_app` with `http_protocol` answers an offer of HTTP/2."""
    async with running(engine=make_engine(), http=http_protocol()) as server:
        await _answers_offer(server)


async def _answers_offer(server: Server) -> None:
    body = b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"a"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + OFFER
    async with peer(server.port) as client:
        await client.say(head + b"content-length: %d\r\n\r\n" % len(body), body)
        status, document = await client.answer()
    assert (status, document["object"]) == (200, "chat.completion")
