"""When the next process may start: backoff and breaker, without any process."""

from __future__ import annotations

from typing import Any

import pytest

from lifecycle_zmq import Restarts

BROKEN = (60.0, True)


def make(**options: Any) -> Restarts:
    """Restarts whose row ends after a second of service."""
    settings: dict[str, Any] = {"max_crashes": None, "crash_window": 60.0}
    settings |= {"backoff": 0.25, "max_backoff": 1.0, "broken_for": 60.0}
    return Restarts(**(settings | options))


def test_delay_doubles_up_to_its_limit_and_begins_anew_after_service() -> None:
    """At once, then 0.25 s doubled up to 1 s; long service ends the row (`fault-30`)."""
    restarts = make()
    delays = [restarts.record_exit(number, 0.1)[0] for number in range(5)]
    assert delays == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert restarts.record_exit(6, 1.0) == (0.0, False)
    assert restarts.record_exit(7, 0.1) == (0.25, False)


def test_engine_that_never_served_is_not_started_again_at_once() -> None:
    """The first delay of an engine that cannot start is not zero."""
    assert [make().record_exit(0, 0.0)[0]] == [0.25]


def test_delay_stays_finite_after_thousands_of_deaths() -> None:
    """A row without end does not overflow."""
    restarts = make()
    for number in range(3000):
        delay, broken = restarts.record_exit(number, 0.0)
    assert (delay, broken) == (1.0, False)


def test_crash_loop_opens_the_breaker() -> None:
    """More than three ends within a minute: none is started for a while (`fault-30`)."""
    restarts = make(max_crashes=3)
    assert [restarts.record_exit(at, 0.1)[1] for at in (100, 120, 140)] == [False] * 3
    assert restarts.record_exit(159, 0.1) == BROKEN


def test_ends_that_are_far_apart_do_not_open_the_breaker() -> None:
    """The fourth end counts with those of the minute before it, and no older one."""
    restarts = make(max_crashes=3)
    assert not any(restarts.record_exit(at, 0.1)[1] for at in range(0, 1000, 21))


def test_trial_that_fails_breaks_the_engine_again() -> None:
    """Half open: one is tried, and its end alone is enough to break it again."""
    restarts = make(max_crashes=3)
    assert [restarts.record_exit(0, 0.1)[1] for _ in range(4)][-1]
    assert restarts.record_exit(1000, 0.1) == BROKEN
    assert restarts.record_exit(2000, 0.0) == BROKEN


def test_trial_that_serves_long_enough_closes_the_breaker() -> None:
    """After that an end is one like any other."""
    restarts = make(max_crashes=3)
    assert [restarts.record_exit(0, 0.1)[1] for _ in range(4)][-1]
    assert restarts.record_exit(1000, 5.0) == (0.0, False)
    assert restarts.record_exit(1010, 0.1) == (0.25, False)


@pytest.mark.parametrize("crashes", [4, 40])
def test_reset_forgets_every_death(crashes: int) -> None:
    """After the cause is fixed, a reset skips the wait."""
    restarts = make(max_crashes=3)
    for _ in range(crashes):
        restarts.record_exit(0, 0.1)
    restarts.reset()
    assert restarts.record_exit(1, 0.1) == (0.0, False)
