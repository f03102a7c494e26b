"""Real engine processes, a fake engine that misbehaves, and a leak check."""

from __future__ import annotations

import binascii
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import msgpack
import numpy as np  # noqa: F401 - its OpenBLAS keeps a thread, which is no leak
import pytest
import zmq
from zmq_wire import SocketPairServer, wire

import lifecycle_zmq
from lifecycle import EngineLost
from lifecycle_zmq import ZmqEngine

SCRIPT = Path(__file__).with_name("scripted_engine.py")
BOUND = 120.0
FOLDER = Path(__file__).parent
EMPTY_TICK: dict[str, Any] = {
    "accepted": [],
    "rejected": [],
    "tokens": b"",
    "chunks": [],
    "done": [],
    "freed": [],
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave trio with any but the first transport and kind of arena to `make prove`.

    `make test` runs every test on both loops and over every transport, not on each pair.
    """
    for item in items:
        if isinstance(item, pytest.Function) and FOLDER in item.path.parents:
            spec = getattr(item, "callspec", None)
            chosen = list(spec.params.values()) if spec else []
            others = any(each in chosen for each in ("ipc", "shm", "frames"))
            if "trio" in chosen and others:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Run every anyio test on both backends."""
    return request.param


@pytest.fixture
def environment() -> dict[str, str]:
    """An environment in which a child imports what this process imported."""
    roots = {str(Path(lifecycle_zmq.__file__).parents[1])}
    roots.add(str(Path(sys.modules["lifecycle"].__file__ or "").parents[1]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sorted(roots))}


@pytest.fixture
def engine_argv() -> list[str]:
    """The command line of the scripted engine."""
    return [sys.executable, str(SCRIPT)]


@pytest.fixture
def transport() -> str:
    """What carries the messages of `make_engine`, unless a file says otherwise."""
    return "pair"


@pytest.fixture
def make_engine(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, transport: str
) -> Callable[..., ZmqEngine]:
    """A scripted engine whose restarts are quick; arguments go to the script."""

    def make(*arguments: str, **options: Any) -> ZmqEngine:
        settings = {"backoff": 0.05, "env": environment, "directory": tmp_path}
        settings["transport"] = transport
        return ZmqEngine([*engine_argv, *arguments], **(settings | options))

    return make


def prefixed(first: int, size: int) -> bytes:
    """The prefix of a part as docs/reference/wire.md has it."""
    count = size.to_bytes(5, "big")
    check = binascii.crc_hqx(bytes((first, 0, 0)) + count, 0xFFFF)
    return struct.pack(">BH", first, check) + count


def framed(*parts: bytes, apart: bool = False) -> bytes:
    """A message as docs/reference/wire.md has it; `apart`: without its tensors' bytes."""
    follow = reversed(range(len(parts)))
    whole = b""
    for number, (left, part) in enumerate(zip(follow, parts, strict=True)):
        first = left | (128 if apart and not number else 0)
        whole += prefixed(first, len(part))
        whole += b"" if apart and number else part
    return whole


class PairEnds:
    """The server of a pair, and the socket that its client would have."""

    def __init__(self) -> None:
        self.client, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.left: list[bool] = []
        self.framed = framed
        self.server = SocketPairServer(theirs.detach(), lambda: self.left.append(True))

    def arrive(self) -> list[wire.Buffer] | None:
        """The next message, which must be soon, with the memory that it came in."""
        until = time.monotonic() + BOUND
        while time.monotonic() < until:
            arrived = self.server.receive()
            if arrived is not None:
                return None if arrived[1] is None else list(arrived[1])
            self.server.poll(10)
        raise TimeoutError

    def receive(self) -> list[bytes] | None:
        """A copy of the next message, which must be soon."""
        parts = self.arrive()
        return None if parts is None else [bytes(part) for part in parts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.server.__exit__(None, None, None)
        self.client.close()


@pytest.fixture
def make_ends() -> Callable[[], PairEnds]:
    """Makes what has to be closed."""
    return PairEnds


@pytest.fixture
def ends() -> Iterator[PairEnds]:
    """A server and its client's socket."""
    with PairEnds() as it:
        yield it


Said = tuple[str, str]


class FakeEngine:
    """A ROUTER in this process that says exactly what a test makes it say."""

    def __init__(self, endpoint: str, incarnation: int) -> None:
        self.endpoint = endpoint
        self.incarnation = incarnation
        self.peer = b""
        self.sent = self.pings = 0
        self.heard: list[Said] = []
        self.messages: list[wire.Message] = []
        self.granted: dict[str, int] = {}
        self.generations: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._unread: list[Said] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(endpoint)

    async def hear(self) -> Said:
        """Return what comes next, which must be soon, and of which stream it is."""
        with anyio.fail_after(BOUND):
            while not self._unread:  # after a PING there is still nothing
                if not self._take():
                    await anyio.wait_readable(self._socket.get(zmq.FD))
        return self._unread.pop(0)

    async def greet(self) -> None:
        """Answer the client's first message as an engine does."""
        assert await self.hear() == ("STATUS", "")
        self.say(wire.Kind.READY, {})
        self.say(wire.Kind.REPORT, {"ask": 0, "status": {}})

    async def hear_all(self) -> list[Said]:
        """Return all that was said by now, as ordered before a mark."""
        # Whatever was sent before is in the socket once nothing came for a while;
        # the bound only matters to a test that expects nothing.
        with anyio.move_on_after(0.05) as quiet:
            while True:
                while self._take():
                    quiet.deadline = anyio.current_time() + 0.05
                await anyio.wait_readable(self._socket.get(zmq.FD))
        said, self._unread = self._unread, []
        return said

    def _take(self) -> bool:
        if not self._socket.poll(0):
            return False
        self.peer, *parts = self._socket.recv_multipart()
        message = wire.decode(parts, accept=wire.FROM_CLIENT)
        if message.kind is wire.Kind.PING:
            self.pings += 1
            return True
        self.messages.append(message)
        for what, generation in self._read(message):
            self._unread.append((what, self._keys.get(generation, "")))
            self.heard.append(self._unread[-1])
        return True

    def _read(self, message: wire.Message) -> Iterator[tuple[str, int]]:
        if message.kind is not wire.Kind.CONTROL:
            if message.kind is wire.Kind.START:
                self._name(message.generation, message.body["key"])
            yield message.kind.name, message.generation
            return
        for generation, key, _, _ in message.body["start"]:
            self._name(generation, key)
            yield "START", generation
        for generation, credit in message.body["grant"]:
            key = self._keys[generation]
            self.granted[key] = self.granted.get(key, 0) + credit
            yield "GRANT", generation
        for what in ("cancel", "end"):
            for generation in message.body[what]:
                yield what.upper(), generation

    def _name(self, generation: int, key: str) -> None:
        self._keys[generation] = key
        self.generations[key] = generation

    def accept(self, key: str) -> None:
        """Say that a stream was taken."""
        self.tick(accepted=[self.generations[key]])

    def reject(self, key: str, code: str, message: str) -> None:
        """Say that a stream was not taken."""
        self.tick(rejected=[[self.generations[key], code, message]])

    def chunk(self, key: str, first: int, items: list[Any], finish: Any = None) -> None:
        """Send items of one stream, none of them in the compact form."""
        generation = self.generations.get(key, 99)
        packed = [msgpack.packb(item) for item in items]
        self.tick(chunks=[[generation, first, packed, finish]])

    def done(self, key: str) -> None:
        """Say that a stream is forgotten."""
        self.tick(done=[self.generations[key]])

    def tick(self, header: dict[str, int] | None = None, **fields: Any) -> None:
        """Send one TICK of those fields, under a forged header if one is given."""
        self.say(wire.Kind.TICK, EMPTY_TICK | fields, **(header or {}))

    def say(self, kind: wire.Kind, body: dict[str, Any], **changes: int) -> None:
        """Send one message; `changes` forge its header."""
        header = {"incarnation": self.incarnation, "sequence": self.sent} | changes
        self.say_raw(wire.encode(kind, body, **header))
        self.sent += 1

    def say_raw(self, *parts: bytes) -> None:
        """Send anything."""
        self._socket.send_multipart([self.peer, *parts])

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(linger=0)


@pytest.fixture
def fake_engine(tmp_path: Path) -> Iterator[FakeEngine]:
    """A fake engine of incarnation 7."""
    fake = FakeEngine(f"ipc://{tmp_path}/fake", 7)
    yield fake
    fake.close()


@contextmanager
def _watching() -> Iterator[None]:
    before = _inventory()
    yield
    deadline = time.monotonic() + BOUND
    # A thread of libzmq or of a worker pool needs a moment to be gone.
    while (more := _more(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more, [
        it.read_text().strip() for it in Path("/proc/self/task").glob("*/comm")
    ]


def _more(before: dict[str, Any]) -> dict[str, Any]:
    # Less than before is nothing of ours: an older thread that has ended meanwhile.
    now = _inventory()
    return {what: (before[what], now[what]) for what in now if now[what] > before[what]}


def _inventory() -> dict[str, Any]:
    own = Path("/proc/self")
    children: list[str] = []
    for path in own.glob("task/*/children"):
        with suppress(FileNotFoundError):  # of a thread that has just ended
            children += path.read_text().split()
    # anyio's pytest plugin runs trio beside a pool thread that stays idle for 10 s.
    # By their numbers, as one of them may end before the tasks are listed.
    pooled = {
        str(it.native_id)
        for it in threading.enumerate()
        if it.name.startswith("Trio thread")
    }
    return {
        "descriptors": len(list((own / "fd").iterdir())),
        "threads": len({it.name for it in (own / "task").iterdir()} - pooled),
        "children": sorted(children),
    }


@pytest.fixture
def no_leaks(tmp_path: Path) -> Iterator[None]:
    """Descriptors, threads, children and socket directories return to baseline."""
    with _watching():
        yield
    left = [path.name for path in tmp_path.glob("lifecycle-*")]
    assert left == []
    assert [it.name for it in threading.enumerate() if "parent-watch" in it.name] == []


@contextmanager
def _watched(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        # One that stayed fails the test, and is not left to the machine.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


@pytest.fixture
def watched() -> Callable[[int], AbstractContextManager[int]]:
    """A descriptor that is readable once a process has ended, which it has afterwards."""
    return _watched


@pytest.fixture
def becomes() -> Callable[..., Any]:
    """Wait until a condition of an engine holds, which tells of each change."""

    async def wait(engine: ZmqEngine, condition: Callable[[], Any]) -> None:
        with anyio.fail_after(BOUND):
            while not condition():
                await engine._supervisor.changed.wait()

    return wait


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait for a condition, within a bound, without blocking the loop."""

    async def wait(condition: Callable[[], Any], *, seconds: float = BOUND) -> None:
        with anyio.fail_after(seconds):
            while not condition():
                await anyio.sleep(0.002)

    return wait


class Waiters:
    """Streams of one incarnation, and when each of them failed."""

    def __init__(self, engine: ZmqEngine, tasks: Any) -> None:
        self.engine = engine
        self.tasks = tasks
        self.reported: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.last = 0.0
        self._live = 0
        self._changed = anyio.Event()

    async def start(self, count: int, request: dict[str, Any]) -> None:
        """Return once every stream has its first item."""
        number = self.engine.incarnation
        for index in range(count):
            self.tasks.start_soon(self._read, f"{number}.{index}", request)
        await self._until(lambda: self._live == count)

    async def _read(self, key: str, request: dict[str, Any]) -> None:
        try:
            async for item in await self.engine.start(key, request):
                if item == [0]:
                    self._live += 1
                    self._change()
        except EngineLost as lost:
            self.reported[key] += 1
            self.reasons[lost.reason] += 1
            self.last = time.monotonic()
            self._change()

    async def all_failed(self, count: int) -> None:
        """Wait until every one of them has failed."""
        await self._until(lambda: self.reported.total() == count)
        self._live = 0

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


@pytest.fixture
async def waiters_of(anyio_backend: Any) -> Any:
    """A function that makes `Waiters` whose tasks end with the test."""
    async with anyio.create_task_group() as tasks:
        yield lambda engine: Waiters(engine, tasks)
        tasks.cancel_scope.cancel()
