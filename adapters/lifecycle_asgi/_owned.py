"""Sources of a response that are closed when the request is over.

Most frameworks never close the generator of a body: one left at a ``yield`` ends
when the collector finds it, in another request, and one that never began runs none of
its ``finally``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Generic, Protocol, Self, TypeVar

import anyio

T = TypeVar("T")


class Closable(Protocol):
    """An async generator, a `lifecycle.Stream`, or what else has to be closed."""

    async def aclose(self) -> object:
        """Close it."""


class Begun(Generic[T]):
    """An iterator whose first item is there already.

    No generator: one that is left would have to be closed, too.
    """

    __slots__ = ("_first", "_source")

    def __init__(self, first: list[T], source: AsyncIterator[T]) -> None:
        self._first = first
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await self._source.__anext__()

    async def aclose(self) -> None:
        """Drop the first item and close the source.

        Cancellation:
            Goes through to the source.
        """
        self._first.clear()
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


async def begun(source: AsyncIterator[T]) -> Begun[T]:
    """Wait for the first item of *source*, if it has one.

    Raises:
        Exception: What *source* raised instead.

    Cancellation:
        Goes through to *source*.
    """
    async for item in source:
        return Begun([item], source)
    return Begun([], source)


async def close_all(sources: list[Any], grace: float) -> None:
    """Close each of *sources*, the last one first; an error of one keeps none open.

    Raises:
        Exception: Of the last one that failed.

    Cancellation:
        Shielded for as long as *grace* seconds for each.
    """
    async with AsyncExitStack() as stack:
        for source in sources:
            stack.push_async_callback(_close, source, grace)


async def _close(source: Closable, grace: float) -> None:
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + grace):
        await source.aclose()
