"""Engines that are one async generator per request: real processes, both loops there."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from zmq_wire import Kind, pack_request, wire

from lifecycle import EngineLost, Payload, SessionRegistry
from lifecycle_zmq import (
    EngineFailed,
    EngineLoop,
    GeneratorBackend,
    QueuedTransport,
    RequestRejected,
    ThreadEngine,
    ZmqEngine,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

BOUND = 120.0
Loop = Literal["asyncio", "trio"]
Make = Callable[..., ZmqEngine]
LOOPS: tuple[Loop, ...] = ("asyncio", "trio")


@pytest.fixture(params=["pair", "ipc"])
def transport(request: pytest.FixtureRequest) -> Any:
    """Both of them: each has a descriptor of another kind."""
    return request.param


@pytest.fixture
def engine_argv() -> list[str]:
    """The scripted engine, as generators."""
    return [
        sys.executable,
        str(Path(__file__).with_name("scripted_generators.py")),
    ]


@pytest.fixture
def environment(environment: dict[str, str], anyio_backend: str) -> dict[str, str]:
    """The engine runs the same event loop as the test."""
    return environment | {"GENERATORS": anyio_backend}


async def books(engine: ZmqEngine) -> dict[str, Any]:
    """What the engine's generators have written down."""
    status: dict[str, Any] = await engine.status()
    assert status["bad_frames"] == status["duplicate_ends"] == 0
    backend: dict[str, Any] = status["backend"]
    return backend


async def read(stream: Any) -> list[Any]:
    """All that is left of a stream."""
    with anyio.fail_after(BOUND):
        return [item async for item in stream]


async def test_serves_many_that_leave_at_random(make_engine: Make) -> None:
    """128 at a time read, leave, or start nothing at all; no generator is left."""
    draw = random.Random(5)
    async with make_engine("--step", "0.002") as engine:
        await engine.wait_ready()

        async def one(number: int) -> None:
            leaves = draw.expovariate(30) if number % 3 else BOUND
            with anyio.move_on_after(leaves), sessions.open(f"s{number}") as session:
                if number % 16 == 1:
                    return  # never started
                source = await session.start(
                    lambda: engine.start(session.key, {"count": number}),
                    end=lambda _: engine.end(session.key),
                )
                async with session.stream(source) as items:
                    got = [item async for item in items]
                assert got == [[it] for it in range(number)]

        with anyio.fail_after(2 * BOUND):
            async with SessionRegistry() as sessions:
                for _ in range(2):
                    async with anyio.create_task_group() as tasks:
                        for number in range(128):
                            tasks.start_soon(one, number)
            assert (engine.streams, (await engine.status())["live"]) == (0, 0)
        seen = await books(engine)
        assert (seen["live"], seen["generators"], seen["ending"]) == ([], 0, 0)


async def test_refuses_what_is_raised_before_a_generator_waits(
    make_engine: Make,
) -> None:
    """Then there is nothing to end; after it has waited, its stream fails instead."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            for request, code in (
                ({"reject": "full"}, "full"),
                ({"raise_in_start": "a prompt"}, "internal"),
            ):
                with pytest.raises(RequestRejected) as refused:
                    await engine.start("a", request)
                assert refused.value.code == code
                assert "prompt" not in str(refused.value)
            assert engine.streams == 0
            stream = await engine.start("b", {"reject": "full", "wait_before": 0.05})
            with pytest.raises(EngineFailed) as failed:
                await anext(stream)
            assert (failed.value.code, failed.value.message) == ("full", "as asked")
            await engine.end("b")
            status = await engine.status()
        assert (status["starts"], status["rejected"], status["live"]) == (1, 2, 0)


async def test_tells_of_an_end_when_the_generator_is_closed(make_engine: Make) -> None:
    """Its clean-up takes a while and is part of the stream: other ends do not wait."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            request = {"hold": True, "close_seconds": 2.0}
            await engine.start("a", request)
            await engine.start("b", {"hold": True})
            ended: list[str] = []

            async def end(key: str) -> None:
                await engine.end(key)
                ended.append(key)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end, "a")
                tasks.start_soon(end, "b")
            assert ended == ["b", "a"]
            assert (await books(engine))["live"] == []


async def test_leaves_the_generator_of_a_slow_reader_at_its_yield(
    make_engine: Make,
) -> None:
    """Nothing of its stream is lost or merged, and no other stream waits for it."""
    async with make_engine("--step", "0", "--hold", str(2**16)) as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            slow = await engine.start("slow", {"count": 200, "size": 9_000})
            assert len(await read(await engine.start("b", {"count": 400}))) == 400
            made = (await books(engine))["made"]["slow"]
            assert len(await read(await engine.start("c", {"count": 400}))) == 400
            assert (await books(engine))["made"]["slow"] == made < 100
            assert await read(slow) == [b"x" * 9_000] * 200
            for key in ("slow", "b", "c"):
                await engine.end(key)


async def test_takes_one_item_a_turn_of_a_generator_that_never_waits(
    make_engine: Make,
) -> None:
    """One turn brings as much of it as of the others, so they get on beside it."""
    async with make_engine("--step", "0") as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            many = {"count": 1, "size": 10, "each": 100_000}
            greedy = await engine.start("greedy", many)
            assert len(await read(await engine.start("b", {"count": 50}))) == 50
            assert (await books(engine))["live"] == ["greedy"]
            await anext(greedy)
            await engine.end("greedy")
            assert (await books(engine))["live"] == []


async def test_sends_on_what_the_socket_had_no_room_for(make_engine: Make) -> None:
    """The rest goes when the client has read, though it has nothing to say itself."""
    streams: dict[str, Any] = {}

    async def start(key: str) -> None:
        streams[key] = await engine.start(key, request)

    async with make_engine("--step", "0.2") as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            # Each is less than half a window: nothing is granted for what was read.
            request = {"count": 1, "size": 30_000}
            async with anyio.create_task_group() as tasks:
                for number in range(256):
                    tasks.start_soon(start, f"s{number}")
            # The fault: the loop that reads is held up, while 8 MB are on their way.
            time.sleep(0.5)  # noqa: ASYNC251
            for stream in streams.values():
                assert await read(stream) == [b"x" * 30_000]
            for key in streams:
                await engine.end(key)


async def test_fails_the_stream_of_the_generator_that_raised_alone(
    make_engine: Make, anyio_backend: str
) -> None:
    """Its reader gets the error's type without its message; the neighbour reads on."""
    requests: list[dict[str, Any]] = [{"raise_at": 2}]
    if anyio_backend == "asyncio":  # where any task may cancel any future
        requests.append({"lost_at": 2})
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            other = await engine.start("b", {"count": 200})
            for request in requests:
                stream = await engine.start("a", request)
                assert [await anext(stream), await anext(stream)] == [[0], [1]]
                with pytest.raises(EngineFailed) as failed:
                    await anext(stream)
                assert failed.value.code == "internal"
                assert "asked" not in str(failed.value)
                await engine.end("a")
            stream = await engine.start("a", {"fail_at": 0})
            with pytest.raises(EngineFailed, match="asked: as asked"):
                await anext(stream)
            await engine.end("a")
            assert await read(other) == [[it] for it in range(200)]
            await engine.end("b")
        assert engine.incarnation == 1


async def test_frees_tensors_that_a_generator_has_dropped(make_engine: Make) -> None:
    """Nothing else holds what a request brought once its generator has let go."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            box = Payload({"x": np.ones(2**18, np.uint8)}, nbytes=2**18)
            stream = await engine.start("a", {"count": 2, "watch": True}, box)
            assert await read(stream) == [[0], [0]]
            await engine.end("a")
            assert (await books(engine))["seen"] == [["x", "B", [2**18], 64]]


async def test_closes_generators_in_their_own_tasks_at_shutdown(
    make_engine: Make, tmp_path: Path
) -> None:
    """The engine shuts down, and each of its generators runs its clean-up."""
    marks = [tmp_path / f"mark-{number}" for number in range(8)]
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            for mark in marks:
                request = {"hold": True, "mark": str(mark), "close_seconds": 0.1}
                await engine.start(mark.name, request)
    assert [mark.name for mark in marks if not mark.exists()] == []


async def test_counts_as_busy_while_a_generator_blocks_the_loop(
    make_engine: Make, eventually: Any
) -> None:
    """And as stalled at the bound; one that only waits is neither."""
    async with make_engine(busy_after=0.4, stalled_after=0.8) as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            waits = await engine.start("waits", {"wait_at": 1})
            assert await anext(waits) == [0]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_lost, waits, "stalled")
                for _ in range(20):  # for longer than one may block the loop
                    await anyio.sleep(0.05)
                    assert engine.health == "serving"
                stuck = {"forever": True, "sleep_at": 0, "seconds": 600}
                stream = await engine.start("stuck", stuck)
                await eventually(lambda: engine.health == "busy")
                await read_lost(stream, "stalled")


async def read_lost(stream: Any, reason: str) -> None:
    """Read on until the engine is lost, for that reason."""
    with pytest.raises(EngineLost) as lost:
        await read(stream)
    assert lost.value.reason == reason


@pytest.mark.parametrize("reason", ["killed", "exit"])
async def test_fails_all_readers_once_when_it_dies(
    make_engine: Make, reason: str
) -> None:
    """128 streams, one word each; another engine serves after."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            streams = [
                await engine.start(f"s{number}", {"forever": True})
                for number in range(127)
            ]
            pid = (await books(engine))["pid"]  # before the last one may end it
            leaves = {"leave_at": 20} if reason == "exit" else {"forever": True}
            streams.append(await engine.start("last", leaves))
            async with anyio.create_task_group() as tasks:
                for stream in streams:
                    tasks.start_soon(read_lost, stream, reason)
                if reason == "killed":
                    os.kill(pid, signal.SIGKILL)
            assert all([await read(stream) == [] for stream in streams])
            for number in range(127):
                await engine.end(f"s{number}")
            await engine.end("last")
            await engine.wait_ready()
            assert engine.incarnation == 2
            assert await read(await engine.start("s", {"count": 3})) == [[0], [1], [2]]


async def test_many_that_begin_slowly_are_not_stalled(make_engine: Make) -> None:
    """Each blocks the loop within its bound, all of them in one turn of it."""
    async with make_engine(stalled_after=0.7) as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    request = {"count": 1, "start_seconds": 0.2}
                    tasks.start_soon(engine.start, f"s{number}", request)
        assert engine.incarnation == 1


async def test_many_that_are_closed_slowly_are_not_stalled(make_engine: Make) -> None:
    """Each blocks the loop within its bound, all of them in one turn of it."""
    async with make_engine(stalled_after=0.7) as engine:
        await engine.wait_ready()
        with anyio.fail_after(BOUND):
            for number in range(6):
                await engine.start(f"s{number}", {"hold": True, "end_seconds": 0.2})
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(engine.end, f"s{number}")
            while (await engine.status())["backend"]["ending"]:
                pass
        assert engine.incarnation == 1


class Queue:
    """A transport that brings some starts, and keeps what is said until all end."""

    ahead = full = False

    def __init__(self, keys: list[str]) -> None:
        self._arrived = deque(
            wire.encode(
                Kind.START,
                {
                    "key": key,
                    "window": 4096,
                    "request": pack_request({}),
                    "tensors": [],
                },
                incarnation=1,
                sequence=number,
                generation=number + 1,
            )
            for number, key in enumerate(keys)
        )
        self._count = self.ends = len(keys)
        self.said: list[dict[str, Any]] = []
        self.over: Callable[[], None] = lambda: None
        self.accepted = anyio.Event()

    def poll(self, milliseconds: int | None) -> None:
        """Not in an event loop."""
        raise AssertionError

    async def wait(self, *, room: bool = False) -> None:
        """Wait for ever once all was brought."""
        assert not room
        if not self._arrived:
            await anyio.sleep_forever()

    def receive(self) -> Any:
        """Bring one more."""
        return (b"client", [self._arrived.popleft()]) if self._arrived else None

    def send(self, address: bytes, head: bytes) -> bool:
        """Keep what a tick says."""
        assert address == b"client"
        message = wire.decode([head], accept=wire.FROM_ENGINE)
        if message.kind is Kind.TICK:
            self.said.append(dict(message.body))
        if sum(len(it["accepted"]) for it in self.said) == self._count:
            self.accepted.set()
        if sum(len(it["chunks"]) for it in self.said) == self.ends:
            self.over()
        return True


@pytest.mark.parametrize("on", LOOPS)
def test_sends_all_items_of_one_turn_in_one_message(on: Loop) -> None:
    """Sixty-four generators wake up at once; their tokens travel together."""
    keys = [f"s{number}" for number in range(64)]
    opened: dict[str, anyio.Event] = {}

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        opened[key] = anyio.Event()
        if len(opened) == len(keys):
            await queue.accepted.wait()
            for event in opened.values():
                event.set()
        await opened[key].wait()
        yield [7]

    queue = Queue(keys)
    loop = EngineLoop(GeneratorBackend(serve, backend=on), incarnation=1)
    queue.over = loop.stop
    loop.run(queue)
    with_tokens = [len(it["tokens"]) for it in queue.said if it["tokens"]]
    assert with_tokens == [64]
    assert sum(len(it["accepted"]) for it in queue.said) == 64


@pytest.mark.parametrize("on", LOOPS)
def test_key_is_free_after_a_start_with_a_merge_that_is_none(on: Loop) -> None:
    """Refused before there is a generator that would have to be closed first."""
    merges = iter(["join", "never"])
    made: list[str] = []

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        made.append(key)
        yield [1]

    @asynccontextmanager
    async def bounded() -> AsyncIterator[None]:
        with anyio.fail_after(BOUND):
            yield

    def merge(_: object) -> Any:
        return next(merges)

    backend = GeneratorBackend(serve, merge=merge, backend=on, lifespan=bounded)
    loop = EngineLoop(backend, incarnation=1)
    queue = Queue(["a", "a"])
    queue.over, queue.ends = loop.stop, 1
    loop.run(queue)
    reported = "merge returned str, not None or a Merge"
    assert next(it["rejected"] for it in queue.said) == [[1, "internal", reported]]
    assert [it["accepted"] for it in queue.said if it["accepted"]] == [[2]]
    assert made == ["a"]


def test_tells_nothing_of_a_stream_that_was_ended_since() -> None:
    """What it had yielded goes with it: the key may be another stream's by then."""
    stepped: list[str] = []

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        if key == "a":
            await queue.accepted.wait()
            await anyio.wait_all_tasks_blocked()  # also who tells of what is put
            go_on.set()
            yield [1]
        await go_on.wait()  # until that is there, and not taken yet
        backend.end("a")
        stepped.extend(output.key for output in backend.step())
        loop.stop()
        yield [2]

    go_on = anyio.Event()
    backend = GeneratorBackend(serve)
    loop = EngineLoop(backend, incarnation=1)
    queue = Queue(["a", "b"])
    loop.run(queue)
    assert stepped == []


@pytest.mark.parametrize("on", LOOPS)
async def test_lives_around_its_generators(on: Loop) -> None:
    """What a lifespan makes is there before the first one and until the last closes."""
    reported: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        reported.append("up")
        yield
        reported.append("down")

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        reported.append("serve")
        try:
            yield [1]
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await (
                    anyio.wait_all_tasks_blocked()
                )  # no other task is left to wait for
            reported.append("closed")

    async with ThreadEngine(
        lambda: GeneratorBackend(serve, backend=on, lifespan=lifespan)
    ) as engine:
        with anyio.fail_after(BOUND):
            await engine.wait_ready()
            assert await anext(await engine.start("a", {})) == [1]
    assert reported == ["up", "serve", "closed", "down"]


@pytest.mark.parametrize("on", LOOPS)
async def test_names_what_ended_the_loop(on: Loop) -> None:
    """An error of a generator's task is raised as it is, not as a group of one."""

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        yield [1]
        if key == "b":
            raise SystemExit(3)
        await anyio.sleep_forever()

    async with ThreadEngine(lambda: GeneratorBackend(serve, backend=on)) as engine:
        with anyio.fail_after(BOUND):
            await engine.wait_ready()
            stream = await engine.start("a", {})
            assert await anext(stream) == [1]
            with suppress(EngineLost):  # it may be over before that is accepted
                await engine.start("b", {})
            await read_lost(stream, "SystemExit")


@pytest.mark.parametrize("on", LOOPS)
async def test_ends_when_its_event_loop_does(on: Loop) -> None:
    """A lifespan that swallows what ends it leaves no engine that refuses everything."""

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        with suppress(BaseExceptionGroup):
            yield

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        try:
            yield [1]
            await anyio.sleep_forever()
        finally:
            raise SystemExit(3)

    def make() -> GeneratorBackend:
        return GeneratorBackend(serve, backend=on, lifespan=lifespan)

    async with ThreadEngine(make) as engine:
        with anyio.fail_after(BOUND):
            await engine.wait_ready()
            stream = await engine.start("a", {})
            engine.cancel("a")
            await read_lost(stream, "RuntimeError")


async def test_fails_only_the_stream_of_a_cancelled_task() -> None:
    """As a library may do that knows the task: the loop goes on, with all others."""

    async def serve(key: str, request: Any, tensors: Any) -> AsyncIterator[Any]:
        yield [1]
        await anyio.lowlevel.checkpoint()  # until that is reported
        if key == "a":
            task = asyncio.current_task()
            assert task is not None and task.cancel()
        await anyio.lowlevel.checkpoint()
        yield [2]

    async with ThreadEngine(lambda: GeneratorBackend(serve)) as engine:
        with anyio.fail_after(BOUND):
            await engine.wait_ready()
            stream = await engine.start("a", {})
            with pytest.raises(EngineFailed, match="it raised CancelledError"):
                await read(stream)
            await engine.end("a")
            assert await read(await engine.start("b", {})) == [[1], [2]]
            assert engine.incarnation == 1


async def test_lets_the_loop_turn_though_more_has_come() -> None:
    """Messages that never end must not hold up the generators that they are for."""
    transport = QueuedTransport()
    turns: list[int] = []

    async def other() -> None:
        turns.append(1)

    transport.put(b"client", [b"message"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(8):
            await transport.wait()
        assert turns


@pytest.mark.parametrize("on", LOOPS)
async def test_says_what_is_no_generator(on: Loop) -> None:
    """A coroutine function raises at once; a wrong result raises at the call."""

    async def answers(key: str, request: Any, tensors: Any) -> Any:
        return [key]

    with pytest.raises(TypeError, match="answers yields nothing"):
        GeneratorBackend(answers, backend=on)  # type: ignore[arg-type]

    def lists(key: str, request: Any, tensors: Any) -> Any:
        if request:
            raise RequestRejected("odd", "as asked")
        return [key]

    async with ThreadEngine(lambda: GeneratorBackend(lists, backend=on)) as engine:
        with anyio.fail_after(BOUND):
            await engine.wait_ready()
            for request, code in (({}, "internal"), ({"x": 1}, "odd")):
                with pytest.raises(RequestRejected) as refused:
                    await engine.start("a", request)
                assert refused.value.code == code
