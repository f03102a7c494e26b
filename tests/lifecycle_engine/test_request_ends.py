"""How a generating request ends when its client, or another task, ends it early."""

from __future__ import annotations

import json
import threading
from typing import Any, Self

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope
from http_kit import encoded

from lifecycle import Gate
from lifecycle_engine import (
    AppSettings,
    FetchLimits,
    HttpsGet,
    SimProcessor,
    create_app,
)

LONG = 200_000  # parsed in a thread


class NoEngine:
    """An engine that is ready, and that no request of these tests reaches."""

    ready, pid, incarnation, health = True, None, 1, "ready"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def make_app(payloads: Gate | None = None, **settings: Any) -> Any:
    """An application without a process."""
    engine: Any = NoEngine()
    settings = {"model": "sim", **settings}
    return create_app(
        engine,
        SimProcessor(),
        gate=payloads or Gate(bytes=10**9, name="payloads"),
        settings=AppSettings(**settings),
    )


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops."""
    return str(request.param)


@pytest.mark.anyio
async def test_answers_once_a_request_cancelled_while_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cancellation by id comes while a thread finds its body to be wrong."""
    app = make_app()
    service = app.state.service
    parsing, cancelled = threading.Event(), threading.Event()
    parse = service.parser.parse

    def parse_later(*args: Any) -> Any:
        parsing.set()
        assert cancelled.wait(60)
        return parse(*args)

    monkeypatch.setattr(service.parser, "parse", parse_later)
    server = ScriptedServer(b"{" + b" " * LONG)
    scope = http_scope("/generate", headers=[(b"x-request-id", b"mine")])
    with anyio.fail_after(60):
        async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
            tasks.start_soon(app, scope, server.receive, server.send)
            await anyio.to_thread.run_sync(parsing.wait)
            service.sessions.get("mine").stop("cancelled")
            cancelled.set()
    kinds = [message["type"] for message in server.sent]
    assert kinds == ["http.response.start", "http.response.body"]
    assert server.status == 499
    assert service.sessions.statistics().outcomes["cancelled"] == 1


@pytest.mark.anyio
async def test_client_that_leaves_a_body_passed_on_is_gone() -> None:
    """In shadow, the rest of a large body is read outside of `Admission`."""
    app = make_app(shadow=True, body_bytes=1000)
    service = app.state.service
    whole = json.dumps({"text": "x" * 2000}).encode()
    server = ScriptedServer(whole)
    server.messages = [
        {"type": "http.request", "body": whole, "more_body": True},
        {"type": "http.disconnect"},
    ]
    with anyio.fail_after(60):
        async with app.router.lifespan_context(app):
            await app(http_scope("/generate"), server.receive, server.send)
    assert service.sessions.statistics().outcomes["client_gone"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize("prefix", ["", "/below"])
@pytest.mark.parametrize("suffix", ["", "\n"])
async def test_serves_every_path_that_is_routed(prefix: str, suffix: str) -> None:
    """Also below another application, and with the line end that routes let through."""
    app = make_app()
    server = ScriptedServer(b"{}")
    scope = http_scope(f"{prefix}/generate{suffix}", root_path=prefix)
    with anyio.fail_after(60):
        async with app.router.lifespan_context(app):
            await app(scope, server.receive, server.send)
    assert server.status == 400


async def connect(*_: Any) -> Any:
    """Connect to nothing."""
    raise OSError


class Pictures(HttpsGet):
    """Fetches the same picture from everywhere, or none in time."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__(FetchLimits(seconds=0.001 if late else 60), connect=connect)
        self.late = late

    async def __call__(self, url: str) -> bytes:
        """Return a picture."""
        if self.late:
            await anyio.sleep_forever()
        return encoded(40, 30)


def asks_for_picture() -> ScriptedServer:
    """A request for a picture that is fetched."""
    ask = {"text": "go", "images": ["https://pictures.example/image.png"]}
    return ScriptedServer(json.dumps(ask).encode())


@pytest.mark.anyio
async def test_holds_no_fetched_file_while_it_is_refused() -> None:
    """A client that does not read its answer keeps out no others."""
    payloads = Gate(bytes=10**9, slots=1, max_waiting=0, name="payloads")
    app = make_app(payloads, fetch=Pictures())
    remote, server = app.state.service.remote, asks_for_picture()
    held: list[int] = []

    def note(_: Any) -> None:
        held.append(remote.gate.statistics().bytes_in_use)

    server.on_send = note
    with anyio.fail_after(60):
        async with app.router.lifespan_context(app):
            with payloads.try_admit(bytes=1):
                await app(http_scope("/generate"), server.receive, server.send)
    assert server.status == 503
    assert held == [0, 0]
    assert remote.gate.statistics().admitted == 1


@pytest.mark.anyio
async def test_fetch_that_takes_too_long_is_a_failure() -> None:
    """No limit of this server refuses it."""
    app, server = make_app(fetch=Pictures(late=True)), asks_for_picture()
    with anyio.fail_after(60):
        async with app.router.lifespan_context(app):
            await app(http_scope("/generate"), server.receive, server.send)
    assert server.status == 504
    outcomes = app.state.service.sessions.statistics().outcomes
    assert (outcomes["failed"], outcomes["refused"]) == (1, 0)
