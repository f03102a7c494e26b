"""What a request owns is closed with it, in the task that the server called."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope
from starlette.responses import StreamingResponse

from lifecycle import Gate, GateFull, Stream, managed
from lifecycle_asgi import (
    LifecycleMiddleware,
    RequestScope,
    request_of,
    request_scope,
)

pytestmark = pytest.mark.anyio


class Words:
    """An async generator's promises, and what became of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.closed_in: list[int] = []

    async def __call__(self) -> Any:
        try:
            for _ in range(1000):
                yield b"word"
                await anyio.lowlevel.checkpoint()
        finally:
            self.closed_in.append(anyio.get_current_task().id)
            if self.error is not None:
                raise self.error


async def serve(app: Any, server: ScriptedServer) -> None:
    """One request, from the task that asks."""
    with anyio.fail_after(120):
        await LifecycleMiddleware(app)(http_scope(), server.receive, server.send)


async def test_closes_body_that_framework_leaves_at_its_yield() -> None:
    """A client who leaves while a part is sent ends the generator at once (peers-8)."""
    words, server = Words(), ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async for _word in request_of(scope).own(words()):
            server.gone.set()
            await anyio.sleep_forever()

    await serve(app, server)
    assert words.closed_in == [anyio.get_current_task().id]


async def test_cancels_body_where_it_waits() -> None:
    """A disconnect while parts are ready cancels the generator where it waits."""
    server, ended_by = ScriptedServer(), []

    async def words() -> Any:
        try:
            for _ in range(20):
                yield b"word"
            await anyio.sleep_forever()
        except BaseException as error:
            ended_by.append(type(error))
            raise

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await StreamingResponse(words())(scope, receive, send)

    server.on_send = lambda message: server.gone.set()
    await serve(app, server)
    assert ended_by == [anyio.get_cancelled_exc_class()]


@pytest.mark.parametrize("way", ["own", "begin"])
async def test_closes_stream_that_was_never_iterated(way: str) -> None:
    """An answer that is given up before its first part leaves nothing."""
    gate, server = Gate(slots=1), ScriptedServer()

    @managed(gate=gate)
    async def speak() -> Any:
        yield b"word"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if way == "own":
            request_of(scope).own(speak())
        else:
            await request_of(scope).begin(speak())
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await serve(app, server)
    assert gate.statistics().slots_in_use == 0
    assert server.status == 500


async def test_raises_refusal_before_the_status_is_sent() -> None:
    """`begin` waits for the first item, so that a refusal can be a status."""
    gate, server = Gate(slots=0, max_waiting=0), ScriptedServer()

    @managed(gate=gate)
    async def speak() -> Any:
        yield b"word"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await request_of(scope).begin(speak())

    with pytest.raises(GateFull):
        await serve(app, server)
    assert not server.offered


async def test_begins_with_every_item() -> None:
    """Nothing is lost or repeated by looking at the first item."""

    async def speak(*words: bytes) -> Any:
        for word in words:
            yield word

    for words in ([], [b"one"], [b"one", b"two", b"three"]):
        server = ScriptedServer()

        async def app(
            scope: Any, receive: Any, send: Any, words: list[bytes] = words
        ) -> None:
            body = await request_of(scope).begin(speak(*words))
            await StreamingResponse(body)(scope, receive, send)

        await serve(app, server)
        assert server.body == b"".join(words)


async def test_closes_the_others_when_one_fails_to_close() -> None:
    """An error while closing is raised once all are closed."""
    mine, other = Words(ValueError("mine")), Words()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for each in (other(), mine()):
            request_of(scope).own(each)
            await anext(each)

    with pytest.raises(ValueError, match="^mine$"):
        await serve(app, ScriptedServer())
    assert mine.closed_in
    assert other.closed_in


async def test_keeps_error_of_application_before_that_of_closing() -> None:
    """What the application raised is what is heard of."""
    words = Words(ValueError("closing"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anext(request_of(scope).own(words()))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await serve(app, ScriptedServer())
    assert words.closed_in


async def test_closes_what_was_begun_and_forgets_its_first_item() -> None:
    """A framework that closes what it was given closes the source of it."""
    words = Words()
    body = await RequestScope().begin(words())
    await body.aclose()
    assert words.closed_in
    with pytest.raises(StopAsyncIteration):
        await anext(body)
    bare = await RequestScope().begin(Bare())
    assert [item async for item in bare] == [b"word"]
    await bare.aclose()


class Bare:
    """An iterator of one item that has no `aclose`."""

    def __init__(self) -> None:
        self._items = [b"word"]

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            raise StopAsyncIteration
        return self._items.pop()


async def test_lets_a_clean_up_wait_where_everything_is_cancelled() -> None:
    """Within its grace nothing cuts it short."""
    closed = []

    async def slow() -> Any:
        try:
            yield b""
        finally:
            await anyio.lowlevel.checkpoint()
            closed.append(True)

    request = RequestScope()
    await anext(request.own(slow()))
    with anyio.fail_after(120), anyio.CancelScope() as outside:
        outside.cancel()
        await request.close(1.0)
    assert closed == [True]


async def test_closes_no_longer_than_its_grace() -> None:
    """A generator that does not end is left after `grace` seconds."""

    async def stuck() -> Any:
        try:
            yield b""
        finally:
            with anyio.CancelScope(shield=False):
                await anyio.sleep_forever()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await anext(request_of(scope).own(stuck()))

    server = ScriptedServer()
    with anyio.fail_after(120):
        serving = LifecycleMiddleware(app, grace=0.01)
        await serving(http_scope(), server.receive, server.send)


async def test_closes_what_a_request_scope_owns() -> None:
    """The same holds without ASGI."""
    words = Words()
    with anyio.fail_after(120):
        async with request_scope(anyio.sleep_forever) as request:
            stream = request.own(Stream(words()))
            await anext(stream)
    assert stream.closed
    assert words.closed_in == [anyio.get_current_task().id]


@pytest.mark.parametrize("leaves", ["cancelled", "raises", "ends"])
async def test_keeps_what_a_block_raised_before_an_error_of_closing(
    leaves: str,
) -> None:
    """A cancellation is never lost to a clean-up that fails, nor is an error."""
    words = Words(ValueError("closing"))
    expected = {"raises": KeyError, "ends": ValueError}.get(leaves)
    with anyio.fail_after(120), anyio.CancelScope() as outside:
        with pytest.raises(expected) if expected else nullcontext():
            async with request_scope(anyio.sleep_forever) as request:
                await anext(request.own(words()))
                if leaves == "raises":
                    raise KeyError("mine")
                if leaves == "cancelled":
                    outside.cancel()
                    await anyio.sleep_forever()
    assert outside.cancelled_caught is (leaves == "cancelled")
    assert words.closed_in
