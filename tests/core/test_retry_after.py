"""Refusals: after how many seconds a client may retry."""

import itertools

import anyio
import pytest

from lifecycle import Gate, GateFull
from lifecycle.testing import assert_quiescent


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusal_of(gate: Gate) -> GateFull:
    """Ask a gate that is full."""
    with pytest.raises(GateFull) as caught:
        gate.try_admit()
    return caught.value


@pytest.mark.parametrize("hold_s", [0.01, 5.0, 500.0])
def test_spreads_a_herd(hold_s: float) -> None:
    """A thousand clients refused at once come back spread out (B19)."""
    clock = Clock()
    gate = Gate(slots=1, clock=clock)
    for _ in range(5):
        with gate.try_admit():
            clock.now += hold_s
            refusal_of(gate)
    with gate.try_admit():
        waits = sorted(refusal_of(gate).retry_after for _ in range(1000))
    low, high = waits[0], waits[-1]
    assert 1 <= low < high <= 60
    assert high / low > 2.5
    # Evenly: no tenth of the interval has more than twice its part.
    tenth = (high - low) / 10
    for i in range(10):
        inside = [w for w in waits if low + i * tenth <= w < low + (i + 1) * tenth]
        assert len(inside) <= 200
    assert_quiescent(gate)


def test_follows_the_load() -> None:
    """The slower a gate drains, the later a client may retry (B19)."""
    means = []
    for hold_s in (1.0, 4.0, 16.0):
        clock = Clock()
        gate = Gate(slots=1, clock=clock)
        for _ in range(30):
            with gate.try_admit():
                clock.now += hold_s
                refusal_of(gate)
        with gate.try_admit():
            waits = [refusal_of(gate).retry_after for _ in range(50)]
        means.append(sum(waits) / len(waits))
    assert means[0] < means[1] < means[2]
    assert means[2] == pytest.approx(16, rel=0.5)


def test_grows_with_a_gate_that_is_stuck() -> None:
    """Where nothing leaves at all, later refusals name longer waits."""
    clock = Clock()
    gate = Gate(slots=1, clock=clock)
    with gate.try_admit():
        early = [refusal_of(gate).retry_after for _ in range(20)]
        clock.now += 30
        late = [refusal_of(gate).retry_after for _ in range(20)]
    assert sum(late) > 2 * sum(early)
    assert max(late) <= 60


def test_says_what_to_do() -> None:
    """The message names the gate and the wait, and no request."""
    gate = Gate(slots=1, name="photos", clock=Clock())
    with gate.try_admit():
        refusal = refusal_of(gate)
    assert str(refusal) == (
        f"gate 'photos' is full; retry in {refusal.retry_after:.1f} s"
    )


@pytest.mark.anyio
async def test_counts_each_that_waits() -> None:
    """Behind each of them a client is told to stay away for longer."""
    clock, means = Clock(), list[float]()
    gate = Gate(slots=1, clock=clock)
    for _ in range(30):
        with gate.try_admit():
            clock.now += 4.0
            refusal_of(gate)
    held = gate.try_admit()
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            waits = [refusal_of(gate).retry_after for _ in range(200)]
            means.append(sum(waits) / len(waits))
            tasks.start_soon(gate.admit)
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    held.release()
    assert all(later > 1.15 * sooner for sooner, later in itertools.pairwise(means))
    assert_quiescent(gate)
