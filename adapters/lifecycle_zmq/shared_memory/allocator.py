"""The arena's allocator: which regions are in use, and until when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from mmap import mmap
from typing import Any

Freed = Callable[[], None]
OnRelease = Callable[[int, Freed | None], None]


class Block:
    """One region, in use as long as this object lives.

    Every array, tensor and memoryview over its bytes references it, and so does a
    lease. When the last reference goes the region is free: neither lost nor reused
    early.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_freed",
        "_mapping",
        "_nbytes",
        "_offset",
        "_on_release",
    )

    def __init__(
        self,
        mapping: mmap,
        *,
        address: int,
        nbytes: int,
        offset: int,
        on_release: OnRelease,
        freed: Freed | None,
    ) -> None:
        self._mapping = mapping
        self._address = address
        self._nbytes = nbytes
        self._offset = offset
        self._on_release = on_release
        self._freed = freed

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The bytes, for numpy."""
        return {
            "version": 3,
            "data": (self._address, False),
            "shape": (self._nbytes,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        """Free the region; any thread may run this at any point."""
        self._on_release(self._offset, self._freed)


# A page: regions share neither cache lines nor pages that a device copies.
GRANULE = 4096


def rounded(nbytes: int) -> int:
    """Return the bytes that a region for `nbytes` takes, a positive multiple."""
    return max(1, -(-nbytes // GRANULE)) * GRANULE


class RegionAllocator:
    """Allocates disjoint regions of one range, first fit. Holds no memory itself.

    The first hole that is long enough is taken, from the lowest address: pages that
    were used before are used again, and those at the end are perhaps never touched.
    Neighbouring holes are always merged.
    """

    def __init__(self, size: int) -> None:
        if size <= 0 or size % GRANULE:
            raise ValueError(f"size is {size}; pass a positive multiple of {GRANULE}")
        self.size = size
        self.used = 0
        self._holes = [0]
        self._hole_length = {0: size}
        self._taken: list[int] = []
        self._length: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of regions."""
        return len(self._taken)

    @property
    def end(self) -> int:
        """End of the last region: all from there on is free."""
        last = self._taken[-1] if self._taken else 0
        return last + self._length.get(last, 0)

    @property
    def longest_hole(self) -> int:
        """Length of the longest hole: the largest region possible now."""
        return max(self._hole_length.values(), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new region for `nbytes`, or None: no hole fits."""
        length = rounded(nbytes)
        for index, offset in enumerate(self._holes):
            if self._hole_length[offset] >= length:
                self._cut(index, offset, length)
                return offset
        return None

    def release(self, offset: int) -> None:
        """Free the region that begins at `offset`.

        Raises:
            KeyError: None does.
        """
        length = self._length.pop(offset)
        del self._taken[bisect_left(self._taken, offset)]
        self.used -= length
        after = bisect_left(self._holes, offset)
        if after < len(self._holes) and self._holes[after] == offset + length:
            length += self._hole_length.pop(self._holes.pop(after))
        if after > 0:
            before = self._holes[after - 1]
            if before + self._hole_length[before] == offset:
                self._hole_length[before] += length
                return
        self._holes.insert(after, offset)
        self._hole_length[offset] = length

    def region_of(self, offset: int, nbytes: int) -> int | None:
        """Return the offset of the region that contains this range, or None."""
        index = bisect_right(self._taken, offset) - 1
        if index < 0:
            return None
        start = self._taken[index]
        inside = offset + nbytes <= start + self._length[start]
        return start if inside else None

    def _cut(self, index: int, offset: int, length: int) -> None:
        rest = self._hole_length.pop(offset) - length
        if rest:
            self._holes[index] = offset + length
            self._hole_length[offset + length] = rest
        else:
            del self._holes[index]
        insort(self._taken, offset)
        self._length[offset] = length
        self.used += length
