"""The load of benchmarks/link.py: what streams produce, and what readers check.

A token carries its number and the microsecond of its birth in 32 bits, so that every
reader can check that none is missing and tell how long each was under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from lifecycle_zmq import Finish, Output

_NUMBER = 2**12
_MICROS = 2**20


def token(number: int) -> int:
    """Return the token of that number, born now."""
    return (number % _NUMBER) << 20 | (time.monotonic_ns() // 1000) % _MICROS


def age(value: int) -> float:
    """Return the seconds since a token was born; at most one."""
    now = time.monotonic_ns() // 1000
    return ((now - value) % _MICROS) / 1e6


class Transport(Protocol):
    """One way to an engine; made for one cell."""

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Begin a stream."""
        ...

    async def end(self, key: str) -> None:
        """Make the engine forget it."""
        ...

    async def cpu(self) -> float:
        """Return the seconds of CPU that the engine process has used."""
        ...


class Pace:
    """Ticks at a fixed rate, or as fast as can be."""

    def __init__(self) -> None:
        self._next = 0.0

    def until_next(self, rate: float) -> float:
        """Return the seconds until the next tick is due, which is then taken."""
        now = time.monotonic()
        self._next = max(self._next + 1 / rate, now) if rate else now
        return self._next - now


class Steps:
    """The step engine: one item for each stream and step. A `lifecycle_zmq.Backend`.

    Request fields: ``count`` items, ``rate`` steps a second or 0, ``distinct`` for
    items that are no tokens, ``merge`` for the rule.
    """

    def __init__(self) -> None:
        self._live: dict[str, dict[str, Any]] = {}
        self._pace = Pace()

    def start(self, key: str, request: dict[str, Any], tensors: dict[str, Any]) -> Any:
        """Take a request."""
        del tensors
        self._live[key] = {**request, "at": 0}
        return request.get("merge", "concatenate")

    def cancel(self, key: str) -> None:
        """Stop a stream."""
        self._live[key]["count"] = 0

    def end(self, key: str) -> None:
        """Forget a stream."""
        self._live.pop(key, None)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._live)

    @property
    def rate(self) -> float:
        """Steps a second; 0 is as many as can be."""
        return max((it["rate"] for it in self._live.values()), default=0)

    def step(self) -> list[Output]:
        """Wait for the tick, then produce an item for each stream."""
        delay = self._pace.until_next(self.rate)
        if delay > 0:
            time.sleep(delay)
        return self.produce()

    def produce(self) -> list[Output]:
        """Produce an item for each stream."""
        outputs = []
        for key, it in list(self._live.items()):
            at = it["at"]
            if at >= it["count"]:
                del self._live[key]
                outputs.append(Output(key, (), Finish("completed")))
                continue
            it["at"] = at + 1
            item: Any = {"number": at} if it.get("distinct") else [token(at)]
            outputs.append(Output(key, (item,)))
        return outputs

    def status(self) -> dict[str, Any]:
        """Return the CPU time of this process."""
        return {"cpu": time.process_time(), "live": len(self._live)}


class Stepper:
    """The step engine as a task of the event loop that its streams are read in."""

    def __init__(self) -> None:
        self._steps = Steps()
        self._pace = Pace()
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            while not self._steps.busy:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(max(0.0, self._pace.until_next(self._steps.rate)))
            for output in self._steps.produce():
                self._put(output)

    def _begin(self, key: str, request: dict[str, Any]) -> None:
        self._steps.start(key, request, {})
        self._work.set()

    def _put(self, output: Output) -> None:
        raise NotImplementedError


@dataclass
class Readings:
    """What the readers of one cell saw.

    Attributes:
        measuring: Whether the ages of tokens are kept now.
        ages: Of each token, in seconds.
        tokens: In all items.
        items: Delivered.
        streams: That ended, in order and whole.
    """

    measuring: bool = True
    ages: list[float] = field(default_factory=list)
    tokens: int = 0
    items: int = 0
    streams: int = 0

    async def read(self, source: AsyncIterator[Any], count: int) -> None:
        """Read one stream to its end; what breaks a law is an error.

        Raises:
            AssertionError: A token is missing, repeated or in the wrong place, or the
                stream ended too early.
        """
        seen = 0
        async for item in source:
            for value in item:
                assert value >> 20 == seen % _NUMBER, "a token is not the next one"
                seen += 1
            self.items += 1
            self.tokens += len(item)
            if self.measuring:
                # Of all, for the first of those that were merged has waited longest.
                self.ages += map(age, item)
        assert seen == count, f"{seen} of {count} tokens"
        try:
            await anext(source)
        except StopAsyncIteration:
            self.streams += 1
        else:
            raise AssertionError("an item after the end")
