"""A payload's lease that lasts as long as the payload's memory.

What is written where the engine reads it is not gone at hand-off: it is in use until
the engine has given it back. A gate over such memory has to wait for that.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

from lifecycle import Lease
from lifecycle_zmq import Arena

_ROOM = 2 * 2**30


class Tenure:
    """Holds a lease until nobody needs it any more: neither who holds this, nor memory.

    There is nothing to release. Whoever is about to make the payload holds this; what
    was made is covered by it; so whatever goes wrong, and wherever, the lease ends with
    the last of them.

    Args:
        lease: Of a gate over the memory; nobody else releases it.
    """

    __slots__ = ("__weakref__", "_lease")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def cover(self, arrays: Iterable[Any], *, nbytes: int) -> None:
        """Keep the lease until the memory of the *arrays* is free; any thread.

        Args:
            arrays: Of numpy. Views of an arena's region count until it is free.
            nbytes: What they take in all, which the lease is settled to.
        """
        for array in arrays:
            # What has no owner to be watched is as good as gone.
            with contextlib.suppress(TypeError):
                end = weakref.finalize(_owner(array), _let_go, self)
                end.atexit = False
        self._lease.settle(bytes=nbytes)

    def __del__(self) -> None:
        """Release the lease; this may be any thread."""
        self._lease.release()


def room(payload_bytes: int | None, arena_bytes: int) -> int:
    """Return the bytes of a gate over payloads: never more than the arena has.

    Args:
        payload_bytes: As wanted; ``None``: all that there is.
        arena_bytes: Of the arena; 0 if there is none.
    """
    if not arena_bytes:
        return payload_bytes or _ROOM
    arena_bytes = Arena.cost(arena_bytes)
    return min(payload_bytes or arena_bytes, arena_bytes)


def _owner(array: Any) -> Any:
    """Return what keeps the memory of an array."""
    base = array
    while base is not None:
        array, base = base, getattr(base, "base", None)
    return array


def _let_go(_: Tenure) -> None:
    """Drop the argument."""
