"""Large tensors are copied beside the loop, and never kept by what did it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from lifecycle import EngineLost, Payload
from lifecycle_zmq import RequestRejected, ZmqEngine
from lifecycle_zmq.memory import parcels, views

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="no such memory"),
    pytest.mark.usefixtures("no_leaks"),
]

MIB = 2**20


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing here may need the collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=[0, 64 * MIB], ids=["passed", "arena"])
def arena_bytes(request: pytest.FixtureRequest) -> int:
    """Where the tensors are brought."""
    size: int = request.param
    return size


class Gate:
    """Holds each copy up until it is opened, and says in which threads they are made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.open = threading.Event()
        self._reached = threading.Event()
        for module, name in ((parcels, "_write"), (views, "fill")):
            patch.setattr(module, name, self._held(getattr(module, name)))

    def _held(self, copy: Callable[..., None]) -> Callable[..., None]:
        def hold(*arguments: Any) -> None:
            self.threads.append(threading.get_ident())
            self._reached.set()
            assert threading.get_ident() == threading.main_thread().ident or (
                self.open.wait(20)
            )
            copy(*arguments)

        return hold

    async def reached(self) -> None:
        """Wait until a copy is about to be made."""
        assert await anyio.to_thread.run_sync(self._reached.wait, 20)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Before each copy."""
    return Gate(monkeypatch)


def boxed(mib: int = 8) -> tuple[Payload[Any], weakref.ref[Any]]:
    """A box with a large array and a small one, and a weak reference of the first."""
    array = np.arange(mib * MIB // 4, dtype=np.int32).reshape(2, -1)
    return Payload({"x": array, "y": b"small"}), weakref.ref(array)


async def test_large_tensors_are_copied_in_a_thread_and_arrive(
    make_engine: Callable[..., ZmqEngine], gate: Gate, arena_bytes: int
) -> None:
    """The loop turns meanwhile, and once: what was copied is passed as it is."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        box, watch = boxed()
        async with anyio.create_task_group() as tasks:

            async def start() -> None:
                await engine.start("a#1", {"hold": True}, box)
                assert watch() is None

            tasks.start_soon(start)
            await gate.reached()
            gate.open.set()
        assert threading.main_thread().ident not in gate.threads
        seen = (await engine.status())["backend"]["seen"]
        assert [it[:3] for it in seen] == [["x", "i", [2, MIB]], ["y", "B", [5]]]
        await engine.end("a#1")


async def test_small_tensors_are_copied_at_once(
    make_engine: Callable[..., ZmqEngine], gate: Gate, arena_bytes: int
) -> None:
    """A thread takes longer than they do."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        await engine.start("a#1", {"hold": True}, boxed(3)[0])
        assert set(gate.threads) == {threading.main_thread().ident}


async def test_tensors_that_lie_in_the_arena_are_left_there(
    make_engine: Callable[..., ZmqEngine], gate: Gate
) -> None:
    """Nothing is copied, by nobody."""
    async with make_engine(arena_bytes=64 * MIB) as engine:
        await engine.wait_ready()
        pixels = engine.arena.empty((8, MIB), "uint8")
        pixels[:] = 7
        box = Payload({"x": pixels})
        del pixels
        await engine.start("a#1", {"hold": True}, box)
        assert gate.threads == []
        await engine.end("a#1")
        assert engine.arena.statistics().used == 0


@pytest.mark.parametrize("waits", [False, True])
async def test_cancelled_copy_keeps_nothing_and_starts_nothing(
    make_engine: Callable[..., ZmqEngine],
    gate: Gate,
    arena_bytes: int,
    *,
    waits: bool,
) -> None:
    """Whether it was under way or waited for its turn; the error may be kept."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        before = len(list(Path("/proc/self/fd").iterdir()))
        kept: list[BaseException] = []

        async def start(key: str, box: Payload[Any]) -> None:
            try:
                await engine.start(key, {"hold": True}, box)
            except BaseException as error:
                kept.append(error)
                raise

        boxes = [boxed() for _ in range(1 + waits)]
        async with anyio.create_task_group() as tasks:
            for number, (box, _) in enumerate(boxes):
                tasks.start_soon(start, f"a#{number}", box)
            await gate.reached()
            assert all(box.taken for box, _ in boxes)
            tasks.cancel_scope.cancel()
            gate.open.set()
        del box
        assert len(kept) == len(boxes)
        assert [watch() for _, watch in boxes] == [None] * len(boxes)
        assert (await engine.status())["starts"] == 0
        assert len(gate.threads) == (1 if arena_bytes else 2)  # of one request
        if arena_bytes:
            assert engine.arena.statistics().used == 0
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        # The turn was given back.
        await engine.start("b#1", {"hold": True}, boxed()[0])


async def test_engine_that_dies_during_a_copy_is_told(
    make_engine: Callable[..., ZmqEngine], gate: Gate, arena_bytes: int
) -> None:
    """As if it had died before; the payload is dropped."""
    async with make_engine(arena_bytes=arena_bytes, backoff=60.0) as engine:
        await engine.wait_ready()
        box, watch = boxed()
        lost: list[EngineLost] = []

        async def start() -> None:
            try:
                await engine.start("a#1", {}, box)
            except EngineLost as error:
                lost.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await gate.reached()
            assert engine.pid is not None and engine._client is not None
            os.kill(engine.pid, 9)
            await engine._client.wait_lost()
            gate.open.set()
        assert [it.reason for it in lost] == ["killed"]
        assert watch() is None


async def test_tensor_that_cannot_be_sent_is_refused_as_ever(
    make_engine: Callable[..., ZmqEngine], gate: Gate, arena_bytes: int
) -> None:
    """Before anything is copied."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        box = Payload({"x": np.zeros((4096, 4096))[:, ::2]})
        with pytest.raises(RequestRejected, match="unencodable"):
            await engine.start("a#1", {}, box)
        assert gate.threads == []


async def test_copies_that_there_is_no_room_for_are_sent(
    make_engine: Callable[..., ZmqEngine], gate: Gate
) -> None:
    """By an arena that is too small, and a system that has no memory to pass."""
    gate.open.set()
    async with make_engine(arena_bytes=MIB) as engine:
        await engine.wait_ready()
        await engine.start("a#1", {"hold": True}, boxed()[0])
        assert engine.arena.statistics().spilled == 1
        assert (await engine.status())["backend"]["seen"][0][:3] == ["x", "i", [2, MIB]]


async def test_engine_that_is_left_during_a_copy_is_told(
    make_engine: Callable[..., ZmqEngine], gate: Gate, arena_bytes: int
) -> None:
    """The arena is closed by then, which is no error that a caller could make use of."""
    lost: list[EngineLost] = []
    arrays = {name: np.ones(8 * MIB, np.uint8) for name in "xy"}
    watches = [weakref.ref(array) for array in arrays.values()]
    async with anyio.create_task_group() as tasks:
        async with make_engine(arena_bytes=arena_bytes) as engine:
            await engine.wait_ready()

            async def start(box: Payload[Any]) -> None:
                try:
                    await engine.start("a#1", {}, box)
                except EngineLost as error:
                    lost.append(error)

            tasks.start_soon(start, Payload(arrays))
            del arrays
            await gate.reached()
        gate.open.set()
    assert len(lost) == 1
    assert [watch() for watch in watches] == [None, None]


async def test_tensors_are_copied_at_once_where_no_thread_is_to_be_had(
    make_engine: Callable[..., ZmqEngine],
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    arena_bytes: int,
) -> None:
    """A request that could be served is not refused for it."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        monkeypatch.setattr(anyio.to_thread, "run_sync", refuse)
        box, watch = boxed()
        await engine.start("a#1", {"hold": True}, box)
        assert watch() is None
        assert set(gate.threads) == {threading.main_thread().ident}
        seen = (await engine.status())["backend"]["seen"]
        assert seen[0][:3] == ["x", "i", [2, MIB]]


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_native_cancellations_of_a_copy_leave_nothing(
    make_engine: Callable[..., ZmqEngine], eventually: Any, gate: Gate, arena_bytes: int
) -> None:
    """They do not wait for the thread, which drops what it copied when it is done."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        before = len(list(Path("/proc/self/fd").iterdir()))
        box, watch = boxed()
        task = asyncio.create_task(engine.start("a#1", {"hold": True}, box))
        await gate.reached()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        await eventually(lambda: watch() is None)
        await eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) == before)
        if arena_bytes:
            await eventually(lambda: engine.arena.statistics().used == 0)
        assert (await engine.status())["starts"] == 0
