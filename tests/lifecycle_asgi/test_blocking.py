"""Blocking generators, and sessions in generators, of clients that hang up for real."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from anyio.to_thread import current_default_thread_limiter
from asgi_kit import ScriptedServer, http_scope, serving
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from lifecycle import Gate, SessionRegistry, consumer_gone, in_thread, managed, scrub
from lifecycle_asgi import LifecycleMiddleware, RequestScope, request_of
from lifecycle_asgi.starlette import ManagedResponse, ResumableStreams

pytestmark = pytest.mark.asyncio
CLIENTS = 16
PATIENCE = 120


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone must do; the collector comes too late."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Picture:
    """A decoded picture: large, and watched by a weak reference."""

    def __init__(self) -> None:
        self.pixels = bytearray(1_000_000)


class Watch:
    """Counts pictures and generators that live, and where generators were closed."""

    def __init__(self) -> None:
        self.pictures: weakref.WeakSet[Picture] = weakref.WeakSet()
        self.made = 0
        self.generators = 0
        self.closed_in: set[int] = set()

    def picture(self) -> Picture:
        """Decode a picture."""
        self.pictures.add(picture := Picture())
        self.made += 1
        return picture

    def events(self, picture: Any) -> Iterator[bytes]:
        """Stream events without end, and hold the picture all the while."""
        pixels = picture if isinstance(picture, Picture) else picture.take()
        self.generators += 1
        try:
            while True:
                yield b"event\n" if pixels.pixels else b""
        finally:
            self.generators -= 1
            self.closed_in.add(threading.get_ident())


async def hang_up(port: int) -> None:
    """Read three events and leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    events = 0
    while events < 3:
        events += await reader.readline() == b"event\n"
    writer.transport.abort()


async def until(ready: Callable[[], bool]) -> None:
    """Let the loop run until *ready*."""
    async with asyncio.timeout(PATIENCE):
        while not ready():
            await asyncio.sleep(0.001)


def body_begun(request: Request, watch: Watch) -> Any:
    """The generator as it is, its first item awaited."""
    return request_of(request.scope).begin(watch.events(watch.picture()))


async def body_owned(request: Request, watch: Watch) -> Any:
    """The generator as it is."""
    return request_of(request.scope).own(watch.events(watch.picture()))


async def body_in_thread(request: Request, watch: Watch) -> Any:
    """Owned by nothing."""
    return in_thread(watch.events)(watch.picture())


async def body_managed(request: Request, watch: Watch) -> Any:
    """Admitted by a gate, scrubbed, and owned."""
    stream = managed(gate=Gate(slots=1), scrub="picture")(watch.events)
    return await request_of(request.scope).begin(stream(watch.picture()))


async def body_scrubbed(request: Request, watch: Watch) -> Any:
    """Scrubbed, and owned by nothing."""
    return scrub("picture")(watch.events)(watch.picture())


BODIES = {
    "begun": body_begun,
    "owned": body_owned,
    "in_thread": body_in_thread,
    "managed": body_managed,
    "scrubbed": body_scrubbed,
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_leaves_nothing_of_blocking_generators_after_their_clients_hang_up(
    body: Any,
) -> None:
    """Of 16 clients that leave after three events, no generator or picture is left."""
    watch, app = Watch(), FastAPI()

    @app.get("/")
    async def events(request: Request) -> Any:
        return StreamingResponse(await body(request, watch))

    app.add_middleware(LifecycleMiddleware)
    async with asyncio.timeout(PATIENCE), serving(app) as port:
        await asyncio.gather(*[hang_up(port) for _ in range(CLIENTS)])
        await until(lambda: not watch.generators and not watch.pictures)
    assert watch.made == CLIENTS
    assert len(watch.closed_in) >= 1
    assert threading.get_ident() not in watch.closed_in


@pytest.mark.usefixtures("no_collector")
async def test_leaves_nothing_without_the_middleware() -> None:
    """Under Starlette alone a disconnect closes the generators, too."""
    watch, app = Watch(), FastAPI()

    @app.get("/")
    async def events() -> Any:
        return StreamingResponse(in_thread(watch.events)(watch.picture()))

    async with asyncio.timeout(PATIENCE), serving(app) as port:
        await asyncio.gather(*[hang_up(port) for _ in range(CLIENTS)])
        await until(lambda: not watch.generators and not watch.pictures)
    assert threading.get_ident() not in watch.closed_in


async def test_owns_what_is_already_asynchronous_as_it_is() -> None:
    """Only blocking iterators get a thread; one that never began is just dropped."""
    request = RequestScope()
    watch = Watch()
    source = in_thread(watch.events)(watch.picture())
    assert request.own(source) is source
    request.own(watch.events(watch.picture()))
    await request.close(1.0)
    assert watch.generators == 0
    assert not watch.pictures


class Rows:
    """A cursor, not a generator: it has to be closed though nothing was read."""

    def __init__(self) -> None:
        self.read_in: list[int] = []
        self.closed_in: list[int] = []

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> str:
        self.read_in.append(threading.get_ident())
        return "data: row\n\n"

    def close(self) -> None:
        """As of a cursor: it may block."""
        self.closed_in.append(threading.get_ident())


@pytest.mark.parametrize("way", ["own", "begin", "resume", "respond"])
async def test_closes_a_blocking_iterator_that_never_began(way: str) -> None:
    """Where its client leaves before a thread is free for it; in a thread, and once."""
    rows, server, sessions = Rows(), ScriptedServer(), SessionRegistry()
    streams, limiter = ResumableStreams(sessions), current_default_thread_limiter()
    gate, tokens = Gate(slots=1), limiter.total_tokens

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if way == "resume":
            await streams.start(rows)(scope, receive, send)
        elif way == "respond":
            await ManagedResponse(rows, gate=gate, slots=1)(scope, receive, send)
        elif way == "begin":
            await request_of(scope).begin(rows)
        else:
            request_of(scope).own(rows)
            await asyncio.sleep(3600)

    async def leave() -> None:
        await until(lambda: way == "own" or limiter.statistics().tasks_waiting > 0)
        assert gate.statistics().slots_in_use == (way == "respond")
        server.gone.set()

    limiter.total_tokens = 0
    try:
        async with asyncio.timeout(PATIENCE), sessions, streams:
            leaving = asyncio.create_task(leave())
            guarded = LifecycleMiddleware(app)
            await guarded(http_scope(), server.receive, server.send)
            await leaving
            await until(lambda: rows.closed_in)
            await until(lambda: not gate.statistics().slots_in_use)
    finally:
        limiter.total_tokens = tokens
    assert rows.read_in == []
    assert len(rows.closed_in) == 1
    assert rows.closed_in != [threading.get_ident()]


class Work:
    """A blocking generator that works for long between two items."""

    def __init__(self) -> None:
        self.ran_in: list[int] = []
        self.at_work, self.noticed = threading.Event(), threading.Event()
        self.go_on = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.ran_in.append(threading.get_ident())
        try:
            yield b"event\n" * 3
            self.at_work.set()
            while not consumer_gone():
                time.sleep(0.001)
            self.noticed.set()
            self.go_on.wait(PATIENCE)
            yield b"for nobody"
        finally:
            self.ran_in.append(threading.get_ident())


@pytest.mark.parametrize("made", [iter, in_thread(iter)])
async def test_keeps_the_lease_of_a_response_while_its_thread_works(
    monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any]
) -> None:
    """The thread hears of a client that leaves; its end gives the lease back."""
    monkeypatch.setattr("lifecycle_asgi.starlette._CLOSE_SECONDS", 0.01)
    work, gate, app = Work(), Gate(bytes=10), FastAPI()

    @app.get("/")
    async def events() -> Any:
        return ManagedResponse(made(work), gate=gate, bytes=4)

    guarded, over = LifecycleMiddleware(app, grace=0.01), asyncio.Event()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        await guarded(scope, receive, send)
        over.set()

    async with asyncio.timeout(PATIENCE), serving(watched) as port:
        await hang_up(port)
        await until(work.noticed.is_set)
        await over.wait()
        assert gate.statistics().bytes_in_use == 4
        work.go_on.set()
        await until(lambda: not gate.statistics().bytes_in_use)
    first, last = work.ran_in
    assert first == last != threading.get_ident()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_keeps_the_lease_of_a_response_that_is_cancelled(times: int) -> None:
    """By its server, which may insist: the thread still works."""
    work, gate, server = Work(), Gate(bytes=10), ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = ManagedResponse(iter(work), gate=gate, bytes=4)
        await response(scope, receive, send)

    guarded = LifecycleMiddleware(app)
    async with asyncio.timeout(PATIENCE):
        serving = asyncio.create_task(
            guarded(http_scope(), server.receive, server.send)
        )
        await until(work.at_work.is_set)  # closed before, it would end at once
        for _ in range(times):
            serving.cancel()
            await until(work.noticed.is_set)
            await asyncio.sleep(0)
        if times > 2:
            with pytest.raises(asyncio.CancelledError):
                await serving
        assert gate.statistics().bytes_in_use == 4
        work.go_on.set()
        await until(lambda: not gate.statistics().bytes_in_use)
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_keeps_the_bytes_of_a_request_while_its_threads_work() -> None:
    """Those of `Admission`, until the last one has ended."""
    works, request, given_back = (Work(), Work()), RequestScope(), threading.Event()
    request.keep_bytes(given_back.set)

    async def read(work: Work) -> None:
        async for _ in await request.begin(iter(work)):
            pass

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(read(work))
            await until(work.at_work.is_set)
        await request.close(0.01)
        for work in works:
            await until(work.noticed.is_set)
            assert not given_back.is_set()
            work.go_on.set()
            await until(lambda: len(work.ran_in) > 1)  # noqa: B023 - until it is true
        await until(given_back.is_set)


async def test_refuses_to_wait_for_its_own_lease() -> None:
    """A stream that asks the gate of its response would wait for ever."""
    gate, server, errors = Gate(slots=1), ScriptedServer(), []

    async def words() -> AsyncIterator[bytes]:
        try:
            await gate.admit()
        except RuntimeError as error:
            errors.append(str(error))
        yield b"word"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ManagedResponse(words(), gate=gate)(scope, receive, send)

    async with asyncio.timeout(PATIENCE):
        await LifecycleMiddleware(app)(http_scope(), server.receive, server.send)
    assert "deadlock" in errors[0]
    assert gate.statistics().slots_in_use == 0


async def test_closes_a_blocking_iterator_that_began_in_its_thread() -> None:
    """Once, where it was read."""
    rows, request = Rows(), RequestScope()
    assert await anext(await request.begin(rows)) == "data: row\n\n"
    await request.close(PATIENCE)
    assert rows.closed_in == rows.read_in


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "never-waits"])
@pytest.mark.usefixtures("no_collector")
async def test_ends_sessions_of_generators_after_their_clients_hang_up(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A block around the items of a response leaves no session and no error behind."""
    sessions, app, ids = SessionRegistry(), FastAPI(), iter(range(CLIENTS))

    @app.get("/")
    async def events(request: Request) -> Any:
        async def body(name: str) -> AsyncIterator[bytes]:
            with sessions.open(name) as session:
                request_of(request.scope).attach(session)
                while True:
                    yield b"event\n"
                    if waits:
                        await asyncio.sleep(0)

        return StreamingResponse(body(str(next(ids))))

    app.add_middleware(LifecycleMiddleware)
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(PATIENCE), sessions, serving(app) as port:
            await asyncio.gather(*[hang_up(port) for _ in range(CLIENTS)])
            await until(lambda: not sessions.live())
            outcomes = sessions.statistics().outcomes
    assert outcomes["client_gone"] == CLIENTS
    assert caplog.records == []


async def test_ends_the_session_of_a_generator_that_is_read_to_its_end() -> None:
    """A response that ends by itself completes its session."""
    server = ScriptedServer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def body() -> AsyncIterator[bytes]:
            with sessions.open("a"):
                yield b"one"
                yield b"two"

        await StreamingResponse(body())(scope, receive, send)

    async with SessionRegistry() as sessions:
        await LifecycleMiddleware(app)(http_scope(), server.receive, server.send)
        assert sessions.statistics().outcomes["completed"] == 1
    assert server.body == b"onetwo"


async def test_keeps_a_session_with_items_from_several_tasks() -> None:
    """A keep-alive that awaits each item in a new task does not end the session."""
    async with SessionRegistry() as sessions:

        async def body() -> AsyncIterator[int]:
            with sessions.open("a"):
                yield 1
                yield 2

        source = body()
        for expected in (1, 2):
            assert await asyncio.create_task(anext(source)) == expected
            await asyncio.sleep(0)
            assert len(sessions.live()) == 1
        with contextlib.suppress(StopAsyncIteration):
            await asyncio.create_task(anext(source))
        assert sessions.statistics().outcomes["completed"] == 1
