"""CPython's own tests of its semaphore, run with a gate in its place.

They were written without gates in mind, so they promise what a limiter promises
anywhere: an order, no slot lost, no task stranded by a cancellation.
"""

import asyncio
import unittest
from collections import deque

import pytest

from lifecycle import Gate, Lease

theirs = pytest.importorskip("test.test_asyncio.test_locks", exc_type=ImportError)

# The one looks at the text that another class shows of itself; the other, of 3.13, at
# a place that asyncio calls free although it has been granted already.
WHITE_BOX = {"test_repr", "test_acquire_fifo_order_4"}


class Semaphore:
    """The part of a semaphore that the tests use; each permit is a lease."""

    def __init__(self, value: int = 1) -> None:
        self._gate = Gate(slots=value)
        self._leases: deque[Lease] = deque()

    async def acquire(self) -> bool:
        self._leases.append(await self._gate.admit())
        return True

    def release(self) -> None:
        if self._leases:
            self._leases.popleft().release()
        else:  # one that was never acquired raises the limit
            self._gate.resize(slots=1 + (self._gate.statistics().slots or 0))

    def forget(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def locked(self) -> bool:
        return self._value == 0 or self._waiters is not None

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_exc: object) -> None:
        self.release()

    @property
    def _value(self) -> int:
        now = self._gate.statistics()
        return (now.slots or 0) - now.slots_in_use

    @property
    def _waiters(self) -> list[object] | None:
        return [None] * self._gate.statistics().waiting or None


@pytest.mark.parametrize(
    "name",
    sorted(
        set(unittest.TestLoader().getTestCaseNames(theirs.SemaphoreTests)) - WHITE_BOX
    ),
)
def test_passes_what_the_interpreter_asks_of_a_semaphore(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, hand-off and cancellation are those of asyncio.Semaphore (B1, B2, B5)."""
    made: list[Semaphore] = []

    def make(value: int = 1) -> Semaphore:
        made.append(Semaphore(value))
        return made[-1]

    monkeypatch.setattr(asyncio, "Semaphore", make)
    result = unittest.TestResult()
    theirs.SemaphoreTests(name).run(result)
    for semaphore in made:
        semaphore.forget()
    assert result.testsRun == 1
    assert result.failures + result.errors == []
