from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lifecycle_engine import DeviceLost, Emitted, Prompt, Scheduler, SimRunner
from lifecycle_zmq import Output, RequestRejected

PIXELS = 24


class FailingRunner(SimRunner):
    """A simulated model that fails on demand, and records its calls."""

    def __init__(self, slots: int = 2) -> None:
        super().__init__(slots=slots, max_length=100, sleep=lambda _: None)
        self.fail_prefill: BaseException | None = None
        self.fail_decode: BaseException | None = None
        self.calls: list[tuple[str, Any]] = []

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        self.calls.append(("prefill", slot))
        emitted = super().prefill(slot, prompt, start, stop)
        if self.fail_prefill is not None:
            error, self.fail_prefill = self.fail_prefill, None
            raise error
        return emitted

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        self.calls.append(("decode", list(slots)))
        if self.fail_decode is not None:
            error, self.fail_decode = self.fail_decode, None
            raise error
        return super().decode(slots)


@pytest.fixture
def runner() -> FailingRunner:
    """A simulated model that works until it is set to fail."""
    return FailingRunner()


@pytest.fixture
def scheduler(runner: FailingRunner) -> Scheduler:
    """A scheduler over it."""
    return Scheduler(runner)


def start(scheduler: Scheduler, key: str, count: int = 3, **fields: Any) -> None:
    """Start a request with one pixel."""
    request = {"input_ids": [1, 2], "max_tokens": count} | fields
    scheduler.start(key, request, {"pixels": memoryview(bytes(PIXELS)).cast("f")})


def drain(scheduler: Scheduler) -> list[Output]:
    """Step until nothing is left to do."""
    outputs: list[Output] = []
    while scheduler.busy:
        outputs += scheduler.step()
    return outputs


def assert_idle(scheduler: Scheduler, runner: SimRunner) -> None:
    """Everything is freed, and every started request has ended once."""
    status = scheduler.status()
    assert not scheduler.busy
    assert status["waiting"] == status["running"] == status["payload_bytes"] == 0
    assert status["slots_free"] == runner.slots
    assert runner.kv_bytes == 0
    assert status["started"] == sum(status["finished"].values())


def test_stream_until_max_tokens(scheduler: Scheduler, runner: FailingRunner) -> None:
    """A request gets one token a step and then its finish reason, in order."""
    start(scheduler, "a", 3)
    outputs = drain(scheduler)
    assert [len(output.items) for output in outputs] == [1, 1, 2]
    assert all(type(output.items[0]) is list for output in outputs)
    assert outputs[-1].items[-1] == {"finish_reason": "length"}
    assert [output.finish is not None for output in outputs] == [False, False, True]
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.reason == "completed"
    assert_idle(scheduler, runner)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_stop_token_ends_the_stream_and_is_not_emitted(
    scheduler: Scheduler, runner: FailingRunner, position: int
) -> None:
    """A stop id ends the stream at any token, and is not emitted."""
    start(scheduler, "a", 8)
    tokens = [output.items[0][0] for output in drain(scheduler)]
    first = tokens.index(tokens[position])
    start(scheduler, "b", 8, stop_ids=[tokens[position]])
    items = [item for output in drain(scheduler) for item in output.items]
    assert items == [[token] for token in tokens[:first]] + [{"finish_reason": "stop"}]
    assert_idle(scheduler, runner)


def test_prefills_alternate_with_decode_steps(
    scheduler: Scheduler, runner: FailingRunner
) -> None:
    """At most one prefill per step, and running requests are decoded first."""
    start(scheduler, "a", 5)
    start(scheduler, "b", 5)
    scheduler.step()
    scheduler.step()
    assert runner.calls == [("prefill", 0), ("decode", [0]), ("prefill", 1)]


def test_queue_is_served_in_order(scheduler: Scheduler) -> None:
    """Requests run in order of arrival, however many wait."""
    for key in "abcde":
        start(scheduler, key, 1)
    assert [output.key for output in drain(scheduler)] == list("abcde")


def test_batch_is_bounded_below_the_slots() -> None:
    """At most max_batch requests run at once, even if more slots are free."""
    runner = FailingRunner(slots=4)
    scheduler = Scheduler(runner, max_batch=2)
    for key in "abc":
        start(scheduler, key, 10)
    for _ in range(4):
        scheduler.step()
    status = scheduler.status()
    assert (status["running"], status["waiting"], status["slots_free"]) == (2, 1, 2)


@pytest.mark.parametrize("leave", ["cancel", "end"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancel_and_end_free_everything_in_any_phase(
    scheduler: Scheduler, runner: FailingRunner, leave: str, steps: int
) -> None:
    """Queued, in prefill, decoding or at the last step: all is freed (peers-22)."""
    start(scheduler, "a", 4)
    for _ in range(steps):
        scheduler.step()
    getattr(scheduler, leave)("a")
    status = scheduler.status()
    assert (status["slots_free"], status["payload_bytes"]) == (2, 0)
    outputs = drain(scheduler)
    reasons = [output.finish.reason for output in outputs if output.finish is not None]
    assert reasons == (["cancelled"] if leave == "cancel" else [])
    assert not any(output.items for output in outputs)
    assert_idle(scheduler, runner)


def test_end_after_cancel_discards_the_output(
    scheduler: Scheduler, runner: FailingRunner
) -> None:
    """A stream that is ended before its cancellation is reported sends nothing more."""
    start(scheduler, "a")
    scheduler.cancel("a")
    scheduler.end("a")
    assert scheduler.step() == []
    assert_idle(scheduler, runner)
    assert scheduler.status()["finished"]["cancelled"] == 1


def test_cancel_and_end_of_unknown_keys_are_no_ops(
    scheduler: Scheduler, runner: FailingRunner
) -> None:
    """Cancel and END of an unknown or finished key change nothing."""
    start(scheduler, "a", 1)
    drain(scheduler)
    for key in ("a", "b"):
        scheduler.cancel(key)
        scheduler.end(key)
    assert_idle(scheduler, runner)


def test_key_is_refused_while_in_use(scheduler: Scheduler) -> None:
    """A key is in use while it is queued, runs, or its cancellation is unreported."""
    start(scheduler, "a", 5)
    for act in (lambda: None, scheduler.step, lambda: scheduler.cancel("a")):
        act()
        with pytest.raises(RequestRejected, match="in use"):
            start(scheduler, "a")
    scheduler.step()
    start(scheduler, "a")


def test_full_queue_rejects(runner: FailingRunner) -> None:
    """A full queue rejects the next request and keeps nothing of it."""
    scheduler = Scheduler(runner, max_waiting=1)
    start(scheduler, "a")
    with pytest.raises(RequestRejected, match="retry later") as caught:
        start(scheduler, "b")
    assert caught.value.code == "overloaded"
    assert scheduler.status()["rejected"] == 1
    assert scheduler.status()["payload_bytes"] == PIXELS


def test_failing_prefill_fails_alone(
    scheduler: Scheduler, runner: FailingRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt on which the model fails gets the error; its neighbours continue."""
    start(scheduler, "a", 4)
    scheduler.step()
    runner.fail_prefill = ValueError("secret words of the prompt")
    start(scheduler, "b")
    start(scheduler, "c")
    finishes = {o.key: o.finish for o in drain(scheduler) if o.finish is not None}
    assert {key: finish.reason for key, finish in finishes.items()} == {
        "a": "completed",
        "b": "failed",
        "c": "completed",
    }
    assert finishes["b"].code == "prefill_failed"
    assert finishes["b"].message == "prefill failed: ValueError"
    (record,) = caplog.records
    assert "ValueError at test_scheduler.py:" in record.getMessage()
    assert "secret" not in caplog.text
    assert_idle(scheduler, runner)


def test_failing_decode_fails_that_step(
    scheduler: Scheduler, runner: FailingRunner
) -> None:
    """All requests of a failing batch fail; others continue."""
    for key in "abc":
        start(scheduler, key, 4)
    scheduler.step()
    scheduler.step()
    runner.fail_decode = RuntimeError("secret")
    outputs = scheduler.step()
    assert {o.key: o.finish.code for o in outputs if o.finish is not None} == {
        "a": "decode_failed",
        "b": "decode_failed",
    }
    rest = drain(scheduler)
    assert {output.key for output in rest} == {"c"}
    assert rest[-1].finish is not None
    assert rest[-1].finish.reason == "completed"
    assert_idle(scheduler, runner)


@pytest.mark.parametrize("leaves", ["completed", "cancel", "end", "deadline", "failed"])
def test_failing_free_affects_no_request(
    leaves: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A runner that cannot free a slot is logged; other requests continue."""
    runner, now = FailingRunner(), [0.0]
    scheduler = Scheduler(runner, clock=lambda: now[0])
    free = runner.free

    def fail(slot: int) -> None:
        free(slot)
        raise RuntimeError("secret")

    timeout = {"timeout": 5.0} if leaves == "deadline" else {}
    start(scheduler, "a", 2 if leaves == "completed" else 9, **timeout)
    start(scheduler, "b", 9)
    scheduler.step()
    monkeypatch.setattr(runner, "free", fail)
    if leaves == "failed":
        runner.fail_prefill = ValueError("no")
    elif leaves == "deadline":
        now[0] = 6.0
    elif leaves in ("cancel", "end"):
        getattr(scheduler, leaves)("a")
    start(scheduler, "c", 3)
    outputs = drain(scheduler)
    found = {o.key: o.finish.reason for o in outputs if o.finish is not None}
    bad = {"cancel": "cancelled", "deadline": "failed", "completed": "completed"}
    if leaves == "failed":
        assert found == {"a": "completed", "b": "failed", "c": "completed"}
    else:
        of_a = {"a": bad[leaves]} if leaves in bad else {}
        assert found == {**of_a, "b": "completed", "c": "completed"}
    assert "freeing a KV slot failed: RuntimeError at " in caplog.text
    assert "secret" not in caplog.text
    assert_idle(scheduler, runner)


def test_error_of_a_runner_keeps_no_request_alive(
    scheduler: Scheduler, runner: FailingRunner
) -> None:
    """An exception that is raised again and again keeps neither frames nor prompts."""
    error = ValueError("no")
    for number in range(3):
        runner.fail_prefill = error
        start(scheduler, str(number), 2)
        assert drain(scheduler)[-1].finish is not None
    assert (error.__traceback__, error.__context__) == (None, None)


def test_reuses_a_slot_after_a_failing_free(
    scheduler: Scheduler, runner: FailingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing frees never use up the slots, including cached ones."""
    monkeypatch.setattr(runner, "free", lambda slot: 1 / 0)
    for number in range(9):
        key = str(number)
        start(scheduler, key, 2, session=key if number % 2 else None)
        assert drain(scheduler)[-1].finish is not None
    assert scheduler.status()["slots_free"] == runner.slots


def test_lost_device_is_not_a_failing_free(
    scheduler: Scheduler, runner: FailingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fatal error propagates, also from END."""

    def lose(slot: int) -> None:
        raise DeviceLost("gone")

    monkeypatch.setattr(runner, "free", lose)
    start(scheduler, "a", 9)
    scheduler.step()
    with pytest.raises(DeviceLost):
        scheduler.end("a")


def test_runner_with_too_few_items_fails_the_step(
    scheduler: Scheduler, runner: FailingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner that returns too few tokens is an error, not a shifted batch."""
    start(scheduler, "a", 4)
    scheduler.step()
    monkeypatch.setattr(runner, "decode", lambda slots: [])
    (output,) = scheduler.step()
    assert output.finish is not None
    assert output.finish.code == "decode_failed"
    assert_idle(scheduler, runner)


@pytest.mark.parametrize("where", ["fail_prefill", "fail_decode"])
def test_lost_device_is_not_a_failed_request(
    scheduler: Scheduler, runner: FailingRunner, where: str
) -> None:
    """A fatal error of the process is not reported as a request's own."""
    start(scheduler, "a", 4)
    if where == "fail_decode":
        scheduler.step()
    setattr(runner, where, DeviceLost("gone"))
    with pytest.raises(DeviceLost):
        scheduler.step()


def test_status_is_plain_and_balances(
    scheduler: Scheduler, runner: FailingRunner
) -> None:
    """Counters are plain values and add up at every moment."""
    start(scheduler, "a", 9)
    start(scheduler, "b", 9)
    start(scheduler, "c", 9)
    scheduler.step()
    scheduler.step()
    status = scheduler.status()
    times = status.pop("times")
    assert (times["prefill"]["runs"], times["prefill"]["tokens"]) == (2, 4)
    assert (times["decode"]["runs"], times["decode"]["tokens"]) == (1, 1)
    assert status == {
        "waiting": 1,
        "queued": ["c"],
        "prefilling": 0,
        "running": 2,
        "max_batch": 2,
        "slots": 2,
        "slots_free": 0,
        "slots_cached": 0,
        "slots_evicted": 0,
        "tokens_resumed": 0,
        "kv_used": 7 / 200,
        "runner": {"kv_bytes": 4 * 1024},
        "payload_bytes": PIXELS,
        "steps": 2,
        "tokens": 3,
        "started": 3,
        "rejected": 0,
        "preempted": 0,
        "finished": {"completed": 0, "cancelled": 0, "failed": 0, "ended": 0},
    }


def test_batch_beyond_the_slots_raises(runner: FailingRunner) -> None:
    """A batch that could never fill is a mistake in the configuration."""
    with pytest.raises(ValueError, match="has 2 slots"):
        Scheduler(runner, max_batch=3)


def test_tokens_do_not_depend_on_other_requests(
    runner: FailingRunner, check_alone: Callable[..., list[Any]]
) -> None:
    """A stream is the same alone and among others that come and go."""
    alone = check_alone("a", 6)
    scheduler = Scheduler(runner)
    start(scheduler, "x", 2, input_ids=[9])
    start(scheduler, "a", 6)
    start(scheduler, "y", 3, input_ids=[8, 7])
    items = [i for o in drain(scheduler) if o.key == "a" for i in o.items]
    assert items == alone


@pytest.fixture
def check_alone() -> Callable[..., list[Any]]:
    """Return a function that streams one request alone."""

    def run(key: str, count: int) -> list[Any]:
        scheduler = Scheduler(FailingRunner())
        start(scheduler, key, count)
        return [item for output in drain(scheduler) for item in output.items]

    return run
