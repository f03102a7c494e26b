"""Speculative decoding: drafts change how fast tokens come, and no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_kit import (  # noqa: E402
    COUNT,
    Drafts,
    Kit,
    find_continuation,
    load_model,
    tokens_of,
)

from lifecycle_engine import (  # noqa: E402
    Emitted,
    Prompt,
    Sampling,
    Scheduler,
    SimRunner,
)

FAMILIES = ("llama", "qwen3", "llava", "qwen2_5_vl", "qwen3_vl")


class Guesses(Drafts):
    """Drafts that are right up to a random place; stands in for a good draft model."""

    def __init__(self, answers: list[list[int]], seed: int = 1) -> None:
        self.answers, self.random = answers, random.Random(seed)
        self.right = 0.7
        self.tokens = 4

    def propose(
        self, slots: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        drafts = []
        for ids in texts:
            answer = next(
                (each for each in self.answers if list(ids) == each[: len(ids)]),
                [],
            )
            count = self.random.randrange(self.tokens + 1)
            draft = answer[len(ids) : len(ids) + count]
            drafts.append(
                [
                    token if self.random.random() < self.right else token ^ 1
                    for token in draft
                ]
            )
        return drafts


def guessing(
    kit: Kit, prepared: list[Any], wanted: list[list[int]], **options: Any
) -> Any:
    """A runner with good drafts for these requests."""
    runner = kit.runner(speculative="ngram", draft_tokens=4, **options)
    runner._drafts = Guesses(
        [
            [*each.request["input_ids"], *tokens]
            for each, tokens in zip(prepared, wanted, strict=True)
        ]
    )
    return runner


def serve(scheduler: Scheduler, requests: dict[str, Any]) -> dict[str, list[int]]:
    """Run all of them together, each joining a step after the one before it."""
    tokens: dict[str, list[int]] = {}
    waiting = list(requests.items())
    while waiting or scheduler.busy:
        if waiting:
            key, (request, tensors) = waiting.pop(0)
            tokens[key] = []
            scheduler.start(key, request, dict(tensors))
        for output in scheduler.step():
            tokens[output.key] += tokens_of(output)
    return tokens


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another small text model with the same vocabulary."""
    return Kit(tmp_path_factory.mktemp("draft"), "qwen3").folder


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["off", "fake"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_tokens(
    prompts: Callable[[str], list[tuple[Any, list[int]]]],
    kits: Callable[[str], Kit],
    draft: Path,
    family: str,
    graphs: Any,
) -> None:
    """With good, poor and no drafts, in any chunks and batches: those of `generate`."""
    kit = kits(family)
    prepared = [each for each, _ in prompts(family)]
    wanted = [tokens for _, tokens in prompts(family)]
    for chunk, options in (
        (512, {"speculative": "ngram"}),
        (7, {"speculative": f"draft={draft}", "draft_tokens": 3}),
        (64, {"speculative": f"draft={kit.folder}"} if not kit.images else {}),
    ):
        assert kit.serve(prepared, chunk=chunk, graphs=graphs, **options) == wanted
    runner = guessing(kit, prepared, wanted, graphs=graphs)
    scheduler = Scheduler(runner, chunk=33)
    requests = {str(at): (e.request, e.tensors) for at, e in enumerate(prepared)}
    assert list(serve(scheduler, requests).values()) == wanted
    report = runner.status()
    assert 0 < report["draft_tokens_accepted"] < report["draft_tokens"]


def test_model_that_drafts_for_itself_is_always_right(
    kits: Callable[[str], Kit], prompts: Callable[[str], Any]
) -> None:
    """Chunks and accepted runs leave both models with the same text."""
    kit = kits("qwen3")
    for chunk in (5, 512):
        runner = kit.runner(speculative=f"draft={kit.folder}", draft_tokens=3)
        scheduler = Scheduler(runner, chunk=chunk)
        prepared, wanted = zip(*prompts("qwen3"), strict=True)
        requests = {str(at): (e.request, {}) for at, e in enumerate(prepared)}
        assert list(serve(scheduler, requests).values()) == list(wanted)
        report = runner.status()
        # The last step of a request may have drafts that it has no use for.
        assert report["draft_tokens_accepted"] >= report["draft_tokens"] - 4 * 2
        assert scheduler.status()["times"]["decode"]["runs"] < COUNT


@pytest.mark.parametrize("speculative", ["ngram", "guesses"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.2, "seed": 6, "top_p": 0.9, "top_k": 40},
        {"logprobs": 2},
    ],
)
def test_sampled_tokens_stay_the_same(
    kits: Callable[[str], Kit], speculative: str, sampling: dict[str, Any]
) -> None:
    """A seed yields the tokens, and their probabilities, that it yields alone."""
    kit = kits("qwen3")
    each = kit.prepare("Tell me of a heap. " * 4)
    request = each.request | sampling | {"max_tokens": 40}
    plain = items_of(Scheduler(kit.runner()), request)
    runner = kit.runner(speculative="ngram")
    if speculative == "guesses":
        runner = guessing(kit, [each], [[item_token(item) for item in plain]])
    made = items_of(Scheduler(runner), request)
    assert [item_token(item) for item in made] == [item_token(item) for item in plain]
    for mine, theirs in zip(made, plain, strict=True):
        if type(mine) is dict:
            assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
    if speculative == "guesses":
        assert runner.status()["draft_tokens_accepted"] > 3


def items_of(scheduler: Scheduler, request: dict[str, Any]) -> list[Any]:
    scheduler.start("a", request, {})
    items = [item for _ in steps(scheduler) for item in _]
    assert items.pop() == {"finish_reason": "length"}
    return items


def steps(scheduler: Scheduler) -> Iterator[list[Any]]:
    while scheduler.busy:
        for output in scheduler.step():
            yield output.items


def item_token(item: Any) -> int:
    return item["token"] if type(item) is dict else item[0]


@pytest.mark.parametrize("rules", [{"repetition_penalty": 1.3}, {"min_new_tokens": 9}])
def test_generation_rules_hold_inside_a_run(
    tmp_path: Path, kits: Callable[[str], Kit], rules: dict[str, Any]
) -> None:
    """Each token of a run counts for the penalty and the length of the next."""
    kit = kits("qwen3").copied(tmp_path / "rules", generation_config=rules)
    prepared = [kit.prepare("la la la la la la la la"), kit.prepare("Hello there.")]
    wanted = [kit.generate(each) for each in prepared]
    scheduler = Scheduler(guessing(kit, prepared, wanted))
    requests = {str(at): (e.request, {}) for at, e in enumerate(prepared)}
    assert list(serve(scheduler, requests).values()) == wanted


def test_run_ends_at_a_limit_and_at_a_stop_token(kits: Callable[[str], Kit]) -> None:
    """Tokens of a run beyond the last one are not part of the answer."""
    kit = kits("qwen3")
    each = kit.prepare("Write a long story about a heap.", ignore_eos=True)
    wanted = kit.generate(each, 30)
    for count in range(1, 12):
        runner = guessing(kit, [each], [wanted])
        runner._drafts.right = 1.0
        scheduler = Scheduler(runner)
        request = each.request | {"max_tokens": count}
        assert serve(scheduler, {"a": (request, {})})["a"] == wanted[:count]
        stop = wanted[count]
        if stop not in wanted[:count]:
            request = each.request | {"max_tokens": 25, "stop_ids": [stop]}
            assert serve(scheduler, {"a": (request, {})})["a"] == wanted[:count]
        assert scheduler.status()["slots_free"] == 4


def test_last_position_of_a_slot_is_usable(kits: Callable[[str], Kit]) -> None:
    """No draft is written beyond the end of a row."""
    kit = kits("qwen3")
    each = kit.prepare("Hello there.")
    room = len(each.request["input_ids"]) + COUNT
    wanted = kit.generate(each)
    for speculative in ("ngram", f"draft={kit.folder}"):
        runner = kit.runner(speculative=speculative, max_length=room, slots=1)
        for _ in range(2):
            assert serve(Scheduler(runner), {"a": (each.request, {})})["a"] == wanted


@pytest.mark.parametrize("speculative", ["ngram", "draft"])
def test_conversation_resumes_with_drafts(
    kits: Callable[[str], Kit], speculative: str
) -> None:
    """The next turn starts from the accepted tokens, and from none that was rejected."""
    kit = kits("llama")
    name = "ngram" if speculative == "ngram" else f"draft={kit.folder}"
    runner = kit.runner(speculative=name, slots=2)
    scheduler, plain = Scheduler(runner, chunk=9), Scheduler(kit.runner(), chunk=9)
    ids = kit.prepare("la la la la la la la").request["input_ids"]
    for turn in range(4):
        request = {"input_ids": ids, "max_tokens": 7, "session": "s", "stop_ids": []}
        mine = serve(scheduler, {"a": (request, {})})["a"]
        del request["session"]
        assert mine == serve(plain, {"a": (request, {})})["a"], turn
        ids = [*ids, *mine, *ids[:5]]
    assert scheduler.status()["tokens_resumed"] > 20


def test_cancelled_requests_leave_nothing(kits: Callable[[str], Kit]) -> None:
    """At any step: rows are zeroed, of drafts as well, and others keep their tokens."""
    kit = kits("qwen3")
    numbers = random.Random(3)
    prepared = [kit.prepare("la " * n) for n in (3, 9, 20, 40)]
    wanted = [kit.generate(each) for each in prepared]
    runner = kit.runner(speculative=f"draft={kit.folder}", draft_tokens=3, slots=3)
    scheduler = Scheduler(runner, chunk=8)
    tokens: dict[str, list[int]] = {}
    cancelled = set()
    for n in range(60):
        key = f"{n % 4}-{n}"
        tokens[key] = []
        scheduler.start(key, prepared[n % 4].request, {})
        for _ in range(numbers.randrange(6)):
            for output in scheduler.step():
                tokens[output.key] += tokens_of(output)
        if numbers.random() < 0.4:
            victim = numbers.choice(list(tokens))
            cancelled.add(victim)
            scheduler.end(victim)
    while scheduler.busy:
        for output in scheduler.step():
            tokens[output.key] += tokens_of(output)
    for key, made in tokens.items():
        answer = wanted[int(key[0])]
        assert made == (answer[: len(made)] if key in cancelled else answer)
    assert scheduler.status()["slots_free"] == 3
    for cache in (runner.cache, runner._drafts._cache):
        for layer in cache.layers:
            assert not layer.keys[:-1].any()
            assert not layer.values[:-1].any()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
def test_spoilt_drafts_fail_nobody(
    kits: Callable[[str], Kit], sampling: dict[str, Any]
) -> None:
    """A token after a draft that has no finite logits is generated again, alone.

    A sampled one uses the random number of its place.
    """
    kit = kits("qwen3")
    each = kit.prepare("Hello there.", **sampling)
    wanted = serve(Scheduler(kit.runner()), {"a": (each.request, {})})["a"]
    runner = guessing(kit, [each], [wanted])
    runner._drafts.right = 1.0

    def spoil(_module: Any, _args: Any, logits: Any) -> Any:
        logits = logits.clone()
        if logits.ndim == 3:
            logits[:, 1:] = float("nan")
        return logits

    with kit.model.lm_head.register_forward_hook(spoil):
        assert serve(Scheduler(runner), {"a": (each.request, {})})["a"] == wanted


@pytest.mark.parametrize(
    ("speculative", "tokens", "message"),
    [
        ("trigram", 4, "use ngram, or draft=FOLDER"),
        ("draft=", 4, "use ngram, or draft=FOLDER"),
        ("ngram", 0, "draft_tokens is 0"),
        ("draft={llava}", 4, "takes images"),
        ("draft={short}", 4, "set max_length to 256 or less"),
        ("draft=/nowhere", 4, "/nowhere"),
    ],
)
def test_wrong_drafts_are_refused(
    tmp_path: Path,
    kits: Callable[[str], Kit],
    speculative: str,
    tokens: int,
    message: str,
) -> None:
    """When the model is loaded, with the value, the limit and a remedy."""
    folder = ""
    if "llava" in speculative:
        folder = str(kits("llava").folder)
    elif "short" in speculative:
        config = {"max_position_embeddings": 256}
        folder = str(kits("llama").copied(tmp_path / "short", config=config).folder)
    speculative = speculative.format(llava=folder, short=folder)
    with pytest.raises((OSError, ValueError), match=message):
        kits("qwen3").runner(speculative=speculative, draft_tokens=tokens)


@pytest.mark.parametrize(
    ("text", "count", "wanted"),
    [
        ([], 4, []),
        ([1, 2], 4, []),
        ([1, 2, 3], 4, []),
        ([1, 2, 9, 1, 2], 4, [9, 1, 2]),
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, [7]),
        ([2, 3, 7, 2, 3, 8, 2, 3], 1, [8]),
        ([5, 5, 5, 5, 5, 5, 5, 5], 3, [5, 5, 5]),
        ([4, 6, 4, 6, 4, 6, 4, 6], 4, [4, 6, 4, 6]),
    ],
)
def test_continuation_is_what_followed(
    text: list[int], count: int, wanted: list[int]
) -> None:
    """Of the longest match, and of the latest place with enough after it."""
    assert find_continuation(np.array(text, np.int32), count) == wanted


class Runs(SimRunner):
    """Yields several bytes a step, or whatever a test gives it."""

    wrong: Any = None

    def decode(self, slots: Sequence[int]) -> list[Any]:
        if self.wrong is not None:
            return [self.wrong for _ in slots]
        return [[self._emit(slot) for _ in range(3)] for slot in slots]


@pytest.mark.parametrize("wrong", [[], [None], [Emitted([1], 1), 5], (1, 2)])
def test_wrong_run_fails_its_request(wrong: Any) -> None:
    """A runner's list is checked item by item."""
    runner = Runs(sleep=lambda _: None)
    scheduler = Scheduler(runner)
    request = {"input_ids": [1, 2], "max_tokens": 9}
    scheduler.start("a", request, {})
    scheduler.step()
    runner.wrong = wrong
    (output,) = scheduler.step()
    assert output.finish is not None
    assert output.finish.code == "decode_failed"
    assert not output.items
    assert scheduler.status()["slots_free"] == scheduler.status()["slots"]


def test_own_runner_yields_several_items_a_step() -> None:
    """The scheduler streams a list as its items, and counts them all."""
    runner = Runs(sleep=lambda _: None)
    scheduler = Scheduler(runner)
    scheduler.start("a", {"input_ids": [1, 2], "max_tokens": 8}, {})
    plain = Scheduler(SimRunner(sleep=lambda _: None))
    plain.start("a", {"input_ids": [1, 2], "max_tokens": 8}, {})
    assert items(scheduler) == items(plain)
    status = scheduler.status()
    assert status["tokens"] == 8
    assert status["times"]["decode"]["runs"] == 3
    assert status["times"]["decode"]["tokens"] == 9  # the last two are dropped


def items(scheduler: Scheduler) -> list[Any]:
    return [item for made in steps(scheduler) for item in made]


def test_drafts_are_in_the_models_own_type(kits: Callable[[str], Kit]) -> None:
    """A draft model is loaded as the model is."""
    kit = kits("qwen3")
    half = load_model(kit.folder, device="cpu", dtype="bfloat16")
    runner = type(kit.runner())(
        half, slots=1, max_length=64, speculative=f"draft={kit.folder}"
    )
    assert runner._drafts._cache.layers[0].keys.dtype == torch.bfloat16
    prompt = Prompt([1, 2, 3], {}, Sampling())
    assert runner.prefill(0, prompt, 0, 3) is not None
    assert runner.decode([0])


@pytest.mark.parametrize("graphs", ["off", "fake"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
def test_draft_that_is_not_finite_fails_nobody(
    kits: Callable[[str], Kit], graphs: str, sampling: dict[str, Any]
) -> None:
    """Its key and value reach what does not attend to it: zero times NaN is NaN."""
    kit = kits("qwen3")
    prepared = [kit.prepare("Hello there.", **sampling), kit.prepare("la " * 30)]
    requests = {str(at): (each.request, {}) for at, each in enumerate(prepared)}
    wanted = serve(Scheduler(kit.runner()), requests)
    used = {token for tokens in wanted.values() for token in tokens}
    used.update(*(each.request["input_ids"] for each in prepared))
    bad = min({*range(1000)} - used)
    runner = kit.runner(speculative="ngram", draft_tokens=3, graphs=graphs)
    runner._drafts.propose = lambda slots, _: [[1, bad, bad][-slot:] for slot in slots]

    def spoil(_module: Any, args: Any, embedded: Any) -> Any:
        return embedded.masked_fill((args[0] == bad)[..., None], float("nan"))

    with kit.model.model.embed_tokens.register_forward_hook(spoil):
        assert serve(Scheduler(runner), requests) == wanted


def test_draft_model_may_know_more_tokens(
    tmp_path: Path, kits: Callable[[str], Kit]
) -> None:
    """No draft is a token that the model does not have."""

    def pad(config: Any) -> None:
        config.vocab_size += 2000

    kit, larger = kits("qwen3"), Kit(tmp_path, "llama", change=pad)
    prepared = [kit.prepare("Hello there."), kit.prepare("Tell me of a heap.")]
    wanted = [kit.generate(each) for each in prepared]
    for mine, other, want in ((kit, larger, wanted), (larger, kit, None)):
        drafting = mine.serve(prepared, chunk=9, speculative=f"draft={other.folder}")
        assert drafting == (want or mine.serve(prepared, chunk=9))


def test_cached_slots_widen_no_batch_of_drafts(kits: Callable[[str], Kit]) -> None:
    """A graph of more lanes than run would be captured while requests wait."""
    kit, options = kits("qwen3"), {"slots": 8, "max_batch": 2, "graphs": "fake"}
    runner = kit.runner(speculative=f"draft={kit.folder}", **options)
    scheduler = Scheduler(runner, max_batch=2)
    ids = kit.prepare("Hello there.").request["input_ids"]
    for name in "abcdefg":
        request = {"input_ids": ids, "max_tokens": 1, "session": name}
        assert serve(scheduler, {name: (request, {})})[name]
    assert serve(scheduler, {"z": ({"input_ids": ids, "max_tokens": 9}, {})})["z"]
    for steps in (runner._steps, runner._drafts._steps):
        assert {shape.width for shape in steps._shapes} <= {1, 2}


def test_pass_that_fails_leaves_drafts_in_step(
    kits: Callable[[str], Kit], caplog: pytest.LogCaptureFixture
) -> None:
    """Resumed prompts whose pass fails after the drafts have read them run again."""
    kit = kits("llama")
    runner = kit.runner(speculative=f"draft={kit.folder}", slots=3)
    scheduler, plain = Scheduler(runner, chunk=400), Scheduler(kit.runner(), chunk=400)
    ids = kit.prepare("la la la la").request["input_ids"]
    request = {"input_ids": ids, "max_tokens": 5, "stop_ids": []}
    for name in "abc":
        serve(scheduler, {name: (request | {"session": name}, {})})
    logits, failures = runner.forward.logits, []

    def fail_once(hidden: Any) -> Any:
        if len(hidden) > 1 and not failures:
            failures.append(len(hidden))
            raise RuntimeError("no room")
        return logits(hidden)

    runner.forward.logits = fail_once
    longer = request | {"input_ids": [*ids, *ids[1:4]]}
    for name in "abc":
        scheduler.start(name, longer | {"session": name}, {})
    got: dict[str, list[int]] = {name: [] for name in "abc"}
    while scheduler.busy:
        for output in scheduler.step():
            got[output.key] += tokens_of(output)
    wanted = serve(plain, {"a": (longer, {})})["a"]
    assert failures == [3]
    assert "3 prompts in one pass: RuntimeError" in caplog.text
    assert list(got.values()) == [wanted] * 3
