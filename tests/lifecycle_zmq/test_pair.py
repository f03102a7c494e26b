"""The pair of sockets, the engine's end: frames cut anywhere, a client that hangs up."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lifecycle_zmq import (
    EngineClient,
    EngineServer,
    ProtocolError,
    ZmqEngine,
    transport,
)
from lifecycle_zmq.memory.tensors import LOST
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.wire import Kind
from lifecycle_zmq.transport import frame_writer, frames, pair
from lifecycle_zmq.transport.pair import Pair

BOUND = 20.0
MIB = 2**20
Ends = Any  # as in conftest.py


# The first part of a message of which another one is to follow.
ONE_MORE = struct.pack(">Q", 1 << 56 | 40) + b"x" * 40


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
        pytest.param(struct.pack(">Q", 2**56 - 1), id="endless"),
        pytest.param(struct.pack(">Q", 2 * MIB), id="too-long"),
        pytest.param(struct.pack(">Q", 8 << 56 | 40), id="too-many-parts"),
        pytest.param(ONE_MORE + b"\x01" + bytes(7), id="more"),
        pytest.param(ONE_MORE + struct.pack(">Q", 5 * 2**30), id="tensor"),
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
    """Whoever took some of what came in one read finds the rest without news."""
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


def test_server_that_nobody_reads_keeps_and_then_refuses(
    monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    """It never waits; what it kept comes in order; too much, and the client is gone."""
    monkeypatch.setattr(frame_writer, "MOST_WAITING", 3 * MIB)
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
    # What it refused is missed for ever: whoever waits for it is told of an end.
    assert ends.left


class _Idle:
    busy = False

    def nothing(self, *_: object) -> None:
        """Nobody asks for anything."""

    start = cancel = end = step = status = nothing


def test_server_leaves_when_its_only_client_hangs_up() -> None:
    """Nobody else could ever reach it."""
    pair = Pair()
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
    monkeypatch.delitem(sys.modules, f"{transport.__name__}.zmq_client", raising=False)
    monkeypatch.delattr(transport, "zmq_client", raising=False)
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
