"""What clients are sent when the upstream fails, or when the proxy refuses."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pkgutil import resolve_name

import anyio
import pytest
from asgi_kit import http_scope
from certificates import certificate
from ports import free_port
from proxy_kit import HEAD_END, Peer, raw_upstream, running_proxy

from lifecycle_tools.proxy import Proxy, ProxyTimeouts, Upstream

CHAT = (
    b"%s /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
    b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)
POST, PUT = CHAT % b"POST", CHAT % b"PUT"
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ndata\r\n"
DECLARED = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata"


@pytest.mark.asyncio
async def test_sends_502_when_upstream_refuses(tmp_path):
    """A server that is not there is a 502 in OpenAI's format, and a line in the log."""
    async with running_proxy(f"http://127.0.0.1:{free_port()}", tmp_path) as proxy:
        head, body = await proxy.ask(POST)
        assert head.startswith(b"HTTP/1.1 502")
        assert json.loads(body)["error"]["code"] == "upstream_unavailable"
        assert "POST /v1/chat/completions: 502: The upstream refuses" in proxy.log()


@pytest.mark.asyncio
async def test_says_why_there_is_no_connection(tmp_path):
    """Not every error is a refusal: a name, a certificate, a limit of the proxy."""
    async with running_proxy("http://a.invalid", tmp_path) as proxy:
        head, body = await proxy.ask(POST)
        assert head.startswith(b"HTTP/1.1 502")
        assert b"No connection to the upstream: " in body
        assert b"refuses" not in body


@pytest.mark.parametrize("handshakes", [True, False])
@pytest.mark.asyncio
async def test_says_that_there_is_no_tls(handshakes, tmp_path):
    """And names neither the upstream nor its address to clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path, "other.example"))

    async def handle(reader, writer):
        await reader.read(65536)
        writer.close()

    secure = context if handshakes else None  # without it, it hears no handshake
    listening = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=secure)
    port = listening.sockets[0].getsockname()[1]
    async with listening, running_proxy(f"https://127.0.0.1:{port}", tmp_path) as proxy:
        head, body = await proxy.ask(POST)
    assert head.startswith(b"HTTP/1.1 502")
    assert b"TLS" in body
    assert b"127.0.0.1" not in body
    assert b"other.example" not in body


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((errno.ENETUNREACH, errno.ECONNREFUSED), "refuses connections"),
        ((errno.ECONNREFUSED, errno.EADDRNOTAVAIL), "refuses connections"),
        ((errno.ENETUNREACH, errno.EMFILE), "ulimit -n"),
        ((errno.ENETUNREACH, errno.EHOSTUNREACH), "No route to host"),
    ],
)
def test_names_the_error_that_tells_most_of_several_addresses(numbers, words):
    """A machine without IPv6 fails at one of the two, whatever the other does."""
    why = resolve_name("lifecycle_tools.proxy.upstream:_why")
    error = OSError("All connection attempts failed")
    each = [OSError(number, os.strerror(number)) for number in numbers]
    error.__cause__ = ExceptionGroup("multiple connection attempts failed", each)
    assert words in why(error)


def test_says_which_limit_leaves_no_connection():
    """Without a descriptor for it, the message names the limit."""
    error = resolve_name("lifecycle_tools.proxy.connection:UpstreamError")
    upstream = Upstream(f"http://127.0.0.1:{free_port()}")
    taken = []

    async def connect():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            await upstream.connect()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in taken:
                os.close(number)

    with pytest.raises(error, match="Too many open files; raise .*ulimit -n"):
        anyio.run(connect)


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        (["--host", "a.invalid"], "--host a.invalid: "),
        (["--port", "65536"], "65535"),
        (["--uds", "/" + 200 * "a"], "path too long; give another"),
    ],
)
def test_refuses_an_address_that_it_cannot_listen_on(listen, words):
    """In a line that names it, before anything listens."""
    done = run_command(*listen)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_takes_no_socket_from_a_server_that_listens(tmp_path):
    """A second proxy at the same path ends; after a crash the path is taken over."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))
        first.listen()
        inode = path.stat().st_ino
        done = run_command("--uds", str(path))
    assert done.returncode == 2, done.stderr
    assert "a server listens there" in " ".join(done.stderr.split())
    assert path.stat().st_ino == inode


def run_command(*options):
    """Run a proxy that ends by itself."""
    command = "from lifecycle_tools import main; main()"
    arguments = ["proxy", "--upstream", "http://127.0.0.1:9", *options]
    return subprocess.run(
        [sys.executable, "-c", command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "1000"},
    )


@pytest.mark.asyncio
async def test_logs_its_budget_when_it_starts(tmp_path):
    """One line says what requests may have, before the first of them."""
    url = f"http://127.0.0.1:{free_port()}"
    async with running_proxy(url, tmp_path, LIFECYCLE_BYTES="64MiB") as proxy:
        line = " INFO lifecycle: Admission: 64 MiB for requests, of "
        assert proxy.log().count(line) == 1, proxy.log()


@pytest.mark.parametrize("slots", ["0", "8"])
@pytest.mark.asyncio
async def test_tells_when_it_starts_that_one_client_may_fill_the_upstream(
    slots, tmp_path
):
    """A limit on bytes alone keeps nobody's small requests out of its queue."""
    url = f"http://127.0.0.1:{free_port()}"
    async with running_proxy(url, tmp_path, LIFECYCLE_SLOTS=slots) as proxy:
        line = " INFO lifecycle: Admission: any number of requests at a time, "
        assert proxy.log().count(line) == (slots == "0"), proxy.log()


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", b"SSH-2.0-x\r\n\r\n"])
@pytest.mark.asyncio
async def test_sends_502_when_there_is_no_response(sent, tmp_path):
    """A connection that ends before the head, or is no HTTP, is a 502."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.read_body()
        await peer.send(sent)

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        head, _ = await proxy.ask(POST)
        assert head.startswith(b"HTTP/1.1 502")
        assert upstream.connections == 1


@pytest.mark.asyncio
async def test_sends_504_when_upstream_is_silent(tmp_path):
    """No head in time is a 504, and the connection is closed."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.closed()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path, "--head-timeout", "0.2") as proxy,
    ):
        head, body = await proxy.ask(POST)
        assert head.startswith(b"HTTP/1.1 504")
        assert json.loads(body)["error"]["code"] == "upstream_timeout"
        while upstream.open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [CHUNKED, DECLARED])
@pytest.mark.asyncio
async def test_cuts_the_response_when_upstream_is_cut(sent, tmp_path):
    """A response that breaks off upstream never ends cleanly for the client."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(sent)

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(GET)
        found = await asyncio.wait_for(reader.read(-1), 30)
        assert b"data" in found
        assert not found.endswith(b"0" + HEAD_END)
        assert "response cut" in proxy.log()
        assert "Traceback" not in proxy.log()
        writer.close()


@pytest.mark.asyncio
@pytest.mark.thorough
async def test_cuts_the_response_when_upstream_falls_silent(tmp_path):
    """Between two parts, each of which may take as long; the client is told by a cut."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(CHUNKED)
        for _ in range(5):
            await asyncio.sleep(0.8)
            await peer.send(b"4\r\nmore\r\n")
        await peer.closed()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path, "--idle-timeout", "3") as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(GET)
        found = await asyncio.wait_for(reader.read(-1), 30)
        assert found.count(b"more") == 5  # in four seconds
        assert not found.endswith(b"0" + HEAD_END)
        assert "response cut: The upstream sent nothing for 3 s" in proxy.log()
        assert await upstream.settled() == 0
        writer.close()


@pytest.mark.asyncio
@pytest.mark.thorough
async def test_takes_no_slow_reader_for_a_silent_upstream(tmp_path):
    """A client may read nothing for longer than the upstream may send nothing."""
    size = 32 * 2**20  # more than all buffers on the way

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        await peer.send(b"x" * size)

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path, "--idle-timeout", "5") as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(GET)
        head = await asyncio.wait_for(reader.readuntil(HEAD_END), 30)
        await asyncio.sleep(7)
        assert b"200 OK" in head
        try:
            await asyncio.wait_for(reader.readexactly(size), 60)
        finally:
            writer.close()
        assert "sent nothing" not in proxy.log()


@pytest.mark.parametrize(("request_", "tries"), [(GET, 2), (PUT, 2), (POST, 1)])
@pytest.mark.asyncio
async def test_sends_again_only_what_is_safe(request_, tries, tmp_path):
    """A kept connection that is lost is replaced, but not under a POST."""
    served = 0

    async def handle(peer: Peer) -> None:
        nonlocal served
        while True:
            await peer.read_head()
            await peer.read_body()
            served += 1
            if served == 2:
                return
            await peer.send(OK)

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path, "--upstream-keep-alive", "60") as proxy,
    ):
        await proxy.ask(GET)
        head, _ = await proxy.ask(request_)
        assert served == 1 + tries
        assert head.split()[1] == (b"200" if tries == 2 else b"502")


@pytest.mark.asyncio
async def test_drops_a_kept_connection_that_upstream_closed(tmp_path):
    """A POST never meets a connection whose end was there to be seen."""
    closed = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.read_body()
        await peer.send(OK)
        peer.writer.close()
        await peer.writer.wait_closed()
        closed.set()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path, "--upstream-keep-alive", "60") as proxy,
    ):
        for _ in range(20):
            closed.clear()
            head, _ = await proxy.ask(POST)
            assert head.startswith(b"HTTP/1.1 200")
            await closed.wait()
        assert upstream.connections == 20


def answer(listener: socket.socket) -> None:
    """Answer each request of the next connection."""
    connection, _ = listener.accept()
    with connection:
        while connection.recv(65536):
            connection.sendall(OK)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_keeps_no_connection_for_another_event_loop():
    """One of a loop that has ended can be neither used nor closed, as in test clients."""
    statuses = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        statuses.append(message.get("status"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(5):
            threading.Thread(target=answer, args=(listener,), daemon=True).start()
        app = Proxy(Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        for backend in ("asyncio", "asyncio", "trio", "trio", "asyncio"):
            scope = http_scope(headers=[(b"host", b"a")])
            anyio.run(app, scope, receive, send, backend=backend)
    assert statuses == 5 * [200, None]
    del app
    gc.collect()  # which warns of connections whose event loop nobody closed them in


@pytest.mark.asyncio
async def test_closes_unused_connections_without_a_lifespan():
    """As where it is mounted: each request closes those that others left for long."""
    arrived, all_arrived = [], asyncio.Event()

    async def handle(peer: Peer) -> None:
        while await peer.read_head():
            arrived.append(peer)
            if len(arrived) == 3:
                all_arrived.set()
            await all_arrived.wait()
            await peer.send(OK)

    async def receive():
        return {"type": "http.request"}

    async def send(_):
        pass

    async with raw_upstream(handle) as (upstream, url):
        target = Upstream(url, timeouts=ProxyTimeouts(keep_alive=600.0))
        app, scope = Proxy(target), http_scope(headers=[(b"host", b"a")])
        await asyncio.gather(*(app(scope, receive, send) for _ in range(3)))
        for connection in [*target._idle][:2]:
            connection.idle_since -= 1000.0
        await app(scope, receive, send)
        assert upstream.connections == 3
        until = asyncio.get_running_loop().time() + 30
        while upstream.open > 1 and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        assert upstream.open == 1
        await target.aclose()


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"content-length: +2\r\n",
        b"host: b\r\ncontent-length: 2\r\n",
    ],
)
@pytest.mark.asyncio
async def test_refuses_what_two_servers_read_differently(framing, tmp_path):
    """Ambiguous framing is a 400, and the upstream hears nothing of it."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        for method in (b"POST", b"DELETE"):
            start = method + b" / HTTP/1.1\r\nhost: a\r\n"
            reader, writer = await proxy.connect()
            writer.write(start + framing + b"\r\n2\r\n{}\r\n0\r\n\r\n")
            found = await asyncio.wait_for(reader.read(-1), 30)  # and it is closed
            assert found.startswith(b"HTTP/1.1 400"), found
            writer.close()
        assert upstream.connections == 0


@pytest.mark.parametrize(
    "host", [None, b"[::1]evil.com", b"a@b", b"a b", b"a/b", b"[::1", b"a:b", b"a\\b"]
)
@pytest.mark.asyncio
async def test_refuses_a_host_that_is_none(host, tmp_path):
    """Servers take different parts of it for the name; the upstream hears nothing."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()

    line = b"" if host is None else b"host: %s\r\n" % host
    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(b"GET / HTTP/1.1\r\n" + line + b"\r\n")
        found = await asyncio.wait_for(reader.readline(), 30)
        assert found.startswith(b"HTTP/1.1 400"), found
        writer.close()
        assert upstream.connections == 0


@pytest.mark.parametrize(
    ("version", "host"),
    [
        (b"1.1", b"host: [::1]:80\r\n"),
        (b"1.1", b"host: A-b.example:\r\n"),
        (b"1.1", b"host: 127.0.0.1\r\n"),
        (b"1.1", b"host:\r\n"),
        (b"1.0", b""),
    ],
)
@pytest.mark.asyncio
async def test_passes_on_every_host_that_is_one(version, host, tmp_path):
    """Names, addresses and an empty one, and none where HTTP/1.0 has none."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(OK)

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(b"GET / HTTP/%s\r\n" % version + host + b"\r\n")
        found = await asyncio.wait_for(reader.readline(), 30)
        assert found.split()[1] == b"200", found
        writer.close()


@pytest.mark.asyncio
async def test_refuses_websockets_in_a_sentence(tmp_path):
    """With --max-message 0, an upgrade is a 501 that says where to connect."""
    none = ("--max-message", "0")
    async with running_proxy("http://127.0.0.1:1", tmp_path, *none) as proxy:
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n"
        head, body = await proxy.ask(
            GET.replace(b"\r\n\r\n", b"\r\n" + upgrade + b"\r\n")
        )
        assert head.startswith(b"HTTP/1.1 501")
        assert b"no WebSockets" in body


@pytest.mark.asyncio
async def test_reads_admission_from_the_environment(tmp_path):
    """A body above LIFECYCLE_MAX_BODY is a 413 before the upstream hears of it."""

    async def handle(peer: Peer) -> None:
        await peer.read_head()

    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path, LIFECYCLE_MAX_BODY="1") as proxy,
    ):
        head, _ = await proxy.ask(POST)
        assert head.startswith(b"HTTP/1.1 413")
        line = "POST /v1/chat/completions refused with 413 request_too_large: The "
        assert proxy.log().count(line) == 1
        assert upstream.connections == 0


@pytest.mark.asyncio
async def test_refuses_when_the_pool_is_full(tmp_path):
    """With all connections in use, a request waits and is then refused with 503."""
    done = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(CHUNKED)
        await done.wait()

    options = ("--max-connections", "1", "--connect-timeout", "0.2")
    async with (
        raw_upstream(handle) as (upstream, url),
        running_proxy(url, tmp_path, *options) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(GET)
        await reader.readuntil(b"data")
        head, _ = await proxy.ask(GET)
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in head
        assert upstream.connections == 1
        writer.transport.abort()
        done.set()


@pytest.mark.asyncio
async def test_drains_before_it_ends(tmp_path):
    """After SIGTERM a response under way is completed, and then the process ends."""
    go_on = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.read_head()
        await peer.send(CHUNKED)
        await go_on.wait()
        await peer.send(b"4\r\nrest\r\n0\r\n\r\n")

    async with (
        raw_upstream(handle) as (_, url),
        running_proxy(url, tmp_path) as proxy,
    ):
        reader, writer = await proxy.connect()
        writer.write(GET)
        await reader.readuntil(b"data\r\n")
        proxy.process.send_signal(signal.SIGTERM)
        while "Shutting down" not in proxy.log():
            await asyncio.sleep(0.01)
        go_on.set()
        await asyncio.wait_for(reader.readuntil(b"4\r\nrest\r\n0\r\n\r\n"), 30)
        assert await asyncio.wait_for(proxy.process.wait(), 30) in (0, -signal.SIGTERM)
        writer.close()


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a?b", "unix:"])
def test_refuses_an_address_that_is_none(url):
    """An upstream of another form is refused with the forms that are known."""
    with pytest.raises(ValueError, match="must be http"):
        Upstream(url)
