"""Every shape of a generator, as the body of a response of every framework.

Frameworks read a body in a task of their own, and `begin` asks for its first item in
another: no block of the generator may depend on the task that entered it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from anyio.lowlevel import checkpoint
from asgi_kit import serving

from lifecycle import Session, SessionRegistry, Stream, managed
from lifecycle.testing import assert_quiescent
from lifecycle_asgi import LifecycleMiddleware, request_of

pytestmark = pytest.mark.asyncio
PATIENCE = 120
WHOLE = 5
# Idle for longer than a busy machine takes.
LIMITS = {"first_item": 600.0, "idle": 600.0, "total": 600.0}


async def words(count: int) -> AsyncIterator[bytes]:
    """Items that the loop has to be waited for; of none, one and then silence."""
    for number in range(count or 1):
        await checkpoint()
        yield b"%d\n" % number
    if not count:
        await asyncio.get_running_loop().create_future()


class Shapes:
    """Functions that stream, by shape, and what they leave of it."""

    def __init__(self, sessions: SessionRegistry, limits: dict[str, float]) -> None:
        self.sessions, self.limits = sessions, limits
        self.begun, self.ended = 0, 0
        give = managed(sessions=sessions, key=lambda key, count: key)
        self.managed_session = give(self._managed_session)
        self.managed_stream = give(self._managed_stream)
        self.managed_two_phases = give(self._managed_two_phases)
        self.managed_blocking = give(self._managed_blocking)

    async def start(self, session: Session, count: int) -> AsyncIterator[bytes]:
        """Begin at an engine, which is owed an END."""

        async def open_() -> AsyncIterator[bytes]:
            await checkpoint()
            self.begun += 1
            return words(count)

        return await session.start(open_, end=self._end)

    def _end(self, _: object) -> None:
        self.ended += 1

    async def plain(self, _key: str, count: int) -> AsyncIterator[bytes]:
        async for word in words(count):
            yield word

    async def session(self, key: str, count: int) -> AsyncIterator[bytes]:
        with self.sessions.open(key) as session:
            async for word in await self.start(session, count):
                yield word

    async def stream(self, key: str, count: int) -> AsyncIterator[bytes]:
        with self.sessions.open(key) as session:
            source = await self.start(session, count)
            async with session.stream(source, **self.limits) as items:
                async for word in items:
                    yield word

    async def on_a_stack(self, key: str, count: int) -> AsyncIterator[bytes]:
        async with AsyncExitStack() as stack:
            session = stack.enter_context(self.sessions.open(key))
            source = session.stream(await self.start(session, count), **self.limits)
            async for word in await stack.enter_async_context(source):
                yield word

    async def in_a_manager(self, key: str, count: int) -> AsyncIterator[bytes]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Stream[bytes]]:
            with self.sessions.open(key) as session:
                source = await self.start(session, count)
                async with session.stream(source, **self.limits) as items:
                    yield items

        async with opened() as items:
            async for word in items:
                yield word

    async def nested(self, key: str, count: int) -> AsyncIterator[bytes]:
        async with Stream(self.stream(key, count)) as items:
            async for word in items:
                yield word

    def blocking(self, _key: str, count: int) -> Iterator[bytes]:
        for number in range(count):
            yield b"%d\n" % number

    async def _managed_session(
        self, key: str, count: int, session: Session
    ) -> AsyncIterator[bytes]:
        async for word in await self.start(session, count):
            yield word

    async def _managed_stream(
        self, key: str, count: int, session: Session
    ) -> AsyncIterator[bytes]:
        async with session.stream(await self.start(session, count)) as items:
            async for word in items:
                yield word

    async def _managed_two_phases(
        self, key: str, count: int, session: Session
    ) -> Stream[bytes]:
        return session.stream(await self.start(session, count), **self.limits)

    def _managed_blocking(
        self, key: str, count: int, session: Session
    ) -> Iterator[bytes]:
        yield from self.blocking(key, count)


NAMES = (
    "plain",
    "session",
    "stream",
    "on_a_stack",
    "in_a_manager",
    "nested",
    "blocking",
    "managed_session",
    "managed_stream",
    "managed_two_phases",
    "managed_blocking",
)
Body = Callable[[Any, str], Any]


def starlette(body: Body) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def speak(request: Any) -> Any:
        return StreamingResponse(await body(request.scope, request.path_params["how"]))

    return Starlette(routes=[Route("/{how}", speak)])


def fastapi(body: Body) -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse

    app = FastAPI()

    async def speak(request: Any, how: str) -> Any:
        return StreamingResponse(await body(request.scope, how))

    speak.__annotations__ = {"request": Request, "how": str}
    app.get("/{how}")(speak)
    return app


def litestar(body: Body) -> Any:
    from litestar import Litestar, Request, get
    from litestar.response import Stream as Streamed

    async def speak(request: Any) -> Any:
        return Streamed(await body(request.scope, request.path_params["how"]))

    speak.__annotations__ = {"request": Request, "return": Streamed}
    return Litestar([get("/{how:str}")(speak)])


def quart(body: Body) -> Any:
    from quart import Quart, Response, request

    app = Quart(__name__)

    @app.get("/<how>")
    async def speak(how: str) -> Response:
        return Response(await body(request.scope, how))

    return app


async def ask(port: int, path: str, *, leave: bool, status: bytes = b"200") -> bytes:
    """Read the whole answer, or leave after its third item."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET /{path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    begun = await reader.readuntil(b"\r\n\r\n")
    assert begun.split()[1].startswith(status), begun
    read = await (reader.readuntil(b"2\n") if leave else reader.read())
    writer.transport.abort()
    return read


@pytest.mark.parametrize("way", ["begin", "own", "return"])
@pytest.mark.parametrize("framework", [starlette, fastapi, litestar, quart])
async def test_answers_whole_and_ends_with_its_client(
    framework: Callable[[Body], Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A complete answer is complete; one whose client leaves ends, and END is sent."""
    sessions = SessionRegistry()
    shapes, keys = Shapes(sessions, LIMITS), iter(range(1000))

    async def body(scope: Any, how: str) -> Any:
        name, _, count = how.partition("-")
        items = getattr(shapes, name)(str(next(keys)), int(count))
        if way == "begin":
            return await request_of(scope).begin(items)
        if way == "own" or "blocking" in name:  # a response needs it asynchronous
            return request_of(scope).own(items)
        return items

    app = LifecycleMiddleware(framework(body))
    # With the chunk that says that nothing is missing.
    whole = b"".join([b"2\r\n%b\r\n" % word async for word in words(WHOLE)])
    whole += b"0\r\n\r\n"
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(PATIENCE), sessions, serving(app) as port:
            got = {n: await ask(port, f"{n}-{WHOLE}", leave=False) for n in NAMES}
            assert {n: b for n, b in got.items() if b != whole} == {}
            assert set(_counted(sessions)) == {"completed"}
            asking = [ask(port, f"{n}-{10**9}", leave=True) for n in NAMES]
            await asyncio.gather(*asking)
            while sessions.live() or sessions.statistics().closing:
                await asyncio.sleep(0.001)
            assert_quiescent(sessions)
    assert "failed" not in _counted(sessions)
    assert shapes.begun == shapes.ended
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("ended_by", ["idle", "total", "stop"])
@pytest.mark.parametrize("framework", [starlette, fastapi, litestar, quart])
async def test_ends_the_wait_for_a_silent_engine(
    framework: Callable[[Body], Any], ended_by: str
) -> None:
    """A framework reads without a block; deadlines and `stop` end it all the same."""
    names = ("stream", "nested", "in_a_manager", "managed_two_phases")
    limits = {} if ended_by == "stop" else {ended_by: 0.05}
    sessions = SessionRegistry()
    shapes = Shapes(sessions, limits)

    async def body(scope: Any, how: str) -> Any:
        return await request_of(scope).begin(getattr(shapes, how)(how, 0))

    app = LifecycleMiddleware(framework(body))
    async with (
        asyncio.timeout(PATIENCE),
        sessions,
        serving(app, log_level="critical") as port,
    ):
        # On a busy machine an answer may end before it begins, as an error.
        asks = [ask(port, name, leave=False, status=b"") for name in names]
        asking = asyncio.gather(*asks)
        if ended_by == "stop":
            while shapes.begun < len(names):
                await asyncio.sleep(0.001)
            for name in names:
                await sessions.cancel(name)
        for answer in await asking:
            assert not answer.endswith(b"0\r\n\r\n")  # nor does it seem whole
        while sessions.live() or sessions.statistics().closing:
            await asyncio.sleep(0.001)
        assert_quiescent(sessions)
    outcome = "cancelled" if ended_by == "stop" else "deadline"
    assert _counted(sessions) == {outcome: len(names)}
    assert shapes.begun == shapes.ended


def _counted(sessions: SessionRegistry) -> dict[str, int]:
    outcomes = sessions.statistics().outcomes
    return {outcome: count for outcome, count in outcomes.items() if count}
