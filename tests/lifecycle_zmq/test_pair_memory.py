"""Tensors in memory that is passed: whole, unchanged, and never a descriptor left."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lifecycle_zmq import EncodeError, ProtocolError
from lifecycle_zmq.memory import parcels
from lifecycle_zmq.transport import frame_writer, passing
from lifecycle_zmq.transport.pair import Pair, PairLink

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="no such memory"),
    pytest.mark.usefixtures("no_leaks"),
]

MIB = 2**20
SEALS = 15
Ends = Any  # as in conftest.py


def memory(data: bytes, *, seals: int = SEALS) -> int:
    """A memfd with `data` in it."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def pass_on(ends: Ends, frame: bytes, *descriptors: int) -> None:
    """Send bytes and descriptors as a client may, and keep none of these."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    ends.client.sendmsg([frame], rights if descriptors else ())
    for each in descriptors:
        os.close(each)


@pytest.fixture
def link(ends: Ends) -> Iterator[PairLink]:
    """What writes to the server of `ends`."""
    ours = ends.client.dup()
    frame_writer.prepare(ours)
    it = PairLink(ours, lambda _: True)
    yield it
    it.close()


def descriptors() -> set[str]:
    """What this process has open, by number."""
    return {it.name for it in Path("/proc/self/fd").iterdir()}


def mapped() -> int:
    """How many mappings of passed memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:tensors")


def test_tensors_arrive_as_they_were(ends: Ends, link: PairLink) -> None:
    """Of any length and number, on boundaries, writable, their senders' memory free."""
    tensors = [os.urandom(size) for size in (1, 63, 64, 65, 70_000, 4096, 3 * MIB)]
    held = descriptors()
    data = bytearray(tensors[-1])
    assert link.send([b"head", *tensors[:-1], data])
    data[:] = bytes(len(data))
    assert descriptors() == held
    parts = ends.arrive()
    assert descriptors() == held
    head, *rest = parts
    assert bytes(head) == b"head"
    assert [bytes(part) for part in rest] == tensors
    assert all(np.frombuffer(it, np.uint8).ctypes.data % 64 == 0 for it in rest)
    rest[0][0] ^= 255
    assert rest[0][0] == tensors[0][0] ^ 255
    assert bytes(rest[1]) == tensors[1]


def test_memory_goes_with_the_last_view_of_it(ends: Ends, link: PairLink) -> None:
    """Whatever the view is, and without the collector; no descriptor stays till then."""
    assert link.send([b"head", bytes(MIB), b"b" * MIB])
    held = descriptors()
    last = ends.arrive()[-1]
    view = np.frombuffer(last, np.uint8)[5:6]
    del last
    assert mapped() == 1
    assert descriptors() == held
    assert view[0] == ord("b")
    del view
    assert mapped() == 0


def test_small_tensors_travel_in_the_stream(ends: Ends, link: PairLink) -> None:
    """Memory costs more than they do."""
    assert link.send([b"head", bytes(30_000), bytes(30_000)])
    parts = ends.arrive()
    assert mapped() == 0
    assert [len(part) for part in parts] == [4, 30_000, 30_000]


@pytest.mark.parametrize("cut", [1, 7, 9, 30, 43])
def test_message_may_be_cut_anywhere(ends: Ends, cut: int) -> None:
    """What was passed with its first byte is its own, also if the next one is there."""
    frame = ends.framed(b"h" * 20, bytes(100), bytes(50), apart=True)
    data = b"a" * 100 + bytes(28) + b"b" * 50
    got = []
    for _ in range(2):
        pass_on(ends, frame[:cut], memory(data))
        got.append(ends.server.receive())
        pass_on(ends, frame[cut:])
    got.append(ends.server.receive())
    assert got[0] is None
    for arrived in got[1:]:
        assert [bytes(it) for it in arrived[1]] == [HEAD, b"a" * 100, b"b" * 50]


HEAD = b"h" * 20


def _unsealed(size: int) -> int:
    return memory(bytes(size), seals=0)


def _pipe(_: int) -> int:
    read, write = os.pipe()
    os.close(write)
    return read


CASES: dict[str, Callable[[int], list[int]]] = {
    "none": lambda _: [],
    "unsealed": lambda size: [_unsealed(size)],
    "writable": lambda size: [memory(bytes(size), seals=SEALS & ~fcntl.F_SEAL_WRITE)],
    "shrinks": lambda size: [memory(bytes(size), seals=SEALS & ~fcntl.F_SEAL_SHRINK)],
    "short": lambda size: [memory(bytes(size - 1))],
    "long": lambda size: [memory(bytes(size + 1))],
    "two": lambda size: [memory(bytes(size)), memory(bytes(size))],
    "many": lambda size: [memory(bytes(size)) for _ in range(200)],
    "pipe": lambda size: [_pipe(size)],
    "directory": lambda _: [os.open("/", os.O_RDONLY)],
    "file": lambda _: [os.open(__file__, os.O_RDONLY)],
    "device": lambda _: [os.open("/dev/zero", os.O_RDONLY)],
    "path": lambda _: [os.open(__file__, os.O_PATH)],
}


@pytest.mark.parametrize("case", CASES)
def test_memory_that_is_none_is_refused_and_closed(ends: Ends, case: str) -> None:
    """Not sealed, of another size, too many, none, or something else altogether."""
    held = descriptors()
    frame = ends.framed(HEAD, bytes(70_000), bytes(10), apart=True)
    size = parcels.layout([70_000, 10])[1]
    pass_on(ends, frame, *CASES[case](size))
    with pytest.raises(ProtocolError):
        ends.receive()
    assert descriptors() == held
    assert mapped() == 0
    assert ends.receive() is None
    assert ends.left == [True]


@pytest.mark.parametrize("frames", ["alone", "inline", "begun"])
def test_memory_that_no_message_announces_is_refused(ends: Ends, frames: str) -> None:
    """Beside a message without tensors, one that has them in it, half of either."""
    held = descriptors()
    frame = {
        "alone": ends.framed(HEAD),
        "inline": ends.framed(HEAD, bytes(100)),
        "begun": ends.framed(HEAD)[:20],
    }[frames]
    pass_on(ends, frame, memory(bytes(100)))
    if frames == "begun":
        ends.server.receive()
        pass_on(ends, ends.framed(HEAD)[20:] + ends.framed(b"next"))
    with pytest.raises(ProtocolError):
        while ends.receive() is not None:
            pass
    assert descriptors() == held
    assert ends.receive() is None


def test_memory_that_piles_up_is_refused(ends: Ends) -> None:
    """A peer that passes some with every byte cannot fill the table of descriptors."""
    held = descriptors()
    for byte in ends.framed(HEAD):
        pass_on(ends, bytes([byte]), memory(b"x"))
    with pytest.raises(ProtocolError):
        ends.receive()
    assert descriptors() == held


@pytest.mark.parametrize("size", [0, 2**33])
def test_length_without_memory_is_refused(ends: Ends, size: int) -> None:
    """Nothing, and far more than there is: neither is ever mapped."""
    frame = ends.framed(HEAD, b"", apart=True)[:-8] + size.to_bytes(8, "big")
    pass_on(ends, frame, memory(b""))
    with pytest.raises(ProtocolError):
        ends.receive()


def test_message_without_tensors_cannot_have_them_apart(ends: Ends) -> None:
    """A prefix that says so is a fault."""
    pass_on(ends, ends.framed(HEAD, apart=True), memory(b"x"))
    with pytest.raises(ProtocolError):
        ends.receive()


def test_engine_that_passes_memory_leaves_nothing(ends: Ends) -> None:
    """The client takes none in, whatever comes."""
    pair = Pair()
    theirs, heard = socket.socket(fileno=pair._theirs.detach()), []
    link = pair.connect(lambda parts: bool(heard.append(bytes(parts[0]))) or True)
    ends.client.close()
    ends.client = theirs
    held = descriptors()
    pass_on(ends, ends.framed(b"said"), memory(b"x"))
    link.drain()
    assert heard == [b"said"]
    assert descriptors() == held
    pass_on(ends, ends.framed(b"said", b"x", apart=True), memory(b"x"))
    with pytest.raises(ProtocolError):
        link.drain()
    assert descriptors() == held
    link.close()
    pair.close()


def test_server_that_leaves_closes_what_it_did_not_use(ends: Ends) -> None:
    """Of a message that was begun, and of those that were never read."""
    held = descriptors()
    frame = ends.framed(HEAD, b"x", apart=True)
    pass_on(ends, frame[:9], memory(b"x"))
    assert ends.server.receive() is None
    pass_on(ends, frame[9:])
    pass_on(ends, frame, memory(b"x"))
    ends.server.__exit__(None, None, None)
    assert len(descriptors()) < len(held)


@contextmanager
def full(link: PairLink) -> Iterator[int]:
    """A link whose socket takes nothing more; of how many bytes, with their prefix."""
    head = bytes(100_000)
    sent = 0
    while not link._writer.waiting:
        assert link.send([head])
        sent += 1
    yield sent


def test_memory_that_waits_is_passed_in_its_turn(ends: Ends, link: PairLink) -> None:
    """Behind what waits already, and what follows it; nothing of it stays here."""
    held = descriptors()
    with full(link) as sent:
        assert link.send([b"one", b"1" * MIB])
        assert link.send([b"between"])
        assert link.send([b"two", b"2" * MIB])
        assert len(descriptors()) == len(held) + 2
        got: list[list[bytes]] = []
        while len(got) < sent + 3:
            link._writer.flush()
            arrived = ends.server.receive()
            got += [] if arrived is None else [[bytes(it) for it in arrived[1]]]
    del arrived
    assert got[:sent] == [[bytes(100_000)]] * sent
    assert got[sent:] == [[b"one", b"1" * MIB], [b"between"], [b"two", b"2" * MIB]]
    assert descriptors() == held
    assert mapped() == 0


@pytest.mark.parametrize("by_us", [False, True])
def test_memory_that_was_not_sent_goes_with_the_link(
    ends: Ends, link: PairLink, *, by_us: bool
) -> None:
    """However it ends: on our side, or because the engine has hung up."""
    held = descriptors()
    with full(link):
        assert link.send([b"one", bytes(MIB)])
        assert descriptors() != held
        if by_us:
            link.close()
        else:
            ends.server.__exit__(None, None, None)
            with pytest.raises(OSError, match="reset|pipe"):
                link._writer.flush()
            link._hang_up()
    # One less: the socket of whoever ended it.
    assert len(descriptors()) == len(held) - 1
    assert link._writer.waiting == 0


def test_only_so_many_descriptors_wait(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: PairLink
) -> None:
    """More are kept as bytes; all together are bounded."""
    monkeypatch.setattr(frame_writer, "MOST_DESCRIPTORS", 2)
    monkeypatch.setattr(frame_writer, "MOST_TENSORS", 5 * MIB)
    held = descriptors()
    with full(link):
        for _ in range(3):
            assert link.send([b"one", bytes(MIB)])
        assert len(descriptors()) == len(held) + 2
        with pytest.raises(EncodeError) as caught:
            link.send([b"more", bytes(2 * MIB)])
        assert caught.value.code == "no_memory"
    link.close()
    assert len(descriptors()) == len(held) - 1


def _fails(code: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["memfd_create", "pwrite", "fcntl"])
def test_tensors_are_sent_where_there_is_no_memory_to_pass(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: PairLink, call: str, code: int
) -> None:
    """No descriptor left, no memory, or a system without seals."""
    module = fcntl if call == "fcntl" else os
    held = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(module, call, _fails(code))
        assert link.send([b"head", b"x" * 100_000])
    assert ends.receive() == [b"head", b"x" * 100_000]
    assert mapped() == 0
    assert descriptors() == held


@pytest.mark.parametrize("waits", [False, True])
def test_tensors_are_sent_where_too_many_are_under_way(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: PairLink, *, waits: bool
) -> None:
    """The system bounds descriptors that nobody has read; then their bytes go."""
    monkeypatch.setattr(passing, "send", _fails(errno.ETOOMANYREFS))
    held = descriptors()
    if waits:
        with full(link) as sent:
            assert link.send([b"head", b"x" * MIB, b"y"])
            for _ in range(sent - 1):
                ends.receive()
    else:
        sent = 1
        assert link.send([b"head", b"x" * MIB, b"y"])
    while (parts := ends.server.receive()) is None or len(parts[1] or ()) < 3:
        link._writer.flush()
    assert [bytes(part) for part in parts[1] or ()] == [b"head", b"x" * MIB, b"y"]
    assert descriptors() == held
    assert link._writer.waiting == 0
    assert mapped() == 0


def test_copy_that_there_is_no_memory_for_is_refused_and_the_link_lives(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: PairLink
) -> None:
    """Nothing of it is sent."""

    def fail(*_: object) -> bytes:
        raise MemoryError

    with full(link) as sent:
        monkeypatch.setattr(parcels, "SUPPORTED", False)
        monkeypatch.setattr(frame_writer, "bytes", fail, raising=False)
        with pytest.raises(EncodeError) as caught:
            link.send([b"head", bytes(MIB)])
        assert caught.value.code == "no_memory"
        monkeypatch.undo()
        for _ in range(sent - 1):
            ends.receive()
        link._writer.flush()
        assert link.send([b"next"])
        assert [ends.receive() for _ in range(2)][1] == [b"next"]
