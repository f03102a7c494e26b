"""A payload's bytes stay admitted until the engine has read it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from lifecycle import Lease


class Unread:
    """The lease of one payload, which several answers may be made from.

    At hand-off a payload has left this process and lies in the engine's line, where
    nothing else would bound it. It is gone with the first item of each answer, or when
    the engine has been told of its end.

    Args:
        lease: Released when it is gone for all of them; ``None`` is for text alone.
        answers: How many there are.
    """

    __slots__ = ("_begun", "_lease", "_waiting")

    def __init__(self, lease: Lease | None, answers: int) -> None:
        self._lease = lease
        self._waiting = set(range(answers))
        self._begun: set[int] = set()

    def settle(self, nbytes: int) -> None:
        """Correct the estimate, now that the payload exists."""
        if self._lease is not None:
            self._lease.settle(bytes=nbytes)

    def begin(self, index: int) -> None:
        """One answer begins: somebody will say that it is `done`."""
        self._begun.add(index)

    def done(self, index: int) -> None:
        """The payload is gone for one answer. Idempotent."""
        self._waiting.discard(index)
        if self._lease is not None and not self._waiting:
            self._lease.release()

    def abandon(self) -> None:
        """No further answer begins; what has begun goes on."""
        for index in self._waiting - self._begun:
            self.done(index)

    def until_first(self, index: int, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The *items* of one answer, the first of which says that it is `done`."""
        return items if self._lease is None else _Items(self, index, items)


class _Items:
    """An iterator and not a generator, which would have to be closed by its task."""

    __slots__ = ("_index", "_items", "_unread")

    def __init__(self, unread: Unread, index: int, items: AsyncIterator[Any]) -> None:
        self._unread: Unread | None = unread
        self._index = index
        self._items = items

    def __aiter__(self) -> _Items:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._items)
        if self._unread is not None:
            self._unread.done(self._index)
            self._unread = None
        return item

    async def aclose(self) -> None:
        """Close what the items come from."""
        close = getattr(self._items, "aclose", None)
        if close is not None:
            await close()
