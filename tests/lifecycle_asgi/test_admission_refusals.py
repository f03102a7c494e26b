"""Refusals of Admission reach clients that are still sending their bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import trio.testing
from asgi_kit import ScriptedServer, http_scope, serving

from lifecycle import Gate
from lifecycle_asgi import Admission, BodyLimit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PART = b"x" * 65536
PARTS = 40
OK = {"type": "http.response.start", "status": 200}
OK["headers"] = [(b"content-length", b"2")]
REFUSALS: dict[int, dict[str, Any]] = {
    401: {"api_keys": ("k",)},
    408: {"body_timeout": 0.05},
    413: {"max_body": len(PART) * PARTS - 1},
    503: {"bytes": 64 * 2**20, "max_waiting": 0, "slow_after": 60.0},
}


async def read_body(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads its body, and says 200."""
    while (await receive()).get("more_body"):
        pass
    await send(OK)
    await send({"type": "http.response.body", "body": b"ok"})


def head(size: int, *more: bytes) -> bytes:
    """The head of a request that declares *size*."""
    lines = [b"POST /v1/x HTTP/1.1", b"host: here", b"content-length: %d" % size]
    return b"\r\n".join([*lines, *more, b"", b""])


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the content of one response."""
    start = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(start.partition(b"content-length:")[2].split()[0])
    return int(start.split()[1]), await reader.readexactly(length)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Streams]:
    """A connection, closed without a wait."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def take_bytes(admission: Admission, writer: asyncio.StreamWriter) -> None:
    """Hold most of the bytes for bodies, and send nothing."""
    writer.write(head(len(PART) * PARTS))
    while not admission.statistics()["bodies"].bytes_in_use:
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("given", [b"mine-1", b"m" * 128, b"not one\xff", None])
async def test_logs_each_refusal_in_one_line(
    caplog: pytest.LogCaptureFixture, given: bytes | None
) -> None:
    """With what an operator asks, and the id that the client was told."""
    gate = Gate(slots=1, max_waiting=0, name="slots")
    admission = Admission(read_body, environment={}, gates={"slots": gate})
    headers = [(b"content-length", b"2")]
    headers += [] if given is None else [(b"x-request-id", given)]
    server = ScriptedServer(b"{}")
    scope = http_scope("/v1/x\ny", headers=headers)
    with gate.try_admit():
        await admission(scope, server.receive, server.send)
    answered = dict(server.sent[0]["headers"])
    told, after = (
        answered[name].decode() for name in (b"x-request-id", b"retry-after")
    )
    assert (told.encode() == given) == (given is not None and given[:1] == b"m")
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"request {told} of 127.0.0.1: POST /v1/x%0Ay refused with ")
    assert "503 server_overloaded: gate 'slots' is full" in said
    assert f"; Retry-After {after}; waiting: 0 at admission-small, " in said
    assert said.endswith("0 at slots")


@pytest.mark.asyncio
async def test_log_has_nothing_that_a_terminal_obeys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor a line as long as its client likes: of its address, path and id."""
    gate = Gate(slots=1, max_waiting=0, name="slots")
    admission = Admission(read_body, environment={}, gates={"slots": gate})
    wrong = "\x1b[31m\x9b2K\r\n" + "x" * 5000
    scope = http_scope(wrong, headers=[(b"content-length", b"2")])
    scope["client"] = wrong, 1
    server = ScriptedServer(b"{}")
    with gate.try_admit():
        await admission(scope, server.receive, server.send)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.isprintable()
    assert len(said) < 1000
    scope |= {"client": ("2001:db8::1", 1), "path": "/v1/x"}
    scope["headers"] += [(b"x-request-id", b"a\x1b[31m")]
    with gate.try_admit():
        await admission(scope, server.receive, server.send)
    assert " of 2001:db8::1: POST /v1/x refused " in caplog.records[1].getMessage()
    assert caplog.records[1].getMessage().isprintable()


@pytest.mark.asyncio
@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("status", REFUSALS)
async def test_answers_client_that_sends_before_it_reads(
    status: int, http: str
) -> None:
    """With ``connection: close`` the connection is closed, and not reset."""
    admission = Admission(read_body, environment={}, **REFUSALS[status])
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with connected(port) as (_, first), connected(port) as (reader, writer):
            if status == 503:
                await take_bytes(admission, first)
            writer.write(head(len(PART) * PARTS, b"connection: close"))
            # It has arrived; behind a reset, most clients would not get to read it.
            assert (await read_answer(reader))[0] == status
            for _ in range(PARTS):
                writer.write(PART)
                await writer.drain()
            assert await reader.read() == b""


@pytest.mark.asyncio
@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("size", [0, 1, PARTS])
async def test_serves_next_request_after_a_refusal(size: int, http: str) -> None:
    """A refused body is read to its end, and the connection is used again."""
    admission = Admission(read_body, environment={}, api_keys=("k",))
    body = PART * size or b"{}"
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with connected(port) as (reader, writer):
            for _ in range(2):
                writer.write(head(len(body)) + body)
                assert (await read_answer(reader))[0] == 401
                writer.write(head(len(body), b"authorization: bearer k") + body)
                assert await read_answer(reader) == (200, b"ok")


@pytest.mark.asyncio
@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("status", [413, 408, 429])
async def test_limits_answer_client_that_sends_before_it_reads(
    status: int, http: str
) -> None:
    """`BodyLimit` and `per_client` drop the rest of a body before they end, too."""
    size = len(PART) * PARTS
    many = {"bytes": 64 * size, "max_body": size, "per_client": 1}
    layers: dict[int, Any] = {
        408: BodyLimit(read_body, max_bytes=size, timeout=0.05),
        413: BodyLimit(read_body, max_bytes=size - 1),
        429: Admission(read_body, environment={}, **many),
    }
    limit = layers[status]
    entered = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await limit(scope, receive, send)

    async with asyncio.timeout(120), serving(app, http=http) as port:
        async with connected(port) as (_, first), connected(port) as (reader, writer):
            if status == 429:
                first.write(head(size))
                await entered.wait()
            writer.write(head(size, b"connection: close"))
            for _ in range(PARTS if status != 408 else 1):
                writer.write(PART)
                await asyncio.sleep(0.005)
            answer = await read_answer(reader)
            assert answer[0] == status


@pytest.mark.asyncio
@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_waits_for_no_body_that_the_client_holds_back(http: str) -> None:
    """A client that waits for 100 sends no body after a refusal."""
    admission = Admission(read_body, environment={}, api_keys=("k",))
    lines = [b"expect: 100-continue", b"connection: close"]
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with connected(port) as (reader, writer):
            writer.write(head(1000, *lines))
            assert (await read_answer(reader))[0] == 401
            assert await reader.read() == b""


class Endless(ScriptedServer):
    """A client whose body has no end, with a part every *seconds*."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.read = 0

    async def receive(self) -> dict[str, Any]:
        """The next part."""
        await anyio.sleep(self.seconds)
        self.read += len(PART)
        return {"type": "http.request", "body": PART, "more_body": True}


def refuse(server: ScriptedServer, *more: Any, **options: Any) -> float:
    """Refuse one request, and return the seconds of virtual time that it took."""
    admission = Admission(read_body, environment={}, **options)
    chunked = [(b"transfer-encoding", b"chunked")]
    scope = http_scope("/v1/x", **{"headers": chunked, **dict(more)})

    async def ask() -> float:
        await admission(scope, server.receive, server.send)
        return anyio.current_time()

    clock = trio.testing.MockClock(autojump_threshold=0)
    started = clock.current_time()
    ended = anyio.run(ask, backend="trio", backend_options={"clock": clock})
    return ended - started


@pytest.mark.parametrize("seconds", [0.001, 1.0, 1000.0])
def test_stops_dropping_after_seconds_or_bytes(seconds: float) -> None:
    """A body without end is dropped for five seconds, and eight MiB at most."""
    server = Endless(seconds)
    assert refuse(server, api_keys=("k",)) <= 5.1
    assert server.status == 401
    assert server.read <= 8 * 2**20 + len(PART)
    assert not server.sent[-1].get("more_body")


def test_drops_up_to_the_limit_of_a_body_that_it_might_accept() -> None:
    """What is refused as all slots are taken is dropped up to ``max_body``."""
    server = Endless(0.001)
    slots = Gate(slots=0, max_waiting=0)
    refuse(server, bytes=2**30, max_body=2**26, gates={"slots": slots})
    assert server.status == 503
    assert 2**26 < server.read <= 2**26 + 2**22


def test_stops_dropping_when_the_client_leaves() -> None:
    """A disconnect ends the request at once."""
    server = ScriptedServer()
    server.messages = []
    server.on_send = lambda _: server.gone.set()
    assert refuse(server, api_keys=("k",)) < 1
    assert server.status == 401


def test_waits_for_no_body_that_was_not_asked_for() -> None:
    """A client that expects 100 is not sent it, and so sends no body."""
    server = Endless(1000.0)
    headers = [(b"expect", b"100-Continue")]
    assert refuse(server, ("headers", headers), api_keys=("k",)) < 1
    assert server.read == 0


def test_ends_a_stream_of_http2_at_once() -> None:
    """There the end of the response is what the client waits for."""
    server = Endless(1000.0)
    assert refuse(server, ("http_version", "2"), api_keys=("k",)) < 1
    assert server.read == 0


class CorrelationIdMiddleware:
    """As that of asgi-correlation-id, which adds the header of its option."""

    def __init__(self, app: Any, header_name: str) -> None:
        self.app, self.header_name = app, header_name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Add the header to the response."""

        async def adding(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = (self.header_name.lower().encode(), b"theirs")
                message = {**message, "headers": [*message["headers"], added]}
            await send(message)

        await self.app(scope, receive, adding)


@pytest.mark.parametrize("name", ["X-Request-ID", "X-Correlation-ID"])
def test_gives_an_id_where_the_application_gives_none(name: str) -> None:
    """One of its middleware may give another header, and the log needs this one."""
    applications = pytest.importorskip("starlette.applications")
    app = applications.Starlette()
    app.add_middleware(Admission, environment={}, max_body=10)
    app.add_middleware(CorrelationIdMiddleware, header_name=name)
    server = ScriptedServer(b"x" * 20)
    scope = http_scope("/v1/x", headers=[(b"content-length", b"20")])
    anyio.run(app, scope, server.receive, server.send)
    assert server.status == 413
    ids = [it for key, it in server.sent[0]["headers"] if key == b"x-request-id"]
    assert len(ids) == 1
    assert (ids == [b"theirs"]) == (name == "X-Request-ID")


class XRequestIdMiddleware:
    """As vLLM's: no coroutine function, and the class that its name is known by."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """Add the header to the response."""
        asked = dict(scope["headers"]).get(b"x-request-id", b"drawn")

        async def adding(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"x-request-id", asked)]
                message = {**message, "headers": headers}
            await send(message)

        return self.app(scope, receive, adding)


@pytest.mark.parametrize("outside", [True, False])
def test_refusals_have_the_headers_that_the_server_adds(outside: bool) -> None:
    """A web page reads why, and a log finds the request: around the server, or in it."""
    applications = pytest.importorskip("starlette.applications")
    cors = pytest.importorskip("starlette.middleware.cors")
    app = applications.Starlette()
    app.add_middleware(cors.CORSMiddleware, allow_origins=["https://a.example"])
    app.add_middleware(XRequestIdMiddleware)
    settings: dict[str, Any] = {"environment": {}, "max_body": 10}
    if outside:
        served: Any = Admission(app, **settings)
    else:
        app.add_middleware(Admission, **settings)
        served = app

    async def ask(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
        server = ScriptedServer(b"x" * 20)
        length = (b"content-length", b"20")
        scope = http_scope("/v1/x", headers=[length, *headers])
        await served(scope, server.receive, server.send)
        assert server.status == 413
        names = [name for name, _ in server.sent[0]["headers"]]
        assert len(set(names)) == len(names)  # one id, not two
        return dict(server.sent[0]["headers"])

    async def both() -> None:
        if outside:  # as a server does first
            app.middleware_stack = app.build_middleware_stack()
        asked = [(b"origin", b"https://a.example"), (b"x-request-id", b"mine")]
        headers = await ask(asked)
        assert headers[b"access-control-allow-origin"] == b"https://a.example"
        assert headers[b"x-request-id"] == b"mine"
        other = await ask([(b"origin", b"https://b.example")])
        assert b"access-control-allow-origin" not in other
        assert (await ask([]))[b"x-request-id"] == b"drawn"

    anyio.run(both)


def test_headers_are_looked_for_in_no_circle() -> None:
    """An application may be anything."""

    class Circle:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            """Never called."""

    circle = Circle()
    circle.app = circle  # type: ignore[attr-defined]
    server = ScriptedServer()
    scope = http_scope("/v1/x", headers=[(b"content-length", b"20")])
    admission = Admission(circle, environment={}, max_body=10)
    anyio.run(admission, scope, server.receive, server.send)
    assert server.status == 413


def test_leaves_middleware_alone_that_it_cannot_copy() -> None:
    """A class of the same name may be anything; the refusal is sent without it."""

    class CORSMiddleware:
        app = property(lambda _: read_body)  # cannot be set

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            """Never called."""

    server = ScriptedServer()
    scope = http_scope("/v1/x", headers=[(b"content-length", b"20")])
    admission = Admission(CORSMiddleware(), environment={}, max_body=10)
    anyio.run(admission, scope, server.receive, server.send)
    assert server.status == 413
