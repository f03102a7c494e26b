"""The socket pair transport: framing, full sockets, and hang-ups."""

from __future__ import annotations

import errno
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from lifecycle import EngineLost
from lifecycle_zmq import (
    EncodeError,
    EngineClient,
    EngineServer,
    ProtocolError,
    ZmqEngine,
    protocol as wire,
    transport as transport_package,
)
from lifecycle_zmq.heartbeat import StallLimits
from lifecycle_zmq.protocol import Kind
from lifecycle_zmq.shared_memory import memfd as parcels
from lifecycle_zmq.shared_memory.tensors import LOST
from lifecycle_zmq.supervisor import LivenessMonitor
from lifecycle_zmq.transport import (
    endpoints,
    endpoints as rendezvous,
    framing as frame_writer,
    framing as frames,
    socketpair as pair,
)
from lifecycle_zmq.transport.endpoints import IpcEndpoint
from lifecycle_zmq.transport.socketpair import SocketPair, SocketPairClient

BOUND = 120.0
MIB = 2**20
Ends = Any  # as in conftest.py
# The first part of a message of which another one is to follow.
ONE_MORE = frames.prefix(1, 40) + b"x" * 40


def test_messages_are_whole_wherever_the_stream_is_cut(ends: Ends) -> None:
    """Byte by byte or many at once, with tensors small and large."""
    chance = random.Random(5)
    sizes = (0, 1, 40, 4096, 70_000)
    messages = [
        [chance.randbytes(chance.choice(sizes)) for _ in range(chance.randint(1, 8))]
        for _ in range(60)
    ]
    stream = b"".join(ends.framed(*parts) for parts in messages)

    def write() -> None:
        at = 0
        while at < len(stream):
            size = chance.choice((1, 7, 9, 300, 200_000))
            ends.client.sendall(stream[at : at + size])
            at += size

    writer = threading.Thread(target=write)
    writer.start()
    got = [ends.receive() for _ in messages]
    writer.join()
    assert got == messages


@pytest.mark.parametrize("each", [7, 200_000])
@pytest.mark.parametrize("size", [0, 50, 4096, 70_000, MIB // 2])
def test_tensor_without_memory_is_skipped_wherever_the_stream_is_cut(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, size: int, each: int
) -> None:
    """What is before and behind it, in this message and the next one, is whole."""
    found = frames._memory_for
    monkeypatch.setattr(
        frames, "_memory_for", lambda it: LOST if it == size else found(it)
    )
    stream = ends.framed(b"head", b"a" * 99, bytes(size), b"c" * 5000, bytes(size))
    stream += ends.framed(b"next", b"d")

    def write() -> None:
        for at in range(0, len(stream), each):
            ends.client.sendall(stream[at : at + each])

    writer = threading.Thread(target=write)
    writer.start()
    parts = ends.arrive()
    assert [index for index, it in enumerate(parts) if it is LOST] == [2, 4]
    assert [bytes(it) for it in parts] == [b"head", b"a" * 99, b"", b"c" * 5000, b""]
    assert ends.receive() == [b"next", b"d"]
    writer.join()


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(struct.pack(">Q", 40), id="version-2"),
        pytest.param(frames.prefix(0, 2**40 - 1), id="endless"),
        pytest.param(frames.prefix(0, 2 * MIB), id="too-long"),
        pytest.param(frames.prefix(8, 40), id="too-many-parts"),
        pytest.param(ONE_MORE + frames.prefix(1, 0), id="more"),
        pytest.param(ONE_MORE + frames.prefix(0, 5 * 2**30), id="tensor"),
    ],
)
def test_length_that_no_part_has_ends_the_connection(ends: Ends, claim: bytes) -> None:
    """Refused before memory is taken for it; what follows it is not read (`fault-43`)."""
    ends.client.sendall(claim + ends.framed(b"later"))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            ends.receive()
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert ends.left == []
    assert ends.receive() is None
    assert ends.left == [True]


def test_noise_is_refused_and_never_more_than_that(
    ends: Ends, make_ends: Callable[[], Ends]
) -> None:
    """Whatever bytes come: messages, a `ProtocolError`, or the end (`N11`)."""
    chance = random.Random(11)
    good = ends.framed(wire.encode(Kind.STATUS, {"ask": 1}, incarnation=1, sequence=0))
    ended = 0
    for _ in range(300):
        with make_ends() as it:
            noise = bytearray(good * 3)
            for _ in range(chance.randint(1, 6)):
                noise[chance.randrange(len(noise))] = chance.randrange(256)
            it.client.sendall(noise)
            it.client.close()
            try:
                while it.receive() is not None:
                    pass
            except ProtocolError:
                ended += 1
            assert it.receive() is None
    assert ended > 0


def test_messages_that_were_read_ahead_are_not_slept_over(ends: Ends) -> None:
    """The rest of a partly handled read is handled without a new event."""
    ends.client.sendall(ends.framed(b"first") + ends.framed(b"second"))
    assert ends.receive() == [b"first"]
    begin = time.monotonic()
    ends.server.poll(10_000)
    assert time.monotonic() - begin < 5
    assert ends.receive() == [b"second"]
    assert ends.server.receive() is None
    ends.server.poll(1)


def test_message_that_comes_with_the_last_of_many_reads_is_not_slept_over(
    monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    """However many reads a message takes, the engine sleeps only once all is seen."""
    monkeypatch.setattr(pair, "_READS", 1)
    ends.client.sendall(ends.framed(b"whole"))
    begin = time.monotonic()
    while (arrived := ends.server.receive()) is None:
        ends.server.poll(10_000)
    assert time.monotonic() - begin < 5
    assert arrived[1] == [b"whole"]


def test_server_never_waits_whatever_timeout_sockets_have(
    make_ends: Callable[[], Ends],
) -> None:
    """Programs give all sockets one, for downloads; the link is not ended by it."""
    socket.setdefaulttimeout(0.2)
    try:
        it = make_ends()
    finally:
        socket.setdefaulttimeout(None)
    with it:
        assert it.server.receive() is None
    assert it.left == []


def test_server_that_leaves_sends_all_that_fits(ends: Ends) -> None:
    """Also if that is many messages: what was said is heard."""
    head = bytes(9_000)
    sent = 0
    while not ends.server._writer.waiting:
        assert ends.server.send(b"", head)
        sent += 1
    for _ in range(90):
        assert ends.server.send(b"", b"x")
    ends.client.settimeout(BOUND)
    wanted = ends.framed(head) * sent + ends.framed(b"x") * 90
    got = bytearray()
    while len(got) < sent * len(ends.framed(head)) - ends.server._writer.waiting:
        got += ends.client.recv(MIB)
    ends.server.__exit__(None, None, None)
    while data := ends.client.recv(MIB):
        got += data
    assert got == wanted


def test_tensor_is_the_receivers_alone(make_ends: Callable[[], Ends]) -> None:
    """The transport keeps nothing of it, though it came in many reads (law 6)."""
    with make_ends() as it:
        data = it.framed(b"head", bytes(100), bytes(MIB))
        writer = threading.Thread(target=it.client.sendall, args=(data,))
        writer.start()
        while (arrived := it.server.receive()) is None:
            it.server.poll(10)
        writer.join()
        assert arrived[1] is not None
        memory = memoryview(arrived[1][2]).obj
        alive = weakref.ref(memory)
        del arrived, memory
        assert alive() is None


def test_server_queues_and_then_refuses_without_a_reader(
    monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    """It never waits; what it kept comes in order; too much, and the client is gone."""
    monkeypatch.setattr(frame_writer, "MAX_WAITING", 3 * MIB)
    sent = 0
    head = bytes(200_000)
    while sent < 100 and ends.server.send(b"", head):
        sent += 1
    assert 3 * MIB <= sent * len(head) <= 6 * MIB
    ends.client.settimeout(BOUND)
    got = b""
    while len(got) < sent * (len(head) + 8):
        ends.server.receive()
        got += ends.client.recv(MIB)
    assert got == ends.framed(head) * sent
    # A refused message is lost, so the client is disconnected.
    assert ends.left


class _Idle:
    busy = False

    def nothing(self, *_: object) -> None:
        """There are no requests."""

    start = cancel = end = step = status = nothing


def test_server_leaves_when_its_only_client_hangs_up() -> None:
    """No other client could ever reach it."""
    pair = SocketPair()
    theirs = socket.socket(fileno=pair._theirs.detach())
    link = pair.connect(lambda _: True)
    pair.close()
    server = EngineServer(
        f"pair:?link={theirs.detach()}",
        _Idle(),  # type: ignore[arg-type]
        incarnation=1,
        leave_with_parent=False,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    link.close()
    thread.join(BOUND)
    assert not thread.is_alive()


def test_transport_that_is_none_is_refused() -> None:
    """By its name, and with those that there are."""
    with pytest.raises(ValueError, match="pair, ipc"):
        ZmqEngine(["x"], transport="tcp")  # type: ignore[arg-type]


def test_transport_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only who asks for ZeroMQ needs it."""
    name = f"{transport_package.__name__}.zmq"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(transport_package, "zmq", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs zmq; pip .*\[zmq\]"):
        EngineClient("ipc:///nowhere", incarnation=1)


PROGRAM = """
import sys, threading
import anyio
from pathlib import Path
from lifecycle_zmq import ZmqEngine

async def main():
    async with ZmqEngine(sys.argv[1:]) as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"count": 2})
        assert [item async for item in stream] == [[0], [1]]
        maps = Path(f"/proc/{engine.pid}/maps").read_text()
        await engine.end("a#1")
    assert "zmq" not in sys.modules
    assert "libzmq" not in maps

anyio.run(main)
"""


def test_neither_process_imports_zeromq_or_makes_a_directory(
    environment: dict[str, str], engine_argv: list[str], tmp_path: Path
) -> None:
    """A pair leaves nothing in the file system, also while it stands."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *engine_argv],
        env=environment | {"TMPDIR": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def framed(*parts: bytes) -> bytes:
    """A message as docs/reference/wire.md has it."""
    follow = reversed(range(len(parts)))
    pairs = zip(follow, parts, strict=True)
    return b"".join(frames.prefix(left, len(part)) + part for left, part in pairs)


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Run the tests of the client on each loop."""
    if request.param == "uvloop":
        return "asyncio", {"use_uvloop": True}
    return request.param


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has no memory to pass, such as macOS."""
    monkeypatch.setattr(parcels, "SUPPORTED", False)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineClient, socket.socket]]:
    """A client, and the socket of an engine that has said that it is ready."""
    pair = SocketPair()
    with closing(pair), _theirs(pair) as theirs:
        async with EngineClient(pair.connect, incarnation=7) as client:
            theirs.sendall(_said(Kind.READY, 0))
            yield client, theirs


@contextmanager
def linked() -> Iterator[tuple[SocketPairClient, socket.socket]]:
    """A link alone, and the socket of an engine that may read what is sent or not."""
    pair = SocketPair()
    with closing(pair), _theirs(pair) as theirs:
        link = SocketPairClient(*_ours(pair), lambda _: True)
        with closing(link):
            yield link, theirs


@pytest.mark.anyio
@pytest.mark.usefixtures("no_memory")
async def test_engine_that_does_not_read_holds_no_loop_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A send returns at once, the caller's memory is its own again, nothing is lost."""
    monkeypatch.setattr(frame_writer, "MAX_WAITING_TENSORS", 40 * MIB)
    with linked() as (link, theirs), anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.pump, lambda: True)
            memory = bytearray(b"a" * 32 * MIB)
            assert link.send([b"one", memory])
            memory[:] = bytes(len(memory))
            with pytest.raises(EncodeError) as caught:
                link.send([b"two", memory])
            assert caught.value.code == "no_memory"
            assert link.send([b"three"])
            wanted = framed(b"one", b"a" * 32 * MIB) + framed(b"three")
            got = bytearray()
            while len(got) < len(wanted):
                try:
                    got += theirs.recv(MIB)
                except BlockingIOError:
                    await anyio.wait_readable(theirs)
            assert got == wanted
            # The loop ran all the while; and runs no task that waits to write.
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.usefixtures("no_memory")
async def test_tensors_that_wait_leave_room_for_what_is_said_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One START of more than may wait is no reason to give up the engine."""
    monkeypatch.setattr(frame_writer, "MAX_WAITING", 4 * MIB)
    with linked() as (link, _):
        assert link.send([b"start", bytes(8 * MIB)])
        assert link.send([b"cancel"])
        assert all(link.send([bytes(MIB // 2)]) for _ in range(7))
        assert not link.send([bytes(MIB // 2)])


@pytest.mark.anyio
@pytest.mark.usefixtures("no_memory")
async def test_closed_link_keeps_nothing() -> None:
    """A reader may keep its stream, the stream the client, and that the link."""
    with linked() as (link, _):
        assert link.send([b"start", bytes(8 * MIB)])
        assert link._writer.waiting
        tracemalloc.start()
        try:
            assert link.send([b"start", bytes(8 * MIB)])
            link.close()
            assert tracemalloc.get_traced_memory()[0] < MIB
        finally:
            tracemalloc.stop()


class _Failing(socket.socket):
    """One that the system has no memory for."""

    def send(self, *_: Any) -> int:
        raise OSError(errno.ENOBUFS, "no memory")

    def sendmsg(self, *_: Any) -> int:
        raise OSError(errno.ENOBUFS, "no memory")


@pytest.mark.anyio
async def test_message_that_the_system_does_not_take_ends_the_link() -> None:
    """Its waiters would wait forever."""
    pair = SocketPair()
    failing = _Failing(fileno=_ours(pair)[0].detach())
    failing.setblocking(False)
    async with EngineClient(
        lambda handle: SocketPairClient(failing, handle), incarnation=7
    ) as client:
        with anyio.fail_after(BOUND):
            await client.wait_lost()
        assert client.lost == "disconnected"
    pair.close()


@pytest.mark.anyio
async def test_hang_up_of_the_engine_fails_all_waiters() -> None:
    """After what it said before, in one word, to each once."""
    async with connected() as (client, theirs):
        with anyio.fail_after(BOUND):
            await client.wait_ready()
            reported: list[str] = []

            async def ask() -> None:
                try:
                    await client.status()
                except EngineLost as lost:
                    reported.append(lost.reason)

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                theirs.close()
                # Lost as what was under way is, and no error of its own.
                tasks.start_soon(ask)
        assert reported == ["disconnected"] * 4


@pytest.mark.anyio
async def test_messages_before_a_failure_are_handled_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it has left unread what was said to it, which resets the link."""
    async with connected() as (client, theirs):
        with anyio.fail_after(BOUND):
            await client.wait_ready()
            answers: list[Any] = []

            async def ask() -> None:
                answers.append(await client.status())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                said = {"ask": 1, "status": {"streams": 3}}
                theirs.sendall(_said(Kind.REPORT, 1, said) + _said(Kind.READY, 2)[:9])
                theirs.close()
                with LivenessMonitor(StallLimits(1, 1, 1)) as liveness:
                    monkeypatch.setattr(liveness, "_sample", lambda: "disconnected")
                    # uvloop tells of a link that was reset once, and no more.
                    await liveness.monitor(client)
        assert answers == [{"streams": 3}]
        assert client.lost == "disconnected"


@pytest.mark.anyio
async def test_engine_that_sends_no_message_is_lost() -> None:
    """A length that nothing has is a fault of the engine, like any other."""
    async with connected() as (client, theirs):
        theirs.sendall(struct.pack(">Q", MIB))
        with anyio.fail_after(BOUND):
            await client.wait_lost()
        assert client.lost == "protocol"


@pytest.mark.anyio
async def test_messages_before_the_exit_are_drained() -> None:
    """`drain` takes all that is there, and a fault in it is the engine's."""
    async with connected() as (client, theirs):
        client.drain()
        assert client.ready
        theirs.sendall(b"\xff" * 8)
        client.drain()
        assert client.lost == "protocol"


def _said(kind: Kind, sequence: int, body: dict[str, Any] | None = None) -> bytes:
    return framed(wire.encode(kind, body or {}, incarnation=7, sequence=sequence))


def _theirs(pair: SocketPair) -> socket.socket:
    theirs = socket.socket(fileno=pair._theirs.detach())
    theirs.setblocking(False)
    return theirs


def _ours(pair: SocketPair) -> tuple[socket.socket]:
    assert pair._ours is not None
    ours, pair._ours = pair._ours, None
    return (ours,)


@pytest.mark.usefixtures("no_leaks")
def test_endpoint_carries_the_descriptors() -> None:
    """One word on the command line tells all that the engine inherits."""
    descriptors = {"listener": 5, "liveness": 6}
    endpoint = endpoints.join("ipc:///tmp/x/engine", descriptors)
    odd = endpoints.join("ipc:///tmp/x?y=z/engine", descriptors)
    assert endpoints.split(odd) == ("ipc:///tmp/x?y=z/engine", descriptors)
    assert endpoint == "ipc:///tmp/x/engine?listener=5&liveness=6"
    assert endpoints.split(endpoint) == ("ipc:///tmp/x/engine", descriptors)
    plain = "ipc:///tmp/x/engine"
    assert endpoints.split(endpoints.join(plain, {})) == (plain, {})


@pytest.mark.usefixtures("no_leaks")
def test_socket_loses_its_name_after_the_connection(tmp_path: Path) -> None:
    """No other process finds it, and a later kill cannot leave it (`S2`, `fault-56`)."""
    place = IpcEndpoint(tmp_path)
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place.address.removeprefix("ipc://"))
        place.unlink()
        assert list(tmp_path.iterdir()) == []
        place.close()


@pytest.mark.usefixtures("no_leaks")
def test_socket_without_a_connection_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded and leaves nothing."""
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 0.01)
    place = IpcEndpoint(tmp_path)
    with pytest.raises(TimeoutError, match="no connection"):
        place.unlink()
    place.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_leaks")
def test_remove_stale_removes_directories_of_dead_processes(tmp_path: Path) -> None:
    """Not what the living hold, and nothing that is not a socket of ours (`fault-56`)."""
    dead = tmp_path / "lifecycle-zmq-dead"
    dead.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead / "engine"))
    foreign = tmp_path / "lifecycle-zmq-foreign"
    foreign.mkdir()
    (foreign / "letter").touch()
    (tmp_path / "lifecycle-zmq-link").symlink_to(foreign)
    (tmp_path / "lifecycle-zmq-file").touch()
    living = IpcEndpoint(tmp_path)
    rendezvous.remove_stale(tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {living._directory.name}
    assert names == {f"lifecycle-zmq-{it}" for it in ("foreign", "link", "file")}
    assert (foreign / "letter").exists()
    assert living._directory.exists()
    living.close()
    rendezvous.remove_stale(tmp_path / "none")
    shutil.rmtree(foreign)
    for name in ("link", "file"):
        (tmp_path / f"lifecycle-zmq-{name}").unlink()


@pytest.mark.usefixtures("no_leaks")
def test_directory_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers that start at the same moment do not take each other's place."""
    original, raced = rendezvous.tempfile.mkdtemp, []

    def mkdtemp(**options: object) -> str:
        made = original(**options)
        if not raced:
            raced.append(made)
            rendezvous.remove_stale(tmp_path)
        return made

    monkeypatch.setattr(rendezvous.tempfile, "mkdtemp", mkdtemp)
    place = IpcEndpoint(tmp_path)
    assert raced
    assert raced[0] != str(place._directory)
    assert place._directory.exists()
    place.close()
