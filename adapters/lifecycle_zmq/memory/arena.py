"""Memory that both processes see: tensors are written here once and never sent."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import mmap
from typing import Any, get_args
from weakref import WeakValueDictionary

from lifecycle import CostTooLarge, Refused
from lifecycle_zmq import _options
from lifecycle_zmq._errors import EncodeError
from lifecycle_zmq.memory import mapping, views
from lifecycle_zmq.memory.block import Block, Freed
from lifecycle_zmq.memory.mapping import Kind
from lifecycle_zmq.memory.regions import Regions, rounded


class ArenaFull(Refused):
    """No hole of the arena is long enough now; one will be when others are freed."""


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """The books of an arena at one moment; ``size == used + free``, always.

    Attributes:
        size: Bytes in all.
        used: Bytes of all regions, as they are rounded.
        free: Bytes of all holes.
        longest_hole: Bytes of the longest of them.
        regions: How many regions there are.
        loans: How many hand-offs the engine has not given back.
        refused: How often `ArenaFull` was raised.
        spilled: Tensors that were sent because there was no room for them.
    """

    size: int
    used: int
    free: int
    longest_hole: int
    regions: int
    loans: int
    refused: int
    spilled: int


class Arena:
    """Memory for payloads, made before the engine is and mapped by it.

    A region is in use while an array, tensor or memoryview of it is alive here, or the
    engine has one; there is nothing to free. All methods are for any thread.

    Args:
        size: Bytes, rounded up to whole pages. Only pages that were used once take
            memory, and they keep it: fresh ones are what payloads cost.
        kind: ``"memfd"``, ``"shm"``, or ``"frames"``: not shared, sent as copies;
            ``None`` takes the best that the system has.

    Raises:
        ModuleNotFoundError: numpy is not installed.
        OSError: The system has no such memory, or not enough of it.
        TypeError: *size* is no whole number.
        ValueError: It is less than 1, or *kind* none of those.

    Attributes:
        spilled: Tensors that were sent because there was no room for them.
    """

    def __init__(self, size: int, *, kind: Kind | None = None) -> None:
        _options.whole(1, size=size)
        _options.one_of((None, *get_args(Kind)), kind=kind)
        np = views.numpy()
        self._regions = Regions(rounded(size))
        memory = mapping.create(self._regions.size, kind)
        self._mapping: mmap | None = memory.mapping
        self._kind, self._descriptor = memory.kind, memory.descriptor
        self._base = views.address_of(np.frombuffer(memory.mapping, np.uint8))
        self._blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
        self._loans: dict[int, tuple[Block, ...]] = {}
        self._lent = 0
        self._refused = 0
        self.spilled = 0
        self._lock = threading.Lock()
        self._buried: deque[tuple[int, Freed | None]] = deque()
        self._told: deque[Freed] = deque()

    @property
    def capacity(self) -> int:
        """Bytes in all: what a `lifecycle.Gate` over this arena has."""
        return self._regions.size

    @property
    def kind(self) -> Kind:
        """How it is shared."""
        return self._kind

    @property
    def shared(self) -> bool:
        """Whether another process can map it."""
        return self._kind != "frames"

    @property
    def descriptor(self) -> int | None:
        """What the engine process inherits; ``None`` if it is not shared, or closed."""
        return self._descriptor

    @staticmethod
    def cost(nbytes: int) -> int:
        """Return what `nbytes` take here, as a gate over `capacity` has to count."""
        return rounded(nbytes)

    def empty(
        self, shape: views.Shape, dtype: Any, *, freed: Freed | None = None
    ) -> Any:
        """Return an array to write into; what it holds until then is undefined.

        Args:
            shape: As for `numpy.empty`.
            dtype: Of numpy, for an array, or of torch, for a tensor.
            freed: Called once when the region is free again, in any thread, such as
                ``lease.release``; it must not raise. Not called if this raises.

        Raises:
            ArenaFull: Not now.
            CostTooLarge: Never.
            RuntimeError: The arena is closed.
        """
        block = self._allocate(views.nbytes_of(shape, dtype), freed)
        return views.shaped(views.flat(block), shape, dtype)

    def put(self, tensor: Any, *, freed: Freed | None = None) -> Any:
        """Copy an array, a tensor or any buffer, and return the copy.

        Args:
            tensor: Of numpy, of torch on any device, or a buffer.
            freed: As for `empty`.

        Raises:
            ArenaFull: Not now.
            CostTooLarge: Never.
            RuntimeError: The arena is closed.
        """
        if not views.is_torch(tensor):
            import numpy as np

            tensor = np.asarray(tensor)
        copy = self.empty(tuple(tensor.shape), tensor.dtype, freed=freed)
        views.fill(copy, tensor)
        return copy

    def statistics(self) -> ArenaStatistics:
        """Return the books."""
        with self._books() as regions:
            return ArenaStatistics(
                size=regions.size,
                used=regions.used,
                free=regions.size - regions.used,
                longest_hole=regions.longest_hole,
                regions=len(regions),
                loans=len(self._loans),
                refused=self._refused,
                spilled=self.spilled,
            )

    def find(self, view: memoryview) -> tuple[int, Block] | None:
        """Return where a view begins, and its block; None if it has to be sent.

        Args:
            view: C-contiguous and not empty.

        Raises:
            EncodeError: It begins here, and reaches into what is not its own.
        """
        if not self.shared:
            return None
        offset = views.address_of(views.flat(view)) - self._base
        if not 0 <= offset < self.capacity or offset % view.itemsize:
            return None
        with self._books() as regions:
            start = regions.region_of(offset, view.nbytes)
        block = None if start is None else self._blocks.get(start)
        if block is None:
            raise EncodeError(
                "unencodable",
                f"a tensor of {view.nbytes} bytes lies across regions of the arena; "
                "pass what `empty` or `put` returned, or a part of it",
            )
        return offset, block

    def lend(self, blocks: Iterable[Block]) -> int:
        """Keep blocks in use until `take_back`; return the number of the loan."""
        with self._books():
            self._lent += 1
            self._loans[self._lent] = tuple(blocks)
            return self._lent

    def take_back(self, loan: int) -> None:
        """End a loan: the engine has let go of its blocks.

        Raises:
            KeyError: There is no such loan, or it has ended.
        """
        del self._loans[loan]

    def take_back_all(self) -> None:
        """End every loan: the engine process is gone."""
        self._loans.clear()

    def close(self) -> None:
        """Give out nothing more, and the memory back when the last view of it goes."""
        self._loans.clear()
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
        with self._books() as regions:
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
                bury=self._bury,
                freed=freed,
            )
            self._blocks[offset] = block
        return block

    def _full(self, nbytes: int) -> ArenaFull:
        free, hole = self.capacity - self._regions.used, self._regions.longest_hole
        return ArenaFull(
            f"{nbytes} bytes do not fit now: {free} of {self.capacity} are free, at "
            f"most {hole} in one piece; retry later, or make the arena larger",
            retry_after=1.0,
        )

    @contextmanager
    def _books(self) -> Iterator[Regions]:
        try:
            with self._lock:
                self._free_buried()
                yield self._regions
        finally:
            self._settle()

    def _bury(self, offset: int, freed: Freed | None) -> None:
        self._buried.append((offset, freed))
        # Never waits: the lock may be held by this very thread, which the collector
        # interrupted. Whoever holds it looks again after letting it go.
        self._settle()

    def _settle(self) -> None:
        while self._buried and self._lock.acquire(blocking=False):
            try:
                self._free_buried()
            finally:
                self._lock.release()
        # Outside of the lock: it may give a lease back, whose waiters come here.
        with suppress(IndexError):
            while True:
                self._told.popleft()()

    def _free_buried(self) -> None:
        with suppress(IndexError):
            while True:
                offset, freed = self._buried.popleft()
                self._regions.release(offset)
                if freed is not None:
                    self._told.append(freed)
