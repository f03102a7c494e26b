"""One region of an arena, for as long as anybody can see it."""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from typing import Any

Freed = Callable[[], None]
Bury = Callable[[int, Freed | None], None]


class Block:
    """One region. As long as anybody can see its bytes, this lives.

    Every array, tensor and memoryview over them holds it, and so does a loan. When
    the last of them goes the region is free: it can be neither lost nor reused early.

    Args:
        mapping: Kept, so that the memory stays where it is.
        address: Where the region begins.
        nbytes: How long it is.
        offset: What it is called when it is buried.
        bury: Called at the end, with the offset and `freed`.
        freed: What to call when the region is free.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_bury",
        "_freed",
        "_mapping",
        "_nbytes",
        "_offset",
    )

    def __init__(
        self,
        mapping: mmap,
        *,
        address: int,
        nbytes: int,
        offset: int,
        bury: Bury,
        freed: Freed | None,
    ) -> None:
        self._mapping = mapping
        self._address = address
        self._nbytes = nbytes
        self._offset = offset
        self._bury = bury
        self._freed = freed

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Where the bytes are, for numpy."""
        return {
            "version": 3,
            "data": (self._address, False),
            "shape": (self._nbytes,),
            "typestr": "|u1",
        }

    def __del__(self) -> None:
        """Free the region; this may be any thread, in the middle of anything."""
        self._bury(self._offset, self._freed)
