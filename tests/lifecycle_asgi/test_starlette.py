"""`install` and `ManagedResponse`, with Starlette and FastAPI, and the client for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from asgi_kit import serving
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from lifecycle import Gate, GateFull, managed
from lifecycle_asgi import LifecycleMiddleware, refusal_response, request_of
from lifecycle_asgi.starlette import ManagedResponse, install, refusal_handler
from lifecycle_asgi.testing import lifespan, request

pytestmark = pytest.mark.anyio


class Words:
    """A stream, how many items it made, and whether it was closed."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = False

    async def __call__(self) -> Any:
        try:
            while self.made < 1000:
                self.made += 1
                yield f"word {self.made}\n"
                await anyio.sleep(0.001)
        finally:
            self.closed = True

    def blocking(self) -> Iterator[str]:
        """The same in a thread."""
        try:
            while self.made < 1000:
                self.made += 1
                yield f"word {self.made}\n"
                time.sleep(0.001)
        finally:
            self.closed = True


def app_of(make: Any, **options: Any) -> Starlette:
    """An installed application whose one endpoint returns what *make* returns."""

    async def endpoint(request: Request) -> Any:
        await request.body()
        return make()

    app = Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])])
    install(app, **options)
    return app


@pytest.mark.parametrize("way", ["__call__", "blocking"])
async def test_closes_the_stream_of_a_client_that_leaves(way: str) -> None:
    """After three items the work has ended, and the lease is back."""
    words, gate = Words(), Gate(bytes=10)
    app = app_of(lambda: ManagedResponse(getattr(words, way)(), gate=gate, bytes=4))
    answer = await request(app, "GET", "/", leave_after_items=3)
    assert (answer.status, answer.left, len(answer.items)) == (200, True, 3)
    assert words.closed
    assert words.made < 1000
    assert gate.statistics().bytes_in_use == 0


async def test_leaves_after_some_seconds() -> None:
    """A client may also leave a handler that says nothing."""

    async def make() -> Any:
        await anyio.sleep_forever()

    async def endpoint(request: Request) -> Any:
        await request.body()
        return await make()

    app = Starlette(routes=[Route("/", endpoint)])
    install(app)
    answer = await request(app, "GET", "/", leave_after_seconds=0.01)
    assert (answer.left, answer.body) == (True, b"")


@pytest.mark.parametrize("way", ["__call__", "blocking"])
async def test_sends_the_whole_stream(way: str) -> None:
    """A client that stays has every item."""
    words = Words()
    words.made = 996
    app = app_of(lambda: ManagedResponse(getattr(words, way)()))
    answer = await request(app, "GET", "/?x=1")
    assert answer.body == b"".join(b"word %d\n" % n for n in range(997, 1001))
    assert not answer.left
    assert words.closed


@pytest.mark.parametrize(
    ("gate", "status"),
    [(Gate(bytes=10, max_waiting=0), 413), (Gate(slots=0, max_waiting=0), 503)],
)
async def test_refuses_before_the_status(gate: Gate, status: int) -> None:
    """413 for what never fits, else 503 and when to try again; the stream is closed."""
    words = Words()
    cost = {"bytes": 11} if status == 413 else {"slots": 1}
    app = app_of(lambda: ManagedResponse(words(), gate=gate, **cost))
    answer = await request(app, "GET", "/")
    assert answer.status == status
    assert ("retry-after" in answer.headers) == (status == 503)
    assert words.made == 0


def refusing(gate: Gate, size: int) -> FastAPI:
    """An installed application of two WebSockets, which are refused."""
    app = FastAPI()
    install(app)

    @app.websocket("/accepted")
    async def accepted(websocket: WebSocket) -> None:
        await websocket.accept()
        await gate.admit(bytes=size)

    @app.websocket("/closed")
    async def closed(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close(4000)
        await gate.admit(bytes=size)

    @app.websocket("/new")
    async def new(_: WebSocket) -> None:
        await gate.admit(bytes=size)

    return app


@pytest.mark.parametrize("ws", ["websockets-sansio", "wsproto"])
@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [({"slots": 0}, 503, 1013), ({"bytes": 10}, 413, 1009), ({}, 503, 1001)],
)
async def test_refuses_websockets(
    anyio_backend_name: str,
    ws: str,
    limits: dict[str, int],
    status: int,
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a response to the handshake, and after that by a close code and a reason."""
    if anyio_backend_name != "asyncio":
        pytest.skip("uvicorn runs on asyncio")
    gate = Gate(max_waiting=0, **(limits or {"slots": 1}))
    if not limits:
        gate.close()
    async with serving(refusing(gate, 11), ws=ws) as port:
        with anyio.fail_after(60), pytest.raises(InvalidStatus) as denied:
            await connect(f"ws://127.0.0.1:{port}/new")
        assert denied.value.response.status_code == status
        assert ("retry-after" in denied.value.response.headers) == (code == 1013)
        async with connect(f"ws://127.0.0.1:{port}/accepted") as client:
            with anyio.fail_after(60), pytest.raises(ConnectionClosed) as closed:
                await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code
        assert closed.value.rcvd.reason.startswith("The ")
        async with connect(f"ws://127.0.0.1:{port}/closed") as client:
            with anyio.fail_after(60), pytest.raises(ConnectionClosed) as closed:
                await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4000
    assert not [each for each in caplog.records if each.exc_info]


async def test_closes_a_websocket_whose_server_sends_no_response_for_it() -> None:
    """Its handshake is then refused by the server, with 403."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/new", "headers": [], "query_string": b""}
    app = refusing(Gate(slots=0, max_waiting=0), 1)
    with anyio.fail_after(60):
        await app({**scope, "subprotocols": []}, receive, send)
    assert sent == ["websocket.close"]


@pytest.mark.parametrize("response", [ManagedResponse, StreamingResponse])
async def test_refuses_a_managed_stream_in_any_response(response: Any) -> None:
    """A refusal at the first item is never a 200 with an empty body."""
    gate = Gate(slots=0, max_waiting=0)

    @managed(gate=gate)
    async def speak() -> Any:
        yield b"word"

    answer = await request(app_of(lambda: response(speak())), "GET", "/")
    assert answer.status == 503
    assert b"server_overloaded" in answer.body


async def test_raises_at_once_where_a_step_is_missing() -> None:
    """Each mistake is an error that names the remedy, and nothing is sent."""

    async def endpoint(_request: Request) -> Any:
        return ManagedResponse(Words()())

    app = Starlette(routes=[Route("/", endpoint)])
    with pytest.raises(LookupError, match=r"lifecycle_asgi\.starlette\.install\(app\)"):
        await request(app, "GET", "/")
    with pytest.raises(TypeError, match="takes an iterator, not function"):
        ManagedResponse(endpoint)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a cost and no gate: pass gate="):
        ManagedResponse(iter(()), bytes=3)
    with pytest.raises(TypeError, match="Starlette or FastAPI application, not App"):
        other: Any = type("App", (), {})()
        install(other)
    app = Starlette()
    with pytest.raises(ValueError, match="max_body must not be negative"):
        install(app, max_body=-1)
    install(app)
    with pytest.raises(RuntimeError, match="install it once"):
        install(app)
    with pytest.raises(TypeError, match="a handler of Refused, not of KeyError"):
        await refusal_handler(None, KeyError())  # type: ignore[arg-type]


async def test_raises_an_error_of_the_stream_before_the_status() -> None:
    """Any other error at the first item propagates, and can become a 500."""

    async def broken() -> Any:
        raise KeyError("mine")
        yield b""

    app = app_of(lambda: ManagedResponse(broken()))
    with pytest.raises(KeyError, match="mine"):
        await request(app, "GET", "/")


async def test_limits_bodies() -> None:
    """A body above the limit is 413, and one below is read."""
    gate = Gate(bytes=10, max_waiting=0)
    app = app_of(lambda: ManagedResponse(Words()(), gate=gate, bytes=10), max_body=20)
    answer = await request(app, "POST", "/", body=b"x" * 21)
    assert answer.status == 413
    answer = await request(app, "POST", "/", body=b"x" * 8, leave_after_items=1)
    assert answer.status == 200
    assert gate.statistics().bytes_in_use == 0


async def test_runs_background_task_of_a_managed_response() -> None:
    """Also after its client has left, as Starlette does."""
    ran = []

    async def release() -> None:
        await anyio.sleep(0.001)
        ran.append("released")

    app = app_of(lambda: ManagedResponse(Words()(), background=BackgroundTask(release)))
    await request(app, "GET", "/", leave_after_items=1)
    assert ran == ["released"]


@pytest.mark.parametrize(("after", "seconds"), [(1.5, b"2"), (1000.0, b"60")])
async def test_describes_a_refusal_for_any_server(after: float, seconds: bytes) -> None:
    """`refusal_response` returns status, headers and body."""
    status, headers, body = refusal_response(GateFull("full", retry_after=after))
    assert status == 503
    assert (b"retry-after", seconds) in headers
    assert b"try again in %b s" % seconds in body


async def test_runs_the_lifespan_of_an_application() -> None:
    """It starts before the block, ends after it, and tells why it did not start."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope.get("fails"):
            seen.append("fails")
        await send({"type": "lifespan.startup.complete"})
        seen.append("started")
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        seen.append("ended")

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    async with lifespan(app):
        assert seen[:1] == ["started"]
    assert seen == ["started", "ended"]
    with pytest.raises(RuntimeError, match="no startup: no model"):
        async with lifespan(broken):
            pass


async def test_times_out_where_work_goes_on_after_the_client() -> None:
    """The client for tests fails a test of an application that works on."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await request(app, "GET", "/", leave_after_items=0, timeout=0.05)


async def test_passes_other_scopes_through_the_installed_application() -> None:
    """A lifespan reaches an installed application."""
    async with lifespan(app_of(Words)):
        pass


async def test_finds_the_request_of_an_installed_application() -> None:
    """What `install` adds is the same middleware as by hand."""
    seen = []

    async def endpoint(request: Request) -> Any:
        seen.append(request_of(request.scope).live)
        return ManagedResponse(iter(["word"]))

    app = Starlette(routes=[Route("/", endpoint)])
    install(app)
    added: list[Any] = [each.cls for each in app.user_middleware]
    assert LifecycleMiddleware in added
    assert (await request(app, "GET", "/")).body == b"word"
    assert seen == [True]


async def test_reports_an_application_that_ends_instead_of_starting() -> None:
    """`lifespan` raises, and leaves no scope behind."""

    async def ends(scope: Any, receive: Any, send: Any) -> None:
        """Know no lifespan."""

    with anyio.fail_after(60), pytest.raises(RuntimeError, match="application ended"):
        async with lifespan(ends):
            pass


async def test_bounds_how_long_a_stream_may_close(monkeypatch: Any) -> None:
    """A clean-up that hangs does not hold the request without limit."""
    closing = anyio.Event()

    async def words() -> Any:
        try:
            yield b"word"
            await anyio.sleep_forever()
        finally:
            closing.set()
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            await anyio.sleep_forever()

    monkeypatch.setattr("lifecycle_asgi.starlette._CLOSE_SECONDS", 0.01)
    app = Starlette(routes=[Route("/", lambda _: ManagedResponse(words()))])
    install(app)
    with anyio.fail_after(60):
        await request(app, "GET", "/", leave_after_items=1)
    assert closing.is_set()
