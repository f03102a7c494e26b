"""The arena of the API process, however its memory is made."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_memory
from descriptors import descriptors_before, open_descriptors

from lifecycle import CostTooLarge, Gate, GateFull, Refused
from lifecycle_zmq import Arena, ArenaFull, EncodeError

PAGE = 4096
SIZE = 64 * PAGE
KINDS = ("memfd", "shm", "frames")


@pytest.fixture(params=KINDS)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """An arena of 64 pages; without the collector, on which nothing may depend."""
    gc.disable()
    made = Arena(SIZE, kind=request.param)
    yield made
    assert_balanced(made)
    made.close()
    gc.enable()


def assert_balanced(arena: Arena) -> None:
    """Law 3."""
    books = arena.statistics()
    assert books.free + books.used == books.size == arena.capacity


def used(arena: Arena) -> int:
    """Bytes in use, of balanced books."""
    assert_balanced(arena)
    return arena.statistics().used


def test_empty_gives_an_array_of_its_own(arena: Arena) -> None:
    """Shape, dtype and memory are the caller's alone, and aligned to pages."""
    one = arena.empty((3, 100), np.float32)
    two = arena.empty(7, "u1")
    assert (one.shape, one.dtype, two.shape) == ((3, 100), np.dtype("f4"), (7,))
    one[:], two[:] = 1.5, 255
    assert one.min() == one.max() == 1.5
    assert one.ctypes.data % PAGE == two.ctypes.data % PAGE == 0
    assert used(arena) == 2 * PAGE


def test_region_is_free_when_its_last_view_goes(arena: Arena) -> None:
    """Dropping is freeing, without the collector; parts and casts count as views."""
    array = arena.empty((4, PAGE), np.float32)
    part = memoryview(array[1]).cast("B")[5:9]
    row = array.reshape(-1)[100:200].view(np.int16)
    del array
    assert used(arena) == 4 * 4 * PAGE
    del part
    assert used(arena) == 4 * 4 * PAGE
    del row
    assert used(arena) == 0
    assert arena.statistics().regions == 0


def pages(arena: Arena) -> int:
    """Pages that the system has made for it."""
    assert arena.descriptor is not None
    return 512 * os.fstat(arena.descriptor).st_blocks // PAGE


def test_gives_back_what_was_not_used_of_late() -> None:
    """Pages in use stay, and those that were used since it had nothing left."""
    arena = Arena(SIZE, kind="memfd")
    low, high = arena.empty(2 * PAGE, "u1"), arena.empty(20 * PAGE, "u1")
    low[:], high[:] = 1, 2
    assert (pages(arena), arena.give_back(SIZE)) == (22, 0)
    assert arena.give_back(SIZE) == 0  # in use
    del high
    assert arena.give_back(SIZE) == 0  # of late
    assert arena.give_back(8 * PAGE + 1) == 8 * PAGE
    assert pages(arena) == 14
    assert arena.give_back(SIZE) == 12 * PAGE
    assert (pages(arena), arena.give_back(SIZE)) == (2, 0)
    assert low.min() == low.max() == 1
    again = arena.empty(20 * PAGE, "u1")
    assert again.max() == 0
    again[:] = 3
    assert (pages(arena), arena.give_back(SIZE)) == (22, 0)
    del low, again
    arena.close()
    assert arena.give_back(SIZE) == 0


def test_gives_back_where_pages_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of 64 KiB, of which no region needs to fill the last."""
    monkeypatch.setattr(mmap, "PAGESIZE", 16 * PAGE)
    arena = Arena(SIZE, kind="memfd")
    array = arena.empty(50 * PAGE, "u1")
    array[:] = 1
    del array
    assert arena.give_back(SIZE) == 0  # of late
    assert arena.give_back(16 * PAGE) == 2 * PAGE  # the system takes whole ones
    assert arena.give_back(16 * PAGE) == 16 * PAGE
    assert arena.give_back(SIZE) == 32 * PAGE
    assert (pages(arena), arena.give_back(SIZE)) == (0, 0)
    arena.close()


def test_keeps_reserved_pages() -> None:
    """Without room in the file system, their next use would be a crash."""
    arena = Arena(SIZE, kind="shm")
    arena.put(b"x" * SIZE)
    before = pages(arena)
    assert [arena.give_back(SIZE) for _ in range(3)] == [0, 0, 0]
    assert pages(arena) == before
    arena.close()


def test_put_copies_whatever_has_memory(arena: Arena) -> None:
    """Arrays of any layout and plain buffers come out with the same values."""
    source = np.arange(24, dtype=np.int64).reshape(4, 6)
    assert (arena.put(source.T[::2]) == source.T[::2]).all()
    assert bytes(arena.put(b"text")) == b"text"
    assert arena.put(np.float32(3)).item() == 3
    assert used(arena) == 0


def test_torch_dtype_gives_a_tensor(arena: Arena) -> None:
    """A tensor writes into the same memory and holds its region as an array does."""
    torch = pytest.importorskip("torch")
    tensor = arena.empty((2, 8), torch.bfloat16)
    tensor.fill_(2)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (2, 8))
    copy = arena.put(torch.arange(6).reshape(2, 3).T)
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert used(arena) == 2 * PAGE
    rest = copy[1:].numpy()
    del tensor, copy
    assert used(arena) == PAGE
    del rest
    assert used(arena) == 0
    assert arena.empty((0, 3), torch.float32).shape == (0, 3)


def test_refusal_is_typed_and_takes_nothing(arena: Arena) -> None:
    """Full differs from never, both are refusals, and the statistics show it."""
    held = [arena.empty(SIZE // 4, np.uint8) for _ in range(4)]
    with pytest.raises(ArenaFull, match=f"0 of {SIZE} are free") as caught:
        arena.empty(1, np.uint8)
    assert isinstance(caught.value, Refused)
    assert caught.value.reason == "full"
    assert caught.value.retry_after is not None
    with pytest.raises(CostTooLarge):
        arena.empty(SIZE + 1, np.uint8)
    assert used(arena) == SIZE
    assert arena.statistics().refused == 1
    del held[1]
    assert arena.empty(SIZE // 4, np.uint8) is not None


@pytest.mark.parametrize(
    ("shape", "dtype", "reported"),
    [
        ((2, -1), "f4", "lengths are 0 or more"),
        (3, "O", "holds objects"),
        (3, "nope", "nope"),
    ],
)
def test_arrays_that_cannot_be_are_refused(
    arena: Arena, shape: Any, dtype: str, reported: str
) -> None:
    """Negative lengths, objects and unknown types take no region."""
    with pytest.raises((TypeError, ValueError), match=reported):
        arena.empty(shape, dtype)
    assert used(arena) == 0


def test_freed_is_called_once_when_the_region_is_free(arena: Arena) -> None:
    """The call comes after the books, with no lock held: it may allocate at once."""
    calls: list[int] = []
    array = arena.empty(
        SIZE, np.uint8, freed=lambda: calls.append(len(arena.empty(SIZE, np.uint8)))
    )
    assert calls == []
    del array
    assert calls == [SIZE]
    with pytest.raises(CostTooLarge):
        arena.empty(SIZE + 1, np.uint8, freed=lambda: calls.append(0))
    assert calls == [SIZE]


@pytest.mark.anyio
async def test_gate_takes_its_bytes_from_the_arena(arena: Arena) -> None:
    """An admitted request finds a region, and the next waits until it is free."""
    gate = Gate(bytes=arena.capacity)
    nbytes = SIZE // 2 - 5
    first = await gate.admit(bytes=arena.cost(nbytes))
    second = await gate.admit(bytes=arena.cost(nbytes))
    with pytest.raises(GateFull):
        gate.try_admit(bytes=1)
    one = arena.empty(nbytes, np.uint8, freed=first.release)
    two = arena.empty(nbytes, np.uint8, freed=second.release)
    assert gate.statistics().bytes_in_use == used(arena) == SIZE
    lease = acquire_lease(arena, one)
    del one
    if lease is not None:
        with pytest.raises(GateFull):
            gate.try_admit(bytes=1)
        arena.release_lease(lease)
    gate.try_admit(bytes=arena.cost(1)).release()
    del two
    assert gate.statistics().bytes_in_use == used(arena) == 0


def acquire_lease(arena: Arena, array: Any) -> int | None:
    """Lend what an array lies in; None where it would be sent."""
    found = arena.find(memoryview(array))
    return None if found is None else arena.acquire_lease([found[1]])


def test_lease_keeps_the_region_when_all_views_are_gone(arena: Arena) -> None:
    """After hand-off the array is dead and its region is in use until given back."""
    array = arena.empty(PAGE, np.uint8)
    watch = weakref.ref(array)
    lease = acquire_lease(arena, array)
    again = acquire_lease(arena, array[10:20])
    del array
    assert watch() is None
    if arena.kind == "frames":
        assert lease is again is None
        assert used(arena) == 0
        return
    assert lease is not None
    assert again is not None
    arena.release_lease(lease)
    assert used(arena) == PAGE
    arena.release_lease(again)
    assert used(arena) == 0
    for ended in (lease, again, 0, 10**9):
        with pytest.raises(KeyError):
            arena.release_lease(ended)


def test_engine_death_releases_every_lease(arena: Arena) -> None:
    """What is still seen here stays; what only the engine had is free."""
    arrays = [arena.empty(PAGE, np.uint8) for _ in range(8)]
    for array in arrays:
        acquire_lease(arena, array)
    del arrays[:6], array
    arena.release_all_leases()
    assert used(arena) == 2 * PAGE
    assert arena.statistics().leases == 0


def test_view_that_is_not_of_the_arena_has_to_be_sent(arena: Arena) -> None:
    """Foreign memory is not found, nor is what is not aligned to its items."""
    assert arena.find(memoryview(np.zeros(PAGE))) is None
    raw = arena.empty(PAGE, np.uint8)
    odd = np.ndarray(4, np.float64, raw, offset=4)
    assert arena.find(memoryview(odd)) is None


def test_view_across_regions_is_refused(arena: Arena) -> None:
    """A view that reaches into free or foreign memory is an error of its maker."""
    if arena.kind == "frames":
        pytest.skip("nothing is looked up where everything is sent")
    one, two = arena.empty(PAGE, np.uint8), arena.empty(PAGE, np.uint8)
    for start, length in ((one, PAGE + 1), (two, 2 * PAGE), (one, 2 * PAGE)):
        raw = (ctypes.c_ubyte * length).from_address(start.ctypes.data)
        with pytest.raises(EncodeError, match="across regions") as caught:
            arena.find(memoryview(raw).cast("B"))
        assert str(start.ctypes.data) not in str(caught.value)


def test_errors_name_no_place(arena: Arena) -> None:
    """Sizes alone: no offset, no address, no descriptor, no name (`S5`)."""
    kept = arena.empty(37 * PAGE, np.uint8)
    secrets = {str(arena._base), hex(arena._base), str(37 * PAGE), "/dev", "memfd"}
    secrets |= {f"fd {arena.descriptor}", f"descriptor {arena.descriptor}"}
    reported = []
    for nbytes in (SIZE, 2 * SIZE, 28 * PAGE):
        with pytest.raises(Refused) as refused:
            arena.empty(nbytes, np.uint8)
        reported.append(str(refused.value))
    if arena.shared:
        raw = (ctypes.c_ubyte * SIZE).from_address(kept.ctypes.data)
        with pytest.raises(EncodeError) as caught:
            arena.find(memoryview(raw).cast("B"))
        reported.append(str(caught.value))
    arena.close()
    with pytest.raises(RuntimeError) as closed:
        arena.empty(1, np.uint8)
    reported.append(str(closed.value))
    assert [text for text in reported if any(it in text for it in secrets)] == []


def test_fragments_are_joined_again(arena: Arena) -> None:
    """Whatever the order of 2000 arrivals and departures, all is free in the end."""
    chance = random.Random(5)
    held: list[Any] = []
    full = 0
    for _ in range(2000):
        if held and chance.random() < 0.5:
            held.pop(chance.randrange(len(held)))
        else:
            try:
                held.append(arena.empty(chance.randrange(1, SIZE // 6), np.uint8))
                held[-1][::PAGE] = len(held) % 251
            except ArenaFull:
                full += 1
        assert used(arena) == sum(arena.cost(array.nbytes) for array in held)
    assert full > 0
    held.clear()
    books = arena.statistics()
    assert (books.used, books.longest_hole) == (0, SIZE)


def test_threads_share_an_arena(arena: Arena) -> None:
    """Eight threads write and drop; none sees another's bytes, nothing is left."""
    wrong: list[int] = []
    calls: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            length = chance.randrange(1, SIZE // 16)
            try:
                array = arena.empty(length, np.uint8, freed=lambda: calls.append(1))
            except ArenaFull:
                continue
            array[:] = seed
            if int(array.min()) != seed or int(array.max()) != seed:
                wrong.append(seed)
            lease = acquire_lease(arena, array)
            del array
            if lease is not None:
                arena.release_lease(lease)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert used(arena) == 0
    assert len(calls) + arena.statistics().refused == 8 * 300


def test_view_that_dies_while_the_books_are_open_is_freed_after(arena: Arena) -> None:
    """The collector may run in the middle of a change: freed once, when it is whole."""
    gone: list[int] = []
    cycle: list[Any] = [arena.empty(PAGE, np.uint8, freed=lambda: gone.append(1))]
    cycle.append(cycle)
    del cycle
    with arena._locked_regions() as regions:
        gc.collect()
        assert regions.used == PAGE
        assert gone == []
    assert gone == [1]
    assert used(arena) == 0


def test_closed_arena_gives_nothing_and_keeps_what_is_seen(arena: Arena) -> None:
    """Views outlive it, its descriptor does not, and closing twice is fine."""
    array = arena.put(np.arange(10))
    arena.close()
    arena.close()
    assert arena.descriptor is None
    assert array.sum() == 45
    with pytest.raises(RuntimeError, match="closed"):
        arena.empty(1, np.uint8)


def test_views_outlive_the_arena_itself() -> None:
    """An array is valid for as long as it is referenced, whatever happens to the rest."""
    for kind in KINDS:
        made = Arena(SIZE, kind=kind)
        array = made.put(np.arange(10))
        made.close()
        del made
        assert array.sum() == 45


def test_full_shared_memory_is_an_error_and_no_signal() -> None:
    """More than is available: raised when the arena is created, nothing left (`fault-51`, `peers-65`)."""
    there = os.statvfs("/dev/shm")
    before = _left(descriptors_before)
    with pytest.raises(OSError, match="space"):
        Arena(there.f_blocks * there.f_frsize + PAGE, kind="shm")
    assert _left() == before


def test_missing_memfd_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named, it is wanted; by default there is other memory."""
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="has no memfd"):
        Arena(SIZE, kind="memfd")
    Arena(SIZE).close()


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [(resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_FSIZE, "ulimit -f")],
)
def test_names_the_limit_of_the_process_that_an_arena_exceeds(
    limit: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes no memory in /dev/shm, where nothing is released before it fails."""
    monkeypatch.delattr("lifecycle_zmq.shared_memory.memfd._anonymous_shm")
    before = _left(descriptors_before)
    soft, hard = resource.getrlimit(limit)
    size = 2**45  # more than a test's process can have mapped
    resource.setrlimit(limit, (size - PAGE, hard))
    try:
        with pytest.raises(OSError, match=f"{size} bytes: .*{remedy}.*, or lower"):
            Arena(size)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert _left() == before


def test_descriptors_and_names_return_to_baseline() -> None:
    """Nothing is left in the process or in /dev/shm (`law 8`)."""
    before = _left(descriptors_before)
    for kind in KINDS:
        for _ in range(5):
            made = Arena(SIZE, kind=kind)
            made.empty(SIZE, np.uint8)[:] = 1
            made.close()
            del made
    assert _left() == before


def _left(
    descriptors: Callable[[], set[str]] = open_descriptors,
) -> tuple[set[str], list[str], int]:
    maps = Path("/proc/self/maps").read_text()
    shared = maps.count("memfd:arena") + maps.count("/lifecycle-")
    return descriptors(), shared_memory.names(), shared
