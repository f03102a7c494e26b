"""Requests of odd framing: what passes is what the client meant, or nothing does."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from asgi_kit import serving
from proxy_kit import PATIENCE, Peer, raw_upstream, read_response, running_proxy

sys.path.insert(0, str(Path(__file__).parent))

from framing import SETTINGS, Run, storm, upstream_of

from lifecycle_asgi.uvicorn_protocol import HeadersOnly
from lifecycle_tools.proxy import Upstream, create_app

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@contextlib.asynccontextmanager
async def proxy_of(url: str) -> AsyncIterator[int]:
    """Serve the proxy on this loop; yield its port."""
    app = create_app(Upstream(url), environment=SETTINGS)
    async with serving(app, http=HeadersOnly, log_level="critical") as port:
        yield port


@contextlib.asynccontextmanager
async def relay_of(url: str) -> AsyncIterator[int]:
    """Pass all bytes on, as a proxy does that reads no framing; yield its port."""
    target = int(url.rpartition(":")[2])
    tasks: set[Any] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        others, to_others = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, to_others), copy(others, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.wait(tasks)


async def fuzz(proxy: Any, *, seed: int, count: int) -> Run:
    """Send cases to a proxy on this loop."""
    run = Run(seed, count)
    async with asyncio.timeout(PATIENCE), upstream_of(run) as url, proxy(url) as port:
        await storm(run, port)
    return run


@pytest.mark.asyncio
async def test_passes_on_what_was_meant_or_nothing() -> None:
    """Two parsers of the upstream agree on each request, and on where it ends."""
    result = (await fuzz(proxy_of, seed=20_261_127, count=300)).result
    assert result.wrong == []
    assert result.cases == 300
    assert result.reached > 60
    assert result.answered > 60
    assert result.refused > 100


@pytest.mark.asyncio
async def test_sees_what_a_careless_proxy_passes_on() -> None:
    """A relay of bytes is found out at once."""
    wrong = (await fuzz(relay_of, seed=3, count=300)).result.wrong
    assert len(wrong) >= 20


@pytest.mark.asyncio
async def test_sees_two_framings_of_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy that sends a length beside chunks is found out."""
    stream = import_module("lifecycle_tools.proxy.exchange").RequestStream
    begin = stream.__init__

    def careless(self: Any, scope: Any, *rest: Any, **options: Any) -> None:
        if b"transfer-encoding" in dict(scope["headers"]):
            options["headers"] = [*options["headers"], (b"content-length", b"0")]
        begin(self, scope, *rest, **options)

    monkeypatch.setattr(stream, "__init__", careless)
    wrong = (await fuzz(proxy_of, seed=3, count=100)).result.wrong
    assert any("can't be present with Content-Length" in each for each in wrong), wrong


INNER = b"GET /b HTTP/1.1\r\nhost: a\r\n\r\n"
LENGTH = b"content-length: 28\r\n\r\n"
CHUNK = b"transfer-encoding: chunked\r\n\r\n1c\r\n"
OFFER = b"host: a\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n%b: Upgrade, HTTP2-Settings\r\n"
OFFERS = [OFFER % each for each in (b"connection", b"proxy-connection")]


@pytest.mark.parametrize("offer", OFFERS, ids=["connection", "old"])
@pytest.mark.parametrize("chunks", [False, True], ids=["length", "chunks"])
@pytest.mark.asyncio
async def test_reads_the_body_behind_an_offer(offer: bytes, chunks: bool) -> None:
    """httptools leaves it for another protocol, but takes it for requests when it is late."""
    sent = asyncio.Queue[bytes]()

    async def handle(peer: Peer) -> None:
        while head := await peer.read_head():
            sent.put_nowait(head)
            if b"POST" in head:
                sent.put_nowait(await peer.reader.readuntil(INNER))
                if chunks:
                    await peer.reader.readuntil(b"0\r\n\r\n")
            await peer.send(OK)

    async with (
        asyncio.timeout(PATIENCE),
        raw_upstream(handle) as (_, url),
        proxy_of(url) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /a HTTP/1.1\r\n" + offer + (CHUNK if chunks else LENGTH))
        await asyncio.sleep(0.05)  # so that it is late; in time, it is read as well
        writer.write(INNER + (b"\r\n0\r\n\r\n" if chunks else b""))
        writer.write(b"GET /c HTTP/1.1\r\n" + offer + b"\r\n")
        for _ in range(2):
            answer, _ = await read_response(reader)
            assert answer.split()[1] == b"200"
        writer.close()
        first, body, last = [sent.get_nowait() for _ in range(3)]
        assert sent.empty()
    assert first.startswith(b"POST /a ")
    assert body.endswith(INNER)
    assert last.startswith(b"GET /c ")
    for word in (b"upgrade", b"http2-settings"):
        assert word not in (first + last).lower()


@pytest.mark.asyncio
async def test_takes_nothing_behind_a_connect_for_a_request() -> None:
    """The connection is closed with the answer."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()

    async with (
        asyncio.timeout(PATIENCE),
        raw_upstream(handle) as (upstream, url),
        proxy_of(url) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT /a HTTP/1.1\r\nhost: a\r\n" + LENGTH)
        answer, _ = await read_response(reader)
        assert answer.split()[1] == b"400"
        with contextlib.suppress(ConnectionError):
            writer.write(INNER)
            assert await reader.read() == b""
        writer.close()
    assert upstream.connections == 0


@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/1.0", b" HTTP/2.0"])
@pytest.mark.asyncio
async def test_refuses_chunks_of_another_version(version: bytes) -> None:
    """Only HTTP/1.1 has them; a line without a version is that of HTTP/0.9."""
    sent = b"POST /a" + version + b"\r\nhost: a\r\n" + CHUNK + INNER + b"\r\n0\r\n\r\n"

    async def handle(peer: Peer) -> None:
        await peer.read_head()

    async with (
        asyncio.timeout(PATIENCE),
        raw_upstream(handle) as (upstream, url),
        proxy_of(url) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        head, _ = await read_response(reader)
        assert head.startswith(b"HTTP/1.1 400 ")
        writer.close()
    assert upstream.connections == 0


@pytest.mark.asyncio
async def test_cancels_a_request_whose_client_has_sent_another() -> None:
    """Both are ended when the client leaves, not the last one alone."""
    reached, left = asyncio.Event(), asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        reached.set()
        await peer.closed()
        left.set()

    async with (
        asyncio.timeout(PATIENCE),
        raw_upstream(handle) as (upstream, url),
        proxy_of(url) as port,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(2 * b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n")
        await reached.wait()  # both were read at once
        writer.transport.abort()
        await left.wait()
    assert upstream.connections == 1


HANDSHAKE = (
    b"GET /%b HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.mark.asyncio
async def test_answers_in_the_order_of_requests_before_a_websocket(
    tmp_path: Path,
) -> None:
    """A handshake behind a request that waits is none; frames before its answer end it."""
    reached, left = asyncio.Event(), asyncio.Event()
    waiting, may_answer = asyncio.Event(), asyncio.Event()

    async def handle(peer: Peer) -> None:
        if b"/silent" in await peer.read_head():
            reached.set()
            await peer.closed()
            left.set()
        else:
            waiting.set()
            await may_answer.wait()
            await peer.send(OK)

    async with (
        asyncio.timeout(PATIENCE),
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(b"GET /a HTTP/1.1\r\nhost: a\r\n\r\n" + HANDSHAKE % b"b")
        await waiting.wait()
        may_answer.set()
        for status in (b"200", b"501"):
            head, _ = await read_response(reader)
            assert head.split()[1] == status
        writer.close()
        reader, writer = await proxy.connect()
        writer.write(HANDSHAKE % b"silent")
        await reached.wait()
        writer.write(b"\xff" * 9)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await left.wait()
        writer.close()
        assert "Traceback" not in proxy.log()


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [(b"a", b"connection: host\r\n", b"200"), (b"a#b", b"", b"400")],
    ids=["named-host", "fragment"],
)
@pytest.mark.asyncio
async def test_sends_each_handshake_with_a_host_and_without_a_fragment(
    path: bytes, more: bytes, status: bytes, tmp_path: Path
) -> None:
    """No ``Connection`` takes the host away, and no path is read beyond its end."""
    sent = (HANDSHAKE % path).replace(b"\r\nhost: a\r\n", b"\r\nhost: a\r\n" + more)

    async def handle(peer: Peer) -> None:
        assert b"\r\nhost: a\r\n" in await peer.read_head()
        await peer.send(OK)

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        for request in (sent, sent.replace(b"upgrade: websocket\r\n", b"")):
            head, _ = await proxy.ask(request)
            # A fragment is dropped where there is no WebSocket.
            assert head.split()[1] == (status if request is sent else b"200")
            assert upstream.connections == (status == b"200") + (request is not sent)
