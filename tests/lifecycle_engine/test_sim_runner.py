from __future__ import annotations

import array

import pytest

from lifecycle_engine import Prompt, SimCost, SimRunner

BYTES_PER_PIXEL = 24
COST = SimCost(prefill_token=1.0, prefill_pixel=0.25, decode_step=10.0, decode_lane=2.0)


@pytest.fixture
def slept() -> list[float]:
    """The seconds of each sleep."""
    return []


@pytest.fixture
def runner(slept: list[float]) -> SimRunner:
    """A simulated model that does not sleep."""
    return SimRunner(slots=2, kv_bytes_per_token=100, cost=COST, sleep=slept.append)


def pixels(count: int, value: float = 1.0) -> memoryview:
    """Pixels of one value."""
    return memoryview(array.array("f", [value]) * (count * BYTES_PER_PIXEL // 4))


def test_prefill_takes_time_by_tokens_and_pixels(
    runner: SimRunner, slept: list[float]
) -> None:
    """A prompt costs its tokens and its pixels, through the injected sleep."""
    runner.prefill(0, Prompt([1, 2, 3], {"pixels": pixels(8)}), 0, 3)
    assert sum(slept) == 3 * 1.0 + 8 * 0.25


def test_decode_takes_time_by_lanes(runner: SimRunner, slept: list[float]) -> None:
    """A step costs once for itself and once for each request in it."""
    for slot in (0, 1):
        runner.prefill(slot, Prompt([1], {}), 0, 1)
    slept.clear()
    runner.decode([0, 1])
    assert slept == [10.0 + 2 * 2.0]


def test_prefill_holds_real_memory_until_freed(runner: SimRunner) -> None:
    """A running request holds KV memory of the stated size."""
    runner.prefill(1, Prompt([0] * 50, {}), 0, 50)
    assert runner.kv_bytes == 5000
    assert bytes(runner._kv[1]) == b"\1" * 5000
    runner.free(1)
    runner.free(1)
    assert runner.kv_bytes == 0


def test_text_depends_on_every_byte_of_the_payload(runner: SimRunner) -> None:
    """A changed last pixel changes the stream; the same payload repeats it."""

    def stream(buffer: memoryview) -> list[int]:
        emitted = [runner.prefill(0, Prompt([5], {"pixels": buffer}), 0, 1)]
        for _ in range(10):
            emitted += runner.decode([0])
        runner.free(0)
        return [each.token for each in emitted]

    changed = pixels(1000)
    changed[-1] = 2.0
    assert stream(pixels(1000)) == stream(pixels(1000))
    assert stream(pixels(1000)) != stream(changed)


@pytest.mark.parametrize(
    "tensors",
    [
        {"pixels": memoryview(bytes(24))},
        {"pixels": memoryview(bytes(20)).cast("f")},
        {"pixels": pixels(4)[::2]},
        {"pixels": pixels(1), "more": pixels(1)},
    ],
)
def test_check_refuses_odd_buffers(
    runner: SimRunner, tensors: dict[str, memoryview]
) -> None:
    """Another format, half a pixel, gaps or a second tensor are refused."""
    with pytest.raises(ValueError, match="expected"):
        runner.check(Prompt([1], tensors))
