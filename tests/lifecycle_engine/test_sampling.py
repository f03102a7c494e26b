"""How tokens are drawn: limits, penalties and defaults, and the rows of a batch."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_kit import Kit, load_config  # noqa: E402

from lifecycle_engine import Sampling  # noqa: E402
from lifecycle_engine.model.kv_cache import BatchRows  # noqa: E402
from lifecycle_engine.model.sampler import (  # noqa: E402
    GenerationRules,
    LogitsProcessors,
    Sampler,
    sample_tokens,
)

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 3.5]])


def draws(count: int, **options: Any) -> list[int]:
    """Tokens sampled one after the other from the first lane."""
    sampler = Sampler(Sampling(**options))
    return [sample_tokens(LOGITS[:1], [sampler])[0].token or 0 for _ in range(count)]


def test_greedy_takes_the_largest() -> None:
    """At temperature 0 each lane yields its largest logit, as a list of one token."""
    emitted = sample_tokens(LOGITS, [Sampler(Sampling()), Sampler(Sampling())])
    assert [each.item for each in emitted] == [[1], [3]]
    assert [each.token for each in emitted] == [1, 3]


def test_seed_samples_the_same_in_any_batch() -> None:
    """Samples of a seed do not depend on other requests in the batch."""
    alone = draws(50, temperature=1.0, seed=3)
    sampler, other = Sampler(Sampling(1.0, seed=3)), Sampler(Sampling(2.0, seed=4))
    both = [sample_tokens(LOGITS.flip(0), [other, sampler])[1].token for _ in range(50)]
    assert both == alone
    assert draws(50, temperature=1.0, seed=5) != alone
    assert draws(50, temperature=1.0) != draws(50, temperature=1.0)


def test_truncation_of_other_lanes_changes_no_sample() -> None:
    """Another lane's top_p or log probabilities do not affect a lane's tokens."""
    alone = draws(50, temperature=1.0, seed=3)
    sampler = Sampler(Sampling(1.0, seed=3))
    beside = [
        Sampler(Sampling(1.0, 0.5, seed=4)),
        Sampler(Sampling(logprobs=3)),
        Sampler(Sampling(0.7, seed=9)),
    ]
    logits = LOGITS[[1, 1, 1, 0]]
    drawn = [sample_tokens(logits, [*beside, sampler])[3] for _ in range(50)]
    assert [each.token for each in drawn] == alone
    assert drawn[0].item == [alone[0]]


def test_impossible_tokens_are_never_sampled() -> None:
    """A token of probability zero is never sampled, even by extreme random numbers."""
    low = float("-inf")
    logits = torch.tensor([[low, 0.0, low, 0.0, low]])
    for top_p in (1.0, 0.9):
        sampler = Sampler(Sampling(1.0, top_p, seed=1))
        for number in (0.0, 0.5, 1 - 1e-16):
            Sampler.random, original = lambda _, it=number: it, Sampler.random
            try:
                assert sample_tokens(logits, [sampler])[0].token in (1, 3)
            finally:
                Sampler.random = original


def test_samples_follow_the_logits() -> None:
    """The frequencies of many samples match the softmax."""
    counts = Counter(draws(4000, temperature=1.0, seed=1))
    weights = torch.softmax(LOGITS[0], dim=-1)
    for token, weight in enumerate(weights.tolist()):
        assert abs(counts[token] / 4000 - weight) < 0.04


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.0, {1}), (0.6, {1}), (0.7, {1, 2}), (0.95, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_most_likely(top_p: float, tokens: set[int]) -> None:
    """Only the most likely tokens with this total probability are sampled."""
    assert set(draws(600, temperature=1.0, top_p=top_p, seed=1)) == tokens


def test_logprobs_are_those_of_the_model() -> None:
    """They are of the model's logits, independent of the temperature."""
    sampler = Sampler(Sampling(temperature=5.0, seed=1, logprobs=2))
    (emitted,) = sample_tokens(LOGITS[:1], [sampler])
    expected = torch.log_softmax(LOGITS[0], dim=-1).tolist()
    item = emitted.item
    assert item["token"] == emitted.token
    assert math.isclose(item["logprob"], expected[item["token"]], rel_tol=1e-5)
    assert [token for token, _ in item["top"]] == [1, 2]
    assert all(math.isclose(p, expected[t], rel_tol=1e-5) for t, p in item["top"])


def test_zero_logprobs_return_no_alternatives() -> None:
    """The token's own log probability is still returned."""
    (emitted,) = sample_tokens(LOGITS[:1], [Sampler(Sampling(logprobs=0))])
    assert emitted.item["top"] == []
    assert emitted.item["logprob"] < 0


def test_step_synchronises_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are read in one copy, however they are sampled."""
    read: list[int] = []
    plain = torch.Tensor.tolist

    def tolist(tensor: Any) -> Any:
        read.append(tensor.numel())
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    samplers = [
        Sampler(Sampling()),
        Sampler(Sampling(1.0, seed=3)),
        Sampler(Sampling(1.0, 0.5, seed=4)),
    ]
    assert len(sample_tokens(LOGITS[[0, 1, 0]], samplers)) == 3
    assert read == [3]


@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.0, 5e-324])
@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 1e-308, 5e-324])
def test_tiny_temperature_samples_the_largest(temperature: float, top_p: float) -> None:
    """Also where a logit divided by the temperature overflows."""
    sampler = Sampler(Sampling(temperature, top_p, seed=1))
    logits = torch.tensor(
        [[1.0, 30.0, -math.inf, 29.0, -5.0], [-9.0, -3.0, -5, -8, -7]]
    )
    drawn = sample_tokens(logits, [sampler, sampler])
    assert [each.token for each in drawn] == [1, 1]


def test_penalty_in_half_precision_matches_generate() -> None:
    """A penalty rounded to eight bits would make two logits equal."""
    logits = torch.tensor([[3.015625, 2.75, 0.0]], dtype=torch.bfloat16)
    ruled = LogitsProcessors(
        GenerationRules(penalty=1.0965),
        slots=1,
        vocab_size=3,
        device=torch.device("cpu"),
    )
    penalised = ruled.first(0, [0], logits)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.0965)
    wanted = processor(torch.tensor([[0]]), logits.float())
    assert torch.equal(penalised, wanted)
    assert penalised[0, 0] != penalised[0, 1]


def test_neutral_options_are_accepted() -> None:
    """Sampling options, which each request sets itself, and options that are off."""
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.3, top_k=5, num_beams=1, no_repeat_ngram_size=0
    )
    assert GenerationRules.from_config(config) == GenerationRules()
    for penalty in (0, -1.0):
        config.repetition_penalty = penalty
        with pytest.raises(ValueError, match="must be above 0"):
            GenerationRules.from_config(config)


REFUSED: dict[str, Any] = {
    "bad_words_ids": [[5]],
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [3, 1.5],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "no_repeat_ngram_size": 2,
    "num_beams": 3,
    "sequence_bias": [[[5], 10.0]],
    "stop_strings": ["a"],
    "token_healing": True,
    "watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_option_that_would_change_tokens_is_refused(
    kits: Callable[[str], Kit], tmp_path: Path, name: str
) -> None:
    """Before loading; the error lists the supported options and the remedy."""
    config = transformers.GenerationConfig()
    for each, value in REFUSED.items():
        setattr(config, each, value if each == name else getattr(config, each))
    with pytest.raises(ValueError, match=f"has {name}, .* known are .*take it out"):
        GenerationRules.from_config(config)
    (tmp_path / "config.json").write_text(
        (kits("qwen3").folder / "config.json").read_text()
    )
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({name: REFUSED[name]}))
    with pytest.raises(ValueError, match=f"has {name}, "):
        load_config(tmp_path)


SLOTS = 12


class Rows:
    """A cache that only tracks the owner of each row."""

    def __init__(self) -> None:
        self.owner: list[int | None] = [None] * SLOTS

    def clear(self, row: int, start: int, stop: int) -> None:
        self.owner[row] = None

    def swap(self, row: int, other: int, length: int) -> None:
        owner = self.owner
        owner[row], owner[other] = owner[other], owner[row]


def bucket(lanes: int) -> int:
    """Powers of two, up to the slots."""
    return next(width for width in (1, 2, 4, 8, SLOTS) if width >= lanes)


@pytest.mark.parametrize("seed", range(200))
def test_only_running_and_prefilling_rows_widen_a_batch(seed: int) -> None:
    """Cached slots never widen a batch; rows in prefill stay in place."""
    rng = random.Random(seed)
    rows: Any = Rows()
    batch_rows = BatchRows(rows, slots=SLOTS, max_length=50)
    for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
        batch_rows.assign(slot, Sampler(Sampling()), None)
        rows.owner[batch_rows[slot].row] = slot
    taken = [slot for slot in rows.owner if slot is not None]
    for slot in rng.sample(taken, rng.randint(0, len(taken) - 1)):
        batch_rows.free(slot)
        taken.remove(slot)
    batch = rng.sample(taken, rng.randint(1, len(taken)))
    others = [slot for slot in taken if slot not in batch]
    prefilling = set(rng.sample(others, rng.randint(0, len(others))))
    for slot in set(taken) - prefilling:
        batch_rows[slot].token = 1  # it streams, or is cached
    before = {slot: batch_rows[slot].row for slot in prefilling}
    width = batch_rows.pack(batch, bucket)
    assert all(batch_rows[slot].row < width for slot in batch)
    assert width <= bucket(len(batch) + len(prefilling))
    assert {slot: batch_rows[slot].row for slot in prefilling} == before
    assert [rows.owner[batch_rows[slot].row] for slot in taken] == taken


CUTS = [
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
    {"top_k": 9999},
    {"top_k": 1, "top_p": 0.1, "min_p": 1.0},
]


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_draws_as_often_as_generate(
    kits: Callable[[str], Kit],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Of a model's own logits: each token at as many of all chances as its share."""
    kit = kits("qwen3")
    prepared = kit.prepare("see")
    output = kit.model.generate(
        input_ids=torch.tensor([prepared.request["input_ids"]]),
        max_new_tokens=1,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{"top_k": 0, **options},
    )
    shares = torch.softmax(output.scores[0][0].double(), dim=-1)
    asked = Sampling(**{"temperature": 1.0, "seed": 1, **options})
    lanes = 2000
    numbers = iter([(at + 0.5) / lanes for at in range(lanes)])
    monkeypatch.setattr(Sampler, "random", lambda _: next(numbers))
    logits = output.logits[0].expand(lanes, -1)
    drawn = sample_tokens(logits, [Sampler(asked)] * lanes)
    counts = Counter(each.token for each in drawn)
    for token, share in enumerate(shares.tolist()):
        assert abs(counts[token] / lanes - share) < 1.5 / lanes
    assert sum(counts.values()) == lanes


def test_tokens_that_are_as_likely_as_the_last_are_drawn_from() -> None:
    """As `generate` does, whichever of them comes first."""
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0]])
    sampler = Sampler(Sampling(1.0, seed=1, top_k=2))
    drawn = {sample_tokens(logits, [sampler])[0].token for _ in range(300)}
    assert drawn == {0, 1, 2, 4}


def test_cuts_of_neighbours_change_no_draws() -> None:
    """Each lane is cut by its own request alone."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 0.5]])
    own = {"temperature": 1.0, "seed": 3, "top_k": 3, "min_p": 0.05}

    def draws(beside: list[Sampling]) -> list[int | None]:
        samplers = [*map(Sampler, beside), Sampler(Sampling(**own))]
        lanes = logits.expand(len(samplers), -1)
        return [sample_tokens(lanes, samplers)[-1].token for _ in range(60)]

    alone = draws([])
    assert draws([Sampling(1.0, top_k=1), Sampling(1.0, min_p=0.9)]) == alone
    assert set(alone) == {1, 2, 4}
