"""An arena between two processes: what the engine sees, and what a kill leaves."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_memory import names

from lifecycle_zmq import Arena

PAGE = 4096
SIZE = 64 * PAGE
HERE = Path(__file__).parent
SHARED = ("memfd", "shm")


class Peer:
    """The other process, as this one speaks with it."""

    def __init__(self, descriptor: int, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "arena_peer.py"), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            env=env,
        )
        self.greeting = self._answer()

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Ask, and return the answer."""
        assert self.process.stdin is not None
        line = json.dumps([method, *arguments]) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Kill and reap it."""
        # Not by `communicate`, which flushes an input that a test has closed.
        with self.process:
            self.process.kill()
            self.process.wait(20)


@pytest.fixture(params=SHARED)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """An arena of 64 pages that another process can map."""
    made = Arena(SIZE, kind=request.param)
    yield made
    books = made.statistics()
    assert books.free + books.used == books.size
    made.close()


@pytest.fixture
def spawn(arena: Arena, environment: dict[str, str]) -> Iterator[Callable[..., Peer]]:
    """Make peers of the arena, or of another descriptor."""
    with contextlib.ExitStack() as peers:

        def make(descriptor: int | None = None) -> Peer:
            descriptor = arena.descriptor if descriptor is None else descriptor
            assert descriptor is not None
            peer = Peer(descriptor, environment)
            peers.callback(peer.close)
            return peer

        yield make


def place(arena: Arena, array: Any) -> tuple[int, int]:
    """Lend an array; return the number of the loan and where it begins."""
    found = arena.find(memoryview(array))
    assert found is not None
    offset, block = found
    return arena.acquire_lease([block]), offset


def test_peer_sees_what_is_written_without_a_copy(
    arena: Arena, spawn: Callable[..., Peer]
) -> None:
    """The same bytes, also those written later; read-only; given back by letting go."""
    peer = spawn()
    assert peer.greeting == "ready"
    assert peer("descriptors") is False
    array = arena.empty((4, 300), np.float32)
    array[:] = 0
    lease, offset = place(arena, array)
    assert peer("take", lease, "a", offset, "f", [4, 300]) == [True, "f", [4, 300], 0]
    array.reshape(-1).view(np.uint8)[:64] = 2
    del array
    assert peer("look", "a") == 128
    assert peer("write", "a") == "TypeError"
    assert (peer("leases"), arena.statistics().used) == (1, 2 * PAGE)
    assert peer("drop", "a") == [lease]
    assert peer("leases") == 0
    arena.release_lease(lease)
    assert arena.statistics().used == 0


def test_peer_checks_every_place(arena: Arena, spawn: Callable[..., Peer]) -> None:
    """Out of range, unaligned or begun twice: ProtocolError, and nothing is held (`S5`)."""
    peer = spawn()
    for number, where in enumerate(
        [
            [SIZE, "B", [1]],
            [SIZE - 8, "d", [2]],
            [0, "f", [SIZE // 4 + 1]],
            [0, "B", [2**40, 2**40]],
            [4, "d", [1]],
            [2**62, "B", [1]],
        ]
    ):
        assert peer("take", number, "a", *where) == "ProtocolError"
    assert peer("take", 90, "a", SIZE - 8, "d", [1])[:3] == [True, "d", [1]]
    assert peer("take", 90, "b", 0, "B", [1]) == "ProtocolError"
    assert peer("drop", "a") == [0, 1, 2, 3, 4, 5, 90]


def test_what_is_no_memory_is_not_mapped(spawn: Callable[..., Peer]) -> None:
    """A pipe that was passed on by mistake ends in one sentence."""
    reading, writing = os.pipe()
    try:
        greeting = spawn(reading).greeting
    finally:
        os.close(reading)
        os.close(writing)
    assert greeting == "OSError: the inherited arena descriptor refers to no memory"


def test_memory_cannot_be_cut_off(environment: dict[str, str]) -> None:
    """Sealed: the descriptor cannot shrink what the other process reads (`S5`)."""
    arena = Arena(SIZE, kind="memfd")
    descriptor = arena.descriptor
    assert descriptor is not None
    for size in (0, SIZE - PAGE, SIZE + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    arena.close()


def test_killed_peer_gives_everything_back_once_reaped(
    arena: Arena, spawn: Callable[..., Peer]
) -> None:
    """SIGKILL in the middle of a loan; the next peer has a whole arena (`fault-22`)."""
    for _ in range(2):
        peer = spawn()
        array = arena.put(np.ones(SIZE - PAGE, np.uint8))
        lease, offset = place(arena, array)
        del array
        assert peer("take", lease, "a", offset, "B", [SIZE - PAGE])[3] == 64
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.process.wait(20)
        assert arena.statistics().free == PAGE
        arena.release_all_leases()
        assert arena.statistics().free == SIZE


def test_peer_that_leaves_takes_nothing_along(
    arena: Arena, spawn: Callable[..., Peer]
) -> None:
    """No resource tracker: a process that only maps it does not remove it (`peers-67`)."""
    array = arena.put(np.ones(PAGE, np.uint8))
    for _ in range(2):
        peer = spawn()
        lease, offset = place(arena, array)
        assert peer("take", lease, "a", offset, "B", [PAGE])[3] == 64
        peer.process.communicate(timeout=20)
        assert peer.process.returncode == 0
        arena.release_lease(lease)
    assert array.sum() == PAGE


@pytest.mark.parametrize("kind", SHARED)
def test_killed_owner_leaves_nothing(
    kind: str, environment: dict[str, str], watched: Any
) -> None:
    """SIGKILL of the API process: no name, no memory, no process (`fault-31`, `peers-71`)."""
    before = names()
    with subprocess.Popen(
        [sys.executable, str(HERE / "arena_owner.py"), kind],
        stdout=subprocess.PIPE,
        env=environment,
    ) as owner:
        assert owner.stdout is not None
        pid, seen = json.loads(owner.stdout.readline())
        with watched(pid) as engine:
            there = names()
            owner.kill()  # whatever is found, as it would be waited for
            assert select.select([engine], [], [], 20)[0]
        assert seen[3] == 64
        assert there == before
    assert names() == before
