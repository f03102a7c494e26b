"""A lossy link in front of a scripted engine, for the simulation.

Ordered in each direction, as one socket is, with a latency for each message.
What is on its way when the engine dies is lost with it; items may be sent twice
or not at all. Numbers on the items let the receiving end drop what came twice
and fail a stream with a gap: the same contract that a real transport has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from lifecycle import EngineLost
from lifecycle.testing import ScriptedEngine


class Gap(Exception):
    """An item was lost on its way; the stream cannot go on."""


class LossyLink:
    """Stands in for the engine, one network away.

    Args:
        engine: What is on the other end.
        rng: Draws latencies and losses.
        tasks: Where messages travel; they do so also when their sender is gone.
        lose: Chance that an item is lost.
        double: Chance that an item comes twice.
    """

    def __init__(
        self,
        engine: ScriptedEngine,
        rng: random.Random,
        tasks: TaskGroup,
        *,
        lose: float,
        double: float,
    ) -> None:
        self.engine = engine
        self._rng = rng
        self._tasks = tasks
        self._lose = lose
        self._double = double
        self._wire: deque[tuple[_Reply, Callable[[], Awaitable[Any]]]] = deque()

    async def start(self, key: str, payload: object = None) -> _Received:
        """Send START, and wait for the answer. The payload is copied to the wire."""
        del payload
        sent = await self._call(partial(self.engine.start, key))
        return _Received(self, sent)

    async def end(self, key: str) -> None:
        """Send END, and wait for the answer; there is none from the dead."""
        with suppress(EngineLost):
            await self._call(partial(self.engine.end, key))

    @property
    def busy(self) -> bool:
        """Whether anything is still on its way."""
        return bool(self._wire)

    def copies(self) -> int:
        """How often the next item arrives: once, twice or never."""
        if self._rng.random() < self._lose:
            return 0
        return 2 if self._rng.random() < self._double else 1

    async def _call(self, message: Callable[[], Awaitable[Any]]) -> Any:
        reply = _Reply(self.engine.incarnation)
        self._wire.append((reply, message))
        self._tasks.start_soon(self._carry, self._latency(), self._latency())
        await reply.come.wait()
        if reply.error is not None:
            raise reply.error
        return reply.value

    async def _carry(self, there: float, back: float) -> None:
        await anyio.sleep(there)
        # From the queue, whichever task is first: nothing overtakes on a wire.
        reply, message = self._wire.popleft()
        try:
            self._assert_same(reply)
            reply.value = await message()
            await anyio.sleep(back)
            self._assert_same(reply)
        except Exception as error:  # noqa: BLE001 - it is the answer
            reply.error = error
        reply.come.set()

    def _assert_same(self, reply: _Reply) -> None:
        if not self.engine.alive or self.engine.incarnation != reply.incarnation:
            raise EngineLost("it died on the way", reason="killed")

    def _latency(self) -> float:
        return self._rng.choice((0.0, 0.001, 0.01))


class _Reply:
    """What comes back for a message, from the incarnation it was sent to."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.come = anyio.Event()
        self.value: Any = None
        self.error: Exception | None = None


class _Received:
    """The receiving end of one stream."""

    def __init__(self, link: LossyLink, sent: Any) -> None:
        self._link = link
        self._sent = sent
        self._number = self._expected = 0
        self._inbox: deque[tuple[int, Any]] = deque()
        self._over = False

    @property
    def closed(self) -> bool:
        return self._sent.closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            while self._inbox:
                number, item = self._inbox.popleft()
                if number > self._expected:
                    raise Gap(f"item {self._expected} never came")
                if number == self._expected:
                    self._expected += 1
                    return item
            if self._over:
                # The end is numbered too, or a lost last item would pass.
                if self._expected < self._number:
                    raise Gap(f"item {self._expected} never came")
                raise StopAsyncIteration
            await self._receive()

    async def _receive(self) -> None:
        try:
            item = await anext(self._sent)
        except StopAsyncIteration:
            self._over = True
            return
        number, self._number = self._number, self._number + 1
        self._inbox += [(number, item)] * self._link.copies()

    async def aclose(self) -> None:
        await self._sent.aclose()
