from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lifecycle_engine.runner import Emitted, Prompt
from lifecycle_engine.scheduler import Scheduler
from lifecycle_engine.sim_runner import SimRunner


class Watched(SimRunner):
    """A simulated model that counts what it reads and checks that slots are its own."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots, max_length=400, sleep=lambda _: None)
        self.read = 0

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        assert not start or len(self._kv[slot]) == start * 1024
        self.read += stop - start
        return super().prefill(slot, prompt, start, stop)

    def resume(self, slot: int, prompt: Prompt) -> int:
        assert slot in self._kv, "there is nothing to go on from"
        return super().resume(slot, prompt)


class Forgetful:
    """A model that cannot go on from a slot."""

    keep: Sequence[str] = ()

    def __init__(self) -> None:
        self._sim = SimRunner(slots=2, max_length=400, sleep=lambda _: None)
        for name in ("slots", "max_length", "vocab_size", "check", "prefill"):
            setattr(self, name, getattr(self._sim, name))
        for name in ("decode", "free", "status", "needs_tensors_until"):
            setattr(self, name, getattr(self._sim, name))


def turn(
    scheduler: Scheduler, ids: list[int], *, session: str | None = "s", **more: Any
) -> list[int]:
    """Run one turn to its end and END it; return its tokens."""
    request = {"input_ids": list(ids), "max_tokens": 4, "session": session} | more
    scheduler.start("turn", request, {})
    tokens: list[int] = []
    while scheduler.busy:
        for output in scheduler.step():
            tokens += [i[0] for i in output.items if type(i) is list]
    scheduler.end("turn")
    return tokens


def kept(scheduler: Scheduler) -> tuple[int, int]:
    """Slots that are kept, and those that hold nothing."""
    status = scheduler.status()
    return status["slots_kept"], status["slots_free"] - status["slots_kept"]


def test_next_turn_reads_what_is_new_alone() -> None:
    """Neither what was asked before nor what was answered is read again, but its last."""
    runner = Watched(2)
    scheduler = Scheduler(runner, chunk=8)
    ids = [1] * 20
    said = turn(scheduler, ids)
    assert (runner.read, kept(scheduler)) == (20, (1, 1))
    longer = ids + said + [2] * 5
    assert turn(scheduler, longer) == turn(Scheduler(Watched(1)), longer, session=None)
    # The last token that was drawn has never been an input.
    assert runner.read == 20 + 1 + 5
    assert scheduler.status()["tokens_resumed"] == 23


def test_turn_tells_first_and_once_what_was_there_already() -> None:
    """A turn that had to begin again, in another slot, tells nothing of it."""
    scheduler = Scheduler(Watched(1), chunk=2, max_batch=1)
    said = [1] * 8 + turn(scheduler, [1] * 8)
    request = {"input_ids": [*said, 2], "max_tokens": 2, "session": "s"}
    scheduler.start("a", request, {})
    items = [i for _ in range(9) for output in scheduler.step() for i in output.items]
    assert items[0] == {"cached_tokens": 11}
    assert [type(item) for item in items] == [dict, list, list, dict]


def test_turn_that_had_to_begin_anew_tells_nothing_of_it() -> None:
    """Its slot went to a share that had none; in the next one it was read whole."""
    scheduler = Scheduler(Watched(2), chunk=2)
    said = [1] * 8 + turn(scheduler, [1] * 8)
    other = {"input_ids": [5], "max_tokens": 20}
    scheduler.start("other", other, {})
    request = {"input_ids": [*said, *([2] * 9)], "max_tokens": 2, "session": "s"}
    scheduler.start("turn", request, {})
    scheduler.step()
    scheduler.start("guest", other | {"share": "guest", "max_tokens": 1}, {})
    told = []
    while scheduler.busy:
        for output in scheduler.step():
            told += [output.items[0]] if output.key == "turn" else []
    assert scheduler.status()["preempted"] == 1
    assert scheduler.status()["tokens_resumed"] > 0
    assert {type(item) for item in told} == {list}


def test_same_prompt_again_reads_its_last_token() -> None:
    """A whole prompt that is there already still needs a pass that draws."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    first = turn(scheduler, [1, 2, 3])
    assert turn(scheduler, [1, 2, 3]) == first
    assert runner.read == 3 + 1


def test_prompt_that_differs_goes_on_from_where_it_is_the_same() -> None:
    """An edited question keeps what was before it, another conversation nothing."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3, 4, 5])
    edited = [1, 2, 3, 9]
    assert turn(scheduler, edited) == turn(Scheduler(Watched(1)), edited, session=None)
    assert runner.read == 5 + 1
    turn(scheduler, [8, 8])
    assert runner.read == 5 + 1 + 2


def test_other_shares_conversation_of_the_same_name_is_another() -> None:
    """What one user said is never there for another one, whatever they call it."""
    runner = Watched(2)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3], share="a")
    turn(scheduler, [1, 2, 3], share="b")
    assert runner.read == 6
    assert kept(scheduler) == (2, 0)


def test_kept_slot_costs_nobody_his_place() -> None:
    """Who needs a slot takes the one that was left alone for longest."""
    runner = Watched(2)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 1, 1], session="old")
    turn(scheduler, [2, 2, 2], session="new")
    turn(scheduler, [1, 1, 1, 1], session="old")
    turn(scheduler, [3], session=None)
    assert scheduler.status()["slots_evicted"] == 1
    assert kept(scheduler) == (1, 1)
    read = runner.read
    turn(scheduler, [1, 1, 1, 1], session="old")
    assert runner.read == read + 1
    turn(scheduler, [2, 2, 2], session="new")
    assert runner.read == read + 4


@pytest.mark.parametrize("leave", ["cancel", "end"])
@pytest.mark.parametrize("steps", range(6))
def test_turn_that_is_left_ends_its_conversation(leave: str, steps: int) -> None:
    """Its slot is free when the call returns; once it was done only the next turn's."""
    scheduler = Scheduler(Watched(1), chunk=2)
    turn(scheduler, [1, 2])
    request = {"input_ids": [1, 2, 3, 4, 5], "max_tokens": 2, "session": "s"}
    scheduler.start("next", request, {})
    done = False
    for _ in range(steps):
        done = done or any(output.finish for output in scheduler.step())
    getattr(scheduler, leave)("next")
    assert done == (steps >= 3)
    # One that waits has not taken the slot yet.
    assert kept(scheduler) == ((0, 1) if 0 < steps < 3 else (1, 0))


def test_last_turn_keeps_nothing() -> None:
    """It goes on from what is there, and is the end of the conversation."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3])
    turn(scheduler, [1, 2, 3, 4], last_turn=True)
    assert runner.read == 4
    assert kept(scheduler) == (0, 1)
    assert runner.kv_bytes == 0


def test_failed_turn_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails, to go on as well, fails that turn alone and frees its slot."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3])

    def fail(slot: int, prompt: Prompt) -> int:
        raise ValueError("no")

    monkeypatch.setattr(runner, "resume", fail)
    scheduler.start("a", {"input_ids": [1], "max_tokens": 1, "session": "s"}, {})
    (output,) = scheduler.step()
    assert output.finish is not None
    assert output.finish.code == "prefill_failed"
    assert kept(scheduler) == (0, 1)
    assert runner.kv_bytes == 0


def test_two_turns_at_a_time_leave_one_slot() -> None:
    """The one that is done last is what the next turn goes on from."""
    scheduler = Scheduler(Watched(2))
    for key, count in (("a", 5), ("b", 2)):
        request = {"input_ids": [1, 2], "max_tokens": count, "session": "s"}
        scheduler.start(key, request, {})
    while scheduler.busy:
        scheduler.step()
    assert kept(scheduler) == (1, 1)


def test_runner_that_cannot_resume_keeps_no_slot() -> None:
    """A conversation is then a number of requests; nothing else changes."""
    scheduler = Scheduler(Forgetful())
    said = turn(scheduler, [1, 2])
    assert turn(scheduler, [1, 2]) == said
    assert kept(scheduler) == (0, 2)


def alone(ids: list[int], count: int) -> list[int]:
    """What a prompt streams that is read whole, in a slot of its own."""
    return turn(Scheduler(Watched(1)), ids, session=None, max_tokens=count)


@pytest.mark.parametrize("seed", range(20))
def test_conversations_of_any_order_stream_as_if_they_were_read_whole(
    seed: int,
) -> None:
    """Turns, edits, cancels and ENDs at any step: tokens and books are right."""
    rng = random.Random(seed)
    runner = Watched(rng.randint(1, 4))
    scheduler = Scheduler(runner, chunk=rng.randint(1, 8))
    said: dict[tuple[str, str], list[int]] = {}
    live: dict[str, tuple[tuple[str, str], list[int], list[int], list[int]]] = {}
    for number in range(60):
        who = rng.choice("ab"), rng.choice("xyz")
        ids = said.get(who, [])[: rng.choice([200, 200, rng.randint(0, 30)])]
        ids = [*ids[:120], *(rng.randint(0, 3) for _ in range(rng.randint(1, 12)))]
        count, key = rng.randint(1, 6), f"k{number}"
        request = {"input_ids": ids, "max_tokens": count, "share": who[0]}
        request |= {"session": who[1], "last_turn": rng.random() < 0.1}
        scheduler.start(key, request, {})
        live[key] = who, ids, alone(ids, count), []
        for _ in range(rng.randint(0, 12)):
            if live and rng.random() < 0.05:
                key = rng.choice(list(live))
                rng.choice([scheduler.cancel, scheduler.end])(key)
                scheduler.end(key)
                del live[key]
            for output in scheduler.step():
                who, ids, wanted, got = live[output.key]
                got += [i[0] for i in output.items if type(i) is list]
                assert got == wanted[: len(got)]
                if output.finish is not None:
                    assert got == wanted
                    said[who] = [*ids, *got]
                    scheduler.end(output.key)
                    del live[output.key]
            status = scheduler.status()
            seated = status["prefilling"] + status["running"]
            assert status["slots_kept"] <= status["slots_free"]
            assert status["slots_free"] == runner.slots - seated
            assert len(runner._kv) <= seated + status["slots_kept"]
    assert scheduler.status()["tokens_resumed"] > 0
