"""An application that handles disconnects itself sees what it sees without us."""

from __future__ import annotations

import math
from typing import Any

import anyio
import anyio.to_thread
import pytest
import trio.testing
from asgi_kit import ScriptedServer, alone, http_scope
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse

from lifecycle.lowlevel import call_soon
from lifecycle_asgi import Admission, LifecycleMiddleware, request_of

pytestmark = pytest.mark.anyio


async def serve(app: Any, server: ScriptedServer, **headers: str) -> None:
    """Serve one request, and leave no task."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    with anyio.fail_after(120):
        async with alone():
            scope = http_scope(headers=pairs)
            await app(scope, server.receive, server.send)


async def cancelled(scope: Any) -> None:
    """Wait, shielded, until the disconnect has cancelled the application."""
    await anyio.wait_all_tasks_blocked()
    assert request_of(scope).client_gone


async def test_sends_at_once_what_comes_after_a_wait() -> None:
    """A stream that waits for its items is never made to wait in ``send`` as well."""
    server, turned = ScriptedServer(), []
    part = {"type": "http.response.body", "body": b"x", "more_body": True}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        soon = call_soon()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await anyio.sleep(0.005)
            soon(lambda: turned.append(1))
            before = len(turned)
            await send(part)
            assert len(turned) == before, "the event loop turned in send"
        await send({**part, "more_body": False})

    await serve(LifecycleMiddleware(app), server)
    assert server.body == b"x" * 21
    assert turned


@pytest.mark.parametrize("reads", [True, False])
async def test_lets_a_handler_poll_for_the_disconnect(reads: bool) -> None:
    """`is_disconnected` becomes true, and what the handler does then runs."""
    server, seen = ScriptedServer(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        if reads:
            await request.body()
        polls = 0
        while not await request.is_disconnected():
            polls += 1
            if polls == 3:
                server.gone.set()
            await anyio.sleep(0.001)
        await anyio.sleep(0.01)
        seen.append("abort")

    await serve(LifecycleMiddleware(app), server)
    assert seen == ["abort"]


async def test_lets_shielded_code_poll_for_the_disconnect() -> None:
    """Where nothing can be cancelled, the disconnect is seen at the first look."""
    server, seen = ScriptedServer(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await request.body()
        with anyio.CancelScope(shield=True):
            server.gone.set()
            await cancelled(scope)
            seen.append(await request.is_disconnected())

    await serve(LifecycleMiddleware(app), server)
    assert seen == [True]


@pytest.mark.parametrize("wrap", [LifecycleMiddleware, lambda app: app])
async def test_runs_background_tasks_after_a_disconnect(wrap: Any) -> None:
    """Servers give back a load count there, or abort an engine's request."""
    server, ran = ScriptedServer(), []

    async def words() -> Any:
        yield b"word"
        server.gone.set()
        await anyio.sleep_forever()

    async def release() -> None:
        await anyio.sleep(0.01)
        ran.append("released")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        response = StreamingResponse(words(), background=BackgroundTask(release))
        await response(scope, receive, send)

    await serve(wrap(app), server)
    assert ran == ["released"]
    assert server.status == 200


async def test_sends_a_response_that_a_cancelled_handler_has_ready() -> None:
    """It is not replaced by a cancellation, and its background task runs."""
    server, ran = ScriptedServer(waits=True), []

    async def release() -> None:
        await anyio.sleep(0.01)
        ran.append("released")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        with anyio.CancelScope(shield=True):
            server.gone.set()
            await cancelled(scope)
        response = JSONResponse("ready", background=BackgroundTask(release))
        await response(scope, receive, send)

    await serve(LifecycleMiddleware(app), server)
    assert (server.status, server.body) == (200, b'"ready"')
    assert ran == ["released"]


async def test_cancels_from_outside_what_follows_a_late_response() -> None:
    """It is protected from the disconnect, and from nothing else."""
    server, ends = ScriptedServer(), []
    outside = anyio.CancelScope()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()
        with anyio.CancelScope(shield=True):
            server.gone.set()
            while not request_of(scope).client_gone:
                await anyio.sleep(0.001)
            await anyio.sleep(0.01)
        await JSONResponse("ready")(scope, receive, send)
        outside.cancel()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            ends.append("cancelled")
            raise

    with outside:
        await serve(LifecycleMiddleware(app), server)
    assert ends == ["cancelled"]


async def test_raises_client_disconnect_in_a_handler_that_reads() -> None:
    """As without us; an application may remove a partial upload there."""
    server, ends = ScriptedServer(), []
    server.messages = [{"type": "http.request", "body": b"x", "more_body": True}]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        server.gone.set()
        try:
            await Request(scope, receive).body()
        except ClientDisconnect:
            await anyio.sleep(0.01)
            ends.append("removed")

    await serve(LifecycleMiddleware(app), server)
    assert ends == ["removed"]


async def test_delays_the_cancellation_for_one_that_looks_seldom() -> None:
    """With `cancel_delay` a first look after the disconnect still sees it."""
    server, seen = ScriptedServer(), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await request.body()
        server.gone.set()
        await anyio.sleep(0.05)
        seen.append(await request.is_disconnected())
        await anyio.sleep(0.01)
        seen.append("abort")

    await serve(LifecycleMiddleware(app, cancel_delay=60), server)
    assert seen == [True, "abort"]


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"read_ahead": 0}, {"content-length": "3"}),
        ({}, {"content-length": "3", "expect": "100-continue"}),
    ],
)
async def test_reads_no_body_before_it_is_asked_for(options: Any, headers: Any) -> None:
    """A limit inside the application holds, and 100 Continue is not sent early."""
    server, seen = ScriptedServer(b"a", b"b", b"c"), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.wait_all_tasks_blocked()
        seen.append(len(server.messages))
        await receive()
        await anyio.wait_all_tasks_blocked()
        seen.append(len(server.messages))

    await serve(LifecycleMiddleware(app, **options), server, **headers)
    assert seen == [4, 3]


async def test_reads_for_the_disconnect_where_there_is_no_body() -> None:
    """With `read_ahead=0`, too, a request without a body ends when its client leaves."""
    server = ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        server.gone.set()
        await anyio.sleep_forever()

    wrapped = LifecycleMiddleware(app, read_ahead=0)
    with anyio.fail_after(120):
        await wrapped(http_scope(method="GET"), server.receive, server.send)
    assert server.status == 499


# Starlette leaves the generator to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_ends_a_stream_that_never_suspends_and_listens() -> None:
    """Starlette cancels it on the disconnect, which needs a place to arrive at."""
    server, sent = ScriptedServer(), 0

    async def words() -> Any:
        nonlocal sent
        while True:
            sent += 1
            if sent == 50:
                server.gone.set()
            yield b"word"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await StreamingResponse(words())(scope, receive, send)

    await serve(LifecycleMiddleware(app, disconnect_grace=math.inf), server)
    assert sent < 1_000


@pytest.mark.parametrize(
    ("options", "looked"),
    [({"profile": "sglang"}, True), ({"profile": "vllm"}, False)],
    ids=["sglang", "vllm"],
)
def test_lets_sglang_look_for_a_disconnect(options: Any, looked: bool) -> None:
    """It looks every four seconds, and stops its engine only then."""
    stopped: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await request.body()
        server.gone.set()
        await anyio.sleep(4)
        stopped.append(await request.is_disconnected())

    async def main() -> None:
        nonlocal server
        server = ScriptedServer(b"{}")
        admission = Admission(app, environment={}, **options)
        await admission(http_scope("/generate"), server.receive, server.send)

    server: ScriptedServer
    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})
    assert stopped == ([True] if looked else [])
