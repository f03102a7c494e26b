"""Cancel a request of each other endpoint at every await of its path.

As in `test_cancel`, with pictures by URL, and with the request that cancels another one.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from asgi_kit import Cancelled, ScriptedServer, http_scope
from cancel_kit import World
from descriptors import descriptors_before, open_descriptors
from http_kit import Quiet, data_url, encoded, make_engine, png

from lifecycle import Gate, SessionNotFound
from lifecycle_asgi import ClientIdentity
from lifecycle_engine import (
    AppSettings,
    FetchLimits,
    HttpsGet,
    SimProcessor,
    create_app,
)

PICTURE, REMOTE = data_url(png(40, 30)), "https://pictures.example/image.png"


class Steps:
    """Counts what a fetch waits for, which is in tasks of its own, and leaves there."""

    count, at, gone = 0, 0, staticmethod(lambda: None)

    @classmethod
    async def next(cls) -> None:
        cls.count += 1
        if cls.count == cls.at:
            cls.gone()
        await anyio.lowlevel.checkpoint()


class Site(ByteStream):
    """A connection to a site with one picture; every step suspends."""

    open = 0

    def __init__(self) -> None:
        image = encoded(40, 30)
        head = b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n" % len(image)
        self.parts = [head, image[:100], image[100:]]
        Site.open += 1

    async def send(self, item: bytes) -> None:
        await Steps.next()

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await Steps.next()
        return self.parts.pop(0)

    async def aclose(self) -> None:
        Site.open -= 1


async def resolve(_: str) -> list[str]:
    """A public address."""
    await Steps.next()
    return ["93.184.216.34"]


async def connect(*_: Any) -> Any:
    """A connection."""
    await Steps.next()
    return Site()


def ask(path: str, url: str) -> dict[str, Any]:
    """A request with a picture."""
    if path == "/generate":
        return {"text": "go", "images": [url], "max_tokens": 3}
    picture = {"type": "input_image", "image_url": url}
    items = [{"role": "user", "content": [picture]}]
    return {"model": "sim", "input": items, "max_output_tokens": 3}


def fetching_app(gate: Gate) -> Any:
    """An application that fetches from a `Site`."""
    fetch = HttpsGet(FetchLimits(), resolve=resolve, connect=connect)
    settings = AppSettings(model="sim", fetch=fetch)
    return create_app(make_engine(), SimProcessor(), gate=gate, settings=settings)


async def every_step(path: str) -> int:
    """Leave at each step of a fetch; returns how many there were."""
    gate = Gate(bytes=10**9, slots=1, name="payloads")
    app, document = fetching_app(gate), ask(path, REMOTE)
    body = json.dumps(document).encode()
    async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
        world = World(app, gate, tasks)
        await world.service.engine.wait_ready()
        for at in range(1, 100):
            run = Cancelled(0, "leave", "early")
            Steps.count, Steps.at = 0, at
            leaver = anyio.Event()
            Steps.gone = staticmethod(leaver.set)
            server, _ = await world.once(run, path=path, body=body, leaver=leaver)
            assert Site.open == 0
            if Steps.count < at:
                assert server.status == 200, server.body
                return at - 1
            assert server.status == 499
    raise AssertionError("no end of steps")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("path", ["/v1/responses", "/generate"])
def test_closes_connections_wherever_a_fetch_is_left(backend: str, path: str) -> None:
    """A client that leaves while a picture is fetched leaves no connection."""

    async def main() -> int:
        with anyio.fail_after(800):
            return await every_step(path)

    assert anyio.run(main, backend=backend) >= 5


async def every_point(kind: str, when: str, path: str, body: bytes) -> int:
    """Go through all points in one world; returns how many there were."""
    gate = Gate(bytes=10**9, slots=1, name="payloads")
    app = fetching_app(gate)
    async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
        world = World(app, gate, tasks)
        await world.service.engine.wait_ready()
        await world.once(Cancelled(0, kind, when), path=path, body=body)
        descriptors = descriptors_before()
        for at in range(1, 500):
            run = Cancelled(at, kind, when)
            server, _ = await world.once(run, path=path, body=body)
            assert open_descriptors() == descriptors
            if not run.hit:
                assert server.status == 200, server.body
                return at - 1
            assert run.propagated or server.complete.is_set()
    raise AssertionError("no end of suspension points")


KINDS = [("asyncio", "native", "late"), ("trio", "scope", "early")]


@pytest.mark.parametrize(("backend", "kind", "when"), KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("url", [PICTURE, REMOTE], ids=["sent", "by URL"])
@pytest.mark.parametrize("path", ["/v1/responses", "/generate"])
def test_leaves_nothing_of_other_endpoints(
    backend: str, kind: str, when: str, path: str, url: str, stream: bool
) -> None:
    """No lease, session, payload, task or descriptor is left."""
    body = json.dumps({**ask(path, url), "stream": stream}).encode()

    async def main() -> int:
        with anyio.fail_after(800):
            return await every_point(kind, when, path, body)

    assert anyio.run(main, backend=backend) >= 5


KEY = [(b"x-api-key", b"mine")]


async def every_point_of_cancel(kind: str, when: str, path: str) -> int:
    """Cancel a request that runs, at each point of the request that cancels it."""
    app = create_app(
        make_engine("--sim-decode-step=0.01"),
        SimProcessor(),
        gate=Gate(bytes=10**9, name="payloads"),
        settings=AppSettings(model="sim", client=ClientIdentity(["mine"])),
    )
    endless = {"text": "go", "max_tokens": 2000, "ignore_eos": True}
    body = json.dumps({**endless, "stream": True}).encode()
    async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
        world = World(app, Gate(slots=None, name="none"), tasks)
        sessions = world.service.sessions
        await world.service.engine.wait_ready()
        for at in range(100):
            victim = ScriptedServer(body, waits=True)
            scope = http_scope("/generate", headers=[*KEY, (b"x-request-id", b"mine")])
            tasks.start_soon(app, scope, victim.receive, victim.send)
            while not sessions.live():
                await anyio.sleep(0.001)
            run = Cancelled(at, kind, when)
            server = ScriptedServer()
            to = http_scope(path, headers=KEY)
            await run.run(app(to, server.receive, server.send))
            if not (run.hit or at == 0):
                assert server.status == 200
                assert not sessions.live()
            with contextlib.suppress(SessionNotFound):
                await sessions.cancel("mine")
            with anyio.fail_after(120):
                await victim.complete.wait()
                await Quiet(world.service).reached()
            if at and not run.hit:
                return at - 1
    raise AssertionError("no end of suspension points")


@pytest.mark.parametrize(("backend", "kind", "when"), KINDS)
@pytest.mark.parametrize(
    "path", ["/v1/requests/mine/cancel", "/v1/responses/resp_mine/cancel"]
)
def test_leaves_nothing_of_a_request_that_cancels(
    backend: str, kind: str, when: str, path: str
) -> None:
    """A disconnect during the wait for the engine leaves neither request behind."""

    async def main() -> int:
        with anyio.fail_after(800):
            return await every_point_of_cancel(kind, when, path)

    assert anyio.run(main, backend=backend) >= 1
