"""BodyLimit with a gate: the bytes of all bodies are bounded, not of each alone."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle import Gate
from lifecycle_asgi import BodyLimit, LifecycleMiddleware, request_of

pytestmark = pytest.mark.anyio
OK = {"type": "http.response.start", "status": 200, "headers": []}


def length(size: int) -> list[tuple[bytes, bytes]]:
    """The header that declares *size*."""
    return [(b"content-length", str(size).encode())]


async def call(app: Any, server: ScriptedServer, **changes: Any) -> None:
    """Serve one request under both middlewares."""
    with anyio.fail_after(120):
        await LifecycleMiddleware(app)(
            http_scope(**changes), server.receive, server.send
        )


async def answer(send: Any) -> None:
    """Say 200."""
    await send(OK)
    await send({"type": "http.response.body", "body": b""})


async def read(receive: Any) -> None:
    """Read a body to its end."""
    while (await receive())["more_body"]:
        pass


async def test_admits_declared_body_before_anything_is_read() -> None:
    """The application runs once its body fits beside all others (fault-16)."""
    gate, server = Gate(bytes=100), ScriptedServer(b"x" * 60)
    in_use = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        in_use.append(gate.statistics().bytes_in_use)
        await read(receive)
        await answer(send)

    limited = BodyLimit(app, max_bytes=100, gate=gate)
    first = gate.try_admit(bytes=60)
    async with anyio.create_task_group() as tasks:

        async def serve() -> None:
            await call(limited, server, headers=length(60))

        tasks.start_soon(serve)
        await anyio.wait_all_tasks_blocked()
        assert gate.statistics().waiting == 1
        assert in_use == []
        first.release()
    assert in_use == [60]
    assert gate.statistics().bytes_in_use == 0


async def test_admits_undeclared_body_with_its_first_bytes() -> None:
    """What is metered grows with what was read."""
    gate = Gate(bytes=100)
    server = ScriptedServer(b"x" * 30, b"x" * 40)
    in_use = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        in_use.append(gate.statistics().bytes_in_use)
        for _ in range(3):
            await receive()
            in_use.append(gate.statistics().bytes_in_use)
        await answer(send)

    await call(BodyLimit(app, max_bytes=100, gate=gate), server)
    assert in_use == [0, 30, 70, 70]
    assert gate.statistics().bytes_in_use == 0


async def test_asks_nothing_for_a_request_without_body() -> None:
    """A health check passes a full gate."""
    gate, server = Gate(bytes=0, max_waiting=0), ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        await answer(send)

    await call(BodyLimit(app, max_bytes=100, gate=gate), server)
    assert server.status == 200
    assert gate.statistics().received == 0


@pytest.mark.parametrize("declared", [True, False])
async def test_refusal_has_retry_after(declared: bool) -> None:
    """A full gate is 503 with Retry-After, whatever layer notices."""
    gate, server = Gate(bytes=100, max_waiting=0), ScriptedServer(b"x" * 60)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        await answer(send)

    limited = BodyLimit(app, max_bytes=100, gate=gate)
    with gate.try_admit(bytes=60):
        await call(limited, server, headers=length(60) if declared else [])
    assert server.status == 503
    headers = dict(server.sent[0]["headers"])
    assert 1 <= int(headers[b"retry-after"]) <= 60
    assert json.loads(server.body)["error"]["code"] == "server_overloaded"


async def test_refusal_of_a_closed_gate_says_not_to_retry() -> None:
    """A server that shuts down wants no retry here."""
    gate, server = Gate(bytes=100), ScriptedServer(b"x")
    gate.close()
    await call(BodyLimit(_never, max_bytes=9, gate=gate), server, headers=length(1))
    assert server.status == 503
    assert dict(server.sent[0]["headers"])[b"x-should-retry"] == b"false"


async def test_refuses_body_that_never_fits() -> None:
    """A body above the gate's capacity is 413 like one above the limit."""
    gate, server = Gate(bytes=10), ScriptedServer(b"x" * 60)
    await call(BodyLimit(_never, max_bytes=99, gate=gate), server, headers=length(60))
    assert server.status == 413


async def test_admits_next_body_when_this_one_is_released() -> None:
    """At hand-off the body counts no more, though the stream goes on."""
    gate, server = Gate(bytes=100), ScriptedServer(b"x" * 60)
    in_use = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        request_of(scope).release_body()
        request_of(scope).release_body()
        in_use.append(gate.statistics().bytes_in_use)
        await answer(send)

    await call(BodyLimit(app, max_bytes=99, gate=gate), server, headers=length(60))
    assert in_use == [0]


@pytest.mark.parametrize("error", [None, ValueError("mine")])
async def test_keeps_nothing_after_a_disconnect(error: Exception | None) -> None:
    """A client who leaves, or an error, gives the bytes back."""
    gate, server = Gate(bytes=100), ScriptedServer(b"x" * 60)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        if error is not None:
            raise error
        server.gone.set()
        await anyio.sleep_forever()

    limited = BodyLimit(app, max_bytes=99, gate=gate)
    if error is None:
        await call(limited, server, headers=length(60))
        assert server.status == 499
    else:
        with pytest.raises(ValueError, match="^mine$"):
            await call(limited, server, headers=length(60))
    assert gate.statistics().bytes_in_use == 0


async def test_leaves_line_when_client_leaves() -> None:
    """A disconnected client is not waited for."""
    gate, server = Gate(bytes=100), ScriptedServer(b"x" * 60)
    limited = BodyLimit(_never, max_bytes=99, gate=gate)
    with gate.try_admit(bytes=60):
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                await call(limited, server, headers=length(60))

            tasks.start_soon(serve)
            await anyio.wait_all_tasks_blocked()
            # The body is there, so its end and the disconnect are heard behind it.
            assert gate.statistics().waiting == 1
            server.gone.set()
    assert gate.statistics().waiting == 0
    assert gate.statistics().cancelled == 1


async def _never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("called for a body that was not admitted")
