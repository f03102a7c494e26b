"""Verdicts over an engine that lives, from looks at it; no process, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from lifecycle_zmq.process.pages import Phase
from lifecycle_zmq.process.proc import ProcessState
from lifecycle_zmq.process.watch import Limits, Watch

RUNS = ProcessState()
STOPPED = ProcessState(stopped=True)
Look = tuple[ProcessState, Phase, int]


def make() -> Watch:
    """Bounds as by default."""
    return Watch(Limits(busy=1.0, stalled=30.0, stopped=2.0))


def run(
    watch: Watch, looks: Iterable[Look], *, every: float = 0.05, start: float = 0.0
) -> tuple[float, str] | None:
    """The time of the first verdict, and which."""
    for number, look in enumerate(looks):
        now = start + number * every
        verdict = watch.look(now, *look)
        if verdict is not None:
            return now, verdict
    return None


def test_step_that_takes_five_seconds_is_busy_and_nothing_else() -> None:
    """A hold of the interpreter lock, or a long prefill, is no death (`fault-34`)."""
    watch = make()
    assert run(watch, [(RUNS, Phase.WORKING, 7)] * 100) is None
    assert watch.busy
    assert watch.look(5.0, RUNS, Phase.WORKING, 8) is None
    assert not watch.busy


def test_step_that_takes_too_long_is_stalled() -> None:
    """A call that never returns is told at its bound (`fault-37`, `peers-76`)."""
    verdict = run(make(), [(RUNS, Phase.WORKING, 7)] * 1000)
    assert verdict == (pytest.approx(30.0, abs=0.2), "stalled")


def test_long_prefills_in_a_row_are_never_stalled() -> None:
    """Turns count, not tokens: each step of 20 s is a sign of life (`peers-77`)."""
    looks = [(RUNS, Phase.WORKING, number // 400) for number in range(4000)]
    assert run(make(), looks) is None


def test_engine_that_sleeps_until_a_message_comes_is_well() -> None:
    """Not a single turn in an hour without work is what is wanted."""
    watch = make()
    assert run(watch, [(RUNS, Phase.WAITING, 7)] * 72_000) is None
    assert not watch.busy and not watch.suspicious


@pytest.mark.parametrize(
    "look",
    [(STOPPED, Phase.WAITING, 7), (RUNS, Phase.WORKING, 7), (RUNS, Phase.LEFT, 7)],
)
def test_engine_is_suspected_from_the_first_silent_look_on(look: Look) -> None:
    """Stopped, in a step or gone from its loop; until it shows that it goes on."""
    watch = make()
    assert (watch.stops, watch.suspicious) == (False, False)
    watch.look(0.0, RUNS, Phase.WORKING, 7)
    assert not watch.suspicious
    watch.look(0.05, *look)
    assert watch.suspicious
    assert watch.stops is (look[0] is STOPPED)
    watch.look(0.1, RUNS, Phase.WORKING, 8)
    assert (watch.stops, watch.suspicious) == (False, False)


def test_stopped_process_is_seen_at_the_second_look_and_told_at_its_bound() -> None:
    """Whatever it was doing when the signal came (`fault-23`, `N6`)."""
    for phase in Phase:
        watch = make()
        watch.look(0.0, RUNS, phase, 1)
        assert run(watch, [(STOPPED, phase, 1)] * 2, start=0.05) is None
        assert watch.stopped
        if phase is not Phase.LEFT:
            verdict = run(watch, [(STOPPED, phase, 1)] * 100, start=0.15)
            assert verdict == (pytest.approx(2.05, abs=0.1), "stopped")


def test_process_that_is_continued_in_time_loses_nothing() -> None:
    """Each stop is measured alone."""
    watch = make()
    looks = ([(STOPPED, Phase.WAITING, 1)] * 30 + [(RUNS, Phase.WAITING, 1)]) * 10
    assert run(watch, looks) is None
    assert not watch.stopped


def test_pause_of_our_own_loop_is_not_held_against_the_engine() -> None:
    """Blocked for minutes, or the machine asleep: one gap counts little (`fault-58`, `fault-59`)."""
    watch = make()
    for now in (0.0, 600.0, 1200.0):
        assert watch.look(now, STOPPED, Phase.WORKING, 7) is None
    assert not watch.busy or watch.look(1200.1, RUNS, Phase.WORKING, 8) is None


def test_engine_whose_loop_is_over_but_lives_is_given_up() -> None:
    """Its socket is closed: nobody will be answered, though the process is there."""
    verdict = run(make(), [(RUNS, Phase.LEFT, 9)] * 100)
    assert verdict == (pytest.approx(1.0, abs=0.1), "disconnected")


def test_page_that_nobody_writes_is_no_reason() -> None:
    """An engine that does not show its turns is watched by its end alone."""
    assert run(make(), [(RUNS, Phase.UNKNOWN, 0)] * 2000) is None


def test_looks_in_quick_succession_prove_nothing() -> None:
    """Two looks within a millisecond are one: nobody is refused because of them."""
    watch: Any = make()
    watch.look(0.0, STOPPED, Phase.WAITING, 1)
    watch.look(0.001, STOPPED, Phase.WAITING, 1)
    assert not watch.stopped
