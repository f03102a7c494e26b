"""A payload's bytes stay admitted until the engine has read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from lifecycle import Lease

Items = AsyncIterator[Any]
Open = Callable[[], Awaitable[Items]]
End = Callable[[Items | None], Awaitable[None]]


class Unread:
    """The lease of one payload, which several answers may be made from.

    At hand-off a payload has left this process and lies in the engine's line, where
    nothing else would bound it. It is gone with the first item of each answer, or when
    the engine has been told of its end. Enter it around the starts: whichever of them
    has not begun when they fail never will.

    Args:
        lease: Released when it is gone for all of them; ``None`` is for text alone.
        answers: How many there are.
    """

    __slots__ = ("_begun", "_lease", "_waiting")

    def __init__(self, lease: Lease | None, answers: int) -> None:
        self._lease = lease
        self._waiting = set(range(answers))
        self._begun: set[int] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for index in self._waiting - self._begun:
                self.done(index)

    def starts(self, index: int, open_: Open, end: End) -> tuple[Open, End]:
        """How one answer is opened and ended, and this told of it."""
        if self._lease is None:
            return open_, end

        async def opened() -> Items:
            self._begun.add(index)
            try:
                return _Items(self, index, await open_())
            except Exception:
                self.done(index)
                raise

        async def ended(items: Items | None) -> None:
            try:
                await end(items)
            finally:
                self.done(index)

        return opened, ended

    def done(self, index: int) -> None:
        """The payload is gone for one answer. Idempotent."""
        self._waiting.discard(index)
        if self._lease is not None and not self._waiting:
            self._lease.release()


class _Items:
    """The items of an answer. No generator: its own task would have to close it."""

    __slots__ = ("_index", "_items", "_unread")

    def __init__(self, unread: Unread, index: int, items: Items) -> None:
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
