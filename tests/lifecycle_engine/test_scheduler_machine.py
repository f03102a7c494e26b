from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from lifecycle_engine.runner import Emitted, Prompt
from lifecycle_engine.scheduler import Scheduler
from lifecycle_engine.sim_runner import SimRunner


class Choking(SimRunner):
    """Fails the prompt with token 255, and any batch when told to."""

    choke = False

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        assert start < stop <= len(prompt.input_ids)
        read = len(self._kv.get(slot, b"")) // 1024
        assert read == start, "a chunk is missing, or a slot was handed out twice"
        emitted = super().prefill(slot, prompt, start, stop)
        if 255 in prompt.input_ids[start:stop]:
            raise ValueError("choked")
        return emitted

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        assert slots, "an empty batch was run"
        assert len(set(slots)) == len(slots)
        if self.choke:
            raise RuntimeError("choked")
        return super().decode(slots)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of starts, cancels, ENDs, steps and failures."""

    keys = Bundle("keys")

    @initialize(slots=st.integers(1, 4), data=st.data())
    def make(self, slots: int, data: st.DataObject) -> None:
        self.runner = Choking(slots=slots, max_length=40, sleep=lambda _: None)
        self.scheduler = Scheduler(
            self.runner,
            max_batch=data.draw(st.integers(1, slots)),
            chunk=data.draw(st.integers(1, 5)),
            clock=lambda: self.now,
        )
        self.now = 0.0
        self.number = 0
        # What each live stream was promised, what it got, and how it must end.
        self.owed: dict[str, int] = {}
        self.got: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.finished: dict[str, str] = {}

    @rule(
        target=keys,
        count=st.integers(1, 5),
        length=st.integers(0, 12),
        bad=st.booleans(),
        size=st.integers(0, 3),
        share=st.sampled_from(["", "a", "b"]),
        timeout=st.none() | st.floats(0.5, 3.0),
    )
    def start(
        self,
        count: int,
        length: int,
        bad: bool,
        size: int,
        share: str,
        timeout: float | None,
    ) -> str:
        self.number += 1
        key = f"k{self.number}"
        ids = [1] * length + [255 if bad else 1]
        request = {"input_ids": ids, "max_tokens": count, "share": share}
        request |= {"timeout": timeout}
        tensors = {"pixels": memoryview(bytes(24 * size)).cast("f")} if size else {}
        self.scheduler.start(key, request, tensors)
        self.owed[key], self.got[key] = count, 0
        return key

    @rule(key=keys)
    def cancel(self, key: str) -> None:
        if key in self.owed and key not in self.finished:
            self.cancelled.add(key)
        self.scheduler.cancel(key)

    @rule(key=consumes(keys))
    def end(self, key: str) -> None:
        self.scheduler.end(key)
        self.owed.pop(key, None)

    @rule()
    def wait(self) -> None:
        self.now += 1.0

    @rule(choke=st.sampled_from([False, False, False, True]))
    def step(self, choke: bool) -> None:
        self.runner.choke = choke
        outputs = self.scheduler.step()
        assert len({output.key for output in outputs}) == len(outputs)
        for output in outputs:
            self.book(output)

    def book(self, output: Any) -> None:
        key = output.key
        assert key in self.owed, "a stream spoke after its END"
        assert key not in self.finished, "a stream spoke after its finish"
        self.got[key] += sum(type(item) is list for item in output.items)
        if output.finish is None:
            assert key not in self.cancelled
            return
        reason = output.finish.reason
        self.finished[key] = reason
        assert (reason == "cancelled") == (key in self.cancelled)
        if reason == "completed":
            assert self.got[key] == self.owed[key]
            assert output.items[-1] == {"finish_reason": "length"}

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        status = self.scheduler.status()
        seated = status["prefilling"] + status["running"]
        live = status["waiting"] + seated
        assert status["started"] == live + sum(status["finished"].values())
        assert status["slots_free"] == status["slots"] - seated
        assert status["running"] <= len(self.runner._kv) <= seated
        untold = set(self.owed) - set(self.finished)
        assert live == len(untold - self.cancelled)
        assert self.scheduler.busy == bool(untold)
        if not status["waiting"] + status["prefilling"]:
            assert status["payload_bytes"] == 0

    def teardown(self) -> None:
        """Whatever happened, a bounded number of steps ends everybody."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(19 * self.number + 1):
            if not self.scheduler.busy:
                break
            self.step(choke=False)
        self.books_balance()
        assert not self.scheduler.busy
        assert set(self.owed) <= set(self.finished)
        assert self.runner.kv_bytes == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
