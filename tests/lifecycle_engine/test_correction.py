"""Estimates are corrected by what became of the last ones, and never too far."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from lifecycle_asgi import Correction, MemoryEstimate

LARGE = MemoryEstimate(1000, 24_000_000)


def test_asks_for_all_of_it_until_it_has_seen_some() -> None:
    """Nothing learned is no correction."""
    correction = Correction()
    assert correction.bytes(LARGE) == LARGE.total
    assert correction.ratios == {}


def test_goes_down_slowly_and_up_at_once() -> None:
    """One small result moves it a little, one large result is believed at once."""
    correction = Correction()
    correction.learn(LARGE, 12_000_000)
    first = correction.bytes(LARGE)
    assert LARGE.total > first > 0.9 * LARGE.total
    for _ in range(200):
        correction.learn(LARGE, 12_000_000)
    assert correction.bytes(LARGE) == pytest.approx(1000 + 12_000_000, rel=0.01)
    correction.learn(LARGE, 20_000_000)
    assert correction.bytes(LARGE) >= 1000 + 20_000_000


def test_keeps_to_its_floor_and_never_asks_for_more_than_the_estimate() -> None:
    """However little becomes of them, a quarter is asked for; and never more than all."""
    correction = Correction(floor=0.25)
    for _ in range(1000):
        correction.learn(LARGE, 0)
    assert correction.bytes(LARGE) == 1000 + 6_000_000
    correction.learn(LARGE, 10**12)
    assert correction.bytes(LARGE) == LARGE.total


def test_learns_for_each_class_of_sizes() -> None:
    """What large images become says nothing about small ones."""
    correction = Correction()
    for _ in range(100):
        correction.learn(LARGE, 0)
    small = MemoryEstimate(0, 24_000)
    assert correction.bytes(small) == small.total
    (size,) = correction.ratios
    assert LARGE.tensors < size <= 4 * LARGE.tensors


def test_corrects_no_bytes_of_work() -> None:
    """Files and decoded pixels are as large as their headers say."""
    correction = Correction()
    for _ in range(1000):
        correction.learn(LARGE, 0)
    assert correction.bytes(MemoryEstimate(10**9, 24_000_000)) >= 10**9 + 6_000_000


def test_learns_nothing_from_text() -> None:
    """A request without tensors has no ratio."""
    correction = Correction()
    correction.learn(MemoryEstimate(), 0)
    assert correction.ratios == {}


@pytest.mark.parametrize("floor", [0, -1, 1.5, math.nan])
def test_refuses_a_floor_that_is_none(floor: float) -> None:
    """A floor of 0 would let everybody in at once."""
    with pytest.raises(ValueError, match="floor"):
        Correction(floor=floor)


SIZES = st.integers(1, 10**10)


@given(st.lists(st.tuples(SIZES, st.integers(0, 10**11)), max_size=60))
def test_stays_within_bounds_whatever_happens(seen: list[tuple[int, int]]) -> None:
    """Each ratio is between the floor and 1, and not below what was seen last."""
    correction = Correction(floor=0.25)
    for estimated, actual in seen:
        weight = MemoryEstimate(7, estimated)
        correction.learn(weight, actual)
        asked = correction.bytes(weight)
        assert 7 + 0.25 * estimated <= asked <= 7 + estimated
        assert asked >= 7 + min(actual, estimated) * (1 - 1e-9) - 1
    assert len(correction.ratios) <= 20
