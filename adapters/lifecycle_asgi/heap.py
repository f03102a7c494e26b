"""Gives memory back that the allocator keeps after large bodies and images."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Final

LARGE: Final = 2**20
"""Requests of fewer bytes do not count."""
# The heap is trimmed again once requests have freed so many bytes.
_WORTH: Final = 32 * 2**20


class Heap:
    """Trims the heap of the process once whenever no large request has ended for long.

    glibc keeps blocks of up to 32 MiB after they are freed, in one arena for each of
    several threads. A thread of its own, which lives until it has trimmed, gives their
    pages back without the interpreter's lock. Only an allocation from the arena that is
    being trimmed waits, some tenths of a second for large heaps.

    Args:
        seconds: How long none must have ended.
        sleep: Waits in that thread.
    """

    def __init__(
        self, *, seconds: float = 2.5, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._seconds, self._sleep = seconds, sleep
        self._trim = malloc_trim()
        self._freed = self._trimmed = 0
        # Held by the thread, and never waited for: a finaliser may free a request.
        self._at_work = threading.Lock()

    def freed(self, nbytes: int) -> None:
        """Note that a large request has freed so many bytes. Any thread."""
        self._freed += nbytes
        # As the interpreter ends, no thread begins: its start would wait for ever.
        if self._trim is not None and not sys.is_finalizing():
            self._start(self._trim)

    def _start(self, trim: Callable[[int], int]) -> None:
        worth = self._freed - self._trimmed >= _WORTH
        if worth and self._at_work.acquire(blocking=False):
            run = partial(self._trim_later, trim)
            try:
                it = threading.Thread(target=run, name="lifecycle heap", daemon=True)
                # In a context of its own: that of this request would stay with it.
                Context().run(it.start)
            except RuntimeError:  # no more threads: the next request tries again
                self._at_work.release()

    def _trim_later(self, trim: Callable[[int], int]) -> None:
        seen = -1
        while seen != self._freed:
            seen = self._freed
            self._sleep(self._seconds)
        self._trimmed = seen
        self._at_work.release()
        self._start(trim)  # for requests that found this thread at work
        trim(0)


def malloc_trim() -> Callable[[int], int] | None:
    """Return the function of the C library, which runs without the lock."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
    return trim
