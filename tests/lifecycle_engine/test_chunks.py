from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from lifecycle_engine import Emitted, Prompt, Scheduler, SimRunner
from lifecycle_zmq import Output


class RecordingRunner(SimRunner):
    """A simulated model that records its chunks and batches."""

    def __init__(self, slots: int = 4) -> None:
        super().__init__(slots=slots, max_length=2000, sleep=lambda _: None)
        self.calls: list[tuple[str, Any, Any]] = []

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        self.calls.append(("prefill", slot, (start, stop)))
        return super().prefill(slot, prompt, start, stop)

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        self.calls.append(("decode", None, list(slots)))
        return super().decode(slots)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def start(scheduler: Scheduler, key: str, length: int, **fields: Any) -> None:
    """Start a request of that many prompt tokens."""
    request = {"input_ids": [7] * length, "max_tokens": 5} | fields
    scheduler.start(key, request, {})


def steps_until(scheduler: Scheduler, key: str) -> int:
    """Step until a stream has its first item; return the number of steps."""
    for count in range(1, 1000):
        if any(output.key == key and output.items for output in scheduler.step()):
            return count
    pytest.fail("the stream never began")


@pytest.mark.parametrize(("seconds", "steps"), [(0.25, 1), (1.0, 4), (100.0, 8)])
def test_long_chunks_of_one_client_take_half_of_the_time(
    seconds: float, steps: int
) -> None:
    """The streams of others decode for as long, or eight steps, before the next one."""
    clock = Clock()

    class Slow(RecordingRunner):
        def prefill(self, slot: int, prompt: Prompt, *args: int) -> Emitted | None:
            clock.now += seconds
            return super().prefill(slot, prompt, *args)

        def decode(self, slots: Sequence[int]) -> list[Emitted]:
            clock.now += 0.25
            return super().decode(slots)

    runner = Slow()
    scheduler = Scheduler(runner, chunk=16, clock=clock)
    start(scheduler, "stream", 3, max_tokens=200, client="one")
    scheduler.step()
    start(scheduler, "long", 16 * 4, client="other")
    steps_until(scheduler, "long")
    kinds = [kind for kind, *_ in runner.calls[1:]]
    chunks = [i for i, kind in enumerate(kinds) if kind == "prefill"]
    assert [b - a - 1 for a, b in itertools.pairwise(chunks)] == [steps] * 3


@pytest.mark.parametrize("alone", [True, False])
def test_prompts_that_owe_nobody_wait_for_none(alone: bool) -> None:
    """One's own streams, and prompts of a third client, are not held up."""
    clock = Clock()

    class Slow(RecordingRunner):
        def prefill(self, *args: Any) -> Emitted | None:
            clock.now += 1.0
            return super().prefill(*args)

    scheduler = Scheduler(Slow(), chunk=16, clock=clock)
    start(scheduler, "stream", 3, max_tokens=200, client="one")
    scheduler.step()
    if alone:
        start(scheduler, "long", 16 * 4, client="one")
        assert steps_until(scheduler, "long") == 4
    else:
        start(scheduler, "long", 16 * 40, client="other")
        scheduler.step()
        start(scheduler, "third", 3, client="third")
        assert steps_until(scheduler, "third") == 1


def test_long_prompt_stalls_a_stream_by_one_chunk_a_token() -> None:
    """Between two tokens of a running stream at most one chunk is prefilled."""
    runner = RecordingRunner()
    scheduler = Scheduler(runner, chunk=16)
    start(scheduler, "a", 3, max_tokens=200)
    scheduler.step()
    start(scheduler, "b", 1000)
    start(scheduler, "c", 500)
    runner.calls.clear()
    while scheduler.busy:
        scheduler.step()
    kinds = [kind for kind, _, _ in runner.calls]
    assert ("prefill", "prefill") not in set(itertools.pairwise(kinds))
    sizes = [stop - first for kind, _, (first, stop) in prefills(runner)]
    assert max(sizes) == 16
    assert sum(sizes) == 1500


def prefills(runner: RecordingRunner) -> list[tuple[str, Any, Any]]:
    """Its chunks."""
    return [call for call in runner.calls if call[0] == "prefill"]


def test_short_prompt_overtakes_a_long_one() -> None:
    """A short prompt behind a long one waits for a chunk of it, not for all of it."""
    scheduler = Scheduler(RecordingRunner(), chunk=16)
    start(scheduler, "long", 1600)
    scheduler.step()
    start(scheduler, "short", 10)
    assert steps_until(scheduler, "short") <= 2


def test_long_prompt_gets_every_other_chunk() -> None:
    """However many short prompts arrive, the oldest prompt makes progress."""
    scheduler = Scheduler(RecordingRunner(), chunk=16)
    start(scheduler, "long", 160)
    for number in range(40):
        start(scheduler, f"s{number}", 8, max_tokens=1)
        outputs = scheduler.step()
        if any(output.key == "long" for output in outputs):
            assert number <= 2 * 10
            return
    pytest.fail("the long prompt starved")


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_tokens_do_not_depend_on_the_chunk(chunk: int) -> None:
    """A stream is the same whatever the chunks of its prompt were."""
    streams = []
    for size in (chunk, 7):
        scheduler = Scheduler(RecordingRunner(), chunk=size)
        request = {"input_ids": list(range(50)), "max_tokens": 9}
        scheduler.start("a", request, {"pixels": memoryview(bytes(48)).cast("f")})
        items: list[Any] = []
        while scheduler.busy:
            items += [item for output in scheduler.step() for item in output.items]
        streams.append(items)
    assert streams[0] == streams[1]


@pytest.mark.parametrize("leave", ["cancel", "end"])
@pytest.mark.parametrize("steps", range(6))
def test_cancel_and_end_between_chunks_free_everything(leave: str, steps: int) -> None:
    """Queued, or at the first, a middle or the last chunk: the slot is free at once."""
    runner = RecordingRunner(slots=1)
    scheduler = Scheduler(runner, chunk=4)
    start(scheduler, "a", 17)
    for _ in range(steps):
        scheduler.step()
    getattr(scheduler, leave)("a")
    assert scheduler.status()["slots_free"] == 1
    assert runner.kv_bytes == 0
    outputs = [output for output in scheduler.step() if output.key == "a"]
    assert [o.finish.reason for o in outputs if o.finish is not None] == (
        ["cancelled"] if leave == "cancel" else []
    )
    assert not scheduler.busy


@pytest.mark.parametrize("steps", [0, 2, 8])
def test_deadline_holds_in_every_phase(steps: int) -> None:
    """Queued, in prefill or running, a request past its deadline fails and is removed."""
    clock = Clock()
    scheduler = Scheduler(RecordingRunner(slots=1), chunk=4, clock=clock)
    start(scheduler, "a", 17, max_tokens=50, timeout=2.0)
    for _ in range(steps):
        scheduler.step()
    clock.now = 2.5
    (output,) = scheduler.step()
    assert output.finish is not None
    assert output.finish.code == "deadline_exceeded"
    status = scheduler.status()
    assert not scheduler.busy
    assert (status["slots_free"], status["finished"]["failed"]) == (1, 1)


def test_deadline_of_a_finished_stream_is_ignored() -> None:
    """A request that finished in time gets no later error."""
    clock = Clock()
    scheduler = Scheduler(RecordingRunner(), clock=clock)
    start(scheduler, "a", 3, max_tokens=1, timeout=1.0)
    scheduler.step()
    clock.now = 5.0
    start(scheduler, "b", 3)
    assert [output.key for output in scheduler.step()] == ["b"]


def test_tenants_get_slots_in_turn() -> None:
    """A flood by one tenant does not keep another from the next free slot."""
    scheduler = Scheduler(RecordingRunner(slots=1))
    for number in range(10):
        start(scheduler, f"f{number}", 2, max_tokens=1, tenant="flood")
    scheduler.step()
    start(scheduler, "me", 2, max_tokens=1, tenant="mine")
    outputs: list[Output] = []
    for _ in range(2):
        outputs += scheduler.step()
    assert [output.key for output in outputs] == ["f1", "me"]


def test_runner_that_emits_too_early_or_not_at_all_fails_the_request() -> None:
    """A token before the end of the prompt, or none after it, is an error."""

    class Eager(RecordingRunner):
        def prefill(self, slot: int, prompt: Prompt, *_: int) -> Emitted | None:
            return super().prefill(slot, prompt, 0, len(prompt.input_ids))

    class Silent(RecordingRunner):
        def prefill(self, *args: Any) -> Emitted | None:
            super().prefill(*args)
            return None

    for runner in (Eager(), Silent()):
        scheduler = Scheduler(runner, chunk=4)
        start(scheduler, "a", 4 if isinstance(runner, Silent) else 9)
        (output,) = scheduler.step()
        assert output.finish is not None
        assert output.finish.code == "prefill_failed"
        assert runner.kv_bytes == 0


def test_last_item_of_the_model_ends_the_stream() -> None:
    """An item marked as the last ends its stream."""

    class Short(RecordingRunner):
        def decode(self, slots: Sequence[int]) -> list[Emitted]:
            return [Emitted({"image": b"x"}, last=True) for _ in slots]

    scheduler = Scheduler(Short())
    start(scheduler, "a", 3, max_tokens=50)
    items: list[Any] = []
    while scheduler.busy:
        items += [item for output in scheduler.step() for item in output.items]
    assert items[1:] == [{"image": b"x"}, {"finish_reason": "stop"}]


def test_times_of_prefill_and_decode_are_separate() -> None:
    """Seconds and tokens of both kinds of work are counted, and the batch size."""
    clock = Clock()

    class Slow(RecordingRunner):
        def prefill(self, *args: Any) -> Emitted | None:
            clock.now += 2.0
            return super().prefill(*args)

        def decode(self, slots: Sequence[int]) -> list[Emitted]:
            clock.now += 0.5
            return super().decode(slots)

    scheduler = Scheduler(Slow(), chunk=8, clock=clock)
    start(scheduler, "a", 16, max_tokens=3)
    start(scheduler, "b", 8, max_tokens=3)
    while scheduler.busy:
        scheduler.step()
    times = scheduler.status()["times"]
    assert (times["prefill"]["tokens"], times["prefill"]["seconds"]) == (24, 6.0)
    assert times["prefill"]["longest_recent_run_seconds"] == 2.0
    assert (times["decode"]["tokens"], times["decode"]["seconds"]) == (4, 1.5)
    assert times["decode"]["longest_recent_run_seconds"] == 0.5
    assert times["longest_recent_step_seconds"] == 2.5
    assert times["overhead_seconds"] == 0.0


def test_chunk_of_zero_tokens_raises() -> None:
    """A chunk without tokens would make no progress."""
    with pytest.raises(ValueError, match="chunk is 0"):
        Scheduler(RecordingRunner(), chunk=0)


def test_ten_thousand_requests_are_freed() -> None:
    """Completed, cancelled, ended and timed out: everything is freed."""
    rng = random.Random(7)
    clock = Clock()
    runner = RecordingRunner(slots=8)
    scheduler = Scheduler(runner, chunk=16, clock=clock)
    ends: list[tuple[int, str]] = []
    for number in range(10_000):
        key = f"k{number}"
        length, count = rng.randrange(1, 90), rng.randrange(1, 12)
        timeout = rng.choice([None, None, 30.0])
        share = rng.choice("abc")
        fields = {"max_tokens": count, "timeout": timeout, "tenant": share}
        start(scheduler, key, length, **fields)
        if rng.random() < 0.4:
            heapq.heappush(ends, (number + rng.randrange(40), key))
        while ends and ends[0][0] <= number:
            rng.choice([scheduler.cancel, scheduler.end])(heapq.heappop(ends)[1])
        while scheduler.status()["waiting"] > 20 or rng.random() < 0.5:
            clock.now += 1.0
            scheduler.step()
        runner.calls.clear()
    while scheduler.busy:
        scheduler.step()
    status = scheduler.status()
    assert status["started"] == 10_000 == sum(status["finished"].values())
    assert all(count > 100 for count in status["finished"].values())
    assert (status["slots_free"], status["payload_bytes"], runner.kv_bytes) == (8, 0, 0)
    assert not (runner._next or runner._digest or runner._logprobs)
