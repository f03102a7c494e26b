"""The heap of the server's process: how it is set up, and trimmed after bursts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
from PIL import Image

from lifecycle import Gate

# Options of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Larger blocks get pages of their own; for smaller ones that would cost too much.
_LARGE = 4 * 2**20
# Up to this much free memory stays at the end of a heap, for the next request.
_KEPT = 16 * 2**20
# Seconds between two looks at the gates.
_INTERVAL = 2.0


def configure_malloc() -> bool:
    """Make ``free`` return pages to the system; False without glibc.

    By default, glibc puts blocks on the heap that are as large as the largest block
    freed so far, up to 32 MiB. After a burst of pictures many small blocks lie between
    large holes, and the process keeps its peak memory forever.

    Threads share one heap: each further heap would keep free memory of its own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = {
        _M_MMAP_THRESHOLD: _LARGE,
        _M_TRIM_THRESHOLD: _KEPT,
        _M_ARENA_MAX: 1,
    }
    done = [mallopt(name, value) for name, value in options.items()]
    return all(done)


def reuse_image_memory(count: int) -> None:
    """Decode pictures into the memory of earlier ones.

    Fresh pages are a large part of the cost of decoding. And without reuse, the peak
    memory depends on how decodings overlap. Pillow keeps one block for each thread, as
    large as the last picture decoded in it and 16 MiB at most.

    Args:
        count: Number of threads that decode.
    """
    Image.core.set_blocks_max(count)  # type: ignore[attr-defined]


def trim_heap() -> None:
    """Return the free pages inside of the heap to the system, where libc can."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)


class HeapTrimmer:
    """Trims the heap each time that the gates over bytes are idle after a burst.

    glibc returns only the end of its heap by itself. What lies below a block that is
    still in use, such as a session that was opened during the burst, stays.

    Args:
        gates: Gates over bytes.
        trim: Trims the heap, in a thread.
        every: Seconds between two looks at the gates.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        trim: Callable[[], None] = trim_heap,
        *,
        every: float = _INTERVAL,
    ) -> None:
        self._gates = gates
        self._trim = trim
        self._every = every
        self._released = 0

    async def run(self) -> None:
        """Trim again and again.

        Cancellation:
            At any time; waits for a thread that trims.
        """
        while True:
            await anyio.sleep(self._every)
            if self.is_due():
                await anyio.to_thread.run_sync(self._trim)

    def is_due(self) -> bool:
        """Whether bytes were given back since the last time, and none are held."""
        now = [gate.statistics() for gate in self._gates]
        released = sum(each.released for each in now)
        if released == self._released or any(each.bytes_in_use for each in now):
            return False
        self._released = released
        return True
