"""The heap of the server's process: what goes back, and what is left in peace."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

from PIL import Image

# The names are glibc's.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Above, a block has pages of its own. Up to here they would cost more than they give.
_LARGE = 4 * 2**20
# The end of a heap is kept up to here, for the many small things of the next request.
_KEPT = 16 * 2**20


def give_back_what_is_freed() -> bool:
    """Make ``free`` give pages back, however large a block; False where it is unknown.

    Left alone, glibc puts blocks on the heap that are as large as the largest that was
    ever freed, up to 32 MiB. After a burst of pictures many small blocks lie between
    large holes, and a process holds for ever what it once needed for a moment.

    And it makes heaps for threads, each of which keeps as much as one may. A thread
    that has a heap to itself is faster at what is done here under one lock anyway.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wishes = {
        _M_MMAP_THRESHOLD: _LARGE,
        _M_TRIM_THRESHOLD: _KEPT,
        _M_ARENA_MAX: 1,
    }
    done = [mallopt(name, value) for name, value in wishes.items()]
    return all(done)


def keep_pages_of_pictures(count: int) -> None:
    """Have as many pictures at a time decoded in the pages of those before them.

    Fresh pages are a good part of what it costs to decode a photo. And where they come
    and go with each, what a process holds at most depends on which moments coincide.
    What is kept is a block for each, as large as the last picture that was decoded in
    it and 16 MiB at most; what a larger one needs beyond is given back.

    Args:
        count: How many threads decode.
    """
    Image.core.set_blocks_max(count)  # type: ignore[attr-defined]


@contextlib.contextmanager
def loaded_set_apart() -> Iterator[None]:
    """Keep the collector away from what is there now, until the end of the block.

    A full collection looks at every object there is, and nothing else runs meanwhile.
    The modules of a server are some hundred thousand that never become garbage: 30 to
    80 ms, each time that connections or requests have come and gone.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
