"""`admitted`: a gate as a dependency of FastAPI, for requests and WebSockets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_type_hints

import anyio
import httpx
import pytest
from asgi_kit import serving
from fastapi import Depends, FastAPI, Request, WebSocket
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from lifecycle import Gate, GateFull, Lease, LifecycleError
from lifecycle.shared import SharedGate
from lifecycle_asgi.starlette import ManagedResponse, admitted, install

pytestmark = pytest.mark.anyio
Wraps = Callable[[FastAPI], object]


@pytest.fixture(autouse=True)
def on_asyncio(anyio_backend_name: str) -> None:
    """The server of these tests runs on asyncio."""
    if anyio_backend_name != "asyncio":
        pytest.skip("uvicorn runs on asyncio")


class Picture(BaseModel):
    """A body."""

    name: str


def length(connection: Any) -> int:
    """What a request costs."""
    return int(connection.headers.get("content-length", 1))


class Decoder:
    """An application whose endpoints decode behind a gate."""

    def __init__(self, gate: Gate | SharedGate) -> None:
        self.gate = gate
        self.decoded = 0
        self.app = FastAPI()
        takes = admitted(gate, cost=length)

        @self.app.post("/")
        async def endpoint(
            request: Request,
            picture: Picture,
            lease: Lease = Depends(takes),  # noqa: B008
        ) -> int:
            assert picture.model_dump() == await request.json()
            self.decoded += 1
            assert gate.statistics().bytes_in_use == lease.bytes
            return lease.bytes

        @self.app.websocket("/ws")
        async def ws(
            websocket: WebSocket,
            lease: Lease = Depends(takes),  # noqa: B008
        ) -> None:
            await websocket.accept()
            await websocket.send_text(await websocket.receive_text())
            self.decoded += 1

        @self.app.post("/managed")
        async def managed() -> ManagedResponse:
            return ManagedResponse(iter(()), gate=gate, bytes=15)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for what must come."""
        with anyio.fail_after(60):
            while not true():
                await anyio.sleep(0.001)


def nothing(app: FastAPI) -> None:
    """Leave the application as it is."""


@pytest.mark.parametrize("wrap", [nothing, install])
async def test_endpoint_has_the_lease_and_its_body(wrap: Wraps) -> None:
    """The cost is that of the request, and comes back with its end."""
    decoder = Decoder(Gate(bytes=100))
    wrap(decoder.app)
    async with serving(decoder.app) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", json={"name": "x"})
        assert answer.json() == len(b'{"name":"x"}')
    assert decoder.gate.statistics().bytes_in_use == 0


def without_clock(answer: httpx.Response) -> tuple[Any, ...]:
    """What a client sees, but for the date and the jitter of `Retry-After`."""
    headers = {*answer.headers} - {"date"}
    error = answer.json()["error"]
    return answer.status_code, headers, error.keys(), error["type"], error["code"]


@pytest.mark.parametrize(
    ("gate", "status"),
    [(Gate(slots=0, max_waiting=0), 503), (Gate(bytes=3), 413)],
)
async def test_refuses_as_the_middleware_does(gate: Gate, status: int) -> None:
    """Status, headers and form of the body are those of `ManagedResponse`."""
    found = []
    for wrap, path in ((nothing, "/"), (install, "/"), (install, "/managed")):
        decoder = Decoder(gate)
        wrap(decoder.app)
        async with serving(decoder.app) as port, httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port}{path}"
            answer = await client.post(url, json={"name": "x"})
        assert answer.status_code == status
        assert ("retry-after" in answer.headers) == (status == 503)
        assert decoder.decoded == 0
        found.append(without_clock(answer))
    assert found[0] == found[1] == found[2]


async def test_a_handler_of_the_application_stays() -> None:
    """A refusal goes to the handler that the application has."""
    decoder = Decoder(Gate(slots=0, max_waiting=0))

    @decoder.app.exception_handler(GateFull)
    async def handler(_request: Request, _refusal: GateFull) -> Response:
        return Response("mine", 429)

    async with serving(decoder.app) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", json={"name": "x"})
    assert (answer.status_code, answer.text) == (429, "mine")


async def test_a_handler_of_a_base_class_stays() -> None:
    """A handler of all errors of this project is asked for these as well."""
    decoder = Decoder(Gate(slots=0, max_waiting=0))

    @decoder.app.exception_handler(LifecycleError)
    async def handler(_request: Request, _refusal: LifecycleError) -> Response:
        return Response("mine", 429)

    async with serving(decoder.app) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{port}/", json={"name": "x"})
    assert (answer.status_code, answer.text) == (429, "mine")


async def test_other_refusals_of_the_application_stay_its_own() -> None:
    """What an endpoint raises itself goes where it went before the first refusal."""
    gate = Gate(slots=0, max_waiting=0)
    decoder = Decoder(gate)
    app, found = decoder.app, []

    @app.exception_handler(Exception)
    async def handler(_request: Request, _refusal: Exception) -> Response:
        return Response("mine", 500)

    @app.post("/own")
    async def own() -> None:
        await gate.admit()

    async with serving(app, log_level="critical") as port:
        async with httpx.AsyncClient() as client:
            for path in ("own", "", "own", ""):
                url = f"http://127.0.0.1:{port}/{path}"
                answer = await client.post(url, json={"name": "x"})
                found.append(answer.status_code)
    assert found == [500, 503, 500, 503]


@pytest.mark.parametrize("wrap", [nothing, install])
@pytest.mark.parametrize("how", ["requests", "sockets"])
async def test_client_that_leaves_frees_its_place(
    wrap: Wraps, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All who leave in line are gone while the gate is still full, and none decoded."""
    decoder = Decoder(Gate(slots=1))
    wrap(decoder.app)
    held = decoder.gate.try_admit()
    statistics = decoder.gate.statistics
    async with serving(decoder.app, ws="auto") as port, anyio.create_task_group() as go:
        url = f"127.0.0.1:{port}"

        async def wait_in_line() -> None:
            if how == "sockets":
                await connect(f"ws://{url}/ws")
            else:
                async with httpx.AsyncClient(timeout=None) as client:
                    await client.post(f"http://{url}/", json={"name": "x"})

        for _ in range(6):
            go.start_soon(wait_in_line)
        await decoder.until(lambda: statistics().waiting == 6)
        with caplog.at_level(logging.ERROR):
            go.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await decoder.until(lambda: statistics().waiting == 0)
                held.release()
    assert decoder.decoded == 0
    assert statistics().slots_in_use == 0
    assert not caplog.records


async def test_socket_behind_the_gate_works() -> None:
    """What the wait has read of a WebSocket reaches its endpoint."""
    decoder = Decoder(Gate(slots=1))
    held = decoder.gate.try_admit()
    async with serving(decoder.app, ws="auto") as port, anyio.create_task_group() as go:

        async def talk() -> None:
            async with connect(f"ws://127.0.0.1:{port}/ws") as client:
                await client.send("hello")
                assert await client.recv() == "hello"

        go.start_soon(talk)
        await decoder.until(lambda: decoder.gate.statistics().waiting == 1)
        held.release()
    assert decoder.decoded == 1
    assert decoder.gate.statistics().slots_in_use == 0


async def test_refuses_sockets_before_they_are_accepted() -> None:
    """The handshake is refused, with the response of a request."""
    decoder = Decoder(Gate(slots=0, max_waiting=0))
    async with serving(decoder.app, ws="auto") as port:
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}/ws")
    answer = refused.value.response
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert b"server_overloaded" in (answer.body or b"")


async def test_is_a_context_manager_for_starlette() -> None:
    """Without dependencies it is entered in the endpoint."""
    gate = Gate(slots=1)
    enter = asynccontextmanager(admitted(gate, cost=7))

    async def endpoint(request: Any) -> Response:
        async with enter(request) as lease:
            return JSONResponse([lease.bytes, await request.json()])

    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    async with serving(app) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/"
        assert (await client.post(url, json="x")).json() == [7, "x"]
        held = gate.try_admit()
        gate.close()
        assert (await client.post(url, json="x")).status_code == 503
        held.release()


@pytest.mark.skipif(sys.platform != "linux", reason="a shared gate needs Linux")
async def test_takes_the_gate_of_all_workers(tmp_path: Path) -> None:
    """A dependency and a response take a shared gate, for type checkers, too."""
    gate = SharedGate(tmp_path / "gate", bytes=10, max_waiting=0)
    decoder = Decoder(gate)
    install(decoder.app)
    async with serving(decoder.app) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/"
        for path in ("", "managed"):
            answer = await client.post(url + path, json={"name": "x"})
            assert answer.status_code == 413
    assert gate.statistics().bytes_in_use == 0
    gate.close()
    hints = [get_type_hints(it)["gate"] for it in (admitted, ManagedResponse.__init__)]
    assert hints == [Gate | SharedGate, Gate | SharedGate | None]
