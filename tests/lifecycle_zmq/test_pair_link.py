"""The pair of sockets, the client's end: an engine that hangs up, or never reads."""

from __future__ import annotations

import errno
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import anyio
import pytest

from lifecycle import EngineLost
from lifecycle_zmq import EncodeError, EngineClient
from lifecycle_zmq.memory import parcels
from lifecycle_zmq.process.watch import Limits
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Kind
from lifecycle_zmq.supervision.liveness import Liveness
from lifecycle_zmq.transport import frame_writer
from lifecycle_zmq.transport.pair import Pair, PairLink

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
    pair = Pair()
    with closing(pair), _theirs(pair) as theirs:
        async with EngineClient(pair.connect, incarnation=7) as client:
            theirs.sendall(_said(Kind.READY, 0))
            yield client, theirs


@contextmanager
def linked() -> Iterator[tuple[PairLink, socket.socket]]:
    """A link alone, and the socket of an engine that may read what is sent or not."""
    pair = Pair()
    with closing(pair), _theirs(pair) as theirs:
        link = PairLink(*_ours(pair), lambda _: True)
        with closing(link):
            yield link, theirs


@pytest.mark.anyio
@pytest.mark.usefixtures("no_memory")
async def test_engine_that_does_not_read_holds_no_loop_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A send returns at once, the caller's memory is its own again, nothing is lost."""
    monkeypatch.setattr(frame_writer, "MOST_TENSORS", 40 * MIB)
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
    monkeypatch.setattr(frame_writer, "MOST_WAITING", 4 * MIB)
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
    async with connected() as (client, theirs):
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


@pytest.mark.anyio
async def test_what_an_engine_said_before_it_is_given_up_is_heard_first(
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
                with Liveness(Limits(1, 1, 1)) as liveness:
                    monkeypatch.setattr(liveness, "_look", lambda: "disconnected")
                    # uvloop tells of a link that was reset once, and no more.
                    await liveness.look_after(client)
        assert answers == [{"streams": 3}]
        assert client.lost == "disconnected"


@pytest.mark.anyio
async def test_engine_whose_stream_is_no_message_is_given_up() -> None:
    """A length that nothing has is a fault of the engine, like any other."""
    async with connected() as (client, theirs):
        theirs.sendall(struct.pack(">Q", MIB))
        with anyio.fail_after(BOUND):
            await client.wait_lost()
        assert client.lost == "protocol"


@pytest.mark.anyio
async def test_last_words_are_heard_by_who_looks_for_them() -> None:
    """`drain` takes all that is there, and a fault in it is the engine's."""
    async with connected() as (client, theirs):
        client.drain()
        assert client.ready
        theirs.sendall(b"\xff" * 8)
        client.drain()
        assert client.lost == "protocol"


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
