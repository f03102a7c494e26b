"""Requests and responses pass as they are, but for what belongs to one connection."""

import asyncio
import time

import pytest
from asgi_kit import http_scope, serving
from proxy_kit import Peer, raw_upstream, read_response, running_proxy

from lifecycle_asgi.uvicorn_protocol import HeadersOnly
from lifecycle_tools.proxy import ForwardedHeaders, Proxy, ProxyTimeouts, Upstream

GET = b"GET /a%2Fb//c?d=%20&d=2 HTTP/1.1\r\nhost: example.test\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def answers(response: bytes, *, keep=True):
    async def handle(peer: Peer) -> None:
        while True:
            await peer.read_head()
            await peer.read_body()
            peer.heads = [*getattr(peer, "heads", []), peer.head]
            await peer.send(response)
            if not keep:
                return

    return handle


@pytest.mark.asyncio
async def test_passes_target_and_headers_on(tmp_path):
    """Target, repeated headers and their order pass; those of one connection do not."""
    sent = (
        b"x-one: 1\r\naccept: a/b\r\nx-one: 2\r\nconnection: keep-alive, x-mine\r\n"
        b"x-mine: 1\r\nkeep-alive: 5\r\nte: trailers\r\nupgrade: h2c\r\n"
        b"proxy-connection: close\r\nx-forwarded-for: 10.0.0.9\r\n\r\n"
    )
    async with (
        raw_upstream(answers(OK, keep=False)) as (upstream, url),
        running_proxy(
            url, tmp_path, "--upstream-keep-alive", "0", "--forwarded", "pass"
        ) as proxy,
    ):
        await proxy.ask(GET + sent)
        lines = upstream.heads[0].split(b"\r\n")
        assert lines[0] == b"GET /a%2Fb//c?d=%20&d=2 HTTP/1.1"
        assert [line.lower() for line in lines[1:] if line] == [
            b"host: example.test",
            b"x-one: 1",
            b"accept: a/b",
            b"x-one: 2",
            b"x-forwarded-for: 10.0.0.9",
        ]


@pytest.mark.asyncio
async def test_passes_response_headers_on(tmp_path):
    """Repeated headers and a coded body pass untouched, and nothing is added."""
    response = (
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        b"HTTP/1.1 418 T\r\nset-cookie: a=1\r\nDate: today\r\nset-cookie: b=2\r\n"
        b"content-encoding: gzip\r\nkeep-alive: timeout=5\r\nconnection: x-mine\r\n"
        b"x-mine: 1\r\ncontent-length: 4\r\n\r\nabcd"
    )
    async with (
        raw_upstream(answers(response)) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        head, body = await proxy.ask(GET + b"\r\n")
        assert body == b"abcd"
        assert head.split(b"\r\n")[0].startswith(b"HTTP/1.1 418")
        assert [line.lower() for line in head.split(b"\r\n")[1:] if line] == [
            b"set-cookie: a=1",
            b"date: today",
            b"set-cookie: b=2",
            b"content-encoding: gzip",
            b"content-length: 4",
        ]


CHUNKED = (
    b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
TRAILERS = (
    b"authorization: Bearer k\r\nx-forwarded-for: 10.0.0.1\r\n"
    b"host: b\r\nx-user: admin\r\n\r\n"
)


async def reads_chunks(peer: Peer) -> None:
    await peer.read_head()
    assert await peer.reader.readuntil(b"0\r\n\r\n") == b"3\r\nabc\r\n0\r\n\r\n"
    await peer.send(OK)


@pytest.mark.parametrize("late", [True, False], ids=["late", "with-the-head"])
@pytest.mark.asyncio
async def test_passes_no_trailer_of_a_request_on(late, tmp_path):
    """The upstream is sent what the head said, and nothing that came behind the body."""
    async with (
        raw_upstream(reads_chunks) as (upstream, url),
        running_proxy(url, tmp_path, "--forwarded", "pass") as proxy,
    ):
        head, _ = await send_trailers(await proxy.connect(), late=late)
        assert head.startswith(b"HTTP/1.1 200 ")
        await upstream.settled()
        lines = sorted(upstream.heads[0].lower().split(b"\r\n")[1:])
        assert lines == [b"", b"", b"host: a", b"transfer-encoding: chunked"]


@pytest.mark.asyncio
async def test_passes_no_late_trailer_on_under_another_server():
    """The application alone knows what to pass on before it asks for the body."""
    async with raw_upstream(reads_chunks) as (upstream, url):
        target = Upstream(url)
        app = Proxy(target, forwarded=ForwardedHeaders.PASS)
        async with serving(app, http="httptools") as port:
            pair = await asyncio.open_connection("127.0.0.1", port)
            head, _ = await send_trailers(pair, late=True)
            assert head.startswith(b"HTTP/1.1 200 ")
        assert upstream.heads[0].count(b"\r\n") == 4


async def send_trailers(pair, *, late):
    """Send a body with trailers; return the response."""
    reader, writer = pair
    async with asyncio.timeout(120):
        writer.write(CHUNKED + (b"" if late else b"3\r\nabc\r\n0\r\n" + TRAILERS))
        if late:
            await reader.readuntil(b"100 Continue\r\n\r\n")
            writer.write(b"3\r\nabc\r\n0\r\n" + TRAILERS)
        head, body = await read_response(reader)
        if head.startswith(b"HTTP/1.1 100 "):
            head, body = await read_response(reader)
    writer.close()
    return head, body


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (("--forwarded", "add"), b"10.0.0.9, 127.0.0.1"),
        (("--forwarded", "replace"), b"127.0.0.1"),
        ((), b"127.0.0.1"),
    ],
)
@pytest.mark.asyncio
async def test_sets_forwarded_headers_by_option(how, expected, tmp_path):
    """X-Forwarded-For is replaced or added to, and Host is that of the upstream."""
    async with (
        raw_upstream(answers(OK, keep=False)) as (upstream, url),
        running_proxy(url, tmp_path, *how, "--rewrite-host") as proxy,
    ):
        own = b"x-forwarded-for: 10.0.0.9\r\nx-real-ip: 10.0.0.9\r\n"
        spelt = b"x_forwarded_for: 10.0.0.9\r\nX_Real-IP: 10.0.0.9\r\n"
        await proxy.ask(GET + own + spelt + b"\r\n")
        lines = upstream.heads[0].lower().split(b"\r\n")
        assert b"x-forwarded-for: " + expected in lines
        for name in (b"x-real-ip", b"x_forwarded_for", b"x_real-ip"):
            assert (name + b": 10.0.0.9" in lines) == ("add" in how)
        assert b"x-forwarded-proto: http" in lines
        assert b"x-forwarded-host: example.test" in lines
        assert b"host: " + url.removeprefix("http://").encode() in lines


@pytest.mark.parametrize(
    ("method", "response"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (
            b"GET",
            b'HTTP/1.1 304 Not Modified\r\netag: "a"\r\ncontent-length: 9\r\n\r\n',
        ),
    ],
)
@pytest.mark.asyncio
async def test_passes_responses_without_a_body(method, response, tmp_path):
    """HEAD, 204 and 304 end with their head, and the connection serves the next."""
    async with (
        raw_upstream(answers(response)) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        for _ in range(2):
            writer.write(method + b" / HTTP/1.1\r\nhost: a\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.split()[1] == response.split()[1]
            assert b"transfer-encoding" not in head
            assert (b"content-length: 99" in head) == (method == b"HEAD")
        writer.close()
        assert upstream.connections == 1


CHUNKED_OK = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
)


async def read_to_the_end(proxy, request):
    """Send bytes; return all that comes until the proxy closes."""
    reader, writer = await proxy.connect()
    writer.write(request)
    found = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    return found


@pytest.mark.parametrize(
    "response",
    [
        CHUNKED_OK,
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nonetwo",
        b"HTTP/1.0 200 OK\r\n\r\nonetwo",
    ],
    ids=["chunks", "length", "neither"],
)
@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.asyncio
async def test_sends_a_client_of_http_1_0_no_chunks(response, keep, tmp_path):
    """The body is what it is, and its end that of the connection."""
    async with (
        raw_upstream(answers(response, keep=False)) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        found = await read_to_the_end(proxy, b"GET / HTTP/1.0\r\n" + keep + b"\r\n")
        head, _, body = found.partition(b"\r\n\r\n")
        assert body == b"onetwo"
        assert b"transfer-encoding" not in head.lower()
        assert (b"content-length: 6" in head) == (b"content-length" in response)
        found = await read_to_the_end(proxy, b"HEAD / HTTP/1.0\r\n" + keep + b"\r\n")
        assert found.partition(b"\r\n\r\n")[2] == b""


@pytest.mark.parametrize("keep", [b"", b"\r\nconnection: keep-alive"])
@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/1.0", b" HTTP/2.0"])
@pytest.mark.asyncio
async def test_sends_an_old_client_no_chunks_of_an_application(version, keep):
    """Not even those that it names; the connection ends, whatever the client asks."""

    async def app(scope, receive, send):
        headers = [(b"Transfer-Encoding", b"chunked")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"one"})

    async with serving(app, http=HeadersOnly) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /" + version + keep + b"\r\n\r\n")
        found = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert found.endswith(b"\r\n\r\none")
    assert b"transfer-encoding" not in found


@pytest.mark.asyncio
async def test_sends_a_client_of_http_1_0_no_interim_response(tmp_path):
    """It has no 100: its expectation is ignored, and its chunks are refused."""
    async with (
        raw_upstream(answers(OK, keep=False)) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        head = b"POST / HTTP/1.0\r\nexpect: 100-continue\r\n"
        sent = head + b"content-length: 4\r\n\r\nbody"
        found = await read_to_the_end(proxy, sent)
        assert found.startswith(b"HTTP/1.1 200")
        sent = head + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        found = await read_to_the_end(proxy, sent)
        assert found.startswith(b"HTTP/1.1 400")
        assert upstream.connections == 1


@pytest.mark.parametrize(
    ("interim", "status"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"200"),
        (b"HTTP/1.1 102 P\r\n\r\nHTTP/1.1 103 E\r\nlink: </a>\r\n\r\n", b"200"),
        (b"HTTP/1.1 101 Go\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n", b"502"),
    ],
)
@pytest.mark.asyncio
async def test_passes_over_interim_responses(interim, status, tmp_path):
    """The final head comes alone, and 101 is an answer to no request."""
    async with (
        raw_upstream(answers(interim + OK)) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        for method in (b"GET", b"HEAD"):
            request = method + b" / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            head, _, _ = (await read_to_the_end(proxy, request)).partition(b"\r\n\r\n")
            assert head.split()[1] == status
            assert b"link" not in head


@pytest.mark.parametrize("status", [600, 999])
@pytest.mark.asyncio
async def test_answers_502_for_a_status_that_is_none(status, tmp_path):
    """HTTP has 100 to 599, and a server that cannot send others must not break."""
    response = OK.replace(b"200", b"%d" % status)
    async with (
        raw_upstream(answers(response)) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        found = await read_to_the_end(proxy, GET + b"connection: close\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 502 ")
        assert b"The upstream sent status %d" % status in found
        assert "Traceback" not in proxy.log()


@pytest.mark.asyncio
async def test_announces_no_trailers_that_it_drops(tmp_path):
    """In either direction; the connection to the client serves the next request."""

    async def handle(peer: Peer) -> None:
        for _ in range(2):
            await peer.read_head()
            found = await peer.reader.readuntil(b"0\r\n\r\n")
            assert found == b"3\r\nabc\r\n0\r\n\r\n"
            assert b"trailer" not in peer.head.lower()
            trailed = CHUNKED_OK.replace(b"\r\n\r\n", b"\r\ntrailer: x-sum\r\n\r\n", 1)
            await peer.send(trailed.removesuffix(b"\r\n") + b"x-sum: 42\r\n\r\n")

    sent = b"PUT / HTTP/1.1\r\nhost: a\r\nte: trailers\r\nconnection: te\r\n"
    sent += b"transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        for _ in range(2):
            writer.write(sent + b"3\r\nabc\r\n0\r\nx-sum: 1\r\n\r\n")
            head, body = await asyncio.wait_for(read_response(reader), 120)
            assert b"trailer" not in head.lower()
            assert body == b"6\r\nonetwo\r\n0\r\n\r\n"
        writer.close()
        assert upstream.connections == 1


@pytest.mark.asyncio
async def test_refuses_an_expectation_without_asking_for_the_body(tmp_path):
    """A client that is refused sends no body: the final answer is the first."""
    async with (
        raw_upstream(answers(OK)) as (upstream, url),
        running_proxy(url, tmp_path, LIFECYCLE_MAX_BODY="10") as proxy,
    ):
        head = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
        head, _ = await proxy.ask(head + b"content-length: 11\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ")
        assert upstream.connections == 0


@pytest.mark.parametrize(
    ("expectation", "interim"),
    [(b"100-Continue", True), (b"something-else", False)],
)
@pytest.mark.asyncio
async def test_passes_no_expectation_on(expectation, interim, tmp_path):
    """100 is for the one that HTTP has, in any case; others are ignored."""
    async with (
        raw_upstream(answers(OK, keep=False)) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        head = b"PUT / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nexpect: "
        sent = head + expectation + b"\r\ncontent-length: 3\r\n\r\nabc"
        found = await read_to_the_end(proxy, sent)
        assert found.startswith(b"HTTP/1.1 100 ") == interim
        assert found.count(b"HTTP/1.1 200 ") == 1
        await upstream.settled()
        assert b"expect" not in upstream.heads[0].lower()


@pytest.mark.asyncio
async def test_keeps_no_connection_of_http_1_0_with_chunks(tmp_path):
    """RFC 9112, 6.1: its framing is in doubt, whatever it says of the connection."""
    sent = CHUNKED_OK.replace(b"1.1 200 OK", b"1.0 200 OK\r\nconnection: keep-alive")
    async with (
        raw_upstream(answers(sent)) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        for _ in range(2):
            _, body = await proxy.ask(GET + b"\r\n")
            assert body == b"6\r\nonetwo\r\n0\r\n\r\n"
        assert upstream.connections == 2


@pytest.mark.asyncio
async def test_streams_chunks_of_a_unix_socket(tmp_path):
    """Each chunk arrives before the upstream sends the next, also by unix socket."""
    may_go_on = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await peer.send(b"3\r\none\r\n")
        await may_go_on.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with (
        raw_upstream(handle, tmp_path / "up.sock") as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"3\r\none\r\n"), 30)
        may_go_on.set()
        await asyncio.wait_for(reader.readuntil(b"3\r\ntwo\r\n0\r\n\r\n"), 30)
        writer.close()


@pytest.mark.asyncio
async def test_answers_an_expectation_itself(tmp_path):
    """A client that waits for 100 gets it here, and the upstream gets the body."""
    async with (
        raw_upstream(answers(OK, keep=False)) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        head = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
        writer.write(head + b"content-length: 4\r\n\r\n")
        found = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert found.startswith(b"HTTP/1.1 100")
        writer.write(b"body")
        head, _ = await asyncio.wait_for(read_response(reader), 30)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"expect" not in upstream.heads[0].lower()
        writer.close()


@pytest.mark.asyncio
async def test_passes_an_early_response_while_a_body_is_sent(tmp_path):
    """An upstream that refuses a body which it does not read is heard at once."""
    done = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
        await done.wait()

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        size = 16 * 2**20
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
        head, body = await proxy.ask(head + b"x" * size)
        done.set()
        assert (head[:12], body) == (b"HTTP/1.1 413", b"no")


@pytest.mark.asyncio
async def test_passes_trailers_to_a_server_that_can_send_them():
    """Trailers pass with the extension of ASGI, and TE asks the upstream for them."""
    trailed = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
        b"2\r\nhi\r\n0\r\nx-sum: 42\r\n\r\n"
    )
    messages = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        messages.append(message)

    async with raw_upstream(answers(trailed, keep=False)) as (upstream, url):
        scope = http_scope(
            headers=[(b"host", b"a"), (b"te", b"trailers")],
            extensions={"http.response.trailers": {}},
        )
        server = Upstream(url)
        await Proxy(server)(scope, receive, send)
        await server.aclose()
    assert messages[0]["trailers"]
    assert (b"trailer", b"x-sum") in messages[0]["headers"]
    assert b"".join(each.get("body", b"") for each in messages) == b"hi"
    assert messages[-1]["headers"] == [(b"x-sum", b"42")]
    assert b"te: trailers" in upstream.heads[0].lower()


@pytest.mark.asyncio
async def test_goes_on_where_the_proxy_itself_was_held_up():
    """What has arrived counts, though the event loop looks after the time is over."""
    pieces = asyncio.Queue()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(CHUNKED_OK.removesuffix(b"3\r\ntwo\r\n0\r\n\r\n"))
        assert await pieces.get() == b"one"
        await asyncio.sleep(0.1)
        peer.writer.write(b"3\r\ntwo\r\n")
        time.sleep(1.2)  # noqa: ASYNC251 - of the proxy as well
        assert await pieces.get() == b"two"
        await peer.send(b"0\r\n\r\n")

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        await asyncio.sleep(0)
        if piece := message.get("body"):
            pieces.put_nowait(piece)
        ended.append(message.get("more_body") is False)

    ended = []
    async with asyncio.timeout(120), raw_upstream(handle) as (_, url):
        server = Upstream(url, timeouts=ProxyTimeouts(idle=1.0))
        scope = http_scope(method="GET", headers=[(b"host", b"a")])
        await Proxy(server)(scope, receive, send)
        await server.aclose()
    assert ended == [False, False, False, True]


@pytest.mark.asyncio
async def test_streams_both_ways_with_uvicorn_behind(tmp_path):
    """A body of a method that is not admitted passes in pieces, in both directions."""

    async def echo(scope, receive, send):
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            part = {"type": "http.response.body", "body": message["body"]}
            await send({**part, "more_body": more})

    async with (
        serving(echo, lifespan="off") as port,
        running_proxy(f"http://127.0.0.1:{port}", tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(
            b"DELETE / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for text in (b"first", b"after"):
            writer.write(b"5\r\n" + text + b"\r\n")
            await asyncio.wait_for(reader.readuntil(text + b"\r\n"), 30)
        writer.write(b"0\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30)
        writer.close()


HIDDEN = [
    "/_lifecycle",
    "/_lifecycle/",
    "/_LIFECYCLE?x=1",
    "//_lifecycle",
    "/%5flifecycle",
    "/%255flifecycle",
    "/%" + "25" * 5 + "5flifecycle",
    "/%" + "25" * 20_000 + "41",
    "/v1/../_lifecycle",
    "/v1/%2e%2e/_lifecycle;a=b",
    "/.\\_lifecycle",
    "/_lifecycle/snapshot",
    "/_lifecycle/requests/a/cancel",
    "/_lifecycle;x/status",
    "/_lifecycle/status/../../v1",
]


@pytest.mark.asyncio
async def test_passes_no_path_of_the_operator_on(tmp_path):
    """The upstream takes all clients for local ones, above all with its own Host."""
    shown = ["/v1/models", "/_lifecyclefoo", "/v1/_lifecycle", "/metrics"]
    async with (
        raw_upstream(answers(OK, keep=False)) as (upstream, url),
        running_proxy(
            url, tmp_path, "--rewrite-host", "--upstream-keep-alive", "0"
        ) as proxy,
    ):
        for path in [*HIDDEN, *shown]:
            head = f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            answer, _ = await proxy.ask(head.encode())
            status = b"404" if path in HIDDEN else b"200"
            assert answer.split()[1] == status, path
    targets = [head.split()[1].decode() for head in upstream.heads]
    assert targets == shown
