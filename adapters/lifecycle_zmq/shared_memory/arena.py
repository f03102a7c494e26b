"""The arena: shared memory that payloads are written to once and never sent from."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, get_args
from weakref import WeakValueDictionary

from lifecycle import CostTooLarge, Refused
from lifecycle.lowlevel import check_choice, check_int
from lifecycle_zmq.exceptions import EncodeError
from lifecycle_zmq.shared_memory import memfd, tensors
from lifecycle_zmq.shared_memory.allocator import Block, Freed, RegionAllocator, rounded
from lifecycle_zmq.shared_memory.memfd import ArenaKind


class ArenaFull(Refused):
    """No hole of the arena is long enough now; retry when other regions are freed."""


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Counters of an arena at one moment; ``size == used + free``, always.

    Attributes:
        size: Bytes in all.
        used: Bytes of all regions, as they are rounded.
        free: Bytes of all holes.
        longest_hole: Bytes of the longest of them.
        regions: Number of regions.
        leases: Number of hand-offs that the engine has not released.
        refused: How often `ArenaFull` was raised.
        spilled: Tensors that were sent because there was no room for them.
    """

    size: int
    used: int
    free: int
    longest_hole: int
    regions: int
    leases: int
    refused: int
    spilled: int


class Arena:
    """Memory for payloads, made before the engine is and mapped by it.

    A region is in use while an array, tensor or memoryview of it is alive here or in
    the engine; there is no call to free it. Any thread may call all methods.

    Args:
        size: Bytes, rounded up to whole pages. Only pages that were used once take
            memory, and they keep it until `give_back`: most of the cost of a payload is
            fresh pages.
        kind: ``"memfd"``, ``"shm"``, or ``"frames"``: not shared, sent as copies;
            ``None`` takes the best that the system has.

    Raises:
        ModuleNotFoundError: numpy is not installed.
        OSError: The system has no such memory, or not enough of it.
        TypeError: *size* is no whole number.
        ValueError: It is less than 1, or *kind* is unknown.

    Attributes:
        spilled: Tensors that were sent because there was no room for them.
    """

    def __init__(self, size: int, *, kind: ArenaKind | None = None) -> None:
        check_int(1, size=size)
        check_choice((None, *get_args(ArenaKind)), kind=kind)
        np = tensors.numpy()
        self._regions = RegionAllocator(rounded(size))
        try:
            memory = memfd.create(self._regions.size, kind)
        except OSError as error:
            if (remedy := memfd.REMEDIES.get(error.errno or 0)) is None:
                raise
            what = f"an arena of {self._regions.size} bytes: {error.strerror}"
            how = f"{remedy}, or lower arena_bytes"
            raise OSError(error.errno, f"{what}; {how}") from None
        self._mapping: mmap.mmap | None = memory.mapping
        self._kind, self._descriptor = memory.kind, memory.descriptor
        self._base = tensors.address_of(np.frombuffer(memory.mapping, np.uint8))
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
        self._leases: dict[int, tuple[Block, ...]] = {}
        self._leases_granted = 0
        self._refused = 0
        # Ends of what was in use since `give_back` returned 0, and of what has pages.
        self._busy = self._touched = 0
        self.spilled = 0
        self._lock = threading.Lock()
        self._released: deque[tuple[int, Freed | None]] = deque()
        self._callbacks: deque[Freed] = deque()

    @property
    def capacity(self) -> int:
        """Bytes in all: the capacity of a `lifecycle.Gate` over this arena."""
        return self._regions.size

    @property
    def kind(self) -> ArenaKind:
        """How it is shared."""
        return self._kind

    @property
    def shared(self) -> bool:
        """Whether another process can map it."""
        return self._kind != "frames"

    @property
    def descriptor(self) -> int | None:
        """Descriptor for the engine process; ``None`` if not shared, or closed."""
        return self._descriptor

    @staticmethod
    def cost(nbytes: int) -> int:
        """Return the bytes that `nbytes` take here, for a gate over `capacity`."""
        return rounded(nbytes)

    def empty(
        self, shape: tensors.Shape, dtype: Any, *, freed: Freed | None = None
    ) -> Any:
        """Return an array to write into, uninitialised.

        Args:
            shape: As for `numpy.empty`.
            dtype: Of numpy, for an array, or of torch, for a tensor.
            freed: Called once when the region is free again, in any thread, such as
                ``lease.release``; it must not raise. Not called if this raises.

        Raises:
            ArenaFull: It does not fit now.
            CostTooLarge: It never fits.
            RuntimeError: The arena is closed.
        """
        block = self._allocate(tensors.nbytes_of(shape, dtype), freed)
        return tensors.shaped(tensors.flat(block), shape, dtype)

    def put(self, tensor: Any, *, freed: Freed | None = None) -> Any:
        """Copy an array, a tensor or any buffer, and return the copy.

        Args:
            tensor: Of numpy, of torch on any device, or a buffer.
            freed: As for `empty`.

        Raises:
            ArenaFull: It does not fit now.
            CostTooLarge: It never fits.
            RuntimeError: The arena is closed.
        """
        if not tensors.is_torch(tensor):
            import numpy as np

            tensor = np.asarray(tensor)
        copy = self.empty(tuple(tensor.shape), tensor.dtype, freed=freed)
        tensors.fill(copy, tensor)
        return copy

    def statistics(self) -> ArenaStatistics:
        """Return the counters."""
        with self._locked_regions() as regions:
            return ArenaStatistics(
                size=regions.size,
                used=regions.used,
                free=regions.size - regions.used,
                longest_hole=regions.longest_hole,
                regions=len(regions),
                leases=len(self._leases),
                refused=self._refused,
                spilled=self.spilled,
            )

    def find(self, view: memoryview) -> tuple[int, Block] | None:
        """Return the offset of a view, and its block; None if it has to be sent.

        Args:
            view: C-contiguous and not empty.

        Raises:
            EncodeError: It begins in the arena, and crosses the end of its region.
        """
        if not self.shared:
            return None
        offset = tensors.address_of(tensors.flat(view)) - self._base
        if not 0 <= offset < self.capacity or offset % view.itemsize:
            return None
        with self._locked_regions() as regions:
            start = regions.region_of(offset, view.nbytes)
        block = None if start is None else self._blocks.get(start)
        if block is None:
            raise EncodeError(
                "unencodable",
                f"a tensor of {view.nbytes} bytes lies across regions of the arena; "
                "pass what `empty` or `put` returned, or a part of it",
            )
        return offset, block

    def acquire_lease(self, blocks: Iterable[Block]) -> int:
        """Keep blocks in use until `release_lease`; return the number of the lease."""
        with self._locked_regions():
            self._leases_granted += 1
            self._leases[self._leases_granted] = tuple(blocks)
            return self._leases_granted

    def release_lease(self, lease: int) -> None:
        """Release a lease: the engine uses its blocks no more.

        Raises:
            KeyError: There is no such lease, or it was released.
        """
        del self._leases[lease]

    def release_all_leases(self) -> None:
        """Release every lease: the engine process is gone."""
        self._leases.clear()

    def give_back(self, most: int) -> int:
        """Give the pages to the system that lie behind all that was in use of late.

        Of late means since this returned 0 before: call it until it does, and again
        after a while. Not for an arena that is pinned for a device, which would go on
        to read the pages that it has.

        Args:
            most: Bytes at a time; the interpreter waits for as long as they take.

        Returns:
            How many bytes these were: 0 if nothing is left to give back, or where the
            memory cannot be, as of the kind ``"shm"``, which is reserved.
        """
        with self._locked_regions() as regions:
            page, start = mmap.PAGESIZE, max(self._busy, self._touched - most)
            start = -(-start // page) * page
            length = self._touched - start
            if length > 0 and self._remove(start, length):
                self._touched = start
                return length
            self._busy = regions.end
            return 0

    def _remove(self, start: int, length: int) -> bool:
        mapping = self._mapping  # which `close` takes away, in any thread
        if mapping is None or self._kind == "shm":
            return False
        if not hasattr(mmap, "MADV_REMOVE"):
            return False
        try:
            mapping.madvise(mmap.MADV_REMOVE, start, length)
        except OSError:  # not on this file system
            return False
        return True

    def close(self) -> None:
        """Allocate nothing more; unmap the memory when the last view of it goes."""
        self._leases.clear()
        self._mapping = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _allocate(self, nbytes: int, freed: Freed | None) -> Block:
        if nbytes > self.capacity:
            raise CostTooLarge(
                f"{nbytes} bytes do not fit into an arena of {self.capacity}; "
                "make it larger"
            )
        with self._locked_regions() as regions:
            if self._mapping is None:
                raise RuntimeError("the arena is closed; make another")
            offset = regions.allocate(nbytes)
            if offset is None:
                self._refused += 1
                raise self._full(nbytes)
            block = Block(
                self._mapping,
                address=self._base + offset,
                nbytes=nbytes,
                offset=offset,
                on_release=self._release_later,
                freed=freed,
            )
            self._blocks[offset] = block
            self._busy = max(self._busy, regions.end)
            self._touched = max(self._touched, regions.end)
        return block

    def _full(self, nbytes: int) -> ArenaFull:
        free, hole = self.capacity - self._regions.used, self._regions.longest_hole
        return ArenaFull(
            f"{nbytes} bytes do not fit now: {free} of {self.capacity} are free, at "
            f"most {hole} in one piece; retry later, or make the arena larger",
            retry_after=1.0,
        )

    @contextmanager
    def _locked_regions(self) -> Iterator[RegionAllocator]:
        try:
            with self._lock:
                self._free_released()
                yield self._regions
        finally:
            self._settle()

    def _release_later(self, offset: int, freed: Freed | None) -> None:
        self._released.append((offset, freed))
        # Never waits: this very thread may hold the lock, interrupted by the collector.
        # The holder of the lock checks again after releasing it.
        self._settle()

    def _settle(self) -> None:
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._free_released()
            finally:
                self._lock.release()
        # Outside of the lock: a callback may release a lease, whose waiters come here.
        with suppress(IndexError):
            while True:
                self._callbacks.popleft()()

    def _free_released(self) -> None:
        with suppress(IndexError):
            while True:
                offset, freed = self._released.popleft()
                self._regions.release(offset)
                if freed is not None:
                    self._callbacks.append(freed)
