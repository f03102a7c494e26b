"""What a damaged message does to its link, and what a late or stopped end does not."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from zmq_wire import Kind

from lifecycle import EngineLost
from lifecycle_zmq import EngineClient, ProtocolError, loss_probe
from lifecycle_zmq.client_streams import StreamTable
from lifecycle_zmq.shared_memory import memfd
from lifecycle_zmq.transport import framing as frames

Ends = Any  # as in conftest.py
SMALL = 50


class Clock:
    """The clock of the readers of pairs, which a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes only when a test says so."""
    it = Clock()
    monkeypatch.setattr(frames, "time", it)
    return it


@pytest.mark.parametrize("pause", [0.01, 0.1, 0.25, 20.0])
def test_message_that_never_ends_is_a_fault(
    ends: Ends, clock: Clock, pause: float
) -> None:
    """Its rest is lost; small messages come instead of it, however many."""
    ends.client.sendall(frames.prefix(0, 100_000) + bytes(50_000))
    assert ends.server.receive() is None

    def say_on() -> None:
        for _ in range(50):
            clock.now += pause
            ends.client.sendall(ends.framed(b"ping"))
            assert ends.server.receive() is None

    with pytest.raises(ProtocolError, match="never ends"):
        say_on()
    assert clock.now <= 0.5 or pause == 20.0
    assert ends.receive() is None


@pytest.mark.parametrize("size", [5_000, 49_000])
def test_message_of_a_late_writer_is_no_fault(
    ends: Ends, clock: Clock, size: int
) -> None:
    """However late it comes in pieces of a few thousand bytes, and in a small last one."""
    ends.client.sendall(frames.prefix(0, 50_000) + bytes(100))
    for at in range(100, 50_000, size):
        assert ends.server.receive() is None
        clock.now += 60
        ends.client.sendall(bytes(min(size, 50_000 - at)))
    assert ends.receive() == [bytes(50_000)]


def test_read_that_fills_its_room_is_no_small_one(ends: Ends, clock: Clock) -> None:
    """What is left of a tensor is read by itself, and the next one's bytes after it."""
    parts = [b"head", bytes(1_000), bytes(50_000)]
    stream = ends.framed(*parts)
    at = stream.index(bytes(1_000)) + 990
    ends.client.sendall(stream[:at])
    assert ends.server.receive() is None
    clock.now += 60
    ends.client.sendall(stream[at : at + 100])
    assert ends.server.receive() is None
    ends.client.sendall(stream[at + 100 :])
    assert ends.receive() == parts


class Stopped:
    """The socket of a process that is stopped for a minute before each system call."""

    def __init__(self, sock: socket.socket, stop: Any) -> None:
        self._socket = sock
        self._stop = stop

    def send(self, *args: Any) -> int:
        self._stop()
        return self._socket.send(*args)

    def sendmsg(self, *args: Any) -> int:
        self._stop()
        return self._socket.sendmsg(*args)


@pytest.mark.parametrize("tensors", [0, 7])
@pytest.mark.parametrize("large", [SMALL, 60_000, 300_000])
@pytest.mark.parametrize("queued", [True, False])
def test_writer_that_is_stopped_at_every_system_call_does_no_damage(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    tensors: int,
    large: int,
    *,
    queued: bool,
) -> None:
    """A full socket, a debugger or a quota of CPU time: no message is taken for damaged."""
    monkeypatch.setattr(memfd, "pack", lambda _: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.prepare(ours)
        frames.prepare(theirs)
        writer = frames.FrameWriter(ours)
        reader = frames.FrameReader(theirs, head=2**20, tensors=7)
        got: list[list[bytes]] = []
        said: list[list[bytes]] = []

        def write(*parts: bytes) -> None:
            said.append([*parts])
            writer.write(parts)

        def read() -> None:
            clock.now += 60
            more = True
            while more:
                more = reader.read()
                while (parts := reader.take()) is not None:
                    got.append([bytes(it) for it in parts])

        while queued and not writer.waiting:
            write(bytes(30_000))
        writer._socket = Stopped(ours, read)  # type: ignore[assignment]
        for _ in range(3):
            write(b"h" * large, *[b"t" * SMALL] * tensors)
            write(b"h" * SMALL, *[b"t" * large] * tensors)
        while writer.waiting:
            writer.flush()
        read()
        assert got == said


class FakeSender:
    """Counts the messages of a client; the engine confirms when a test says so."""

    def __init__(self, table: StreamTable) -> None:
        self.sent = 1
        self.pings = 0
        self.table = table

    def ping(self) -> None:
        self.pings += 1
        self.sent += 1

    def confirm(self) -> None:
        self.table.confirmed = self.sent - 1
        self.table.received += 1


@pytest.fixture
def probe() -> Iterator[Any]:
    """A probe, what it asks, and a round of it."""
    table = StreamTable(7)
    sender: Any = FakeSender(table)
    it = loss_probe.LossProbe(sender, table)
    return SimpleNamespace(table=table, sender=sender, round=it._probe)


def test_quiet_client_is_silent_once_everything_is_confirmed(probe: Any) -> None:
    """Its last message is confirmed by one PING; then nothing is sent."""
    probe.table.ready = True
    for _ in range(100):
        probe.round()
        if probe.sender.pings:
            probe.sender.confirm()
    assert probe.sender.pings == 1


def test_engine_that_is_busy_for_an_hour_is_asked_a_few_times(probe: Any) -> None:
    """Messages that it does not read do not pile up in the link."""
    for _ in range(4 * 3600):
        probe.round()
    assert probe.sender.pings < 130


def test_engine_that_was_busy_is_asked_soon_again(probe: Any) -> None:
    """After a step of ten minutes, a lost message shows in the next second."""
    for _ in range(4 * 600):
        probe.round()
    before = probe.sender.pings
    probe.sender.confirm()
    for _ in range(4):
        probe.round()
    assert probe.sender.pings >= before + 3


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_client_that_has_lost_its_engine_asks_no_more(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an answer."""
    monkeypatch.setattr(loss_probe, "_PING_SECONDS", 0.001)
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        with anyio.fail_after(20):
            await client.wait_ready()
            while not fake_engine.pings:
                await fake_engine.hear_all()
        monkeypatch.setattr(loss_probe, "_MOST_DOUBLED", 0)  # asked again and again
        client.mark_failed("stopped")
        before = -1
        with anyio.fail_after(20):  # a last one may be on its way
            while before != fake_engine.pings:
                before = fake_engine.pings
                await fake_engine.hear_all()
        assert before > 0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_leaks")
async def test_client_that_finds_damage_leaves_with_the_next_number(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine believes it: it is the message that comes next. None follows it."""
    monkeypatch.setattr(loss_probe, "_PING_SECONDS", math.inf)
    async with EngineClient(fake_engine.endpoint, incarnation=7) as client:
        await fake_engine.greet()
        with anyio.fail_after(20):
            await client.wait_ready()
        fake_engine.tick(header={"sequence": 99})
        assert await fake_engine.hear() == ("LEAVE", "")
        with pytest.raises(EngineLost):
            await client.status()
        client._sender.send_now(Kind.STATUS, {"ask": 1})
        assert await fake_engine.hear_all() == []
    numbers = [it.sequence for it in fake_engine.messages]
    assert numbers == list(range(len(numbers)))
    assert fake_engine.messages[-1].body == {
        "message": "the client has lost this engine: protocol"
    }
