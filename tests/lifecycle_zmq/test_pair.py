"""The pair of sockets: frames cut anywhere, a side that hangs up, one that never reads."""

from __future__ import annotations

import errno
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

import lifecycle_zmq
from lifecycle import EngineLost
from lifecycle_zmq import (
    EncodeError,
    EngineClient,
    EngineServer,
    ProtocolError,
    ZmqEngine,
    _writer,
    _pair,
    wire,
)
from lifecycle_zmq._liveness import Liveness
from lifecycle_zmq._pair import Pair, PairLink, PairServer
from lifecycle_zmq._watch import Limits
from lifecycle_zmq.wire import Kind

BOUND = 20.0
MIB = 2**20


def framed(*parts: bytes) -> bytes:
    """A message as docs/reference/wire.md has it."""
    follow = reversed(range(len(parts)))
    pairs = zip(follow, parts, strict=True)
    return b"".join(
        struct.pack(">B", left) + len(part).to_bytes(7, "big") + part
        for left, part in pairs
    )


class Ends:
    """A server, and the socket that its client would have."""

    def __init__(self) -> None:
        self.client, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.left: list[bool] = []
        self.server = PairServer(theirs.detach(), lambda: self.left.append(True))

    def receive(self) -> Sequence[wire.Buffer] | None:
        """The next message, which must be soon."""
        until = time.monotonic() + BOUND
        while time.monotonic() < until:
            arrived = self.server.receive()
            if arrived is not None:
                return None if arrived[1] is None else [bytes(it) for it in arrived[1]]
            self.server.poll(10)
        raise TimeoutError


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A server and its client's socket."""
    it = Ends()
    with it.server, it.client:
        yield it


def test_messages_are_whole_wherever_the_stream_is_cut(ends: Ends) -> None:
    """Byte by byte or many at once, with tensors small and large."""
    chance = random.Random(5)
    sizes = (0, 1, 40, 4096, 70_000)
    messages = [
        [chance.randbytes(chance.choice(sizes)) for _ in range(chance.randint(1, 8))]
        for _ in range(60)
    ]
    stream = b"".join(framed(*parts) for parts in messages)

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


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(struct.pack(">Q", 2**56 - 1), id="endless"),
        pytest.param(struct.pack(">Q", 2 * MIB), id="too-long"),
        pytest.param(struct.pack(">Q", 8 << 56 | 40), id="too-many-parts"),
        pytest.param(framed(b"x" * 40, b"y")[:48] + b"\x01" + bytes(7), id="more"),
        pytest.param(
            framed(b"x" * 40, b"y")[:48] + struct.pack(">Q", 5 * 2**30), id="tensor"
        ),
    ],
)
def test_length_that_no_part_has_ends_the_connection(ends: Ends, claim: bytes) -> None:
    """Refused before memory is taken for it; what follows it is not read (`fault-43`)."""
    ends.client.sendall(claim + framed(b"later"))
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


def test_noise_is_refused_and_never_more_than_that(ends: Ends) -> None:
    """Whatever bytes come: messages, a `ProtocolError`, or the end (`N11`)."""
    chance = random.Random(11)
    good = framed(wire.encode(Kind.STATUS, {"ask": 1}, incarnation=1, sequence=0))
    ended = 0
    for _ in range(300):
        it = Ends()
        with it.server, it.client:
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
    """Whoever took some of what came in one read finds the rest without news."""
    ends.client.sendall(framed(b"first") + framed(b"second"))
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
    monkeypatch.setattr(_pair, "_READS", 1)
    ends.client.sendall(framed(b"whole"))
    begin = time.monotonic()
    while (arrived := ends.server.receive()) is None:
        ends.server.poll(10_000)
    assert time.monotonic() - begin < 5
    assert arrived[1] == [b"whole"]


def test_server_never_waits_whatever_timeout_sockets_have() -> None:
    """Programs give all sockets one, for downloads; the link is not ended by it."""
    socket.setdefaulttimeout(0.2)
    try:
        it = Ends()
    finally:
        socket.setdefaulttimeout(None)
    with it.server, it.client:
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
    wanted = framed(head) * sent + framed(b"x") * 90
    got = bytearray()
    while len(got) < sent * len(framed(head)) - ends.server._writer.waiting:
        got += ends.client.recv(MIB)
    ends.server.__exit__(None, None, None)
    while data := ends.client.recv(MIB):
        got += data
    assert got == wanted


def test_tensor_is_the_receivers_alone() -> None:
    """The transport keeps nothing of it, though it came in many reads (law 6)."""
    it = Ends()
    with it.server, it.client:
        data = framed(b"head", bytes(100), bytes(MIB))
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


def test_server_that_nobody_reads_keeps_and_then_refuses(
    monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    """It never waits; what it kept comes in order; too much, and the client is gone."""
    monkeypatch.setattr(_writer, "MOST_WAITING", 3 * MIB)
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
    assert got == framed(head) * sent
    # What it refused is missed for ever: whoever waits for it is told of an end.
    assert ends.left


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Run the tests of the client on each loop."""
    if request.param == "uvloop":
        return "asyncio", {"use_uvloop": True}
    return request.param


@pytest.mark.anyio
async def test_engine_that_does_not_read_holds_no_loop_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A send returns at once, the caller's memory is its own again, nothing is lost."""
    monkeypatch.setattr(_writer, "MOST_TENSORS", 40 * MIB)
    pair = Pair()
    link = PairLink(*_ours(pair), lambda _: True)
    theirs = _theirs(pair)
    with anyio.fail_after(BOUND):
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
                    await anyio.sleep(0.001)
            assert got == wanted
            # The loop ran all the while; and runs no task that waits to write.
            tasks.cancel_scope.cancel()
    link.close()
    theirs.close()


@pytest.mark.anyio
async def test_tensors_that_wait_leave_room_for_what_is_said_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One START of more than may wait is no reason to give up the engine."""
    monkeypatch.setattr(_writer, "MOST_WAITING", 4 * MIB)
    pair = Pair()
    link = PairLink(*_ours(pair), lambda _: True)
    assert link.send([b"start", bytes(8 * MIB)])
    assert link.send([b"cancel"])
    assert all(link.send([bytes(MIB // 2)]) for _ in range(7))
    assert not link.send([bytes(MIB // 2)])
    link.close()
    pair.close()


@pytest.mark.anyio
async def test_closed_link_keeps_nothing() -> None:
    """A reader may keep its stream, the stream the client, and that the link."""
    pair = Pair()
    link = PairLink(*_ours(pair), lambda _: True)
    assert link.send([b"start", bytes(8 * MIB)])
    assert link._writer.waiting
    tracemalloc.start()
    try:
        assert link.send([b"start", bytes(8 * MIB)])
        link.close()
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()
    pair.close()


class _Failing(socket.socket):
    """One that the system has no memory for."""

    def send(self, *_: Any) -> int:
        raise OSError(errno.ENOBUFS, "no memory")

    def sendmsg(self, *_: Any) -> int:
        raise OSError(errno.ENOBUFS, "no memory")


@pytest.mark.anyio
async def test_message_that_the_system_does_not_take_ends_the_link() -> None:
    """Who waits for its answer would wait for ever."""
    pair = Pair()
    failing = _Failing(fileno=_ours(pair)[0].detach())
    failing.setblocking(False)
    async with EngineClient(
        lambda handle: PairLink(failing, handle), incarnation=7
    ) as client:
        with anyio.fail_after(BOUND):
            await client.wait_lost()
        assert client.lost == "disconnected"
    pair.close()


@pytest.mark.anyio
async def test_engine_that_hangs_up_is_told_to_all_who_wait() -> None:
    """After what it said before, in one word, to each once."""
    pair = Pair()
    theirs = _theirs(pair)
    async with EngineClient(pair.connect, incarnation=7) as client:
        theirs.sendall(_said(Kind.READY, 0))
        with anyio.fail_after(BOUND):
            await client.wait_ready()
            told: list[str] = []

            async def ask() -> None:
                try:
                    await client.status()
                except EngineLost as lost:
                    told.append(lost.reason)

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                theirs.close()
                # Lost as what was under way is, and no error of its own.
                tasks.start_soon(ask)
        assert told == ["disconnected"] * 4
    pair.close()


@pytest.mark.anyio
async def test_what_an_engine_said_before_it_is_given_up_is_heard_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it has left unread what was said to it, which resets the link."""
    pair = Pair()
    theirs = _theirs(pair)
    async with EngineClient(pair.connect, incarnation=7) as client:
        theirs.sendall(_said(Kind.READY, 0))
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
                with Liveness(Limits(1, 1, 1)) as liveness:
                    monkeypatch.setattr(liveness, "_look", lambda: "disconnected")
                    # uvloop tells of a link that was reset once, and no more.
                    await liveness.look_after(client)
        assert answers == [{"streams": 3}]
        assert client.lost == "disconnected"
    pair.close()


@pytest.mark.anyio
async def test_engine_whose_stream_is_no_message_is_given_up() -> None:
    """A length that nothing has is a fault of the engine, like any other."""
    pair = Pair()
    theirs = _theirs(pair)
    async with EngineClient(pair.connect, incarnation=7) as client:
        theirs.sendall(_said(Kind.READY, 0) + struct.pack(">Q", MIB))
        with anyio.fail_after(BOUND):
            await client.wait_lost()
        assert client.lost == "protocol"
    theirs.close()
    pair.close()


@pytest.mark.anyio
async def test_last_words_are_heard_by_who_looks_for_them() -> None:
    """`drain` takes all that is there, and a fault in it is the engine's."""
    pair = Pair()
    theirs = _theirs(pair)
    async with EngineClient(pair.connect, incarnation=7) as client:
        theirs.sendall(_said(Kind.READY, 0))
        client.drain()
        assert client.ready
        theirs.sendall(b"\xff" * 8)
        client.drain()
        assert client.lost == "protocol"
    theirs.close()
    pair.close()


class _Idle:
    busy = False

    def nothing(self, *_: object) -> None:
        """Nobody asks for anything."""

    start = cancel = end = step = status = nothing


def test_server_leaves_when_its_only_client_hangs_up() -> None:
    """Nobody else could ever reach it."""
    pair = Pair()
    theirs = _theirs(pair)
    ours, _ = _ours(pair), pair.close()
    server = EngineServer(
        f"pair:?link={theirs.detach()}",
        _Idle(),  # type: ignore[arg-type]
        incarnation=1,
        leave_with_parent=False,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ours[0].close()
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
    monkeypatch.delitem(sys.modules, "lifecycle_zmq._link", raising=False)
    monkeypatch.delattr(lifecycle_zmq, "_link", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs zmq; pip .*\[zmq\]"):
        EngineClient("ipc:///nowhere", incarnation=1)


PROGRAM = """
import sys, threading
import anyio
from pathlib import Path
from lifecycle_zmq import ZmqEngine

async def main():
    async with ZmqEngine(sys.argv[1:], transport="pair") as engine:
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.anyio
@pytest.mark.parametrize(("arena_bytes", "scheme"), [(0, "ipc"), (2**20, "pair")])
async def test_pair_is_for_engines_that_are_sent_nothing_large(
    environment: dict[str, str], arena_bytes: int, scheme: str
) -> None:
    """Tensors would wait in the sender for the engine's step to end."""
    show = "import sys; print(sys.argv[2].split(':')[0]); sys.exit(3)"
    argv = [sys.executable, "-c", show]
    engine = ZmqEngine(argv, env=environment, arena_bytes=arena_bytes, backoff=60)
    with anyio.fail_after(BOUND):
        async with engine:
            while not engine.output:
                await anyio.sleep(0.01)
    assert engine.output.startswith(scheme)


def _said(kind: Kind, sequence: int, body: dict[str, Any] | None = None) -> bytes:
    return framed(wire.encode(kind, body or {}, incarnation=7, sequence=sequence))


def _theirs(pair: Pair) -> socket.socket:
    theirs = socket.socket(fileno=pair._theirs.detach())
    theirs.setblocking(False)
    return theirs


def _ours(pair: Pair) -> tuple[socket.socket]:
    assert pair._ours is not None
    ours, pair._ours = pair._ours, None
    return (ours,)
