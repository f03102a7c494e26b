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
from more_examples import TIMES

from lifecycle_engine import Emitted, Prompt, Scheduler, SimRunner


class FailingRunner(SimRunner):
    """Fails the prompt with token 255, and any batch on demand."""

    choke = False

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        assert start < stop <= len(prompt.input_ids)
        if start:
            read = len(self._kv[slot]) // 1024
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


def whole(request: dict[str, Any], pixels: bytes) -> list[int]:
    """The stream of a request that is prefilled at once, alone, in a new slot."""
    runner = SimRunner(slots=1, max_length=60, sleep=lambda _: None)
    tensors = {"pixels": memoryview(pixels).cast("f")} if pixels else {}
    ids = request["input_ids"]
    emitted = runner.prefill(0, Prompt(ids, tensors), 0, len(ids))
    assert emitted is not None
    tokens = [emitted.item[0]]
    while len(tokens) < request["max_tokens"]:
        tokens += runner.decode([0])[0].item
    return tokens


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of starts, cancels, ENDs, steps and failures, in conversations or not."""

    keys = Bundle("keys")

    @initialize(slots=st.integers(1, 4), data=st.data())
    def make(self, slots: int, data: st.DataObject) -> None:
        self.runner = FailingRunner(slots=slots, max_length=60, sleep=lambda _: None)
        self.scheduler = Scheduler(
            self.runner,
            max_batch=data.draw(st.integers(1, slots)),
            chunk=data.draw(st.integers(1, 5)),
            clock=lambda: self.now,
        )
        self.now = 0.0
        self.number = 0
        # What each live stream was promised, what it got, and how it must end.
        self.owed: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        # The last prompt of each conversation, and of which one each stream is.
        self.said: dict[str, list[int]] = {}
        self.turns: dict[str, str] = {}
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
        session=st.sampled_from([None, None, "x", "y", "z"]),
        last=st.booleans(),
        anew=st.integers(0, 99),
    )
    def start(
        self,
        count: int,
        length: int,
        bad: bool,
        size: int,
        share: str,
        timeout: float | None,
        session: str | None,
        last: bool,
        anew: int,
    ) -> str:
        self.number += 1
        key = f"k{self.number}"
        ids = [1] * length + [255 if bad else 1]
        if session is not None:
            before = self.said.get(session, [])[:anew]
            ids = [*(before if len(before) < 16 else []), *ids]
            ids = [2 if token == 255 and not bad else token for token in ids]
            self.said[session], self.turns[key] = ids, session
        request = {"input_ids": ids, "max_tokens": count, "tenant": share}
        request |= {"timeout": timeout, "session": session, "last_turn": last}
        tensors = {"pixels": memoryview(bytes(24 * size)).cast("f")} if size else {}
        self.scheduler.start(key, request, tensors)
        self.owed[key], self.got[key] = whole(request, bytes(24 * size)), []
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
        self.got[key] += [i[0] for i in output.items if type(i) is list]
        assert self.got[key] == self.owed[key][: len(self.got[key])]
        if output.finish is None:
            assert key not in self.cancelled
            return
        reason = output.finish.reason
        self.finished[key] = reason
        assert (reason == "cancelled") == (key in self.cancelled)
        if reason == "completed":
            assert self.got[key] == self.owed[key]
            if key in self.turns:
                session = self.turns[key]
                self.said[session] = [*self.said[session], *self.got[key]]
            assert output.items[-1] == {"finish_reason": "length"}

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        status = self.scheduler.status()
        seated = status["prefilling"] + status["running"]
        live = status["waiting"] + seated
        assert status["started"] == live + sum(status["finished"].values())
        kept = status["slots_cached"]
        assert kept <= status["slots_free"] == status["slots"] - seated
        held = len(self.runner._kv)
        assert status["running"] + kept <= held <= seated + kept
        untold = set(self.owed) - set(self.finished)
        assert live == len(untold - self.cancelled)
        assert self.scheduler.busy == bool(untold)
        if not status["waiting"] + status["prefilling"]:
            assert status["payload_bytes"] == 0

    def teardown(self) -> None:
        """Whatever happened, a bounded number of steps ends everybody."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(36 * self.number + 1):
            if not self.scheduler.busy:
                break
            self.step(choke=False)
        self.books_balance()
        assert not self.scheduler.busy
        assert set(self.owed) <= set(self.finished)
        assert len(self.runner._kv) == self.scheduler.status()["slots_cached"]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=TIMES * 100, stateful_step_count=40, deadline=None
)
