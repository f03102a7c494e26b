from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lifecycle_engine import Emitted, Prompt, Scheduler, SimRunner


class Watched(SimRunner):
    """A simulated model that counts prefilled tokens and checks its slots."""

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
        assert slot in self._kv, "the slot is empty"
        return super().resume(slot, prompt)


class NotResumable:
    """A model that cannot resume from a slot."""

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
    """Return the numbers of cached and of empty slots."""
    status = scheduler.status()
    return status["slots_cached"], status["slots_free"] - status["slots_cached"]


def test_next_turn_prefills_only_new_tokens() -> None:
    """Earlier turns are not prefilled again, except for the last token."""
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


def test_turn_reports_cached_tokens_once_and_first() -> None:
    """A resumed turn streams its cached tokens before the first item."""
    scheduler = Scheduler(Watched(1), chunk=2, max_batch=1)
    said = [1] * 8 + turn(scheduler, [1] * 8)
    request = {"input_ids": [*said, 2], "max_tokens": 2, "session": "s"}
    scheduler.start("a", request, {})
    items = [i for _ in range(9) for output in scheduler.step() for i in output.items]
    assert items[0] == {"cached_tokens": 11}
    assert [type(item) for item in items] == [dict, list, list, dict]


def test_preempted_turn_reports_no_cached_tokens() -> None:
    """Its slot went to another tenant; in the next one it was prefilled whole."""
    scheduler = Scheduler(Watched(2), chunk=2)
    said = [1] * 8 + turn(scheduler, [1] * 8)
    other = {"input_ids": [5], "max_tokens": 20}
    scheduler.start("other", other, {})
    request = {"input_ids": [*said, *([2] * 9)], "max_tokens": 2, "session": "s"}
    scheduler.start("turn", request, {})
    scheduler.step()
    scheduler.start("guest", other | {"tenant": "guest", "max_tokens": 1}, {})
    items = []
    while scheduler.busy:
        for output in scheduler.step():
            items += [output.items[0]] if output.key == "turn" else []
    assert scheduler.status()["preempted"] == 1
    assert scheduler.status()["tokens_resumed"] > 0
    assert {type(item) for item in items} == {list}


def test_same_prompt_prefills_its_last_token() -> None:
    """A fully cached prompt still needs a pass that yields a token."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    first = turn(scheduler, [1, 2, 3])
    assert turn(scheduler, [1, 2, 3]) == first
    assert runner.read == 3 + 1


def test_changed_prompt_resumes_from_the_common_prefix() -> None:
    """An edited question keeps the turns before it, another conversation nothing."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3, 4, 5])
    edited = [1, 2, 3, 9]
    assert turn(scheduler, edited) == turn(Scheduler(Watched(1)), edited, session=None)
    assert runner.read == 5 + 1
    turn(scheduler, [8, 8])
    assert runner.read == 5 + 1 + 2


def test_conversations_of_two_tenants_are_separate() -> None:
    """Tenants never share a cached slot, even under the same session name."""
    runner = Watched(2)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3], tenant="a")
    turn(scheduler, [1, 2, 3], tenant="b")
    assert runner.read == 6
    assert kept(scheduler) == (2, 0)


def test_conversations_of_two_clients_are_separate() -> None:
    """A tenant and its conversations are those of one client, whatever their names."""
    runner = Watched(2)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3], client="a", tenant="user")
    turn(scheduler, [1, 2, 3], client="b", tenant="user")
    assert runner.read == 6
    assert kept(scheduler) == (2, 0)


def test_cached_slot_delays_no_request() -> None:
    """A new request evicts the least recently used slot."""
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
def test_cancelled_turn_ends_its_conversation(leave: str, steps: int) -> None:
    """Its slot is free when the call returns, unless the turn was complete."""
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


def test_last_turn_is_not_cached() -> None:
    """It resumes from the cached slot, and its own slot is freed."""
    runner = Watched(1)
    scheduler = Scheduler(runner)
    turn(scheduler, [1, 2, 3])
    turn(scheduler, [1, 2, 3, 4], last_turn=True)
    assert runner.read == 4
    assert kept(scheduler) == (0, 1)
    assert runner.kv_bytes == 0


def test_failed_turn_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure, also of a resume, fails only that turn and frees its slot."""
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


def test_two_concurrent_turns_leave_one_cached_slot() -> None:
    """The next turn resumes from the turn that finished last."""
    scheduler = Scheduler(Watched(2))
    for key, count in (("a", 5), ("b", 2)):
        request = {"input_ids": [1, 2], "max_tokens": count, "session": "s"}
        scheduler.start(key, request, {})
    while scheduler.busy:
        scheduler.step()
    assert kept(scheduler) == (1, 1)


def test_runner_without_resume_caches_no_slot() -> None:
    """Each turn is then an independent request."""
    scheduler = Scheduler(NotResumable())
    said = turn(scheduler, [1, 2])
    assert turn(scheduler, [1, 2]) == said
    assert kept(scheduler) == (0, 2)


def alone(ids: list[int], count: int) -> list[int]:
    """Return the stream of a prompt that is prefilled whole, in a new slot."""
    return turn(Scheduler(Watched(1)), ids, session=None, max_tokens=count)


@pytest.mark.parametrize("seed", range(20))
def test_conversations_in_any_order_stream_as_if_prefilled_whole(
    seed: int,
) -> None:
    """Turns, edits, cancels and ENDs at any step: tokens and counters are right."""
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
        request = {"input_ids": ids, "max_tokens": count, "tenant": who[0]}
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
            assert status["slots_cached"] <= status["slots_free"]
            assert status["slots_free"] == runner.slots - seated
            assert len(runner._kv) <= seated + status["slots_cached"]
    assert scheduler.status()["tokens_resumed"] > 0
