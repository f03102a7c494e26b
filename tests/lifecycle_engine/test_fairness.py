from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lifecycle_engine import Emitted, Prompt, Scheduler, SimRunner

PIXELS = 24


class Late(SimRunner):
    """A simulated model that needs its pixels for half of the prompt."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots, max_length=400, sleep=lambda _: None)
        self.prompts: dict[int, Prompt] = {}

    def needs_tensors_until(self, prompt: Prompt) -> int:
        return len(prompt.input_ids) // 2 if prompt.tensors else 0

    def prefill(
        self, slot: int, prompt: Prompt, start: int, stop: int
    ) -> Emitted | None:
        assert not start or len(self._kv[slot]) == start * 1024
        if not start:
            assert set(prompt.tensors) <= {"pixels"}, (
                "what was made of it is still there"
            )
        emitted = super().prefill(slot, prompt, start, stop)
        if not start:
            prompt.tensors["made"] = {"of": slot}
        self.prompts[slot] = prompt
        return emitted

    def decode(self, slots: Sequence[int]) -> list[Emitted]:
        assert not any(self.prompts[slot].tensors for slot in slots)
        return super().decode(slots)


def start(scheduler: Scheduler, key: str, *, tenant: str, length: int = 40) -> None:
    """Start a request with a pixel."""
    request = {"input_ids": [1] * length, "max_tokens": 3, "tenant": tenant}
    scheduler.start(key, request, {"pixels": memoryview(bytes(PIXELS)).cast("f")})


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("slots", "most"), [(2, 2), (8, 7), (16, 14)])
def test_keeps_slots_from_a_client_that_has_company(slots: int, most: int) -> None:
    """A flood, under any number of tenants, leaves a slot to clients seen lately."""
    clock, runner = Clock(), Late(slots)
    scheduler = Scheduler(runner, clock=clock)

    def flood(number: int) -> int:
        for i in range(20):
            request = {"input_ids": [1], "max_tokens": 9, "tenant": f"{number}-{i}"}
            scheduler.start(f"{number}-{i}", {**request, "client": "flood"}, {})
        for _ in range(2):
            scheduler.step()
        status = scheduler.status()
        return int(status["prefilling"] + status["running"])

    def end(number: int) -> None:
        for i in range(20):
            scheduler.end(f"{number}-{i}")

    assert flood(1) == slots
    end(1)
    scheduler.start("other", {"input_ids": [1], "max_tokens": 1, "client": "other"}, {})
    while scheduler.busy:
        scheduler.step()
    clock.now += 59.9
    assert flood(2) == most
    scheduler.start("o2", {"input_ids": [1], "max_tokens": 2, "client": "other"}, {})
    scheduler.step()
    kept = slots - most
    assert scheduler.status()["waiting"] == 20 - most + (not kept)
    end(2)
    scheduler.end("o2")
    clock.now += 60.0
    assert flood(3) == slots
    end(3)
    assert runner.kv_bytes == 0


def test_keeps_slots_from_a_client_beside_one_that_has_been_there_for_long() -> None:
    """A client whose request runs is there, though it started minutes ago."""
    clock = Clock()
    scheduler = Scheduler(Late(16), clock=clock)
    request = {"input_ids": [1], "max_tokens": 90}
    scheduler.start("other", {**request, "client": "other"}, {})
    scheduler.step()
    clock.now += 600.0
    for i in range(20):
        scheduler.start(f"{i}", {**request, "client": "flood"}, {})
    scheduler.step()
    assert scheduler.status()["waiting"] == 20 - 14
    scheduler.end("other")
    clock.now += 60.0
    scheduler.step()
    assert scheduler.status()["waiting"] == 20 - 16


def test_flood_of_one_tenant_gives_a_slot_to_another_at_once() -> None:
    """A tenant with two long prompts keeps one slot; its other prompt restarts later."""
    runner = Late(2)
    scheduler = Scheduler(runner, chunk=4)
    start(scheduler, "a1", tenant="a")
    start(scheduler, "a2", tenant="a")
    start(scheduler, "a3", tenant="a")
    for _ in range(3):
        scheduler.step()
    payload = scheduler.status()["payload_bytes"]
    start(scheduler, "b", tenant="b", length=4)
    keys: list[str] = []
    while scheduler.busy:
        keys += [output.key for output in scheduler.step() if output.finish]
    assert keys == ["b", "a1", "a2", "a3"]
    status = scheduler.status()
    assert status["preempted"] == 1
    assert payload == 3 * PIXELS
    assert status["payload_bytes"] == 0
    assert status["slots_free"] == 2
    assert runner.kv_bytes == 0


def test_preempted_prompt_can_be_cancelled() -> None:
    """Cancelled while it is queued again, it holds nothing and finishes once."""
    scheduler = Scheduler(Late(2), chunk=4)
    for key in ("a1", "a2"):
        start(scheduler, key, tenant="a")
    scheduler.step()
    start(scheduler, "b", tenant="b")
    scheduler.step()
    assert scheduler.status()["preempted"] == 1
    for key in ("a1", "a2", "b"):
        scheduler.cancel(key)
    finished = [output.key for output in scheduler.step()]
    assert sorted(finished) == ["a1", "a2", "b"]
    status = scheduler.status()
    assert status["payload_bytes"] == 0
    assert (status["slots_free"], status["waiting"]) == (2, 0)


@pytest.mark.parametrize("seed", range(20))
def test_preemption_at_any_step_changes_no_stream(seed: int) -> None:
    """Random tenants: every stream is what it is alone, and none starves."""
    rng = random.Random(seed)
    runner = Late(rng.randint(2, 4))
    scheduler = Scheduler(runner, chunk=rng.randint(1, 6))
    live: dict[str, tuple[list[int], list[int]]] = {}
    number = 0
    while number < 60 or scheduler.busy:
        if number < 60 and rng.random() < 0.3:
            number += 1
            ids = [rng.randint(0, 9) for _ in range(rng.randint(1, 40))]
            pixels = rng.randbytes(rng.choice([0, 24, 48]))
            request: dict[str, Any] = {
                "input_ids": ids,
                "max_tokens": rng.randint(1, 5),
            }
            tenant = rng.choice(["a", "a", "a", "b", "c", "d"])
            tensors = {"pixels": memoryview(pixels).cast("f")} if pixels else {}
            live[f"k{number}"] = alone(request, pixels), []
            scheduler.start(f"k{number}", request | {"tenant": tenant}, tensors)
        for output in scheduler.step():
            wanted, got = live[output.key]
            got += [i[0] for i in output.items if type(i) is list]
            assert got == wanted[: len(got)]
            if output.finish is not None:
                assert got == wanted
                del live[output.key]
    assert not live
    assert scheduler.status()["preempted"] > 0
    assert scheduler.status()["payload_bytes"] == 0
    assert runner.kv_bytes == 0


def alone(request: dict[str, Any], pixels: bytes) -> list[int]:
    """Return what a request streams alone."""
    scheduler = Scheduler(SimRunner(slots=1, max_length=400, sleep=lambda _: None))
    tensors = {"pixels": memoryview(pixels).cast("f")} if pixels else {}
    scheduler.start("only", request, tensors)
    tokens: list[int] = []
    while scheduler.busy:
        for output in scheduler.step():
            tokens += [i[0] for i in output.items if type(i) is list]
    return tokens
