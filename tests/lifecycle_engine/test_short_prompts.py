"""Short prompts are prefilled together, and each is as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lifecycle_engine import Prompt, Scheduler, SimRunner

CHUNK = 512


class Together(SimRunner):
    """A simulated model that prefills several prompts in one pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sleep=lambda _: None, **options)
        self.passes: list[list[int]] = []
        self.breaks = False
        self.choked: set[int] = set()
        self.short = 0

    def prefill_together(self, chunks: Sequence[Any]) -> list[Any]:
        self.passes.append([each.stop for each in chunks])
        if self.breaks:
            raise RuntimeError("no room")
        made: list[Any] = []
        for each in chunks:
            if each.prompt.input_ids[0] in self.choked:
                made.append(ValueError("choked"))
            else:
                made.append(self.prefill(*each))
        return made[self.short :]

    def prefill(self, slot: int, prompt: Prompt, start: int, stop: int) -> Any:
        if self.breaks and prompt.input_ids[0] in self.choked:
            raise ValueError("choked")
        return super().prefill(slot, prompt, start, stop)


def start(scheduler: Scheduler, lengths: Sequence[int]) -> None:
    for at, length in enumerate(lengths):
        ids = [at, *[7] * (length - 1)]
        scheduler.start(str(at), {"input_ids": ids, "max_tokens": 3}, {})


def first_steps(scheduler: Scheduler) -> dict[str, int]:
    """Run to the end; return in which step each stream had its first item."""
    first: dict[str, int] = {}
    step = 0
    while scheduler.busy:
        step += 1
        for output in scheduler.step():
            assert output.finish is None or output.finish.reason == "completed"
            first.setdefault(output.key, step)
    return first


def test_many_short_prompts_take_few_steps() -> None:
    """128 at once, of up to 32 tokens: each has its first token within eight steps."""
    runner = Together(slots=128)
    scheduler = Scheduler(runner)
    start(scheduler, [4 + at % 29 for at in range(128)])
    first = first_steps(scheduler)
    assert len(first) == 128
    assert max(first.values()) <= 8
    for stops in runner.passes:
        assert len(stops) * max(stops) <= CHUNK


def test_long_prompts_run_alone() -> None:
    """What is padded never exceeds a chunk, whatever comes together."""
    runner = Together(slots=64, max_length=2000)
    scheduler = Scheduler(runner, chunk=100)
    numbers = random.Random(4)
    lengths = [numbers.choice([1, 5, 20, 51, 99, 100, 101, 700]) for _ in range(60)]
    start(scheduler, lengths)
    assert len(first_steps(scheduler)) == 60
    assert any(len(stops) > 3 for stops in runner.passes)
    assert all(len(stops) * max(stops) <= 100 for stops in runner.passes)


def test_runner_without_it_gets_one_prompt_a_step() -> None:
    """Whose passes may have a price of their own."""
    scheduler = Scheduler(SimRunner(slots=9, sleep=lambda _: None))
    start(scheduler, [3] * 9)
    assert sorted(first_steps(scheduler).values()) == list(range(1, 10))


@pytest.mark.parametrize("breaks", [False, True])
def test_prompt_that_fails_fails_alone(breaks: bool) -> None:
    """Whether the pass says which one it was, or fails as a whole."""
    runner = Together(slots=8)
    runner.choked, runner.breaks = {2, 5}, breaks
    scheduler = Scheduler(runner)
    start(scheduler, [6] * 8)
    ends: dict[str, str] = {}
    while scheduler.busy:
        for output in scheduler.step():
            if output.finish is not None:
                ends[output.key] = output.finish.reason
    assert {key for key, how in ends.items() if how == "failed"} == {"2", "5"}
    assert list(ends.values()).count("completed") == 6
    assert scheduler.status()["slots_free"] == 8


def test_counts_no_tokens_of_a_pass_that_failed() -> None:
    """They are counted once, where each prompt runs alone."""
    runner = Together(slots=8)
    runner.breaks = True
    scheduler = Scheduler(runner)
    start(scheduler, [6] * 8)
    first_steps(scheduler)
    assert scheduler.status()["times"]["prefill"]["tokens"] == 6 * 8


def test_wrong_number_of_items_runs_each_alone() -> None:
    """A runner that breaks its protocol loses the pass, and no request."""
    runner = Together(slots=4)
    runner.short = 1
    scheduler = Scheduler(runner)
    start(scheduler, [6] * 4)
    assert len(first_steps(scheduler)) == 4


FAMILIES = ("llama", "qwen3", "llava", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [None, "draft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_tokens(
    kits: Callable[[str], Any],
    prompts: Callable[[str], list[tuple[Any, list[int]]]],
    family: str,
    speculative: str | None,
) -> None:
    """Texts and pictures together, all at once: the tokens of `generate`."""
    kit = kits(family)
    options: dict[str, Any] = {}
    if speculative is not None:
        options["speculative"] = f"draft={kits('qwen3').folder}"
    runner = kit.runner(slots=12, max_length=1024, **options)
    widths = []
    run = runner.forward.run

    def counted(chunks: Any, images: Any) -> Any:
        widths.append(len(chunks))
        return run(chunks, images)

    runner.forward.run = counted
    scheduler = Scheduler(runner, chunk=1000)
    wanted = {}
    for turn in range(2):
        for at, (prepared, tokens) in enumerate(prompts(family)):
            key = f"{turn}-{at}"
            wanted[key] = tokens
            scheduler.start(key, prepared.request, dict(prepared.tensors))
    got: dict[str, list[int]] = {key: [] for key in wanted}
    while scheduler.busy:
        for output in scheduler.step():
            for item in output.items:
                got[output.key] += item if type(item) is list else []
    assert got == wanted
    assert max(widths) > 2
    assert not any(layer.keys[:-1].any() for layer in runner.cache.layers)


@pytest.mark.slow
def test_windows_and_samplers_of_each_prompt(kits: Callable[[str], Any]) -> None:
    """Seeds and log probabilities are those of a prompt alone."""
    kit = kits("qwen3")
    requests = [
        kit.prepare("see " * n, logprobs=1, temperature=0.9, seed=n).request
        for n in range(1, 9)
    ]

    def run(chunk: int, runner: Any) -> list[list[Any]]:
        scheduler = Scheduler(runner, chunk=chunk)
        items: dict[str, list[Any]] = {}
        for at, request in enumerate(requests):
            items[str(at)] = []
            scheduler.start(str(at), request, {})
        while scheduler.busy:
            for output in scheduler.step():
                items[output.key] += output.items
        return list(items.values())

    together, alone = run(900, kit.runner(slots=8)), run(1, kit.runner(slots=8))
    for mine, theirs in zip(together, alone, strict=True):
        for each, other in zip(mine, theirs, strict=True):
            if "token" in each:
                assert each["token"] == other["token"]
                assert each["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
