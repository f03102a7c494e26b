"""WebSockets pass as they are, in bounded memory, and both sides end together."""

import asyncio
import contextlib
import os
import time
from pkgutil import resolve_name

import pytest
from asgi_kit import serving
from proxy_kit import PATIENCE, Peer, raw_upstream, running_proxy
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Close, Frame, Opcode

from lifecycle_tools.proxy import Proxy, Upstream

BOUNDED = resolve_name("lifecycle_tools.proxy.sockets:BoundedSocket")
MEBIBYTE = 2**20


@contextlib.asynccontextmanager
async def server(handler, **options):
    """Serve WebSockets by *handler*; yield the URL for the proxy."""
    listening = await serve(handler, "127.0.0.1", 0, compression=None, **options)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def client(proxy, path="/v1/realtime", **options):
    url = f"ws://127.0.0.1:{proxy.port}{path}"
    return connect(url, proxy=None, open_timeout=PATIENCE, **options)


@contextlib.asynccontextmanager
async def connected(proxy):
    """Yield a reader and a writer of a WebSocket whose frames the test makes."""
    reader, writer = await proxy.connect()
    try:
        writer.write(handshake())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        yield reader, writer
    finally:
        writer.transport.abort()


async def echo(socket):
    async for message in socket:
        await socket.send(message)


async def refusal(proxy, **options):
    """Return the response that refuses a handshake."""
    with pytest.raises(InvalidStatus) as caught:
        async with client(proxy, **options):
            pass
    return caught.value.response


@pytest.mark.asyncio
async def test_passes_messages_both_ways(tmp_path):
    """Text, binary, empty, fragmented and large ones arrive as they were sent."""
    async with (
        server(echo, max_size=None) as url,
        running_proxy(url, tmp_path) as proxy,
    ):
        async with client(proxy, max_size=None) as socket:
            for sent in ("text ü", b"\0\xff", "", b"", "x" * 8 * MEBIBYTE):
                await socket.send(sent)
                assert await asyncio.wait_for(socket.recv(), PATIENCE) == sent
            await socket.send(["one ", "two"])
            assert await asyncio.wait_for(socket.recv(), PATIENCE) == "one two"
            await asyncio.wait_for(await socket.ping(), PATIENCE)


@pytest.mark.asyncio
async def test_joins_fragments_of_the_upstream(tmp_path):
    """A message in three frames is one, with a ping of the upstream between them."""
    pongs = []

    async def handle(socket):
        await socket.send(["ü"[:1], "a", "b"])
        await asyncio.wait_for(await socket.ping(b"x"), PATIENCE)
        pongs.append(True)
        await socket.send([b"1", b"2"])
        await socket.wait_closed()

    async with server(handle) as url, running_proxy(url, tmp_path) as proxy:
        async with client(proxy) as socket:
            assert await asyncio.wait_for(socket.recv(), PATIENCE) == "üab"
            assert await asyncio.wait_for(socket.recv(), PATIENCE) == b"12"
    assert pongs == [True]


@pytest.mark.asyncio
async def test_passes_the_handshake_on(tmp_path):
    """Target, subprotocol and headers pass by the rules of other requests."""
    heads = []

    async def handle(socket):
        heads.append(socket.request)
        await socket.wait_closed()

    def add_header(socket, request, response):
        response.headers["Set-Cookie"] = "a=1"
        response.headers["Keep-Alive"] = "5"

    options = {"subprotocols": ["b", "c"], "process_response": add_header}
    sent = {
        "authorization": "Bearer k",
        "x-forwarded-for": "10.0.0.9",
        "x-real-ip": "10.0.0.9",
        "forwarded": "for=10.0.0.9",
        "keep-alive": "5",
        "origin": "http://a",
    }
    async with server(handle, **options) as url, running_proxy(url, tmp_path) as proxy:
        offers = {"subprotocols": ["a", "b"], "additional_headers": sent}
        async with client(proxy, "/v1/a%2Fb?m=%20&m=2", **offers) as socket:
            assert socket.subprotocol == "b"
            assert socket.response.headers.get_all("set-cookie") == ["a=1"]
            assert "keep-alive" not in socket.response.headers
    (request,) = heads
    assert request.path == "/v1/a%2Fb?m=%20&m=2"
    found = {name.lower(): value for name, value in request.headers.raw_items()}
    assert found["sec-websocket-protocol"].replace(" ", "") == "a,b"
    assert found["host"] == f"127.0.0.1:{proxy.port}"
    assert found["authorization"] == "Bearer k"
    assert found["origin"] == "http://a"
    assert found["x-forwarded-for"] == "127.0.0.1"
    assert found["x-forwarded-proto"] == "http"
    assert not {"x-real-ip", "forwarded", "keep-alive"} & set(found)
    assert "sec-websocket-extensions" not in found
    assert "WebSocket /v1/a%2Fb, " in proxy.log()
    assert "m=2" not in proxy.log()  # clients send keys in queries


@pytest.mark.parametrize(
    ("code", "reason", "seen"),
    [(1000, "", 1000), (4321, "until then ü", 4321), (None, "", 1005)],
)
@pytest.mark.asyncio
async def test_passes_the_close_of_a_client_on(code, reason, seen, tmp_path):
    """The upstream is told code and reason."""
    closed = asyncio.Queue()

    async def handle(socket):
        await socket.wait_closed()
        closed.put_nowait((socket.close_code, socket.close_reason))

    async with server(handle) as url, running_proxy(url, tmp_path) as proxy:
        async with client(proxy) as socket:
            socket.protocol.send_close(*(() if code is None else (code, reason)))
            socket.send_data()
            await asyncio.wait_for(socket.wait_closed(), PATIENCE)
        assert await asyncio.wait_for(closed.get(), PATIENCE) == (seen, reason)


@pytest.mark.parametrize("code", [1000, 1008, 4321])
@pytest.mark.asyncio
async def test_passes_the_close_of_the_upstream_on(code, tmp_path):
    """The client is told code and reason, behind all messages."""
    ended = asyncio.Queue()

    async def handle(socket):
        for number in range(50):
            await socket.send(str(number))
        await socket.close(code, "why ü")
        ended.put_nowait(socket.protocol.close_rcvd.code)

    async with server(handle) as url, running_proxy(url, tmp_path) as proxy:
        async with client(proxy) as socket:
            found = []
            with pytest.raises(ConnectionClosed):
                while True:
                    found.append(await asyncio.wait_for(socket.recv(), PATIENCE))
            assert found == [str(number) for number in range(50)]
            assert (socket.close_code, socket.close_reason) == (code, "why ü")
        assert await asyncio.wait_for(ended.get(), PATIENCE) == code


@pytest.mark.asyncio
async def test_closes_upstream_soon_after_client_left(tmp_path, record_property):
    """A client that resets its connection ends the upstream's within 50 ms."""
    closed = asyncio.Queue()

    async def handle(socket):
        await socket.send("here")
        await socket.wait_closed()
        closed.put_nowait((time.monotonic(), socket.close_code))

    async with server(handle) as url, running_proxy(url, tmp_path) as proxy:
        before, took = proxy.descriptors(), []
        for _ in range(20):
            async with client(proxy) as socket:
                await socket.recv()
                left = time.monotonic()
                socket.transport.abort()
                at, code = await asyncio.wait_for(closed.get(), PATIENCE)
                assert code == 1006  # no close that the client has not sent
                took.append(at - left)
        record_property("p50_ms", 1000 * sorted(took)[10])
        # As for requests: ten times the promise, as another process may be in the way.
        assert sorted(took)[10] < 0.5
        assert await proxy.settled(before) <= before


@pytest.mark.asyncio
async def test_closes_the_client_soon_after_upstream_was_lost(tmp_path):
    """An upstream that dies is a 1014, bad gateway, at once."""
    lost = asyncio.Queue()

    async def handle(socket):
        await socket.recv()
        lost.put_nowait(time.monotonic())
        socket.transport.abort()

    async with server(handle) as url, running_proxy(url, tmp_path) as proxy:
        took = []
        for _ in range(20):
            async with client(proxy) as socket:
                await socket.send("die")
                with pytest.raises(ConnectionClosed):
                    await asyncio.wait_for(socket.recv(), PATIENCE)
                took.append(time.monotonic() - await lost.get())
                assert socket.close_code == 1014
                assert "upstream" in socket.close_reason
        assert sorted(took)[10] < 0.5


@pytest.mark.asyncio
async def test_opens_nothing_for_a_client_that_leaves_its_handshake(tmp_path):
    """While the upstream thinks about the handshake, a client that leaves ends it."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        upstream.reached.set()
        upstream.closed_at.put_nowait(await peer.closed())

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        _, writer = await proxy.connect()
        writer.write(handshake())
        await asyncio.wait_for(upstream.reached.wait(), PATIENCE)
        left = time.monotonic()
        writer.transport.abort()
        at = await asyncio.wait_for(upstream.closed_at.get(), PATIENCE)
        assert at - left < 5
        assert "Traceback" not in proxy.log()


def handshake(target=b"/", *lines):
    return b"\r\n".join(
        [
            b"GET " + target + b" HTTP/1.1",
            *(lines or (b"host: a",)),
            b"connection: Upgrade",
            b"upgrade: websocket",
            b"sec-websocket-version: 13",
            b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
            b"\r\n",
        ]
    )


UNAUTHORISED = (
    b"HTTP/1.1 401 No\r\nwww-authenticate: Bearer\r\nkeep-alive: 5\r\n"
    b"content-length: 5\r\n\r\nno ke"
)


@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (UNAUTHORISED, 401, b"no ke"),
        (b"HTTP/1.1 403 No\r\n\r\nto the end", 403, b"to the end"),
        (
            b"HTTP/1.1 302 Go\r\nlocation: http://b/\r\ncontent-length: 0\r\n\r\n",
            302,
            b"",
        ),
        (
            b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n",
            503,
            b"no",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 101 Go\r\nupgrade: websocket\r\n\r\n", 502, b"opens no WebSocket"),
        (b"SSH-2.0\r\n\r\n", 502, b"opens no WebSocket"),
        (b"", 502, b"closed the connection"),
    ],
)
@pytest.mark.asyncio
async def test_passes_a_refused_handshake_on(sent, status, part, tmp_path):
    """The client gets the upstream's response, and 502 for what is none."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(sent)

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        head, body = await proxy.ask(handshake())
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert part in body
        assert b"keep-alive" not in head
        assert (b"\r\nwww-authenticate: Bearer\r\n" in head) == (status == 401)
        assert (b"\r\nlocation: http://b/\r\n" in head) == (status == 302)


@pytest.mark.asyncio
async def test_answers_handshakes_that_the_upstream_does_not(tmp_path):
    """No upstream is a 502, a silent one a 504, and a full pool a 503."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        upstream.reached.set()
        await peer.closed()

    async with running_proxy("http://127.0.0.1:1", tmp_path) as proxy:
        assert (await refusal(proxy)).status_code == 502
    options = ("--max-connections", "1", "--connect-timeout", "0.2")
    async with raw_upstream(handle) as (upstream, url):
        async with running_proxy(url, tmp_path, "--head-timeout", "0.2") as proxy:
            assert (await refusal(proxy)).status_code == 504
        upstream.reached.clear()
        async with running_proxy(url, tmp_path, *options) as proxy:
            _, writer = await proxy.connect()
            writer.write(handshake())
            await asyncio.wait_for(upstream.reached.wait(), PATIENCE)
            response = await refusal(proxy)
            assert response.status_code == 503
            assert "retry-after" in response.headers
            writer.close()


@pytest.mark.asyncio
async def test_stops_reading_upstream_when_client_is_slow(tmp_path):
    """Messages for a client that reads nothing stay upstream."""
    sent = 0
    blocked = asyncio.Event()

    async def handle(socket):
        nonlocal sent
        piece = b"x" * 2**18
        try:
            while sent < 2**29:
                async with asyncio.timeout(3):
                    await socket.send(piece)
                sent += len(piece)
        except TimeoutError:
            blocked.set()

    async with server(handle) as url, running_proxy(url, tmp_path) as proxy:
        before = proxy.resident()
        _, writer = await proxy.connect()
        writer.write(handshake())
        writer.transport.pause_reading()
        await asyncio.wait_for(blocked.wait(), 100)
        assert sent < 2**26
        assert proxy.resident() - before < 2**24
        writer.transport.abort()


@pytest.mark.asyncio
async def test_stops_reading_a_client_when_upstream_is_slow(tmp_path):
    """Messages for an upstream that reads nothing stay with the client."""
    done = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(accept_of(peer.head))
        peer.writer.transport.pause_reading()
        await done.wait()

    sent, piece = 0, b"x" * 2**18
    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        before = proxy.resident()
        async with client(proxy, close_timeout=0) as socket:
            with contextlib.suppress(TimeoutError):
                while sent < 2**29:
                    async with asyncio.timeout(3):
                        await socket.send(piece)
                    sent += len(piece)
            assert sent < 2**26
            assert proxy.resident() - before < 2**24
            socket.transport.abort()
            done.set()


def accept_of(head):
    from websockets.utils import accept_key

    (key,) = (
        line.split(b": ")[1]
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"sec-websocket-key: ")
    )
    return (
        b"HTTP/1.1 101 Go\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: " + accept_key(key.decode()).encode() + b"\r\n\r\n"
    )


@pytest.mark.asyncio
async def test_reads_on_while_it_cannot_answer_a_ping(tmp_path):
    """An upstream that pings, and sends before it reads, does not stop for ever."""
    size, got = 8 * MEBIBYTE, asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(accept_of(peer.head))
        peer.writer.transport.pause_reading()
        await asyncio.sleep(1)  # the proxy now waits to send
        await peer.send(Frame(Opcode.PING, b"x").serialize(mask=False))
        for _ in range(64):
            piece = Frame(Opcode.BINARY, b"x" * 2**18).serialize(mask=False)
            await peer.send(piece)
        await got.wait()

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        async with client(proxy, close_timeout=0) as socket:
            sending = asyncio.create_task(socket.send(os.urandom(size)))
            for _ in range(64):
                await asyncio.wait_for(socket.recv(), 60)
            got.set()
            socket.transport.abort()
            with contextlib.suppress(ConnectionClosed):
                await sending


@pytest.mark.parametrize("from_client", [True, False])
@pytest.mark.asyncio
async def test_limits_the_size_of_a_message(from_client, tmp_path):
    """A larger message ends the WebSocket with 1009, on both sides."""
    codes = asyncio.Queue()

    async def handle(socket):
        with contextlib.suppress(ConnectionClosed):
            await socket.send(b"x" * 1000)
            await socket.send(await socket.recv())
            await socket.send(b"x" * (1000 if from_client else 1001))
            await socket.recv()
        await socket.wait_closed()
        codes.put_nowait(socket.close_code)

    async with (
        server(handle) as url,
        running_proxy(url, tmp_path, "--max-message", "1000") as proxy,
    ):
        async with client(proxy) as socket:
            assert len(await asyncio.wait_for(socket.recv(), PATIENCE)) == 1000
            await socket.send(b"x" * 1000)
            assert len(await asyncio.wait_for(socket.recv(), PATIENCE)) == 1000
            if from_client:
                await socket.recv()
                await socket.send(b"x" * 1001)
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(socket.recv(), PATIENCE)
            assert socket.close_code == 1009
        assert await asyncio.wait_for(codes.get(), PATIENCE) == 1009


@pytest.mark.parametrize(
    "frame",
    [b"\x81\x01\xff", b"\xf1\x01a", b"\x80\x01a", b"\x81\x7e\xff"],
    ids=["no utf-8", "reserved bits", "continues nothing", "cut"],
)
@pytest.mark.asyncio
async def test_ends_what_an_upstream_breaks(frame, tmp_path):
    """An upstream that does not keep to the protocol is a 1014, and is left."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(accept_of(peer.head) + frame)
        if len(frame) == 3 and frame[1] == 1:
            await peer.closed()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        async with client(proxy) as socket:
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(socket.recv(), PATIENCE)
            assert socket.close_code == 1014
        assert await upstream.settled() == 0
        assert "Traceback" not in proxy.log()


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.asyncio
async def test_ends_with_an_upstream_that_is_stuck(reads, tmp_path):
    """One that answers no ping, or takes no message, within --idle-timeout is left."""
    done = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(accept_of(peer.head))
        if reads:
            await peer.closed()
        peer.writer.transport.pause_reading()
        await done.wait()

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path, "--idle-timeout", "0.5") as proxy,
    ):
        async with client(proxy, ping_interval=None) as socket:
            if not reads:
                await socket.send(b"x" * 8 * MEBIBYTE)
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(socket.recv(), PATIENCE)
            assert socket.close_code == 1014
            # One that reads nothing is found by either, as its buffers take time to fill.
            whys = ("answered no ping", *(() if reads else ("read nothing",)))
            assert any(why in socket.close_reason for why in whys)
        done.set()


@pytest.mark.asyncio
@pytest.mark.thorough
async def test_keeps_a_silent_upstream_that_answers_pings(tmp_path):
    """Silence is no fault: the upstream is asked, and answers."""
    pings = asyncio.Semaphore(0)

    class Counting(ServerConnection):
        def process_event(self, event):
            if getattr(event, "opcode", None) is Opcode.PING:
                pings.release()
            super().process_event(event)

    async with (
        server(echo, ping_interval=None, create_connection=Counting) as url,
        running_proxy(url, tmp_path, "--idle-timeout", "2") as proxy,
    ):
        async with client(proxy, ping_interval=None) as socket:
            for _ in range(3):  # the third is sent only if one was answered
                await asyncio.wait_for(pings.acquire(), PATIENCE)
            await socket.send("still here")
            assert await asyncio.wait_for(socket.recv(), PATIENCE) == "still here"


@pytest.mark.parametrize(
    ("target", "lines", "status"),
    [
        (b"/_lifecycle/live", (b"host: a",), b"404"),
        (b"/v1/%2e%2e/_lifecycle", (b"host: a",), b"404"),
        (b"http://a/_lifecycle", (b"host: a",), b"400"),
        (b"/", (b"host: a@b",), b"400"),
        (b"/", (b"x: a",), b"400"),
        (b"/", (b"host: a", b"host: b"), b"400"),
    ],
)
@pytest.mark.asyncio
async def test_refuses_what_is_refused_of_requests(target, lines, status, tmp_path):
    """Operator's paths and odd hosts get their answer here; the upstream none."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(handshake(target, *lines))
        found = await asyncio.wait_for(reader.readline(), PATIENCE)
        assert found.split()[1] == status
        writer.close()
        assert upstream.connections == 0


@pytest.mark.asyncio
async def test_asks_for_the_keys_of_admission(tmp_path):
    """A WebSocket has no body to be admitted, but needs its key as other requests do."""
    async with (
        server(echo) as url,
        running_proxy(url, tmp_path, LIFECYCLE_API_KEYS="sesame") as proxy,
    ):
        response = await refusal(proxy)
        assert response.status_code == 401
        assert b"invalid_api_key" in response.body
        key = {"authorization": "Bearer sesame"}
        async with client(proxy, additional_headers=key) as socket:
            await socket.send("in")
            assert await asyncio.wait_for(socket.recv(), PATIENCE) == "in"
        assert "WebSocket /v1/realtime, which no budget limits" in proxy.log()


@pytest.mark.asyncio
async def test_uses_a_unix_socket(tmp_path):
    """The upstream may be a unix socket, as for requests."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(accept_of(peer.head) + b"\x81\x02hi")
        await peer.closed()

    async with (
        raw_upstream(handle, tmp_path / "up.sock") as (_, url),
        running_proxy(url, tmp_path) as proxy,
        client(proxy) as socket,
    ):
        assert await asyncio.wait_for(socket.recv(), PATIENCE) == "hi"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((b"host: a", b"cookie: " + b"x" * 9000), b"431"),
        ((b"host: a", b"content-length: 3"), b"400"),
    ],
)
@pytest.mark.asyncio
async def test_answers_handshakes_that_are_none(lines, status, tmp_path):
    """A head that is too large, or has a body, is refused, and the connection ends."""
    async with running_proxy("http://127.0.0.1:1", tmp_path) as proxy:
        reader, writer = await proxy.connect()
        writer.write(handshake(b"/", *lines))
        found = await asyncio.wait_for(reader.read(), PATIENCE)
        assert found.split()[1] == status
        writer.close()


@pytest.mark.asyncio
async def test_keeps_little_of_a_message_in_small_frames(tmp_path):
    """A message in 600,000 pieces takes its bytes, not an object for each piece."""
    pieces = Frame(Opcode.CONT, b"xy", fin=False).serialize(mask=True) * 10_000
    ping = Frame(Opcode.PING, b"all of it")
    async with (
        server(echo, max_size=None) as url,
        running_proxy(url, tmp_path) as proxy,
        connected(proxy) as (reader, writer),
    ):
        before = proxy.resident()
        writer.write(Frame(Opcode.BINARY, b"", fin=False).serialize(mask=True))
        for _ in range(60):
            writer.write(pieces)
            await asyncio.wait_for(writer.drain(), PATIENCE)
        writer.write(ping.serialize(mask=True))
        await asyncio.wait_for(reader.readuntil(ping.data), PATIENCE)
        assert proxy.resident() - before < 2**24
        writer.write(Frame(Opcode.CONT, b"xy").serialize(mask=True))
        await asyncio.wait_for(reader.readexactly(1_200_002), PATIENCE)


@pytest.mark.asyncio
async def test_keeps_little_for_pings_of_a_client_that_reads_nothing(tmp_path):
    """Its pings do not pile up as pongs."""
    pings = Frame(Opcode.PING, b"x" * 125).serialize(mask=True) * 10_000
    async with (
        server(echo) as url,
        running_proxy(url, tmp_path) as proxy,
        connected(proxy) as (_, writer),
    ):
        before = proxy.resident()
        writer.transport.pause_reading()
        for _ in range(60):
            writer.write(pings)
            await asyncio.wait_for(writer.drain(), PATIENCE)
        assert proxy.resident() - before < 2**24


@pytest.mark.asyncio
async def test_leaves_a_client_that_reads_nothing():
    """One that answers no ping is left, also with messages that it has not read."""
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        with contextlib.suppress(OSError):
            while True:
                await send({"type": "websocket.send", "bytes": b"x" * 2**16})
        ended.set()

    pings = {"ws_ping_interval": 0.5, "ws_ping_timeout": 0.5}
    async with serving(app, http="httptools", ws=BOUNDED, **pings) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(handshake())
        await asyncio.wait_for(ended.wait(), 30)
        writer.transport.abort()


@pytest.mark.asyncio
async def test_an_answer_to_a_client_that_is_left_is_late(monkeypatch):
    """One that sends no frames is left, while the application refuses its handshake."""
    came, goes, ended = asyncio.Event(), asyncio.Event(), asyncio.Queue()
    leave = BOUNDED.handle_parser_exception

    def leave_late(socket):
        goes.set()  # the application runs before the connection is lost
        leave(socket)

    async def app(scope, receive, send):
        await receive()
        came.set()
        await goes.wait()
        answer = "websocket.http.response"
        try:
            await send({"type": f"{answer}.start", "status": 400, "headers": []})
            await send({"type": f"{answer}.body", "body": b"no"})
        except Exception as error:
            ended.put_nowait(error)
            raise

    monkeypatch.setattr(BOUNDED, "handle_parser_exception", leave_late)
    options = {"ws": BOUNDED, "lifespan": "off"}
    async with serving(app, http="httptools", **options) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(handshake())
        await asyncio.wait_for(came.wait(), PATIENCE)
        writer.write(b"no frame")
        error = await asyncio.wait_for(ended.get(), PATIENCE)
        assert isinstance(error, OSError), error
        writer.transport.abort()


@pytest.mark.asyncio
async def test_answers_the_close_of_the_upstream_under_any_server():
    """The upstream gets its answer where nothing stands between proxy and server."""
    answers = asyncio.Queue()

    async def handle(socket):
        await socket.close(4321, "why")
        answers.put_nowait(socket.protocol.close_rcvd)

    async with server(handle) as url:
        app, options = Proxy(Upstream(url)), {"ws": "websockets-sansio"}
        async with serving(app, http="httptools", **options) as port:
            socket = await connect(f"ws://127.0.0.1:{port}/", proxy=None)
            await asyncio.wait_for(socket.wait_closed(), PATIENCE)
            answer = await asyncio.wait_for(answers.get(), PATIENCE)
            assert answer == Close(4321, "why")


@pytest.mark.asyncio
async def test_tells_the_upstream_why_the_server_has_closed():
    """The server refuses messages once it has closed, before it says that it has."""
    codes, refused = asyncio.Queue(), asyncio.Event()

    async def handle(socket):
        await socket.send("late")
        await socket.wait_closed()
        codes.put_nowait(socket.close_code)

    steps = iter(({"type": "websocket.connect"},))
    closed = {"type": "websocket.disconnect", "code": 1009, "reason": "large"}

    async def receive():
        if (message := next(steps, None)) is None:
            await asyncio.wait_for(refused.wait(), PATIENCE)
            message = closed
        return message

    async def send(message):
        if message["type"] == "websocket.send":
            refused.set()
            raise RuntimeError("sent after websocket.close")

    scope = {
        "type": "websocket",
        "path": "/",
        "query_string": b"",
        "headers": [(b"host", b"a")],
    }
    async with server(handle) as url:
        proxy = Proxy(Upstream(url))
        await asyncio.wait_for(proxy(scope, receive, send), PATIENCE)
        assert await asyncio.wait_for(codes.get(), PATIENCE) == 1009
