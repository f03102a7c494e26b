"""Trio's own tests of its limiter and semaphore, run with a gate in their place.

Two of them are left out, for a difference that is a decision: they release on behalf of
a task that has been granted its place and has not resumed. A lease belongs to the task
that asked for it. It is delivered when that task resumes, and nothing else can release
it before: a task that is cancelled in between passes its place on by itself.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lifecycle import Gate, GateFull, Lease

trio = pytest.importorskip("trio")
theirs = pytest.importorskip("trio._tests.test_sync", exc_type=ImportError)

# Left out; see above.
NOT_A_CONTRACT = {
    "test_CapacityLimiter_change_total_tokens",
    "test_CapacityLimiter_zero_limit_tokens",
}


def tokens(value: object) -> int | None:
    if value == math.inf:
        return None
    if not isinstance(value, int):
        raise TypeError("total_tokens must be an int or math.inf")
    if value < 0:  # in their words
        raise ValueError("total_tokens must be >= 0")
    return value


class Limiter:
    """The part of a `trio.CapacityLimiter` that the tests use."""

    def __init__(self, total_tokens: float) -> None:
        self._gate = Gate(slots=tokens(total_tokens))
        self._leases: dict[object, Lease] = {}

    @property
    def _pending_borrowers(self) -> list[None]:
        return [None] * self._gate.statistics().waiting

    @property
    def total_tokens(self) -> float:
        slots = self._gate.statistics().slots
        return math.inf if slots is None else slots

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
            borrowers=list(self._leases),
            tasks_waiting=self._gate.statistics().waiting,
        )

    def acquire_nowait(self) -> None:
        self.acquire_on_behalf_of_nowait(trio.lowlevel.current_task())

    def acquire_on_behalf_of_nowait(self, borrower: object) -> None:
        if borrower in self._leases:
            raise RuntimeError("this borrower holds a token")
        try:
            self._leases[borrower] = self._gate.try_admit()
        except GateFull:
            raise trio.WouldBlock from None

    async def acquire(self) -> None:
        await self.acquire_on_behalf_of(trio.lowlevel.current_task())

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        if borrower in self._leases:
            raise RuntimeError("this borrower holds a token")
        await trio.lowlevel.checkpoint_if_cancelled()
        lease = await self._gate.admit()
        self._leases[borrower] = lease
        await trio.lowlevel.cancel_shielded_checkpoint()

    def release(self) -> None:
        self.release_on_behalf_of(trio.lowlevel.current_task())

    def release_on_behalf_of(self, borrower: object) -> None:
        if borrower not in self._leases:
            raise RuntimeError("this borrower holds no token")
        self._leases.pop(borrower).release()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def forget(self) -> None:
        while self._leases:
            self._leases.popitem()[1].release()


LIMITER = [
    name
    for name in sorted(vars(theirs))
    if name.startswith("test_CapacityLimiter") and name not in NOT_A_CONTRACT
]
GENERIC = [name for name in sorted(vars(theirs)) if name.startswith("test_generic_")]


def run(
    monkeypatch: pytest.MonkeyPatch, test: Callable[..., Any], *args: object
) -> None:
    made: list[Limiter] = []

    def make(total_tokens: float) -> Limiter:
        made.append(Limiter(total_tokens))
        return made[-1]

    monkeypatch.setattr(theirs, "CapacityLimiter", make)
    trio.run(getattr(test, "__wrapped__", test), *args)
    assert made
    for limiter in made:
        limiter.forget()
        assert limiter.borrowed_tokens == 0


def test_knows_what_it_leaves_out() -> None:
    """The tests that are left out exist, and others are run."""
    assert vars(theirs).keys() > NOT_A_CONTRACT
    assert LIMITER
    assert GENERIC


@pytest.mark.parametrize("name", LIMITER)
def test_passes_what_trio_asks_of_a_limiter(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, order, refusals and cancellation are those of a CapacityLimiter."""
    run(monkeypatch, getattr(theirs, name))


@pytest.mark.parametrize("name", GENERIC)
def test_passes_what_trio_asks_of_every_lock(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exclusion and order are those of all of trio's locks."""
    run(monkeypatch, getattr(theirs, name), lambda: theirs.CapacityLimiter(1))
