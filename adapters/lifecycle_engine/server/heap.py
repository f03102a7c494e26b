"""Gives memory back that the allocator keeps after large bodies and images."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import anyio
import anyio.to_thread

from lifecycle import GateStatistics

_SECONDS = 2.5


async def give_back_heap(
    gates: Callable[[], Iterable[GateStatistics]], *, seconds: float = _SECONDS
) -> None:
    """Trim the heap once whenever *gates* have been without bytes, for ever.

    Not while there are bodies, which would take the same pages again.

    Args:
        gates: Returns the state of the gates over what is large.
        seconds: How long nothing must have passed them.

    Cancellation:
        Ends it; a thread may trim for some milliseconds more.
    """
    trim = malloc_trim()
    passed = trimmed = _released(gates())
    while trim is not None:
        await anyio.sleep(seconds)
        now = tuple(gates())
        before, passed = passed, _released(now)
        rests = passed == before and not any(each.bytes_in_use for each in now)
        if rests and passed != trimmed:
            await anyio.to_thread.run_sync(trim, 0, abandon_on_cancel=True)
            trimmed = passed


def _released(gates: Iterable[GateStatistics]) -> int:
    return sum(each.released for each in gates)


def malloc_trim() -> Callable[[int], int] | None:
    """Return the function of the C library, which waits without the interpreter."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
    return trim
