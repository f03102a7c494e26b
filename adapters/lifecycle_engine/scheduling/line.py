"""The line of requests that wait for a slot: pure, and fair between those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """First in, first out for each share, and the shares in turn.

    Who sends a hundred requests has one share, as has who sends one; the one is
    second in line at the latest.
    """

    __slots__ = ("_of", "_shares")

    def __init__(self) -> None:
        # Dicts for their order: leaving from the middle costs nothing.
        self._shares: dict[str, dict[str, T]] = {}
        self._of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: str) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[T]:
        for share in self._shares.values():
            yield from share.values()

    def join(self, key: str, share: str, item: T) -> None:
        """Stand at the end of a share's own line.

        Raises:
            ValueError: The key is in line already.
        """
        if key in self._of:
            raise ValueError("the key is in line already; leave first")
        self._of[key] = share
        self._shares.setdefault(share, {})[key] = item

    def rejoin(self, key: str, share: str, item: T) -> None:
        """Stand at the head of a share's own line: its turn had come before.

        Raises:
            ValueError: The key is in line already.
        """
        self.join(key, share, item)
        line = self._shares[share]
        self._shares[share] = {key: line.pop(key), **line}

    def leave(self, key: str) -> T | None:
        """Leave from wherever in the line; ``None`` if the key is not in it."""
        share = self._of.pop(key, None)
        if share is None:
            return None
        line = self._shares[share]
        item = line.pop(key)
        if not line:
            del self._shares[share]
        return item

    @property
    def shares(self) -> list[str]:
        """Those in line, the one whose turn it is first."""
        return list(self._shares)

    def take(self, share: str | None = None) -> T:
        """Take the first of a share; then it is the other shares' turn.

        Args:
            share: One that is in line; ``None`` is the one whose turn it is.

        Raises:
            LookupError: Nobody is in line, or nobody of that share.
        """
        if not self._shares:
            raise LookupError("nobody is in line")
        share = next(iter(self._shares)) if share is None else share
        line = self._shares.pop(share)
        key = next(iter(line))
        item = line.pop(key)
        del self._of[key]
        if line:
            self._shares[share] = line
        return item
