"""WebSockets whose clients leave, on a real server, and in steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import litestar
import pytest
from asgi_kit import serving
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from websockets.asyncio.client import ClientConnection, connect

from lifecycle import Gate
from lifecycle_asgi import Admission, LifecycleMiddleware

pytestmark = pytest.mark.anyio
PICTURE = bytes(100_000)
Endpoint = Callable[[Any], Awaitable[None]]


def starlette_app(endpoint: Endpoint) -> Any:
    """A Starlette application with one WebSocket."""
    return Starlette(routes=[WebSocketRoute("/", endpoint)])


def fastapi_app(endpoint: Endpoint) -> Any:
    """The same of FastAPI."""
    app = FastAPI()

    @app.websocket("/")
    async def handler(websocket: WebSocket) -> None:
        await endpoint(websocket)

    return app


def litestar_app(endpoint: Endpoint) -> Any:
    """The same of Litestar."""

    async def handler(socket: litestar.WebSocket[Any, Any, Any]) -> None:
        await endpoint(socket)

    return litestar.Litestar([litestar.websocket("/")(handler)])


class Decoder:
    """An endpoint that decodes pictures, one at a time."""

    def __init__(self) -> None:
        self.gate = Gate(slots=1)
        self.decoded = self.ended = 0

    async def endpoint(self, websocket: Any) -> None:
        """Decode one picture when the gate admits it."""
        try:
            await websocket.accept()
            picture = await websocket.receive_bytes()
            with await self.gate.admit(bytes=len(picture)):
                self.decoded += 1
                await websocket.send_text("decoded")
        finally:
            self.ended += 1

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for what must come."""
        with anyio.fail_after(60):
            while not true():
                await anyio.sleep(0.001)


async def leave(client: ClientConnection, how: str) -> None:
    """Leave, with or without saying so."""
    if how == "close":
        await client.close()
    else:
        client.transport.abort()


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("ws", ["websockets-sansio", "wsproto"])
@pytest.mark.parametrize("wrap", [LifecycleMiddleware, Admission])
@pytest.mark.parametrize("make", [starlette_app, fastapi_app, litestar_app])
async def test_waiter_leaves_the_queue_with_its_client(
    anyio_backend_name: str, make: Any, wrap: Any, ws: str, how: str
) -> None:
    """Six pictures of clients that leave in line are not decoded, and the next is."""
    if anyio_backend_name != "asyncio":
        pytest.skip("uvicorn runs on asyncio")
    decoder = Decoder()
    gate = decoder.gate
    async with serving(wrap(make(decoder.endpoint)), ws=ws) as port:
        url = f"ws://127.0.0.1:{port}/"
        clients = [await connect(url) for _ in range(6)]
        with await gate.admit():
            for client in clients:
                await client.send(PICTURE)
            await decoder.until(lambda: gate.statistics().waiting == 6)
            for client in clients:
                await leave(client, how)
            await decoder.until(lambda: decoder.ended == 6)
            assert gate.statistics().waiting == 0
        async with connect(url) as stays:
            await stays.send(PICTURE)
            with anyio.fail_after(60):
                assert await stays.recv() == "decoded"
    assert decoder.decoded == 1


class Wire:
    """The server's side of one WebSocket, in steps."""

    def __init__(self, *pictures: bytes) -> None:
        self.messages: list[dict[str, Any]] = [{"type": "websocket.connect"}]
        for picture in pictures:
            self.messages.append({"type": "websocket.receive", "bytes": picture})
        self.gone = anyio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        """The messages, and the disconnect when the client has left."""
        await anyio.lowlevel.checkpoint()
        if self.messages:
            return self.messages.pop(0)
        await self.gone.wait()
        return {"type": "websocket.disconnect", "code": 1001}

    async def send(self, message: Any) -> None:
        """Keep *message*."""
        self.sent.append(message)

    async def serve(self, app: Any, **options: Any) -> None:
        """Serve this WebSocket."""
        scope = {"type": "websocket"}
        with anyio.fail_after(60):
            await LifecycleMiddleware(app, **options)(scope, self.receive, self.send)
        assert scope == {"type": "websocket"}


async def test_leaves_alone_what_works() -> None:
    """An application that works is not cancelled, and receives the disconnect."""
    wire, seen = Wire(b"one", b"two"), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())
        await send({"type": "websocket.accept"})
        wire.gone.set()
        await anyio.wait_all_tasks_blocked()
        seen.extend([await receive() for _ in range(4)])

    await wire.serve(app)
    disconnect = ("websocket.disconnect", None)
    assert [(each["type"], each.get("bytes")) for each in seen] == [
        ("websocket.connect", None),
        ("websocket.receive", b"one"),
        ("websocket.receive", b"two"),
        disconnect,
        disconnect,
    ]
    assert wire.sent == [{"type": "websocket.accept"}]


@pytest.mark.parametrize("knows", [False, True])
async def test_cancels_who_comes_to_a_gate_without_a_client(*, knows: bool) -> None:
    """Who comes to the gate later is cancelled, unless it has got the disconnect."""
    wire, gate, ended = Wire(), Gate(slots=1), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        wire.gone.set()
        await anyio.wait_all_tasks_blocked()
        if knows:
            await receive()
        with anyio.move_on_after(0.01) as waits:
            await gate.admit()
        ended.append(waits.cancelled_caught)

    held = gate.try_admit()
    await wire.serve(app)
    held.release()
    assert ended == ([True] if knows else [])
    assert gate.statistics().waiting == 0
    assert wire.sent == ([] if knows else [{"type": "websocket.close", "code": 1001}])


async def test_leaves_alone_whose_other_task_receives() -> None:
    """A task that receives handles the disconnect of one that waits."""
    wire, gate, told = Wire(), Gate(slots=1), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def listen() -> None:
            told.append((await receive())["type"])
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            wire.gone.set()
            await gate.admit()
        told.append("cleaned up")

    held = gate.try_admit()
    await wire.serve(app)
    held.release()
    assert told == ["websocket.disconnect", "cleaned up"]


async def test_leaves_alone_whose_other_task_is_busy_with_a_message() -> None:
    """A task that answers a message when its client leaves receives afterwards."""
    wire, gate, told = Wire(b"ping"), Gate(slots=1), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

        async def listen() -> None:
            await receive()
            wire.gone.set()
            await anyio.wait_all_tasks_blocked()
            told.append((await receive())["type"])
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await gate.admit()
        told.append("cleaned up")

    held = gate.try_admit()
    await wire.serve(app)
    held.release()
    assert told == ["websocket.disconnect", "cleaned up"]


@pytest.mark.parametrize("ws", ["websockets-sansio", "wsproto"])
async def test_leaves_alone_what_goes_on_when_it_has_closed(
    anyio_backend_name: str, ws: str
) -> None:
    """The disconnect that servers report of a close is none of the client."""
    if anyio_backend_name != "asyncio":
        pytest.skip("uvicorn runs on asyncio")
    gate, ended, waits = Gate(slots=1), anyio.Event(), anyio.Event()

    async def endpoint(websocket: Any) -> None:
        await websocket.accept()
        await websocket.close()
        waits.set()
        with await gate.admit():
            ended.set()

    held = gate.try_admit()
    async with serving(LifecycleMiddleware(starlette_app(endpoint)), ws=ws) as port:
        async with connect(f"ws://127.0.0.1:{port}/"):
            pass
        with anyio.fail_after(60):
            await waits.wait()
            await anyio.wait_all_tasks_blocked()
            held.release()
            await ended.wait()


async def test_closes_what_the_application_has_closed_no_more() -> None:
    """A cancelled application that closes in its ``finally`` is the last to do so."""
    wire, gate = Wire(), Gate(slots=1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        wire.gone.set()
        try:
            await gate.admit()
        finally:
            await send({"type": "websocket.close", "code": 1011})

    held = gate.try_admit()
    await wire.serve(app)
    held.release()
    assert wire.sent == [{"type": "websocket.close", "code": 1011}]


async def test_a_task_that_has_ended_receives_no_more() -> None:
    """Who received in a task that has ended is cancelled like others."""
    wire, gate = Wire(), Gate(slots=1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
        wire.gone.set()
        await gate.admit()
        pytest.fail("was admitted")

    held = gate.try_admit()
    await wire.serve(app)
    held.release()


async def test_reads_one_large_message_ahead() -> None:
    """Behind a message of the limit nothing is read before the application asks."""
    wire = Wire(bytes(5000), b"6789", b"")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await anyio.wait_all_tasks_blocked()
        assert len(wire.messages) == 2
        await receive()
        await anyio.wait_all_tasks_blocked()
        assert wire.messages == []

    await wire.serve(app, read_ahead=5000)


async def test_empty_messages_are_read_ahead_within_the_limit() -> None:
    """A client that sends nothing, often, is not read for ever."""
    wire = Wire(*[b""] * 1000)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await anyio.wait_all_tasks_blocked()
        assert len(wire.messages) > 990
        for _ in range(1000):
            await receive()
        assert wire.messages == []

    await wire.serve(app, read_ahead=4096)


async def test_raises_as_server_and_application_do() -> None:
    """An error of ``receive`` reaches the application, and its own the server."""
    wire = Wire()

    async def receive() -> Any:
        raise OSError("lost")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(OSError, match="lost"):
            await receive()
        raise ValueError("mine")

    wire.receive = receive  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="mine"):
        await wire.serve(app)


async def test_watches_once_when_nested() -> None:
    """A second middleware inside reads nothing."""
    wire, found = Wire(), []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        found.append(receive)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        found.append(receive)
        await LifecycleMiddleware(inner)(scope, receive, send)

    await wire.serve(outer)
    assert found[0] == found[1]


async def test_cancellation_from_outside_propagates() -> None:
    """A server that cancels the application is cancelled itself."""
    with anyio.CancelScope() as scope:
        wire = Wire()

        async def app(*_call: Any) -> None:
            scope.cancel()
            await anyio.sleep_forever()

        await wire.serve(app)
        pytest.fail("was swallowed")
    assert scope.cancelled_caught


async def test_reads_nothing_that_the_application_never_asks_for() -> None:
    """A server is asked for the first message when the application is."""
    asked: list[bool] = []

    async def receive() -> Any:
        asked.append(True)
        await anyio.sleep_forever()

    async def send(_: Any) -> None:
        """Nothing is sent."""

    async def app(_: Any, __: Any, ___: Any) -> None:
        for _turn in range(10):
            await anyio.lowlevel.checkpoint()

    scope = {"type": "websocket", "path": "/", "headers": []}
    await LifecycleMiddleware(app)(scope, receive, send)
    assert not asked
