"""Memory that is passed, when its making goes wrong: nothing of it stays open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lifecycle_zmq.memory import parcels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no such memory")

TENSORS = [memoryview(b"a" * 100), memoryview(b"b" * 5000)]


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """What is open after a test was open before it."""
    before = sorted(Path("/proc/self/fd").iterdir())
    yield
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def failing(error: BaseException) -> Any:
    """A function that raises it, whatever it is called with."""

    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_keeps_no_memory_that_was_not_filled(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """An error of this process goes on as it is, and takes the descriptor along."""
    monkeypatch.setattr(parcels, "_write", failing(kind()))
    with pytest.raises(kind):
        parcels.pack(TENSORS)


@pytest.mark.parametrize("kind", [OSError, MemoryError, parcels.ProtocolError])
def test_sends_what_it_has_no_room_to_map(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """A copy that cannot be looked at is none: the tensors go as they are."""
    monkeypatch.setattr(parcels, "_open", failing(kind("as asked")))
    assert parcels.pack_early(TENSORS) is None


def test_copies_again_what_is_passed_twice() -> None:
    """A copy that was made early is passed once; afterwards its bytes are copied."""
    early = parcels.pack_early(TENSORS)
    assert early is not None
    for number in range(2):
        descriptor = parcels.pack(early)
        assert descriptor is not None
        passed = parcels.unpack(descriptor, [100, 5000])
        assert [bytes(it) for it in passed] == [bytes(it) for it in TENSORS], number
        passed[0][:] = b"x" * 100  # the receiver's own, whoever else has it mapped
        assert bytes(early[0]) == b"a" * 100


def test_gives_back_a_copy_that_is_never_passed() -> None:
    """As of a request that was cancelled meanwhile: its last view takes it along."""
    early = parcels.pack_early(TENSORS)
    assert early is not None
    early.pop()
    assert bytes(early.pop()) == bytes(TENSORS[0])


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


def test_writes_more_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, each where it belongs."""
    monkeypatch.setattr(parcels, "_MOST_WRITTEN", 1000)
    whole = memoryview(Path(__file__).read_bytes())
    descriptor = parcels.pack([whole])
    assert descriptor is not None
    assert bytes(parcels.unpack(descriptor, [len(whole)])[0]) == bytes(whole)
