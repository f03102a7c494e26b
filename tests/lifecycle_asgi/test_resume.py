"""`ResumableStreams`: a client leaves, and what its stream does then."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import anyio
import anyio.lowlevel
import httpx
import pytest
import trio.testing
from asgi_kit import (
    KINDS,
    Cancelled,
    ScriptedServer,
    cancel_everywhere,
    http_scope,
    serving,
)
from fastapi import BackgroundTasks, FastAPI, Request
from litestar import Litestar, get
from litestar.types import ASGIApp

import lifecycle_asgi
from lifecycle import Gate, GateFull, SessionEnded, SessionRegistry
from lifecycle_asgi import LifecycleMiddleware
from lifecycle_asgi.starlette import ResumableResponse, ResumableStreams, install

pytestmark = pytest.mark.anyio
virtual = pytest.mark.parametrize(
    "anyio_backend",
    [("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)})],
)


class Source:
    """A generator that yields what the test permits, and what became of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.allowed = 0
        self.made = 0
        self.closed = anyio.Event()
        self._changed = anyio.Event()

    def allow(self, count: int) -> None:
        """Have it yield so many more; 0 ends it."""
        self.allowed += count or math.inf  # type: ignore[assignment]
        self._changed.set()
        self._changed = anyio.Event()

    async def events(self) -> AsyncIterator[str]:
        """Yield events while they are allowed."""
        try:
            while True:
                while self.made >= self.allowed:
                    await self._changed.wait()
                if self.allowed == math.inf:
                    break
                self.made += 1
                yield f"data: {self.made}\n\n"
            if self.error is not None:
                raise self.error
        finally:
            self.closed.set()


class World:
    """An application with one stream at a time, and its streams."""

    def __init__(self, **options: Any) -> None:
        self.sessions = SessionRegistry()
        self.streams = ResumableStreams(self.sessions, **options)
        self.sources: list[Source] = []
        self.policy: Any = math.inf
        self.after: list[str] = []
        self.app = FastAPI(lifespan=self.lifespan)

        @self.app.api_route("/chat", methods=["GET", "POST"], response_model=None)
        async def chat(request: Request, later: BackgroundTasks) -> ResumableResponse:
            owner = request.headers.get("x-user")
            if (last := request.headers.get("last-event-id")) is not None:
                return self.streams.resume(last, owner=owner)
            await request.body()
            later.add_task(self.after.append, "background")
            self.sources.append(Source())
            self.sources[-1].allow(1)  # the status comes with it
            return self.streams.start(
                self.sources[-1].events(), on_disconnect=self.policy, owner=owner
            )

    @contextlib.asynccontextmanager
    async def lifespan(self, _: object) -> AsyncIterator[None]:
        """The life of the server."""
        async with self.sessions, self.streams:
            yield

    @property
    def outcomes(self) -> dict[str, int]:
        """How the streams ended."""
        found = self.sessions.statistics().outcomes
        return {str(name): count for name, count in found.items() if count}


async def until(true: Callable[[], object]) -> None:
    """Wait for what must come."""
    with anyio.fail_after(60):
        while not true():
            await anyio.sleep(0.001)


class EventSource:
    """A browser: it reads events, and remembers the id of the last."""

    def __init__(self, client: httpx.AsyncClient, **headers: str) -> None:
        self.client = client
        self.headers = headers
        self.last = ""
        self.data: list[str] = []
        self.status = 0
        self.stream = ""

    @contextlib.asynccontextmanager
    async def connect(self, method: str = "GET") -> AsyncIterator[AsyncIterator[str]]:
        """Connect, or connect again, until the block is left: then hang up."""
        headers = dict(self.headers)
        if self.last:
            headers["last-event-id"] = self.last
        with anyio.fail_after(60):
            async with self.client.stream(method, "/chat", headers=headers) as answer:
                self.status = answer.status_code
                self.stream = answer.headers.get("x-stream-id", "")
                yield self._events(answer.aiter_lines())

    async def _events(self, lines: AsyncIterator[str]) -> AsyncIterator[str]:
        data = ""
        async for line in lines:
            name, _, value = line.partition(": ")
            if name == "data":
                data = value
            elif name == "id":
                self.last = value
            elif not line:
                self.data.append(data)
                yield data

    async def read(self, events: AsyncIterator[str], count: int) -> None:
        """Read so many events."""
        for _ in range(count):
            await anext(events)

    async def rest(self) -> list[str]:
        """Connect, and read to the end."""
        self.data = []
        async with self.connect() as events:
            async for _ in events:
                pass
        return self.data


@contextlib.asynccontextmanager
async def served(world: World, app: Any = None) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the application of *world*."""
    async with serving(app or world.app) as port:
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            yield client


@pytest.fixture
def on_asyncio(anyio_backend_name: str) -> None:
    """uvicorn runs on asyncio."""
    if anyio_backend_name != "asyncio":
        pytest.skip("uvicorn runs on asyncio")


def bare(app: FastAPI) -> None:
    """Leave it as it is."""


wraps = pytest.mark.parametrize("wrap", [bare, install])


# A real server -----------------------------------------------------------------


@wraps
@pytest.mark.usefixtures("on_asyncio")
async def test_resumes_with_exactly_what_is_missing(wrap: Any) -> None:
    """A client that leaves and returns misses no event, and gets none twice."""
    world = World()
    wrap(world.app)
    async with served(world) as client:
        browser = EventSource(client)
        async with browser.connect("POST") as events:
            source = world.sources[0]
            source.allow(2)
            await browser.read(events, 3)
        source.allow(4)
        await until(lambda: source.made == 7)
        assert not source.closed.is_set()
        async with browser.connect() as events:
            await browser.read(events, 4)
            source.allow(2)
            await browser.read(events, 2)
            source.allow(0)
            assert await anext(events, None) is None
        assert browser.last == f"{browser.stream}.9"
        assert browser.data == [str(n) for n in range(1, 10)]
        # Nothing is missing: a browser connects no more.
        async with browser.connect():
            assert browser.status == 204
    assert world.outcomes == {"completed": 1}
    await until(lambda: world.after == ["background"])


@wraps
@pytest.mark.usefixtures("on_asyncio")
async def test_closes_the_generator_of_a_client_that_leaves(wrap: Any) -> None:
    """The default policy is to cancel, and then nothing is left to resume."""
    world = World()
    wrap(world.app)
    world.policy = "cancel"
    async with served(world) as client:
        browser = EventSource(client)
        async with browser.connect("POST") as events:
            await browser.read(events, 1)
        await until(world.sources[0].closed.is_set)
        async with browser.connect():
            assert browser.status == 404
    assert world.outcomes == {"client_gone": 1}


@pytest.mark.usefixtures("on_asyncio")
async def test_closes_the_generator_when_the_time_is_up() -> None:
    """With 0 seconds, that is at once."""
    world = World()
    world.policy = 0.0
    async with served(world) as client:
        browser = EventSource(client)
        async with browser.connect("POST") as events:
            await browser.read(events, 1)
        await until(world.sources[0].closed.is_set)
    assert world.outcomes == {"client_gone": 1}


@pytest.mark.usefixtures("on_asyncio")
async def test_replays_the_rest_after_the_end() -> None:
    """Within `keep` the whole rest is sent, and then the response ends."""
    world = World()
    async with served(world) as client:
        browser = EventSource(client)
        async with browser.connect("POST") as events:
            await browser.read(events, 1)
        world.sources[0].allow(2)
        await until(lambda: world.sources[0].made == 3)
        world.sources[0].allow(0)
        await world.sources[0].closed.wait()
        assert await browser.rest() == ["2", "3"]
        browser.last = browser.stream  # all of it, by its id
        assert await browser.rest() == ["1", "2", "3"]


@pytest.mark.usefixtures("on_asyncio")
async def test_second_client_takes_over() -> None:
    """The first response is cut off, and its end does not touch the second."""
    world = World()
    async with served(world) as client:
        first, second = EventSource(client), EventSource(client)
        async with first.connect("POST") as events:
            source = world.sources[0]
            source.allow(1)
            await first.read(events, 2)
            second.last = first.stream
            async with second.connect() as again:
                await second.read(again, 2)
                with pytest.raises(httpx.RemoteProtocolError):  # not a whole response
                    await anext(events)
                source.allow(1)
                await second.read(again, 1)
                source.allow(0)
                assert await anext(again, None) is None
        assert second.data == ["1", "2", "3"]
    assert world.outcomes == {"completed": 1}


@pytest.mark.usefixtures("on_asyncio")
async def test_owner_alone_resumes() -> None:
    """To others a stream of one owner is unknown, whatever id they send."""
    world = World()
    async with served(world) as client:
        mine = EventSource(client, **{"x-user": "ada"})
        async with mine.connect("POST") as events:
            await mine.read(events, 1)
        world.sources[0].allow(0)
        for headers in ({}, {"x-user": "eve"}):
            other = EventSource(client, **headers)
            other.last = mine.last
            async with other.connect():
                assert other.status == 404
        assert await mine.rest() == []
        assert mine.status == 204


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("", 400),
        ("7", 400),
        ("x" * 32 + ".1e3", 400),
        ("x" * 33, 400),
        ("x" * 32 + ".\u0661", 400),
        ("x" * 32 + ".1\n", 400),
        ("x" * 32 + ".1", 404),
        ("x" * 32, 404),
        (None, 400),
    ],
)
async def test_refuses_other_ids(last: str | None, status: int) -> None:
    """No id is 400, and an id of no stream 404; no header repeats it."""
    world = World()
    server = ScriptedServer()
    async with world.lifespan(None):
        response: Any = world.streams.resume(last)
        await response(http_scope(), server.receive, server.send)
    assert server.status == status
    assert b"x-stream-id" not in dict(server.sent[0]["headers"])


@pytest.mark.usefixtures("on_asyncio")
async def test_refuses_a_number_that_was_never_sent() -> None:
    """An id of the future would leave a gap."""
    world = World()
    async with served(world) as client:
        browser = EventSource(client)
        async with browser.connect("POST") as events:
            await browser.read(events, 1)
        browser.last = f"{browser.stream}.2"
        async with browser.connect():
            assert browser.status == 400


@pytest.mark.usefixtures("on_asyncio")
async def test_litestar_takes_the_response() -> None:
    """The streams without Starlette make an ASGI application."""
    sessions = SessionRegistry()
    streams = lifecycle_asgi.ResumableStreams(sessions)

    @get("/chat")
    async def chat() -> ASGIApp:
        async def events() -> AsyncIterator[bytes]:
            yield b": comment\r\ndata: 1\r\n\r\n"

        return cast("ASGIApp", streams.start(events()))

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with sessions, streams:
            yield

    app = Litestar([chat], lifespan=[lifespan])
    async with serving(app) as port, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/chat")
    stream = answer.headers["x-stream-id"]
    assert answer.text == f": comment\r\ndata: 1\r\nid: {stream}.1\n\n"


@wraps
@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.usefixtures("on_asyncio")
async def test_end_of_the_server_logs_no_error_for_each_client(
    caplog: pytest.LogCaptureFixture, http: str, wrap: Any
) -> None:
    """Their responses are cut off, or refused where nothing of them was sent."""
    world = World()
    wrap(world.app)

    async def silence() -> AsyncIterator[str]:
        await anyio.sleep_forever()
        yield ""

    world.app.get("/silent", response_model=None)(
        lambda: world.streams.start(silence(), on_disconnect=math.inf)
    )
    statuses: list[int] = []

    async def ask(client: httpx.AsyncClient, path: str) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):
            async with client.stream("GET", path) as answer:
                statuses.append(answer.status_code)
                await answer.aread()
                statuses.append(0)  # it seems whole

    with anyio.fail_after(60):
        async with (
            serving(world.app, http=http) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
            anyio.create_task_group() as clients,
        ):
            for path in ("/chat", "/chat", "/silent"):
                clients.start_soon(ask, client, path)
            await until(lambda: len(statuses) == 2)
            await until(lambda: world.sessions.statistics().live == 3)
            await world.sessions.drain(0)
    assert statuses == [200, 200, 503, 0]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# Without a network ---------------------------------------------------------------


class Visit:
    """A client of a scripted server."""

    def __init__(self, response: ResumableResponse) -> None:
        self.response = response
        self.server = ScriptedServer()
        self.raised: list[BaseException] = []
        self.done = anyio.Event()

    async def __call__(self) -> None:
        """Be served, to the end."""
        app: Any = LifecycleMiddleware(self.response)
        try:
            await app(http_scope(), self.server.receive, self.server.send)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.raised.append(error)
        finally:
            self.done.set()

    async def leave(self) -> None:
        """Hang up."""
        self.server.gone.set()
        with anyio.fail_after(60):
            await self.done.wait()

    @property
    def data(self) -> list[str]:
        """The data of the events that came."""
        lines = self.server.body.decode().split("\n")
        return [line[6:] for line in lines if line.startswith("data: ")]


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[Callable[..., Visit]]:
    """Yields what lets a client visit a response."""
    async with anyio.create_task_group() as tasks, world.lifespan(None):

        def visit(response: ResumableResponse) -> Visit:
            found = Visit(response)
            tasks.start_soon(found)
            return found

        yield visit


@virtual
async def test_lives_on_for_its_seconds() -> None:
    """The time runs while there is no client, from the start with each leaving."""
    world, source = World(keep=10), Source()
    source.allow(1)
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect=30))
        await until(lambda: first.data)
        await anyio.sleep(1000)
        await first.leave()
        await anyio.sleep(29.9)
        second = visit(world.streams.resume(first.response.stream))
        await until(lambda: second.data)
        await anyio.sleep(1000)
        await second.leave()
        began = anyio.current_time()
        await source.closed.wait()
        assert anyio.current_time() - began == pytest.approx(30, abs=0.1)
        third = visit(world.streams.resume(first.response.stream))
        await third.done.wait()
        assert third.server.status == 404
    assert world.outcomes == {"client_gone": 1}


@virtual
@pytest.mark.parametrize("seconds", [9.9, 10.1])
async def test_keeps_what_has_ended_for_a_while(seconds: float) -> None:
    """The events go `keep` seconds after the end, or after the last client."""
    world, source = World(keep=10), Source()
    source.allow(1)
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="detach"))
        await until(lambda: first.data)
        await first.leave()
        await anyio.sleep(1000)
        source.allow(0)
        await source.closed.wait()
        await anyio.sleep(seconds)
        second = visit(world.streams.resume(first.response.stream))
        await second.done.wait()
        assert (second.server.status == 200) == (seconds < 10)
        assert second.data == ["1"] * (seconds < 10)


async def test_error_reaches_the_client_that_resumes() -> None:
    """As it was raised, after the events before it; then the stream is done with."""
    world, failure = World(), KeyError("of the engine")
    source = Source(failure)
    source.allow(1)
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="detach"))
        await until(lambda: first.data)
        await first.leave()
        source.allow(1)
        await until(lambda: source.made == 2)
        source.allow(0)
        await source.closed.wait()
        second = visit(world.streams.resume(first.response.stream))
        await second.done.wait()
        assert (first.raised, second.raised) == ([], [failure])
        assert second.data == ["1", "2"]
        assert not second.server.complete.is_set()
        third = visit(world.streams.resume(first.response.stream))
        await third.done.wait()
        assert third.server.status == 404
    assert world.outcomes == {"failed": 1}


async def test_error_reaches_the_client_that_takes_over() -> None:
    """Where the first response cannot end at once, the second is not the whole."""
    world, failure, server = World(), KeyError("of the engine"), ScriptedServer()
    source = Source(failure)
    source.allow(1)
    stuck, ending = anyio.Event(), anyio.Event()

    async def receives_late() -> Any:
        try:
            await anyio.sleep_forever()
        finally:
            ending.set()
            with anyio.CancelScope(shield=True):
                await stuck.wait()

    async with running(world) as visit, anyio.create_task_group() as tasks:
        first: Any = world.streams.start(source.events(), on_disconnect="detach")
        tasks.start_soon(first, http_scope(), receives_late, server.send)
        await until(lambda: server.sent)
        source.allow(0)
        with anyio.fail_after(60):
            await ending.wait()
        second = visit(world.streams.resume(first.stream))
        await until(lambda: second.raised or second.server.complete.is_set())
        stuck.set()
    assert second.raised == [failure]
    assert second.data == ["1"]
    assert not server.complete.is_set()


@pytest.mark.usefixtures("on_asyncio")
async def test_generator_that_is_cancelled_ends_alone() -> None:
    """Such as by a call that it awaits, which somebody else has cancelled."""
    world, source = World(), Source()
    source.allow(1)

    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with running(world) as visit:
        other = visit(world.streams.start(source.events()))
        await until(lambda: other.data)
        first = visit(world.streams.start(events()))
        await first.done.wait()
        source.allow(1)
        await until(lambda: other.data == ["1", "2"])
        source.allow(0)
        await other.done.wait()
    assert first.server.status == 200
    assert not first.server.complete.is_set()
    assert world.outcomes == {"cancelled": 1, "completed": 1}


async def test_refusal_comes_before_the_status() -> None:
    """The application answers an error that comes before the first event."""
    world = World()
    refusal = GateFull("full")
    source = Source(refusal)
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="detach"))
        source.allow(0)
        await first.done.wait()
    assert first.raised == [refusal]
    assert first.server.sent == []
    assert world.outcomes == {"refused": 1}


async def test_drops_the_oldest_without_a_client() -> None:
    """The work goes on in bounded memory, and a client too late learns of the gap."""
    world, source = World(max_bytes=2000), Source()
    source.allow(1)
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="detach"))
        await until(lambda: first.data)
        await first.leave()
        source.allow(99)
        await until(lambda: source.made == 100)
        await anyio.lowlevel.checkpoint()
        stream = first.response.stream
        for after, status in ((1, 410), (70, 410), (95, 200)):
            again = visit(world.streams.resume(f"{stream}.{after}"))
            await until(lambda: again.server.sent)  # noqa: B023
            assert again.server.status == status
        await until(lambda: again.data == ["96", "97", "98", "99", "100"])


async def test_waits_for_a_slow_client() -> None:
    """While a client is there, nothing is dropped that it was not sent."""
    world, source = World(max_bytes=2000), Source()
    source.allow(100)
    slow = anyio.Event()
    async with running(world):
        first = Visit(world.streams.start(source.events(), on_disconnect="detach"))
        send = first.server.send

        async def wait_and_send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await slow.wait()
            await send(message)

        first.server.send = wait_and_send  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await until(lambda: source.made > 5)
            for _ in range(200):
                await anyio.lowlevel.checkpoint()
            assert source.made < 30  # as many as fit, of 120 bytes each
            slow.set()
            await until(lambda: len(first.data) == 100)
            source.allow(0)
    assert first.data == [str(n) for n in range(1, 101)]


async def test_generator_that_never_waits_leaves_the_loop() -> None:
    """Others run while a stream without a client has all of its events ready."""
    world = World(max_bytes=2000)
    made = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal made
        while True:
            made += 1
            yield "data: word\n\n"

    async with running(world) as visit:
        first = visit(world.streams.start(endless(), on_disconnect="detach"))
        await until(lambda: first.data)
        await first.leave()
        before = made
        await until(lambda: made > before + 10)
    assert world.outcomes == {"shutdown": 1}


async def test_limits_streams() -> None:
    """Streams that have ended make room; where all run, the next is refused."""
    world = World(max_streams=2)
    sources = [Source() for _ in range(4)]
    for source in sources:
        source.allow(1)
    async with running(world) as visit:

        async def begin(source: Source) -> Visit:
            found = visit(world.streams.start(source.events(), on_disconnect="detach"))
            await until(lambda: found.server.sent)
            return found

        first, _second = await begin(sources[0]), await begin(sources[1])
        third = await begin(sources[2])
        await third.done.wait()
        assert third.server.status == 503
        assert b"retry-after" in dict(third.server.sent[0]["headers"])
        sources[0].allow(0)
        await first.done.wait()
        fourth = await begin(sources[3])
        assert fourth.server.status == 200
        gone = visit(world.streams.resume(first.response.stream))
        await gone.done.wait()
        assert gone.server.status == 404
    assert world.sessions.statistics().live == 0


async def test_releases_what_a_given_up_stream_holds() -> None:
    """The lease of a generator that nobody resumes comes back."""
    world, gate = World(), Gate(slots=1)

    async def events() -> AsyncIterator[str]:
        with await gate.admit():
            yield "data: 1\n\n"
            await anyio.sleep_forever()

    async with running(world) as visit:
        first = visit(world.streams.start(events(), on_disconnect=0))
        await until(lambda: first.data)
        assert gate.statistics().slots_in_use == 1
        await first.leave()
        await until(lambda: gate.statistics().slots_in_use == 0)


async def test_end_of_the_server_ends_all() -> None:
    """Attached or not: generators are closed, and clients learn of it."""
    world = World()
    sources = [Source(), Source()]
    async with running(world) as visit:
        visits = []
        for source in sources:
            source.allow(1)
            response = world.streams.start(source.events(), on_disconnect="detach")
            visits.append(visit(response))
            await until(lambda: visits[-1].data)
        await visits[0].leave()
    assert [source.closed.is_set() for source in sources] == [True, True]
    assert world.outcomes == {"shutdown": 2}
    # Its connection is not known, so that without an error it would look complete.
    assert [type(error) for error in visits[1].raised] == [SessionEnded]
    visits[1].raised.clear()
    assert not visits[1].server.complete.is_set()
    late: Any = world.streams.start(Source().events())
    with pytest.raises(RuntimeError, match="enter it"):
        await late(http_scope(), visits[0].server.receive, visits[0].server.send)


async def test_draining_registry_starts_none() -> None:
    """The registry is the home of the streams: its end is theirs."""
    world = World()
    async with running(world) as visit:
        await world.sessions.drain(0)
        first = visit(world.streams.start(Source().events()))
        await first.done.wait()
        assert first.server.status == 503


async def test_session_is_found_and_cancelled_by_id() -> None:
    """Its id is the beginning of the stream's, and is of no use to resume."""
    world, source = World(), Source()
    source.allow(1)
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="detach"))
        await until(lambda: first.data)
        await first.leave()
        (session,) = world.sessions.live()
        assert first.response.stream.startswith(session.id)
        assert len(session.id) == 12
        await world.sessions.cancel(session.id)
        await until(source.closed.is_set)
    assert world.outcomes == {"cancelled": 1}


async def test_late_end_of_the_first_leaves_the_second_alone() -> None:
    """The first client's response may end after it was replaced, at any time."""
    world, source = World(max_bytes=1000), Source()
    source.allow(1)
    stuck = anyio.Event()
    async with running(world) as visit:
        first = Visit(world.streams.start(source.events(), on_disconnect="cancel"))

        async def sends_late(message: Any) -> None:
            with anyio.CancelScope(shield=True):
                await stuck.wait()
            first.server.sent.append(message)

        first.server.send = sends_late  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await until(lambda: source.made)
            second = visit(world.streams.resume(first.response.stream))
            source.allow(99)  # the window of the first moves on
            await until(lambda: len(second.data) == 100)
            stuck.set()
            await first.done.wait()
        assert not source.closed.is_set()
        assert (first.raised, first.server.complete.is_set()) == ([], False)
        source.allow(1)
        await until(lambda: len(second.data) == 101)


async def test_first_client_that_never_had_a_status_gets_409() -> None:
    """A response that was taken over before its first event is whole."""
    world, source = World(), Source()
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="detach"))
        await until(world.sessions.live)
        second = visit(world.streams.resume(first.response.stream))
        await first.done.wait()
        assert first.server.status == 409
        source.allow(1)
        await until(lambda: second.data == ["1"])


@wraps
async def test_client_that_is_replaced_before_an_event_has_its_status(
    wrap: Any,
) -> None:
    """A status that `install` holds back is sent, or the server would send a 500."""
    world, source, app = World(), Source(), FastAPI()
    wrap(app)
    source.allow(1)
    async with running(world) as visit:
        response = world.streams.start(source.events(), on_disconnect="detach")
        first = visit(response)
        await until(lambda: first.data)
        last = f"{response.stream}.1"
        app.post("/", response_model=None)(lambda: world.streams.resume(last))
        second = visit(cast("Any", app))
        await until(first.done.is_set)
        await anyio.wait_all_tasks_blocked()
        visit(world.streams.resume(last))
        await until(second.done.is_set)
        assert (second.raised, second.server.status) == ([], 200)
        assert not second.server.complete.is_set()


@pytest.mark.parametrize(
    "item",
    [
        "data: 1",
        "data: 1\n",
        "data: 1\r\n",
        "\n",
        "data: 1\n\ndata: 2\n\n",
        "data: 1\r\r",
        {"data": 1},
        "",
    ],
)
async def test_refuses_items_that_are_no_event(item: Any) -> None:
    """Numbers of half or two events would have a client miss some; none is quoted."""
    world = World()

    async def events() -> AsyncIterator[Any]:
        yield item

    async with running(world) as visit:
        first = visit(world.streams.start(events()))
        await first.done.wait()
    (error,) = first.raised
    assert isinstance(error, ValueError)
    assert str(error).startswith("item 1 of the stream, of type")


async def test_event_of_many_lines_takes_no_memory_for_each() -> None:
    """A hundred times its size, as it once was."""
    world, event = World(), "a\n" * 100_000 + "\n"

    async def events() -> AsyncIterator[str]:
        yield event

    async with running(world) as visit:
        tracemalloc.start()
        try:
            first = visit(world.streams.start(events()))
            await first.done.wait()
            assert tracemalloc.get_traced_memory()[1] < 10 * len(event)
        finally:
            tracemalloc.stop()
    assert len(first.server.body) > len(event)


async def test_own_id_of_an_event_does_not_count() -> None:
    """The last line of a name counts to a browser, and that is ours."""
    world = World()

    async def events() -> AsyncIterator[Any]:
        yield "id: 7\ndata: 1\n\n"

    async with running(world) as visit:
        first = visit(world.streams.start(events()))
        await first.done.wait()
    stream = first.response.stream
    assert first.server.body.decode() == f"id: 7\ndata: 1\nid: {stream}.1\n\n"


async def test_blocking_generator_runs_in_a_thread() -> None:
    """As elsewhere in the package."""
    world = World()
    async with running(world) as visit:
        first = visit(world.streams.start(iter(["data: 1\n\n", "data: 2\n\n"])))
        await first.done.wait()
    assert first.data == ["1", "2"]


class Payload:
    """Must not stay."""


async def test_keeps_nothing_of_a_failed_stream() -> None:
    """Neither the frames of its error nor, after its time, its events."""
    world = World()
    found: list[weakref.ref[Payload]] = []

    async def events() -> AsyncIterator[str]:
        payload = Payload()
        found.append(weakref.ref(payload))
        yield "data: 1\n\n"
        raise ValueError("of the engine")

    gc.disable()
    try:
        async with running(world):
            first = Visit(world.streams.start(events(), on_disconnect="detach"))
            stopped = anyio.Event()

            async def never(message: Any) -> None:
                first.server.sent.append(message)
                await stopped.wait()

            first.server.send = never  # type: ignore[method-assign]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await until(lambda: first.server.sent)
                await first.leave()
            await until(lambda: not world.sessions.live())
            assert found[0]() is None
    finally:
        gc.enable()


async def test_keeps_nothing_that_is_cancelled_with_its_client() -> None:
    """The default policy takes no memory for clients that never come back."""
    world, source = World(), Source()
    async with running(world) as visit:
        first = visit(world.streams.start(source.events()))
        source.allow(0)
        await first.done.wait()
        assert first.server.status == 200
        second = visit(world.streams.resume(first.response.stream))
        await second.done.wait()
        assert second.server.status == 404


async def test_cancelled_server_lets_no_response_seem_whole() -> None:
    """A client that is attached when the server is cancelled learns of it."""
    world, source = World(), Source()
    source.allow(1)
    async with anyio.create_task_group() as clients:
        with anyio.CancelScope() as server:
            async with world.lifespan(None):
                first = Visit(world.streams.start(source.events()))
                clients.start_soon(first)
                await until(lambda: first.data)
                server.cancel()
                await anyio.lowlevel.checkpoint()
    assert first.server.status == 200
    assert not first.server.complete.is_set()


@virtual
@pytest.mark.parametrize("error", [None, ValueError("of the engine")])
async def test_forgets_a_stream_when_its_time_is_up(error: Exception | None) -> None:
    """No reference to its events stays, and none needs the garbage collector."""
    world, source = World(keep=10), Source(error)
    source.allow(1)

    def kept() -> list[object]:
        return [it for it in gc.get_objects() if type(it).__name__ == "EventStream"]

    gc.collect()
    gc.disable()
    try:
        async with running(world) as visit:
            visits = [visit(world.streams.start(source.events(), on_disconnect=99))]
            await until(lambda: visits[0].data)
            await visits.pop().leave()
            source.allow(0)
            await anyio.sleep(9.9)
            assert len(kept()) == 1
            await anyio.sleep(0.2)
            assert kept() == []
    finally:
        gc.enable()


async def test_error_of_the_server_is_raised_as_it_is() -> None:
    """A ``send`` that fails counts as the client's leaving, and is in no group."""
    world, source = World(), Source()
    source.allow(1)
    async with running(world) as visit:
        response: Any = world.streams.start(source.events(), on_disconnect="detach")

        async def fails(message: Any) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            await response(http_scope(), ScriptedServer().receive, fails)
        second = visit(world.streams.resume(response.stream))
        await until(lambda: second.data == ["1"])


async def test_client_that_leaves_before_the_first_event_gets_499() -> None:
    """Middleware around it may rely on a response."""
    world, source = World(), Source()
    async with running(world) as visit:
        first = visit(world.streams.start(source.events(), on_disconnect="cancel"))
        await until(world.sessions.live)
        await first.leave()
        assert first.server.status == 499


def test_validates_what_it_takes() -> None:
    """Mistakes are found where they are made."""
    sessions = SessionRegistry()
    with pytest.raises(ValueError, match="max_bytes"):
        ResumableStreams(sessions, max_bytes=0)
    with pytest.raises(ValueError, match="max_streams"):
        ResumableStreams(sessions, max_streams=0)
    with pytest.raises(ValueError, match="keep"):
        ResumableStreams(sessions, keep=math.nan)
    streams = ResumableStreams(sessions)
    with pytest.raises(TypeError, match="on_disconnect"):
        streams.start(iter(()), on_disconnect="later")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_disconnect"):
        streams.start(iter(()), on_disconnect=-1)
    with pytest.raises(TypeError, match="generator"):
        streams.start([])  # type: ignore[arg-type]


# Cancelled at every point ----------------------------------------------------------


async def few(source: Source) -> AsyncIterator[str]:
    """Four events, with a wait between them."""
    try:
        for _ in range(4):
            await anyio.lowlevel.checkpoint()
            source.made += 1
            yield f"data: {source.made}\n\n"
    finally:
        source.closed.set()


WAYS = [*KINDS, ("asyncio", "leave", "early"), ("trio", "leave", "early")]


@pytest.mark.parametrize(("backend", "kind", "when"), WAYS)
def test_loses_no_event_wherever_a_response_ends(
    backend: str, kind: str, when: str
) -> None:
    """The first client and the next one get all events, each of them once."""

    async def scenario(run: Cancelled) -> None:
        world, source = World(), Source()
        first, second = ScriptedServer(waits=True), ScriptedServer()
        if kind == "leave":
            run.cancel = first.gone.set
        async with world.lifespan(None):
            response: Any = world.streams.start(few(source), on_disconnect="detach")
            await run.run(response(http_scope(), first.receive, first.send))
            if kind != "leave":
                assert run.propagated or not run.hit or first.complete.is_set()
            lines = first.body.decode().split("\n")
            ids = [line[4:] for line in lines if line.startswith("id: ")]
            resumed: Any = world.streams.resume((ids or [response.stream])[-1])
            await resumed(http_scope(), second.receive, second.send)
            if second.status == 404:  # it had not begun
                assert source.made == 0
                return
        lines += second.body.decode().split("\n")
        data = [line[6:] for line in lines if line.startswith("data: ")]
        assert data == ["1", "2", "3", "4"]
        assert second.status == (204 if len(ids) == 4 else 200)
        assert world.outcomes == {"completed": 1}

    assert cancel_everywhere(scenario, backend, kind, when) > 5


@pytest.mark.parametrize(("backend", "kind", "when"), KINDS)
def test_tells_one_client_of_an_error_wherever_a_response_ends(
    backend: str, kind: str, when: str
) -> None:
    """The first one, or the next if that was cancelled: and neither seems whole."""

    async def scenario(run: Cancelled) -> None:
        world, failure = World(), ValueError("of the engine")
        told: list[Exception] = []

        async def fails() -> AsyncIterator[str]:
            await anyio.lowlevel.checkpoint()
            yield "data: 1\n\n"
            await anyio.lowlevel.checkpoint()
            raise failure

        async def serve(response: Any, server: ScriptedServer) -> None:
            try:
                await response(http_scope(), server.receive, server.send)
            except ValueError as error:
                told.append(error)

        first, second = ScriptedServer(waits=True), ScriptedServer()
        async with world.lifespan(None):
            response = world.streams.start(fails(), on_disconnect="detach")
            await run.run(serve(response, first))
            await serve(world.streams.resume(response.stream), second)
        assert not first.complete.is_set()
        assert not second.complete.is_set() or second.status == 404
        assert told == [failure] * bool(world.outcomes)  # unless it had not begun

    assert cancel_everywhere(scenario, backend, kind, when) > 3


@pytest.mark.parametrize(("backend", "kind", "when"), KINDS)
def test_leaves_nothing_wherever_the_server_ends(
    backend: str, kind: str, when: str
) -> None:
    """No task and no session stays, and the generator is closed."""

    async def scenario(run: Cancelled) -> None:
        world, source = World(), Source()
        source.allow(1)

        async def life() -> None:
            async with world.lifespan(None), anyio.create_task_group() as tasks:
                response = world.streams.start(source.events(), on_disconnect=math.inf)
                tasks.start_soon(first := Visit(response))
                while not first.data:
                    await anyio.lowlevel.checkpoint()
                first.server.gone.set()
                await first.done.wait()
                await anyio.lowlevel.checkpoint()

        await run.run(life())
        assert run.propagated or not run.hit or source.closed.is_set()
        assert world.sessions.live() == []
        assert source.closed.is_set() or not source.made
        statistics = world.sessions.statistics()
        assert statistics.opened == sum(statistics.outcomes.values())

    assert cancel_everywhere(scenario, backend, kind, when) > 5
