"""Sealed memory, the allocator of an arena, and tensors passed over a socket pair."""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import random
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from descriptors import descriptors_before, open_descriptors
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lifecycle import Payload
from lifecycle_zmq import EncodeError, ProtocolError, RequestRejected, ZmqEngine
from lifecycle_zmq.shared_memory import memfd as parcels
from lifecycle_zmq.shared_memory.allocator import GRANULE, RegionAllocator, rounded
from lifecycle_zmq.transport import framing as frame_writer, framing as passing
from lifecycle_zmq.transport.framing import FrameReader, FrameWriter
from lifecycle_zmq.transport.socketpair import SocketPair, SocketPairClient

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
TENSORS = [memoryview(b"a" * 100), memoryview(b"b" * 5000)]


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Every descriptor that is open after a test was open before it."""
    if sys.platform != "linux":
        yield
        return
    before = descriptors_before()
    yield
    assert open_descriptors() <= before


def failing(error: BaseException) -> Any:
    """A function that raises it, whatever it is called with."""

    def fail(*_: Any) -> Any:
        raise error

    return fail


@linux_only
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_keeps_no_memory_that_was_not_filled(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """An error of this process goes on as it is, and takes the descriptor along."""
    monkeypatch.setattr(parcels, "_write", failing(kind()))
    with pytest.raises(kind):
        parcels.pack(TENSORS)


@linux_only
@pytest.mark.parametrize("kind", [OSError, MemoryError, parcels.ProtocolError])
def test_sends_what_it_has_no_room_to_map(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """A copy that cannot be looked at is none: the tensors go as they are."""
    monkeypatch.setattr(parcels, "_open", failing(kind("as asked")))
    assert parcels.precopy(TENSORS) is None


@linux_only
def test_copies_again_what_is_passed_twice() -> None:
    """A copy that was made early is passed once; afterwards its bytes are copied."""
    early = parcels.precopy(TENSORS)
    assert early is not None
    for number in range(2):
        descriptor = parcels.pack(early)
        assert descriptor is not None
        passed = parcels.unpack(descriptor, [100, 5000])
        assert [bytes(it) for it in passed] == [bytes(it) for it in TENSORS], number
        passed[0][:] = b"x" * 100  # a private mapping of the receiver
        assert bytes(early[0]) == b"a" * 100


@linux_only
def test_gives_back_a_copy_that_is_never_passed() -> None:
    """As of a request that was cancelled meanwhile: its last view takes it along."""
    early = parcels.precopy(TENSORS)
    assert early is not None
    early.pop()
    assert bytes(early.pop()) == bytes(TENSORS[0])


@linux_only
def test_says_that_what_was_passed_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its receiver lacks the room, which is no fault of who has passed it."""
    descriptor = parcels.pack(TENSORS)
    assert descriptor is not None
    full = SimpleNamespace(mmap=lambda *_: parcels._FAILED)
    monkeypatch.setattr(parcels, "_libc", lambda: full)
    with pytest.raises(MemoryError):
        parcels.unpack(descriptor, [100, 5000])


@linux_only
def test_writes_more_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, each where it belongs."""
    monkeypatch.setattr(parcels, "_MAX_WRITE", 1000)
    whole = memoryview(Path(__file__).read_bytes())
    descriptor = parcels.pack([whole])
    assert descriptor is not None
    assert bytes(parcels.unpack(descriptor, [len(whole)])[0]) == bytes(whole)


PAGES = 24


def test_size_that_is_no_multiple_is_refused() -> None:
    """A range begins and ends at a whole granule, and is not empty."""
    for size in (0, -GRANULE, GRANULE + 1):
        with pytest.raises(ValueError, match=str(size)):
            RegionAllocator(size)


@given(st.integers(0, 2**40))
def test_rounded_is_the_least_positive_multiple(nbytes: int) -> None:
    """A region takes whole granules, at least one."""
    cost = rounded(nbytes)
    assert cost % GRANULE == 0
    assert max(nbytes, 1) <= cost < max(nbytes, 1) + GRANULE


def test_lowest_hole_that_fits_is_taken() -> None:
    """Pages that were used before are used first."""
    regions = RegionAllocator(8 * GRANULE)
    offsets = [regions.allocate(size * GRANULE) for size in (1, 2, 1, 3)]
    assert offsets == [0, GRANULE, 3 * GRANULE, 4 * GRANULE]
    regions.release(0)
    regions.release(GRANULE * 4)
    assert regions.allocate(2 * GRANULE) == 4 * GRANULE
    assert regions.allocate(GRANULE) == 0


def test_free_twice_or_unknown_is_an_error() -> None:
    """Only a region that is there can be freed, once."""
    regions = RegionAllocator(4 * GRANULE)
    offset = regions.allocate(1)
    assert offset == 0
    regions.release(offset)
    for wrong in (offset, GRANULE, -1):
        with pytest.raises(KeyError):
            regions.release(wrong)
    assert (regions.used, regions.longest_hole) == (0, 4 * GRANULE)


class Owners(RuleBasedStateMachine):
    """Beside a list that says of each page whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.regions = RegionAllocator(PAGES * GRANULE)
        self.pages: list[int | None] = [None] * PAGES

    def holes(self) -> list[tuple[int, int]]:
        """First page and length of each run of free pages."""
        runs: list[tuple[int, int]] = []
        for page, owner in enumerate(self.pages):
            if owner is not None:
                continue
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        return runs

    @rule(pages=st.integers(0, PAGES + 1), spare=st.integers(0, GRANULE - 1))
    def allocate(self, pages: int, spare: int) -> None:
        """First fit finds free regions without overlaps."""
        nbytes = pages * GRANULE + spare
        need = rounded(nbytes) // GRANULE
        fitting = [first for first, length in self.holes() if length >= need]
        offset = self.regions.allocate(nbytes)
        if not fitting:
            assert offset is None
            return
        assert offset == fitting[0] * GRANULE
        for page in range(fitting[0], fitting[0] + need):
            assert self.pages[page] is None
            self.pages[page] = offset

    @precondition(lambda self: any(owner is not None for owner in self.pages))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any region may go at any time."""
        owners = sorted({owner for owner in self.pages if owner is not None})
        offset = data.draw(st.sampled_from(owners))
        self.regions.release(offset)
        self.pages = [None if owner == offset else owner for owner in self.pages]

    @rule(offset=st.integers(-1, PAGES * GRANULE), nbytes=st.integers(1, 3 * GRANULE))
    def look(self, offset: int, nbytes: int) -> None:
        """A range belongs to a region only as a whole."""
        first, last = offset // GRANULE, (offset + nbytes - 1) // GRANULE
        owners = set(self.pages[first : last + 1]) if offset >= 0 else {None}
        whole = len(owners) == 1 and last < PAGES
        expected = owners.pop() if whole else None
        assert self.regions.region_of(offset, nbytes) == expected

    @invariant()
    def balance(self) -> None:
        """Free and used are the size, and neighbouring holes are one (`law 3`)."""
        free = sum(owner is None for owner in self.pages)
        assert self.regions.used == (PAGES - free) * GRANULE
        longest = max((length for _, length in self.holes()), default=0)
        assert self.regions.longest_hole == longest * GRANULE
        assert len(self.regions) == len(set(self.pages) - {None})


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
MIB = 2**20
SEALS = 15
Ends = Any  # as in conftest.py


def memory(data: bytes, *, seals: int = SEALS) -> int:
    """A memfd with `data` in it."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def pass_on(ends: Ends, frame: bytes, *open_descriptors: int) -> None:
    """Send bytes and open_descriptors as a client may, and keep none of these."""
    rights = [
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", open_descriptors))
    ]
    ends.client.sendmsg([frame], rights if open_descriptors else ())
    for each in open_descriptors:
        os.close(each)


@pytest.fixture
def link(ends: Ends) -> Iterator[SocketPairClient]:
    """What writes to the server of `ends`."""
    ours = ends.client.dup()
    frame_writer.prepare(ours)
    it = SocketPairClient(ours, lambda _: True)
    yield it
    it.close()


def mapped() -> int:
    """How many mappings of passed memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:tensors")


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_tensors_arrive_as_they_were(ends: Ends, link: SocketPairClient) -> None:
    """Of any length and number, on boundaries, writable, their senders' memory free."""
    tensors = [os.urandom(size) for size in (1, 63, 64, 65, 70_000, 4096, 3 * MIB)]
    held = descriptors_before()
    data = bytearray(tensors[-1])
    assert link.send([b"head", *tensors[:-1], data])
    data[:] = bytes(len(data))
    assert open_descriptors() == held
    parts = ends.arrive()
    assert open_descriptors() == held
    head, *rest = parts
    assert bytes(head) == b"head"
    assert [bytes(part) for part in rest] == tensors
    assert all(np.frombuffer(it, np.uint8).ctypes.data % 64 == 0 for it in rest)
    rest[0][0] ^= 255
    assert rest[0][0] == tensors[0][0] ^ 255
    assert bytes(rest[1]) == tensors[1]


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_memory_goes_with_the_last_view_of_it(
    ends: Ends, link: SocketPairClient
) -> None:
    """Whatever the view is, and without the collector; no descriptor stays till then."""
    assert link.send([b"head", bytes(MIB), b"b" * MIB])
    held = descriptors_before()
    last = ends.arrive()[-1]
    view = np.frombuffer(last, np.uint8)[5:6]
    del last
    assert mapped() == 1
    assert open_descriptors() == held
    assert view[0] == ord("b")
    del view
    assert mapped() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_small_tensors_travel_in_the_stream(ends: Ends, link: SocketPairClient) -> None:
    """Memory costs more than they do."""
    assert link.send([b"head", bytes(30_000), bytes(30_000)])
    parts = ends.arrive()
    assert mapped() == 0
    assert [len(part) for part in parts] == [4, 30_000, 30_000]


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
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


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("case", CASES)
def test_memory_that_is_none_is_refused_and_closed(ends: Ends, case: str) -> None:
    """Not sealed, of another size, too many, none, or something else altogether."""
    held = descriptors_before()
    frame = ends.framed(HEAD, bytes(70_000), bytes(10), apart=True)
    size = parcels.layout([70_000, 10])[1]
    pass_on(ends, frame, *CASES[case](size))
    with pytest.raises(ProtocolError):
        ends.receive()
    assert open_descriptors() == held
    assert mapped() == 0
    assert ends.receive() is None
    assert ends.left == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("frames", ["alone", "inline", "begun"])
def test_memory_that_no_message_announces_is_refused(ends: Ends, frames: str) -> None:
    """Beside a message without tensors, one that has them in it, half of either."""
    held = descriptors_before()
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
    assert open_descriptors() == held
    assert ends.receive() is None


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_memory_that_piles_up_is_refused(ends: Ends) -> None:
    """A peer that passes some with every byte cannot fill the table of open_descriptors."""
    held = descriptors_before()
    for byte in ends.framed(HEAD):
        pass_on(ends, bytes([byte]), memory(b"x"))
    with pytest.raises(ProtocolError):
        ends.receive()
    assert open_descriptors() == held


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("size", [0, 2**33])
def test_length_without_memory_is_refused(ends: Ends, size: int) -> None:
    """Nothing, and far more than there is: neither is ever mapped."""
    frame = ends.framed(HEAD, b"", apart=True)[:-8] + size.to_bytes(8, "big")
    pass_on(ends, frame, memory(b""))
    with pytest.raises(ProtocolError):
        ends.receive()


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_message_without_tensors_cannot_have_them_apart(ends: Ends) -> None:
    """A prefix that says so is a fault."""
    pass_on(ends, ends.framed(HEAD, apart=True), memory(b"x"))
    with pytest.raises(ProtocolError):
        ends.receive()


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_engine_that_passes_memory_leaves_nothing(ends: Ends) -> None:
    """The client takes none in, whatever comes."""
    pair = SocketPair()
    theirs, heard = socket.socket(fileno=pair._theirs.detach()), []
    link = pair.connect(lambda parts: bool(heard.append(bytes(parts[0]))) or True)
    ends.client.close()
    ends.client = theirs
    held = descriptors_before()
    pass_on(ends, ends.framed(b"said"), memory(b"x"))
    link.drain()
    assert heard == [b"said"]
    assert open_descriptors() == held
    pass_on(ends, ends.framed(b"said", b"x", apart=True), memory(b"x"))
    with pytest.raises(ProtocolError):
        link.drain()
    assert open_descriptors() == held
    link.close()
    pair.close()


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_server_that_leaves_closes_what_it_did_not_use(ends: Ends) -> None:
    """Of a message that was begun, and of those that were never read."""
    held = descriptors_before()
    frame = ends.framed(HEAD, b"x", apart=True)
    pass_on(ends, frame[:9], memory(b"x"))
    assert ends.server.receive() is None
    pass_on(ends, frame[9:])
    pass_on(ends, frame, memory(b"x"))
    ends.server.__exit__(None, None, None)
    assert len(open_descriptors()) < len(held)


@contextmanager
def full(link: SocketPairClient) -> Iterator[int]:
    """A link whose socket takes nothing more; of how many bytes, with their prefix."""
    head = bytes(100_000)
    sent = 0
    while not link._writer.waiting:
        assert link.send([head])
        sent += 1
    yield sent


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_memory_that_waits_is_passed_in_its_turn(
    ends: Ends, link: SocketPairClient
) -> None:
    """Behind what waits already, and what follows it; nothing of it stays here."""
    held = descriptors_before()
    with full(link) as sent:
        assert link.send([b"one", b"1" * MIB])
        assert link.send([b"between"])
        assert link.send([b"two", b"2" * MIB])
        assert len(open_descriptors()) == len(held) + 2
        got: list[list[bytes]] = []
        while len(got) < sent + 3:
            link._writer.flush()
            arrived = ends.server.receive()
            got += [] if arrived is None else [[bytes(it) for it in arrived[1]]]
    del arrived
    assert got[:sent] == [[bytes(100_000)]] * sent
    assert got[sent:] == [[b"one", b"1" * MIB], [b"between"], [b"two", b"2" * MIB]]
    assert open_descriptors() == held
    assert mapped() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("by_us", [False, True])
def test_memory_that_was_not_sent_goes_with_the_link(
    ends: Ends, link: SocketPairClient, *, by_us: bool
) -> None:
    """However it ends: on our side, or because the engine has hung up."""
    held = descriptors_before()
    with full(link):
        assert link.send([b"one", bytes(MIB)])
        assert open_descriptors() != held
        if by_us:
            link.close()
        else:
            ends.server.__exit__(None, None, None)
            with pytest.raises(OSError, match="reset|pipe"):
                link._writer.flush()
            link._hang_up()
    # One less: the socket of the closed end.
    assert len(open_descriptors()) == len(held) - 1
    assert link._writer.waiting == 0


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_only_so_many_descriptors_wait(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: SocketPairClient
) -> None:
    """More are kept as bytes; all together are bounded."""
    monkeypatch.setattr(frame_writer, "MAX_WAITING_DESCRIPTORS", 2)
    monkeypatch.setattr(frame_writer, "MAX_WAITING_TENSORS", 5 * MIB)
    held = descriptors_before()
    with full(link):
        for _ in range(3):
            assert link.send([b"one", bytes(MIB)])
        assert len(open_descriptors()) == len(held) + 2
        with pytest.raises(EncodeError) as caught:
            link.send([b"more", bytes(2 * MIB)])
        assert caught.value.code == "no_memory"
    link.close()
    assert len(open_descriptors()) == len(held) - 1


def _fails(code: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["memfd_create", "pwrite", "fcntl"])
def test_tensors_are_sent_where_there_is_no_memory_to_pass(
    monkeypatch: pytest.MonkeyPatch,
    ends: Ends,
    link: SocketPairClient,
    call: str,
    code: int,
) -> None:
    """No descriptor left, no memory, or a system without seals."""
    module = fcntl if call == "fcntl" else os
    held = descriptors_before()
    with monkeypatch.context() as patch:
        patch.setattr(module, call, _fails(code))
        assert link.send([b"head", b"x" * 100_000])
    assert ends.receive() == [b"head", b"x" * 100_000]
    assert mapped() == 0
    assert open_descriptors() == held


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("waits", [False, True])
def test_tensors_are_sent_where_too_many_are_under_way(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: SocketPairClient, *, waits: bool
) -> None:
    """The system limits unread open_descriptors; beyond that their bytes are sent."""
    monkeypatch.setattr(passing, "send", _fails(errno.ETOOMANYREFS))
    held = descriptors_before()
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
    assert open_descriptors() == held
    assert link._writer.waiting == 0
    assert mapped() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
def test_copy_that_there_is_no_memory_for_is_refused_and_the_link_lives(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, link: SocketPairClient
) -> None:
    """Nothing of it is sent."""

    def fail(*_: object) -> bytes:
        raise MemoryError

    with full(link) as sent:
        monkeypatch.setattr(parcels, "SUPPORTED", False)
        monkeypatch.setattr(frame_writer, "_after", fail)
        with pytest.raises(EncodeError) as caught:
            link.send([b"head", bytes(MIB)])
        assert caught.value.code == "no_memory"
        monkeypatch.undo()
        for _ in range(sent - 1):
            ends.receive()
        link._writer.flush()
        assert link.send([b"next"])
        assert [ends.receive() for _ in range(2)][1] == [b"next"]


MESSAGES = 60
HEAD_BYTES = 5_000


def unreliable(dice: random.Random, call: Callable[..., int], code: int) -> Any:
    """`call`, which fails now and then."""

    def tried(*arguments: Any) -> int:
        if dice.random() < 0.1:
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return tried


def halting(dice: random.Random, send: Callable[..., int]) -> Any:
    """`send`, which takes only the beginning now and then."""

    def tried(sock: socket.socket, frame: memoryview, descriptor: int) -> int:
        most = dice.choice([len(frame), dice.randint(1, len(frame))])
        return send(sock, frame[:most], descriptor)

    return tried


def message(dice: random.Random) -> list[bytes]:
    """A head, and up to seven tensors."""
    sizes = [dice.choice([1, 20, HEAD_BYTES])]
    sizes += dice.choices([1, 70, 500, 9_000], k=dice.choice([0, 0, 1, 2, 3, 7]))
    return [dice.randbytes(size) for size in sizes]


def write(dice: random.Random, writer: FrameWriter, parts: list[bytes]) -> None:
    """Send it, its tensors copied before or not."""
    tensors = [memoryview(part) for part in parts[1:]]
    early = parcels.precopy(tensors) if tensors and dice.random() < 0.4 else None
    assert writer.write([parts[0], *(early or tensors)])


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("seed", range(40))
def test_all_arrives_in_order_whatever_fails_meanwhile(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Passed, kept, kept as a copy, or in the stream; and nothing is left of it."""
    dice = random.Random(seed)
    send = unreliable(dice, halting(dice, passing.send), errno.ETOOMANYREFS)
    monkeypatch.setattr(passing, "send", send)
    made = unreliable(dice, os.memfd_create, errno.EMFILE)
    monkeypatch.setattr(os, "memfd_create", made)
    monkeypatch.setattr(frame_writer, "PASSED_BYTES", 200)
    monkeypatch.setattr(frame_writer, "MAX_WAITING_DESCRIPTORS", 5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame_writer.prepare(ours)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, dice.choice([1, 65_536]))
        theirs.setblocking(False)
        writer, reader = (
            FrameWriter(ours),
            FrameReader(theirs, head=HEAD_BYTES, tensors=7),
        )
        sent = [message(dice) for _ in range(MESSAGES)]
        left, heard = sent[::-1], []
        for _ in range(100 * MESSAGES):
            for _ in range(min(len(left), dice.choice([0, 1, 8]))):
                write(dice, writer, left.pop())
            if dice.random() < 0.5:
                writer.flush()
            reader.read()
            while (parts := reader.take()) is not None:
                heard.append([bytes(part) for part in parts])
        assert heard == sent
        assert writer.waiting == 0
        for _ in range(20):  # more than there is room for
            writer.write([b"head", bytes(60_000)])
        writer.drop()
        reader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="no such memory")
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.anyio
@pytest.mark.parametrize("arena_bytes", [0, 2 * MIB])
@pytest.mark.parametrize(
    ("what", "passed"), [("NOFILE", True), ("AS", True), ("AS", False)]
)
async def test_tensors_that_an_engine_has_no_room_for_are_refused_alone(
    make_engine: Callable[..., ZmqEngine],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    arena_bytes: int,
    *,
    passed: bool,
) -> None:
    """No descriptor or no address left: the other streams go on, and the next is served."""
    if not passed:
        monkeypatch.setattr(parcels, "SUPPORTED", False)
    async with make_engine(arena_bytes=arena_bytes) as engine:
        await engine.wait_ready()
        pid, number = engine.pid or 0, getattr(resource, f"RLIMIT_{what}")
        other = await engine.start("other#1", {"forever": True})
        sizes = {"small": MIB, "large": 64 * MIB}
        used = Path(f"/proc/{pid}/statm").read_text().split()[0]
        least = 3 if what == "NOFILE" else int(used) * mmap.PAGESIZE + 8 * MIB
        limits = resource.prlimit(pid, number)
        resource.prlimit(pid, number, (least, limits[1]))
        with anyio.fail_after(20):
            with pytest.raises(RequestRejected) as caught:
                box = Payload({name: bytes(size) for name, size in sizes.items()})
                await engine.start("a#1", {"hold": True}, box)
            assert caught.value.code == "no_memory"
            await engine.end("a#1")
            assert await anext(other)
            resource.prlimit(pid, number, limits)
            box = Payload({name: bytes(size) for name, size in sizes.items()})
            await engine.start("a#2", {"hold": True}, box)
            await engine.end("a#2")
            counters = await engine.status()
        assert (counters["bad_frames"], engine.incarnation) == (0, 1)
        if arena_bytes:
            assert engine.arena.statistics().used == 0
