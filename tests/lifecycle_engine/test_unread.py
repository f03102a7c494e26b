"""The lease of one payload, by itself: whatever becomes of the starts, it is released."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lifecycle import Gate
from lifecycle_engine.routes.unread import Unread

pytestmark = pytest.mark.asyncio


class Answers:
    """Two answers made from one payload, and the gate that it passed."""

    def __init__(self) -> None:
        self.gate = Gate(bytes=10)
        self.unread = Unread(self.gate.try_admit(bytes=8), 2)
        self.pairs = [self.unread.starts(i, self._open, self._end) for i in (0, 1)]

    async def _open(self) -> AsyncIterator[Any]:
        async def items() -> AsyncIterator[int]:
            yield 1
            yield 2

        return items()

    async def _end(self, items: Any) -> None:
        if items is not None:
            await items.aclose()

    @property
    def bytes(self) -> int:
        return self.gate.statistics().bytes_in_use


async def test_releases_with_the_last_first_item() -> None:
    """Both answers have to be read; what follows the first item changes nothing."""
    answers = Answers()
    first, second = [await open_() for open_, _ in answers.pairs]
    assert [item async for item in first] == [1, 2]
    assert answers.bytes == 8
    assert await anext(second) == 1
    assert answers.bytes == 0
    assert await anext(second) == 2
    for (_, end), items in zip(answers.pairs, (first, second), strict=True):
        await end(items)


async def test_releases_what_never_began_when_the_starts_fail() -> None:
    """Of two starts one never began, and the other is over when its END is done."""
    answers = Answers()
    with pytest.raises(TimeoutError), answers.unread:
        await answers.pairs[0][0]()
        raise TimeoutError
    assert answers.bytes == 8
    await answers.pairs[0][1](None)
    assert answers.bytes == 0


async def test_keeps_what_began_when_the_starts_succeed() -> None:
    """Leaving without an error gives nothing back: nothing has been read yet."""
    answers = Answers()
    with answers.unread:
        opened = [await open_() for open_, _ in answers.pairs]
    assert answers.bytes == 8
    for (_, end), items in zip(answers.pairs, opened, strict=True):
        await end(items)
    assert answers.bytes == 0


async def test_closes_what_its_items_come_from() -> None:
    """Who reads no further closes the source, as without it."""
    answers = Answers()
    items = await answers.pairs[0][0]()
    assert await anext(items) == 1
    await items.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(items)
    await answers.pairs[1][1](None)
    assert answers.bytes == 0
