"""Tensors on their way to a real engine: through its arena, and copied beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import shared_memory
from descriptors import descriptors_before, open_descriptors

from lifecycle import EngineLost, Gate, Payload, Refused
from lifecycle_zmq import Arena, EngineClient, RequestRejected, ZmqEngine
from lifecycle_zmq.shared_memory import memfd as parcels, tensors as views
from lifecycle_zmq.tensor_copy import INLINE_BYTES, ArenaPlacement

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)  # threads of its own would look like a leak


MIB = 2**20
SIZE = 16 * MIB
KINDS = ("memfd", "shm", "frames")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing here may need the collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=KINDS)
def make(
    request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path
) -> Callable[..., ZmqEngine]:
    """An engine that keeps tensors as asked, with an arena of each kind."""
    script = str(Path(__file__).with_name("arena_engine.py"))

    def engine(*arguments: str, **options: Any) -> ZmqEngine:
        settings = {"arena_bytes": SIZE, "arena": request.param, "backoff": 0.05}
        return ZmqEngine(
            [sys.executable, script, *arguments],
            env=environment,
            directory=tmp_path,
            **(settings | options),
        )

    return engine


def boxed(**tensors: Any) -> Payload[Any]:
    """A box of tensors."""
    return Payload(tensors)


def used(arena: Arena) -> int:
    """Bytes in use, of books that balance (`law 3`)."""
    books = arena.statistics()
    assert books.free + books.used == books.size == arena.capacity
    return books.used


def filled(arena: Arena, nbytes: int = MIB) -> Any:
    """An array in the arena with something in it."""
    array = arena.empty((2, nbytes // 8), np.int32)
    array[:] = np.arange(nbytes // 8)
    return array


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_engine_sees_each_tensor_whole(make: Callable[..., ZmqEngine]) -> None:
    """In place, copied in, inline and of torch: the same bytes, read-only, in order."""
    pytest.importorskip("torch")
    async with make() as engine:
        await engine.wait_ready()
        arena = engine.arena
        tensors = {
            "place": filled(arena),
            "part": arena.put(np.arange(MIB, dtype=np.float32))[1000:-1000],
            "copied": np.random.default_rng(1).random(MIB // 8),
            "small": np.arange(10, dtype=np.int16),
            "torch": arena.put(torch.arange(MIB // 4, dtype=torch.int32)),
            "bytes": np.full(INLINE_BYTES, 120, np.uint8),
        }
        expected = {
            name: [True, view.format, list(view.shape or ()), zlib.crc32(view)]
            for name, view in (
                (name, memoryview(np.asarray(it))) for name, it in tensors.items()
            )
        }
        box = boxed(**tensors)
        tensors.clear()
        stream = await engine.start("a", {"keep": "end"}, box)
        lent = 0 if arena.kind == "frames" else 7 * MIB
        assert used(arena) == lent
        item = await anext(stream)
        assert item == expected
        assert list(item) == list(expected)
        assert (await engine.status())["leases"] == (lent > 0)
        await engine.end("a")
        assert used(arena) == 0
        assert (await engine.status())["leases"] == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_payload_is_dead_while_its_region_is_in_use(
    make: Callable[..., ZmqEngine],
) -> None:
    """What the engine reads is not held here (`law 6`, `N10`)."""
    async with make() as engine:
        await engine.wait_ready()
        array = filled(engine.arena)
        watch = weakref.ref(array)
        box = boxed(x=array)
        del array
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.start, "a", {"keep": "end"}, box)
            await anyio.wait_all_tasks_blocked()
            assert watch() is None
        await engine.end("a")
        assert used(engine.arena) == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("keep", ["start", 3, "thread"])
async def test_region_is_free_when_the_engine_lets_go(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any], keep: Any
) -> None:
    """While the stream goes on, and also if the engine sleeps and hears nothing."""
    async with make() as engine:
        await engine.wait_ready()
        calls: list[int] = []
        array = engine.arena.empty(MIB, np.uint8, freed=lambda: calls.append(1))
        box = boxed(x=array)
        del array
        stream = await engine.start("a", {"keep": keep, "stay": True}, box)
        await anext(stream)
        await eventually(lambda: calls)
        assert used(engine.arena) == 0
        assert engine.streams == 1
        await engine.end("a")
        assert calls == [1]


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_gives_pages_back_that_nothing_uses(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any]
) -> None:
    """The system gets them, and the next tensors are right all the same."""
    async with make(arena_idle=0.01, arena="memfd") as engine:
        await engine.wait_ready()
        descriptor = engine.arena.descriptor
        assert descriptor is not None
        for key in "ab":
            array = filled(engine.arena, 8 * MIB)
            expected = zlib.crc32(memoryview(array).cast("B"))
            assert 512 * os.fstat(descriptor).st_blocks >= 8 * MIB
            box = boxed(x=array)
            del array
            stream = await engine.start(key, {"keep": "end"}, box)
            assert (await anext(stream))["x"][3] == expected
            await engine.end(key)
            await eventually(lambda: not os.fstat(descriptor).st_blocks)


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("how", ["refuse", "raise", "duplicate"])
async def test_refused_request_frees_its_region(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any], how: str
) -> None:
    """A refusal of the backend or of the server is a hand-off that ended."""
    async with make() as engine:
        await engine.wait_ready()
        request = {"keep": how}
        if how == "duplicate":
            await engine.start("a", {"keep": "start", "stay": True})
            request = {"keep": "end"}
            # As if it were not known here, so that the engine is asked.
            engine._client._table.keys.clear()  # type: ignore[union-attr]
        with pytest.raises(RequestRejected):
            await engine.start("a", request, boxed(x=filled(engine.arena)))
        await eventually(lambda: used(engine.arena) == 0)
        assert (await engine.status())["leases"] == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_request_that_is_not_sent_frees_its_region(
    make: Callable[..., ZmqEngine],
) -> None:
    """Cancelled before hand-off, or unencodable: free at once, nothing was lent."""
    async with make() as engine:
        await engine.wait_ready()
        box = boxed(x=filled(engine.arena))
        assert used(engine.arena) == MIB
        box.clear()
        assert used(engine.arena) == 0
        box = boxed(x=filled(engine.arena))
        with pytest.raises(RequestRejected):
            await engine.start("a", {"keep": object()}, box)
        assert used(engine.arena) == 0
        with pytest.raises(RequestRejected):  # found out when it was lent already
            await engine.start("a", {}, Payload({"": filled(engine.arena)}))
        assert used(engine.arena) == 0
        assert engine.arena.statistics().leases == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_killed_engine_frees_everything_once_it_is_reaped(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any]
) -> None:
    """The next incarnation has the whole arena, with warm pages (`fault-22`)."""
    async with make() as engine:
        for number in (1, 2, 3):
            await eventually(lambda: engine.ready)
            assert engine.incarnation == number
            assert used(engine.arena) == 0
            array = filled(engine.arena, 8 * MIB)
            expected = zlib.crc32(array)
            box = boxed(x=array)
            del array
            stream = await engine.start(f"a{number}", {"keep": "ever"}, box)
            assert (await anext(stream))["x"][3] == expected
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await eventually(lambda: not engine.ready)
        await eventually(lambda: used(engine.arena) == 0)


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_kills_in_the_middle_of_hand_offs_leave_nothing(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any]
) -> None:
    """Senders go on making payloads while engine after engine dies (`peers-64`, `fault-22`)."""
    before = shared_memory.names()
    taken, reported, number, over = 0, 0, 0, False

    async def send() -> None:
        nonlocal taken, reported, number
        while not over:
            number += 1
            try:
                array = filled(engine.arena)
            except Refused:
                array = np.zeros(MIB, np.uint8)
            box = boxed(x=array)
            del array
            try:
                await engine.start(f"a{number}", {"keep": "ever", "stay": True}, box)
                taken += 1
            except EngineLost:
                reported += 1
                await anyio.sleep(0.002)

    options = {"max_crashes": None, "backoff": 0.01, "max_backoff": 0.01}
    async with make(**options) as engine:
        await engine.wait_ready()
        descriptors = len(descriptors_before())
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(send)
            for incarnation in range(1, 6):
                goal = taken + 8
                await eventually(lambda goal=goal: taken > goal)
                assert engine.incarnation == incarnation
                os.kill(engine.pid or 0, signal.SIGKILL)
                await eventually(lambda seen=incarnation: engine.incarnation > seen)
                await eventually(lambda: engine.ready)
            over = True
        os.kill(engine.pid or 0, signal.SIGKILL)
        await eventually(lambda: engine.incarnation == 7 and engine.ready)
        assert reported
        assert used(engine.arena) == 0
        assert len(open_descriptors()) <= descriptors
    assert shared_memory.names() == before


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_tensor_of_several_requests_lives_until_the_last(
    make: Callable[..., ZmqEngine],
) -> None:
    """A region that is freed first takes nothing from the others (`peers-66`)."""
    async with make() as engine:
        await engine.wait_ready()
        array = filled(engine.arena)
        expected = zlib.crc32(array)
        boxes = [boxed(x=array) for _ in range(3)]
        del array
        for number, box in enumerate(boxes):
            request = {"keep": "end", "stay": True}
            stream = await engine.start(f"a{number}", request, box)
            assert (await anext(stream))["x"][3] == expected
            if number < 2:
                await engine.end(f"a{number}")
        shared = engine.arena.shared
        assert used(engine.arena) == (MIB if shared else 0)
        assert engine.arena.statistics().leases == (1 if shared else 0)
        await engine.end("a2")
        assert used(engine.arena) == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_full_arena_costs_time_and_no_request(
    make: Callable[..., ZmqEngine],
) -> None:
    """A tensor that exists and finds no room is sent, and the books say so (`peers-69`)."""
    async with make(arena_bytes=4 * MIB) as engine:
        await engine.wait_ready()
        arrays = [np.full(3 * MIB, number, np.uint8) for number in range(3)]
        arrays.append(np.zeros(5 * MIB, np.uint8))
        for number, array in enumerate(arrays):
            expected = zlib.crc32(array)
            stream = await engine.start(
                f"a{number}", {"keep": "end", "stay": True}, boxed(x=array)
            )
            assert (await anext(stream))["x"][3] == expected
        spilled = 0 if engine.arena.kind == "frames" else 3
        assert engine.arena.statistics().spilled == spilled
        for number in range(4):
            await engine.end(f"a{number}")
        assert used(engine.arena) == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_gate_waits_for_the_engine_to_let_go(
    make: Callable[..., ZmqEngine],
) -> None:
    """With leases that end with their regions, the gate's bytes are the arena's."""
    async with make(arena_bytes=4 * MIB) as engine:
        await engine.wait_ready()
        gate = Gate(bytes=engine.arena.capacity)
        for number in range(12):
            with anyio.fail_after(20):
                lease = await gate.admit(bytes=engine.arena.cost(3 * MIB))
            array = engine.arena.empty(3 * MIB, np.uint8, freed=lease.release)
            box = boxed(x=array)
            del array
            await engine.start(f"a{number}", {"keep": 2, "stay": True}, box)
        for number in range(12):
            await engine.end(f"a{number}")
        assert gate.statistics().bytes_in_use == used(engine.arena) == 0
        assert engine.arena.statistics().refused == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_engine_refuses_places_that_are_none(
    make: Callable[..., ZmqEngine],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., Any],
) -> None:
    """Out of range or unaligned: refused and counted, and all else goes on."""
    async with make() as engine:
        if not engine.arena.shared:
            return
        await engine.wait_ready()
        other = await engine.start("b", {"keep": "end", "stay": True})
        wrong = [SIZE, SIZE - 4, 2**62, 2]
        lodge = ArenaPlacement.place
        for number, offset in enumerate(wrong, 1):

            def misplace(
                lodging: ArenaPlacement, view: memoryview, at: int = offset
            ) -> int:
                assert lodge(lodging, view) is not None
                return at

            monkeypatch.setattr(ArenaPlacement, "place", misplace)
            with pytest.raises(RequestRejected, match="invalid_tensors") as caught:
                await engine.start("a", {"keep": "end"}, boxed(x=filled(engine.arena)))
            assert str(offset) not in str(caught.value) or offset == 2
            status = await engine.status()
            assert status["bad_frames"] == number
            assert (status["leases"], status["live"]) == (0, 1)
        await eventually(lambda: used(engine.arena) == 0)
        assert await anext(other) == {}
        await engine.end("b")


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_engine_that_has_no_arena_refuses_and_gives_back(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any]
) -> None:
    """A program that dropped the arena from its endpoint reads nothing wrong."""
    async with make("--without-arena") as engine:
        if not engine.arena.shared:
            return
        await engine.wait_ready()
        with pytest.raises(RequestRejected, match="invalid_tensors"):
            await engine.start("a", {"keep": "end"}, boxed(x=filled(engine.arena)))
        await eventually(lambda: used(engine.arena) == 0)
        assert (await engine.status())["bad_frames"] == 1


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_release_of_an_unknown_lease_is_a_fault(fake_engine: Any) -> None:
    """Freed without a loan, or twice: nothing that follows is believed (`law 9`)."""
    arena = Arena(SIZE, kind="memfd")
    async with EngineClient(fake_engine.endpoint, incarnation=7, arena=arena) as client:
        await fake_engine.greet()
        await client.wait_ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.start, "a", {}, boxed(x=filled(arena)))
            await fake_engine.hear()
            assert (arena.statistics().leases, used(arena)) == (1, MIB)
            fake_engine.tick(accepted=[1], freed=[1])
        assert used(arena) == 0
        fake_engine.tick(freed=[1])
        with anyio.fail_after(20):
            await client.wait_lost()
        assert client.lost == "protocol"
    arena.close()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_storm_of_cancellations_leaves_nothing(
    make: Callable[..., ZmqEngine], eventually: Callable[..., Any]
) -> None:
    """Clients that leave at any moment of a hand-off: both sides return to zero."""
    chance = random.Random(3)
    async with make() as engine:
        await engine.wait_ready()

        async def ask(key: str, wait: float, nbytes: int, keep: Any) -> None:
            with anyio.move_on_after(wait):
                try:
                    box = boxed(x=engine.arena.empty(nbytes, np.uint8))
                except Exception:  # noqa: BLE001 - full
                    box = boxed(x=np.zeros(nbytes, np.uint8))
                stream = await engine.start(key, {"keep": keep}, box)
                async for _ in stream:
                    pass
            await engine.end(key)

        for batch in range(10):
            async with anyio.create_task_group() as tasks:
                for number in range(30):
                    tasks.start_soon(
                        ask,
                        f"{batch}.{number}",
                        chance.random() * 0.01,
                        chance.randrange(1, MIB),
                        chance.choice(["start", "end", 1, 2]),
                    )
        await eventually(lambda: used(engine.arena) == 0)
        status = await engine.status()
        assert (status["leases"], status["live"], status["backend"]["kept"]) == (
            0,
            0,
            0,
        )
        assert engine.arena.statistics().leases == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_engine_without_an_arena_says_so(make: Callable[..., ZmqEngine]) -> None:
    """The arena is there from entering on, if one was asked for."""
    engine = make(arena_bytes=0)
    with pytest.raises(RuntimeError, match="arena_bytes"):
        _ = engine.arena
    async with engine:
        await engine.wait_ready()
        with pytest.raises(RuntimeError, match="arena_bytes"):
            _ = engine.arena
        array = np.arange(MIB, dtype=np.uint8)
        stream = await engine.start("a", {"keep": "end"}, boxed(x=array))
        assert (await anext(stream))["x"][3] == zlib.crc32(array)
        await engine.end("a")


@pytest.fixture(params=[0, 64 * MIB], ids=["passed", "arena"])
def arena_bytes(request: pytest.FixtureRequest) -> int:
    """Where the tensors are brought."""
    size: int = request.param
    return size


class HeldCopies:
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
def gate(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    """Before each copy."""
    return HeldCopies(monkeypatch)


def large_and_small(mib: int = 8) -> tuple[Payload[Any], weakref.ref[Any]]:
    """A box with a large array and a small one, and a weak reference of the first."""
    array = np.arange(mib * MIB // 4, dtype=np.int32).reshape(2, -1)
    return Payload({"x": array, "y": b"small"}), weakref.ref(array)


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_large_tensors_are_copied_in_a_thread_and_arrive(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies, arena_bytes: int
) -> None:
    """The loop turns meanwhile, and once: what was copied is passed as it is."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        box, watch = large_and_small()
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


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_small_tensors_are_copied_at_once(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies, arena_bytes: int
) -> None:
    """A thread takes longer than they do."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        await engine.start("a#1", {"hold": True}, large_and_small(3)[0])
        assert set(gate.threads) == {threading.main_thread().ident}


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_tensors_that_lie_in_the_arena_are_left_there(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies
) -> None:
    """Nothing is copied."""
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


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("waits", [False, True])
async def test_cancelled_copy_keeps_nothing_and_starts_nothing(
    make_engine: Callable[..., ZmqEngine],
    gate: HeldCopies,
    arena_bytes: int,
    *,
    waits: bool,
) -> None:
    """Whether it was under way or waited for its turn; the error may be kept."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        before = descriptors_before()
        kept: list[BaseException] = []

        async def start(key: str, box: Payload[Any]) -> None:
            try:
                await engine.start(key, {"hold": True}, box)
            except BaseException as error:
                kept.append(error)
                raise

        boxes = [large_and_small() for _ in range(1 + waits)]
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
        assert open_descriptors() == before
        # The turn was given back.
        await engine.start("b#1", {"hold": True}, large_and_small()[0])


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_death_during_a_copy_is_reported(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies, arena_bytes: int
) -> None:
    """As if it had died before; the payload is dropped."""
    async with make_engine(arena_bytes=arena_bytes, backoff=60.0) as engine:
        await engine.wait_ready()
        box, watch = large_and_small()
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


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_tensor_that_cannot_be_sent_is_refused_as_ever(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies, arena_bytes: int
) -> None:
    """Before anything is copied."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        box = Payload({"x": np.zeros((4096, 4096))[:, ::2]})
        with pytest.raises(RequestRejected, match="unencodable"):
            await engine.start("a#1", {}, box)
        assert gate.threads == []


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_copies_that_there_is_no_room_for_are_sent(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies
) -> None:
    """By an arena that is too small, and a system that has no memory to pass."""
    gate.open.set()
    async with make_engine(arena_bytes=MIB) as engine:
        await engine.wait_ready()
        await engine.start("a#1", {"hold": True}, large_and_small()[0])
        assert engine.arena.statistics().spilled == 1
        assert (await engine.status())["backend"]["seen"][0][:3] == ["x", "i", [2, MIB]]


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_close_during_a_copy_is_reported(
    make_engine: Callable[..., ZmqEngine], gate: HeldCopies, arena_bytes: int
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


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
async def test_tensors_are_copied_at_once_where_no_thread_is_to_be_had(
    make_engine: Callable[..., ZmqEngine],
    gate: HeldCopies,
    monkeypatch: pytest.MonkeyPatch,
    arena_bytes: int,
) -> None:
    """A request that could be served is not refused for it."""

    async def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        monkeypatch.setattr(anyio.to_thread, "run_sync", refuse)
        box, watch = large_and_small()
        await engine.start("a#1", {"hold": True}, box)
        assert watch() is None
        assert set(gate.threads) == {threading.main_thread().ident}
        seen = (await engine.status())["backend"]["seen"]
        assert seen[0][:3] == ["x", "i", [2, MIB]]


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_native_cancellations_of_a_copy_leave_nothing(
    make_engine: Callable[..., ZmqEngine],
    eventually: Any,
    gate: HeldCopies,
    arena_bytes: int,
) -> None:
    """They do not wait for the thread, which drops what it copied when it is done."""
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        before = descriptors_before()
        box, watch = large_and_small()
        task = asyncio.create_task(engine.start("a#1", {"hold": True}, box))
        await gate.reached()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        await eventually(lambda: watch() is None)
        await eventually(lambda: open_descriptors() == before)
        if arena_bytes:
            await eventually(lambda: engine.arena.statistics().used == 0)
        assert (await engine.status())["starts"] == 0
