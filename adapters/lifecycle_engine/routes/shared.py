"""What several answers to one request are made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from lifecycle import Payload

Prepared = tuple[dict[str, Any], Payload[Mapping[str, Any]]]


class SiblingFailed(Exception):
    """What this answer was to be made from could not be prepared."""


class Shared:
    """A request that is prepared once, by the first of its answers to begin.

    Args:
        prepare: Returns the request map and its tensors in a box.
        choices: How many answers there are; the last one to take it leaves
            nothing behind.
    """

    __slots__ = ("_failed", "_left", "_prepare", "_request", "_tensors", "_turn")

    def __init__(
        self, prepare: Callable[[], Awaitable[Prepared]], *, choices: int
    ) -> None:
        self._prepare: Callable[[], Awaitable[Prepared]] | None = prepare
        self._left = choices
        self._turn = anyio.Lock()
        self._request: dict[str, Any] = {}
        self._tensors: Mapping[str, Any] = {}

    async def take(self, index: int) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the request map of one answer, and its own mapping of the tensors.

        Answers to a request with a seed get different ones, so that they differ and
        can be had again.

        Raises:
            SiblingFailed: The first to take it could not prepare it.

        Cancellation:
            As for the preparation.
        """
        async with self._turn:
            if self._prepare is not None:
                prepare, self._prepare = self._prepare, None
                self._request, box = await prepare()
                self._tensors = box.take()
        if not self._request:
            raise SiblingFailed("the first answer could not be prepared")
        self._left -= 1
        tensors = dict(self._tensors)
        if not self._left:
            self._tensors = {}
        seed = self._request["seed"]
        seed = None if seed is None else (seed + index) % 2**63
        return self._request | {"seed": seed}, tensors
