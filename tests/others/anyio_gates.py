"""A limiter and a semaphore made of gates, for anyio's own tests of these.

Copied as the `conftest.py` of those tests, so that they import these classes.
"""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from lifecycle import Gate, GateFull, Lease


class CapacityLimiter:
    """The part of anyio's limiter that its tests use; each token is a lease."""

    def __init__(self, total_tokens: float) -> None:
        self._gate = Gate(slots=_slots(total_tokens))
        self._leases: dict[object, Lease] = {}

    @property
    def total_tokens(self) -> float:
        slots = self._gate.statistics().slots
        return math.inf if slots is None else slots

    @total_tokens.setter
    def total_tokens(self, value: float) -> None:
        self._gate.resize(slots=_slots(value))

    @property
    def borrowed_tokens(self) -> int:
        return self._gate.statistics().slots_in_use

    @property
    def available_tokens(self) -> float:
        return self.total_tokens - self.borrowed_tokens

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(
            borrowed_tokens=self.borrowed_tokens,
            total_tokens=self.total_tokens,
            borrowers=tuple(self._leases),
            tasks_waiting=self._gate.statistics().waiting,
        )

    def acquire_nowait(self) -> None:
        self.acquire_on_behalf_of_nowait(anyio.get_current_task().id)

    def acquire_on_behalf_of_nowait(self, borrower: object) -> None:
        self._check(borrower)
        try:
            self._leases[borrower] = self._gate.try_admit()
        except GateFull:
            raise anyio.WouldBlock from None

    async def acquire(self) -> None:
        await self.acquire_on_behalf_of(anyio.get_current_task().id)

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        self._check(borrower)
        self._leases[borrower] = await self._gate.admit()

    def release(self) -> None:
        self.release_on_behalf_of(anyio.get_current_task().id)

    def release_on_behalf_of(self, borrower: object) -> None:
        if borrower not in self._leases:
            what = "isn't holding any of this CapacityLimiter's tokens"
            raise RuntimeError(f"this borrower {what}")
        self._leases.pop(borrower).release()

    def _check(self, borrower: object) -> None:
        if borrower in self._leases:
            what = "is already holding one of this CapacityLimiter's tokens"
            raise RuntimeError(f"this borrower {what}")

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


def _slots(value: object) -> int | None:
    if value == math.inf:
        return None
    if not isinstance(value, int):
        raise TypeError("total_tokens must be an int or math.inf")
    if value < 0:  # in their words
        raise ValueError("total_tokens must be >= 0")
    return value


class Semaphore:
    """The part of anyio's semaphore that its tests use; each permit is a lease."""

    def __init__(
        self,
        initial_value: int,
        *,
        max_value: int | None = None,
        fast_acquire: bool = False,
    ) -> None:
        self._gate = Gate(slots=initial_value)
        self._fast = fast_acquire
        self._leases: deque[Lease] = deque()
        self.max_value = max_value

    @property
    def value(self) -> int:
        now = self._gate.statistics()
        return (now.slots or 0) - now.slots_in_use

    def acquire_nowait(self) -> None:
        try:
            self._leases.append(self._gate.try_admit())
        except GateFull:
            raise anyio.WouldBlock from None

    async def acquire(self) -> None:
        if self._fast and self.value:
            self.acquire_nowait()
        else:
            self._leases.append(await self._gate.admit())

    def release(self) -> None:
        if self._leases:
            self._leases.popleft().release()
            return
        slots = 1 + (self._gate.statistics().slots or 0)  # as a permit that is new
        if self.max_value is not None and slots > self.max_value:
            raise ValueError("released too many times")
        self._gate.resize(slots=slots)

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(tasks_waiting=self._gate.statistics().waiting)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


asyncio_params = [pytest.param(("asyncio", {"debug": True}), id="asyncio")]


@pytest.fixture(params=[*asyncio_params, pytest.param(("trio", {}), id="trio")])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def anyio_backend_name(anyio_backend: Any) -> Any:
    return anyio_backend[0]


@pytest.fixture
def anyio_backend_options(anyio_backend: Any) -> Any:
    return anyio_backend[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.anyio)


anyio.CapacityLimiter = CapacityLimiter  # type: ignore[assignment, misc]
anyio.Semaphore = Semaphore  # type: ignore[assignment, misc]
