"""BodyLimit against a scripted server, on asyncio and trio."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from asgi_kit import ScriptedServer, http_scope
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from lifecycle_asgi import BodyLimit, BodyTooLarge, LifecycleMiddleware

pytestmark = pytest.mark.anyio


async def _length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


APP = Starlette(routes=[Route("/", _length, methods=["POST"])])
STACKS = {
    "limit": lambda n: BodyLimit(APP, max_bytes=n),
    "limit-inside": lambda n: LifecycleMiddleware(BodyLimit(APP, max_bytes=n)),
    "limit-outside": lambda n: BodyLimit(LifecycleMiddleware(APP), max_bytes=n),
}


async def call(app: Any, server: ScriptedServer, declared: int | None = None) -> None:
    """Call *app*, with a declared length if there is one."""
    headers = [(b"host", b"here")]
    if declared is not None:
        headers.append((b"content-length", str(declared).encode()))
    with anyio.fail_after(120):
        await app(http_scope(headers=headers), server.receive, server.send)


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
async def test_refuses_declared_length_before_reading(stack: Any) -> None:
    """A declared length above the limit is 413 and nothing is read (fault-16)."""
    server = ScriptedServer(b"x" * 11)
    await call(stack(10), server, declared=11)
    assert server.status == 413
    error = json.loads(server.body)["error"]
    assert error["code"] == "request_too_large"
    assert "10 bytes" in error["message"]


async def test_keeps_nothing_of_a_body_that_turns_out_too_large() -> None:
    """What the application has read goes with it, collector or not."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts = []
        while True:
            parts.append(await receive())

    server = ScriptedServer(b"", b"x")
    gc.disable()
    tracemalloc.start()
    try:
        server.messages[0]["body"] = bytes(3_000_000)
        await call(BodyLimit(app, max_bytes=3_000_000), server)
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert server.status == 413
    assert left < 1_500_000


async def test_leaves_declared_body_unread() -> None:
    """Not one message of a refused body is taken before the answer is sent."""
    server = ScriptedServer(b"x" * 11)
    unread: list[int] = []
    server.on_send = lambda _: unread.append(len(server.messages))
    await call(BodyLimit(APP, max_bytes=10), server, declared=11)
    assert unread == [2, 2, 0]  # head, content, and the end after the body


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
async def test_refuses_metered_body_as_soon_as_it_passes(stack: Any) -> None:
    """An undeclared body is 413 at the chunk that passes the limit (fault-16)."""
    server = ScriptedServer(*[b"x" * 6] * 100)
    unread: list[int] = []
    server.on_send = lambda _: unread.append(len(server.messages))
    await call(stack(10), server)
    assert server.status == 413
    assert unread[0] > 90  # a few may have been read ahead
    assert not server.messages  # the rest was dropped after the answer


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("declared", [10, None])
async def test_lets_body_of_exactly_the_limit_through(
    stack: Any, declared: Any
) -> None:
    """The limit itself is allowed."""
    server = ScriptedServer(b"x" * 4, b"y" * 6)
    await call(stack(10), server, declared=declared)
    assert (server.status, server.body) == (200, b"10")


async def test_drops_what_application_answers_after_refusal() -> None:
    """An application that answers a refused body itself is not heard."""
    server, seen = ScriptedServer(b"x" * 11), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            with pytest.raises(BodyTooLarge):
                await receive()
        seen.append("refused")
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"oops"})

    await call(BodyLimit(app, max_bytes=10), server)
    assert seen == ["refused"]
    assert server.status == 413
    assert b"oops" not in server.body


@pytest.mark.parametrize("other", [None, OSError()])
async def test_ends_refusal_that_arrives_in_a_group(other: Any) -> None:
    """An application that reads in a task group is refused without a server error."""
    server = ScriptedServer(b"x" * 11)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.sleep_forever()
        raise AssertionError("never")

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except BaseExceptionGroup as group:
            raise BaseExceptionGroup("both", [other, *group.exceptions]) from None

    if other is None:
        await call(BodyLimit(app, max_bytes=10), server)
    else:
        with pytest.raises(BaseExceptionGroup) as caught:
            await call(BodyLimit(failing, max_bytes=10), server)
        assert caught.value.exceptions == (other,)
    assert server.status == 413


async def test_raises_once_response_has_begun() -> None:
    """Behind a response that began there is no 413 left: the error is raised."""
    server = ScriptedServer(b"x" * 11)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    with pytest.raises(BodyTooLarge) as caught:
        await call(BodyLimit(app, max_bytes=10), server)
    assert caught.value.limit == 10
    assert server.status == 200


async def test_ignores_length_that_is_no_number() -> None:
    """A length the server let through but that is no number is metered instead."""
    server = ScriptedServer(b"x" * 3)
    await call(BodyLimit(APP, max_bytes=10), server, declared="many")  # type: ignore[arg-type]
    assert server.body == b"3"


async def test_meters_length_below_zero() -> None:
    """A length that no body can have is no reason to fail."""
    server = ScriptedServer(b"x" * 3)
    await call(BodyLimit(APP, max_bytes=10), server, declared=-5)
    assert server.body == b"3"


async def test_passes_other_scopes_through() -> None:
    """Lifespan calls reach the application untouched."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(scope)

    server = ScriptedServer()
    await BodyLimit(app, max_bytes=1)({"type": "lifespan"}, server.receive, server.send)
    assert seen == [{"type": "lifespan"}]


async def test_refuses_negative_limit() -> None:
    """A limit below zero is a mistake, and so is one that bounds nothing."""
    with pytest.raises(ValueError, match="got -1"):
        BodyLimit(APP, max_bytes=-1)
    with pytest.raises(ValueError, match="got nan"):
        BodyLimit(APP, max_bytes=math.nan)  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("stack", ["limit-inside", "limit-outside", "limit"])
async def test_refuses_body_that_is_not_there_in_time(stack: str) -> None:
    """A body that stands still is 408 (fault-15)."""
    limited: Any = BodyLimit(APP, max_bytes=100, timeout=0.05)
    if stack == "limit-inside":
        limited = LifecycleMiddleware(limited)
    elif stack == "limit-outside":
        app = LifecycleMiddleware(APP)
        limited = BodyLimit(app, max_bytes=100, timeout=0.05)
    server = ScriptedServer(b"x", b"x")
    del server.messages[-1]  # its end never comes
    await call(limited, server, declared=50)
    assert server.status == 408
    error = json.loads(server.body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_timeout")


async def test_refuses_a_late_body_that_never_waits() -> None:
    """A client whose parts are always there does not stay for longer than others."""
    asked = 0

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        until = anyio.current_time() + 0.01
        while anyio.current_time() < until:
            pass
        return {"type": "http.request", "body": b"x", "more_body": asked < 3}

    server = ScriptedServer()
    limited: Any = BodyLimit(APP, max_bytes=9, timeout=0.001)
    with anyio.fail_after(120):
        await limited(http_scope(), receive, server.send)
    assert (server.status, asked) == (408, 3)


async def test_times_no_more_than_the_body() -> None:
    """An answer that takes longer than a body may is given all the same."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        with anyio.move_on_after(0.2):
            await receive()  # hears of the disconnect
        await PlainTextResponse("late")(scope, receive, send)

    server = ScriptedServer(b"x")
    await call(BodyLimit(app, max_bytes=9, timeout=0.1), server)
    assert (server.status, server.body) == (200, b"late")


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_refuses_a_timeout_that_is_none(timeout: float) -> None:
    """No time at all would refuse every body."""
    with pytest.raises(ValueError, match="timeout"):
        BodyLimit(APP, max_bytes=9, timeout=timeout)
