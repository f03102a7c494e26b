"""`cancel_on_disconnect`: one route of FastAPI, Starlette and Litestar."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import anyio
import anyio.lowlevel
import httpx
import litestar
import pytest
from anyio.abc import SocketAttribute
from asgi_kit import ScriptedServer, http_scope, serving
from fastapi import (
    Depends,
    FastAPI,
    HTTPException,
    Request as FastAPIRequest,
    WebSocket,
)
from litestar.di import NamedDependency
from litestar.params import JSONBody
from pydantic import BaseModel, create_model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from websockets.asyncio.client import connect

from lifecycle import Gate, SessionRegistry
from lifecycle_asgi import LifecycleMiddleware, cancel_on_disconnect, request_of

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def on_asyncio(anyio_backend_name: str) -> None:
    """The server of these tests runs on asyncio."""
    if anyio_backend_name != "asyncio":
        pytest.skip("uvicorn runs on asyncio")


class Picture(BaseModel):
    """A body."""

    name: str


class Work:
    """What an endpoint does, and how it ends."""

    def __init__(self) -> None:
        self.began, self.ended = anyio.Event(), anyio.Event()
        self.never = anyio.Event()
        self.how = ""
        self.seen: object = None

    async def __call__(self, seen: object) -> None:
        """Wait for what never comes."""
        self.seen, self.how = seen, "raised"
        self.began.set()
        try:
            await self.never.wait()
        except anyio.get_cancelled_exc_class():
            self.how = "cancelled"
            raise
        finally:
            self.ended.set()


def starlette_app(work: Any) -> Any:
    """Its endpoint takes the request."""

    @cancel_on_disconnect
    async def endpoint(request: Request) -> Response:
        await work((await request.json())["name"])
        return JSONResponse({"name": "done"})

    return Starlette(routes=[Route("/", endpoint, methods=["POST"])])


async def upper(picture: Picture) -> str:
    """A dependency that has the body, too."""
    return picture.name.upper()


def fastapi_app(work: Any) -> Any:
    """Its endpoint takes a model and a dependency, and no request."""
    app = FastAPI()

    @app.post("/")
    @cancel_on_disconnect
    async def endpoint(
        picture: Picture, other: Annotated[str, Depends(upper)], q: int = 1
    ) -> Picture:
        assert (other, q) == (picture.name.upper(), 1)
        await work(picture.name)
        return Picture(name="done")

    return app


def fastapi_app_named(work: Any) -> Any:
    """Its body is called `request`, as in vLLM, and it takes the request as well."""
    app = FastAPI()

    @app.post("/")
    @cancel_on_disconnect
    async def endpoint(request: Picture, raw_request: FastAPIRequest) -> Picture:
        assert await raw_request.json() == {"name": request.name}
        await work(request.name)
        return Picture(name="done")

    return app


def fastapi_app_taken(work: Any) -> Any:
    """Its body is called `request`, and it takes no other."""
    app = FastAPI()

    @app.post("/")
    @cancel_on_disconnect
    async def endpoint(request: Picture) -> Picture:
        await work(request.name)
        return Picture(name="done")

    return app


def litestar_app(work: Any) -> Any:
    """Its endpoint takes the data, and the request."""

    @litestar.post("/", status_code=200)
    @cancel_on_disconnect
    async def endpoint(
        data: JSONBody[Picture], request: litestar.Request[Any, Any, Any]
    ) -> Picture:
        assert await request.json() == {"name": data.name}
        await work(data.name)
        return Picture(name="done")

    return litestar.Litestar([endpoint])


def litestar_app_reads(work: Any) -> Any:
    """Its endpoint reads the request."""

    @litestar.post("/", status_code=200)
    @cancel_on_disconnect
    async def endpoint(request: litestar.Request[Any, Any, Any]) -> dict[str, str]:
        await work((await request.json())["name"])
        return {"name": "done"}

    return litestar.Litestar([endpoint])


APPS = [
    starlette_app,
    fastapi_app,
    fastapi_app_named,
    fastapi_app_taken,
    litestar_app,
    litestar_app_reads,
]
HEAD = "POST / HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
BODY = b'{"name": "cat"}'


@contextlib.asynccontextmanager
async def asked(port: int, body: bytes = BODY, *headers: str) -> AsyncIterator[Any]:
    """A client that has sent a request."""
    lines = "".join(f"{each}\r\n" for each in headers)
    head = f"{HEAD}{lines}content-length: {len(body)}\r\n\r\n".encode()
    async with await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(head)
        if headers:
            assert b"100 Continue" in await client.receive()
        await client.send(body)
        yield client


def reset_on_close(sock: socket.socket) -> None:
    """Have the connection end with a reset."""
    linger = struct.pack("ii", 1, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@pytest.mark.parametrize("how", ["close", "reset", "after 100 Continue"])
@pytest.mark.parametrize("wrap", [lambda app: app, LifecycleMiddleware])
@pytest.mark.parametrize("make", APPS)
async def test_cancels_work_of_a_client_that_leaves(
    make: Callable[[Any], Any], wrap: Any, how: str
) -> None:
    """Work that would never end by itself is cancelled, with its body read."""
    work = Work()
    headers = ["expect: 100-continue"] if how.startswith("after") else []
    async with serving(wrap(make(work))) as port:
        with anyio.fail_after(60):
            async with asked(port, BODY, *headers) as client:
                await work.began.wait()
                if how == "reset":
                    reset_on_close(client.extra(SocketAttribute.raw_socket))
            await work.ended.wait()
    assert (work.how, work.seen) == ("cancelled", "cat")


@pytest.mark.parametrize("wrap", [lambda app: app, LifecycleMiddleware])
@pytest.mark.parametrize("make", APPS)
async def test_answers_a_client_that_stays(
    make: Callable[[Any], Any], wrap: Any
) -> None:
    """A client that stays gets its answer, on a connection that is used again."""
    seen: list[str] = []

    async def work(name: str) -> None:
        seen.append(name)

    async with serving(wrap(make(work))) as port, httpx.AsyncClient() as client:
        for name in ("one", "x" * 300_000):
            url = f"http://127.0.0.1:{port}/"
            answer = await client.post(url, json={"name": name})
            assert (answer.status_code, answer.json()) == (200, {"name": "done"})
            assert seen.pop() == name


def plain(endpoint: Any) -> Any:
    """A Starlette application with one decorated endpoint."""
    methods = ["GET", "POST"]
    route = Route("/", cancel_on_disconnect(endpoint), methods=methods)
    return Starlette(routes=[route])


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is of Linux")
@pytest.mark.parametrize("size", [0, 15, 4 << 20])
async def test_cancels_at_once_who_reads_no_body(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """An unread body delays nothing, and the watcher sees behind a large one."""
    monkeypatch.setattr("lifecycle_asgi.middleware._FIRST_LOOK_SECONDS", 1e6)
    work = Work()

    async def endpoint(request: Request) -> Response:
        await work(request_of(request.scope))
        return Response()

    async with serving(plain(endpoint)) as port:
        # Without a buffer of its own: a transport that still writes closes late.
        with (
            anyio.fail_after(60),
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            client.sendall(f"{HEAD}content-length: {size}\r\n\r\n".encode())
            await work.began.wait()
            push(client, size)
            reset_on_close(client)
            client.close()
            await work.ended.wait()
    assert work.how == "cancelled"
    assert work.seen.client_gone  # type: ignore[attr-defined]


def push(client: socket.socket, size: int) -> None:
    """Send as much of a body as fits."""
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while size:
            size -= client.send(bytes(min(size, 65536)))


async def test_streams_what_an_endpoint_returns() -> None:
    """A stream that begins behind the endpoint is whole, and may read the body."""

    async def endpoint(request: Request) -> Response:
        async def words() -> AsyncIterator[bytes]:
            async for part in request.stream():
                yield part
            yield b"end"

        return StreamingResponse(words())

    # A server that says in its scope that it raises: Starlette does not listen then.
    server = ScriptedServer(b"one", b"two")
    asgi = {"version": "3.0", "spec_version": "2.4"}
    await plain(endpoint)(http_scope(asgi=asgi), server.receive, server.send)
    assert (server.status, server.body) == (200, b"onetwoend")


async def test_errors_are_those_of_the_endpoint() -> None:
    """An exception reaches the handlers of the framework as it was raised."""

    async def endpoint(request: Request) -> Response:
        raise HTTPException(418, "teapot")

    server = ScriptedServer()
    await plain(endpoint)(http_scope(), server.receive, server.send)
    assert (server.status, server.body) == (418, b"teapot")


async def test_session_of_a_client_that_left_is_client_gone() -> None:
    """A session that is attached has the outcome that it has under the middleware."""
    server, sessions = ScriptedServer(), SessionRegistry()

    async def endpoint(request: Request) -> Response:
        with sessions.open("one") as session:
            request_of(request.scope).attach(session)
            server.gone.set()
            await anyio.sleep_forever()
        return Response()

    async with sessions:
        scope = http_scope()
        with anyio.fail_after(60):
            await plain(endpoint)(scope, server.receive, server.send)
        assert sessions.statistics().outcomes["client_gone"] == 1
    assert server.status == 499
    assert "lifecycle" not in scope


async def test_result_of_who_ends_in_spite_of_it_is_sent() -> None:
    """An endpoint that finishes after the disconnect has its answer sent."""
    server = ScriptedServer()

    async def endpoint(request: Request) -> Response:
        server.gone.set()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        return Response("mine")

    await plain(endpoint)(http_scope(), server.receive, server.send)
    assert (server.status, server.body) == (200, b"mine")


async def test_cancellation_from_outside_propagates() -> None:
    """What the server cancels is cancelled, and answered by nobody."""
    server = ScriptedServer()
    with anyio.CancelScope() as scope:

        async def endpoint(request: Request) -> Response:
            scope.cancel()
            await anyio.sleep_forever()
            return Response()

        await plain(endpoint)(http_scope(), server.receive, server.send)
        pytest.fail("was swallowed")
    assert server.sent == []


async def test_frees_its_place_in_a_queue() -> None:
    """A client that leaves while its endpoint waits at a gate is in line no more."""
    gate, server = Gate(slots=1), ScriptedServer()
    held = gate.try_admit()

    async def endpoint(request: Request) -> Response:
        server.gone.set()
        with await gate.admit():
            return Response()

    with anyio.fail_after(60):
        await plain(endpoint)(http_scope(), server.receive, server.send)
    assert (server.status, gate.statistics().waiting) == (499, 0)
    held.release()


async def test_closes_no_streams_and_says_so() -> None:
    """A stream that would be closed before it is sent is an error with a remedy."""

    async def endpoint(request: Request) -> Response:
        async def words() -> AsyncIterator[bytes]:
            yield b"word"

        with pytest.raises(TypeError, match=r"install\(app\)"):
            await request_of(request.scope).begin(words())
        return Response("fine")

    server = ScriptedServer()
    await plain(endpoint)(http_scope(), server.receive, server.send)
    assert server.body == b"fine"


def test_takes_coroutine_functions_only() -> None:
    """A thread cannot be cancelled, and a generator runs elsewhere."""

    def blocks() -> None: ...

    async def yields() -> AsyncIterator[int]:
        yield 1

    for each in (blocks, yields, Work()):
        with pytest.raises(TypeError, match="takes an async def that returns"):
            cancel_on_disconnect(each)  # type: ignore[type-var]


async def test_keeps_what_a_signature_says() -> None:
    """The OpenAPI document is that of the plain endpoint; a direct call just runs."""

    async def endpoint(
        picture: Picture, other: Annotated[str, Depends(upper)], **more: int
    ) -> Picture:
        """Look at it."""
        return picture

    decorated = cancel_on_disconnect(endpoint)
    documents = []
    for each in (endpoint, decorated):
        app = FastAPI()
        app.post("/")(each)
        documents.append(app.openapi())
    assert documents[0] == documents[1]
    assert decorated.__doc__ == "Look at it."
    assert await decorated(Picture(name="x"), "X") == Picture(name="x")


async def test_asks_no_server_twice_for_a_body_that_was_read() -> None:
    """Where no socket is watched, `Expect` keeps nobody from hearing the disconnect."""
    server, work = ScriptedServer(BODY), Work()
    kinds = [(b"content-type", b"application/json"), (b"expect", b"100-continue")]

    async def leaves(name: str) -> None:
        server.gone.set()
        await work(name)

    with anyio.fail_after(60):
        scope = http_scope(headers=kinds)
        await fastapi_app(leaves)(scope, server.receive, server.send)
    assert (work.how, server.status) == ("cancelled", 499)


class DisconnectsOnce(ScriptedServer):
    """A server that reports a disconnect once, as hypercorn does."""

    async def receive(self) -> dict[str, Any]:
        """Wait for ever when it was reported."""
        message = await super().receive()
        if message["type"] == "http.disconnect":
            self.gone, self.complete = anyio.Event(), anyio.Event()
        return message


async def test_begins_no_stream_for_a_client_that_has_left() -> None:
    """A stream that the framework would not end is not begun."""
    server = DisconnectsOnce()

    async def endpoint(request: Request) -> Response:
        async def words() -> AsyncIterator[bytes]:
            while True:
                await anyio.lowlevel.checkpoint()
                yield b"word"

        await request.body()
        server.gone.set()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert await request.is_disconnected()
        return StreamingResponse(words())

    with anyio.fail_after(60):
        await plain(endpoint)(http_scope(), server.receive, server.send)
    assert server.status == 499


@pytest.mark.parametrize("kind", ["fastapi", "litestar"])
async def test_dependency_of_an_endpoint_that_was_cut_off_fails(kind: str) -> None:
    """A dependency with ``yield`` does not take half of the work for the whole."""
    server, ended = ScriptedServer(), []

    async def transaction() -> AsyncIterator[int]:
        try:
            yield 1
        except Exception as error:
            ended.append(getattr(error, "status_code", 0))
            raise
        ended.append("committed")

    async def work() -> None:
        server.gone.set()
        await anyio.sleep_forever()

    app: Any
    if kind == "fastapi":
        app = FastAPI()

        @app.post("/")
        @cancel_on_disconnect
        async def endpoint(one: int = Depends(transaction)) -> None:  # noqa: FAST002
            await work()

    else:

        @litestar.post("/", dependencies={"one": transaction})
        @cancel_on_disconnect
        async def other(
            one: NamedDependency[int], request: litestar.Request[Any, Any, Any]
        ) -> None:
            await work()

        app = litestar.Litestar([other])
    with anyio.fail_after(60):
        await app(http_scope(), server.receive, server.send)
    assert (ended, server.status) == ([499], 499)


async def test_a_model_that_is_called_request_is_none() -> None:
    """A body whose class has the name of a framework's request is a body."""
    named = create_model("Request", scope=(str, "x"))
    server = ScriptedServer(b"{}")

    async def endpoint(body: Any) -> None:
        server.gone.set()
        await anyio.sleep_forever()

    endpoint.__annotations__["body"] = named
    app = FastAPI()
    app.post("/")(cancel_on_disconnect(endpoint))
    kinds = [(b"content-type", b"application/json")]
    with anyio.fail_after(60):
        await app(http_scope(headers=kinds), server.receive, server.send)
    assert server.status == 499


def sockets_fastapi(endpoint: Any) -> Any:
    """An application with one WebSocket."""

    async def handler(websocket: Any) -> None:
        await endpoint(websocket)

    handler.__annotations__["websocket"] = WebSocket
    app = FastAPI()
    app.websocket("/")(cancel_on_disconnect(handler))
    return app


def sockets_litestar(endpoint: Any) -> Any:
    """The same of Litestar."""

    async def handler(socket: litestar.WebSocket[Any, Any, Any]) -> None:
        await endpoint(socket)

    return litestar.Litestar([litestar.websocket("/")(cancel_on_disconnect(handler))])


SOCKETS = pytest.mark.parametrize("make", [sockets_fastapi, sockets_litestar])


@SOCKETS
async def test_socket_that_waits_before_it_accepts_gets_all(make: Any) -> None:
    """What is read ahead changes nothing for who has not received it."""

    async def endpoint(socket: Any) -> None:
        await anyio.wait_all_tasks_blocked()
        await socket.accept()
        for _ in range(2):
            word = await socket.receive_text()
            await anyio.wait_all_tasks_blocked()
            await socket.send_text(word)

    async with serving(make(endpoint), ws="auto") as port:
        with anyio.fail_after(60):
            async with connect(f"ws://127.0.0.1:{port}/") as client:
                await client.send("one")
                await client.send("two")
                assert [await client.recv(), await client.recv()] == ["one", "two"]


@SOCKETS
@pytest.mark.parametrize("accepts", [False, True])
async def test_socket_of_a_client_that_left_is_closed(
    make: Any, caplog: pytest.LogCaptureFixture, *, accepts: bool
) -> None:
    """Who leaves at the gate is closed with one message, and nothing is logged."""
    gate, gone, sent = Gate(slots=1), anyio.Event(), []
    held = gate.try_admit()

    async def endpoint(socket: Any) -> None:
        if accepts:
            await socket.accept()
        gone.set()
        await gate.admit()

    messages = [{"type": "websocket.connect"}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "websocket.disconnect", "code": 1005}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "websocket.close":
            raise OSError("the client has left")

    scope = http_scope(type="websocket", subprotocols=[])
    del scope["method"]
    with anyio.fail_after(60), contextlib.suppress(OSError):
        await make(endpoint)(scope, receive, send)
    assert sent == ["websocket.accept"] * accepts + ["websocket.close"]
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    held.release()


@SOCKETS
async def test_socket_that_was_closed_by_its_endpoint_goes_on(make: Any) -> None:
    """The disconnect that servers report of a close is none of the client."""
    gate, ended = Gate(slots=1), anyio.Event()
    held = gate.try_admit()

    async def endpoint(socket: Any) -> None:
        await socket.accept()
        await socket.close()
        with await gate.admit():
            ended.set()

    async with serving(make(endpoint), ws="auto") as port:
        async with connect(f"ws://127.0.0.1:{port}/"):
            pass
        with anyio.fail_after(60):
            while not gate.statistics().waiting:
                await anyio.sleep(0.001)
            await anyio.wait_all_tasks_blocked()
            held.release()
            await ended.wait()
