from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lifecycle_engine.models.sampling import Sampler, choose  # noqa: E402
from lifecycle_engine.runner import Sampling  # noqa: E402

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 3.5]])


def draws(count: int, **options: Any) -> list[int]:
    """Tokens drawn one after the other from the first lane."""
    sampler = Sampler(Sampling(**options))
    return [choose(LOGITS[:1], [sampler])[0].token or 0 for _ in range(count)]


def test_greedy_takes_the_largest() -> None:
    """At temperature 0 each lane's largest logit is drawn, as a list of one token."""
    emitted = choose(LOGITS, [Sampler(Sampling()), Sampler(Sampling())])
    assert [each.item for each in emitted] == [[1], [3]]
    assert [each.token for each in emitted] == [1, 3]


def test_seed_draws_the_same_in_any_company() -> None:
    """A seed's draws depend on nobody who is drawn for beside it."""
    alone = draws(50, temperature=1.0, seed=3)
    sampler, other = Sampler(Sampling(1.0, seed=3)), Sampler(Sampling(2.0, seed=4))
    both = [choose(LOGITS.flip(0), [other, sampler])[1].token for _ in range(50)]
    assert both == alone
    assert draws(50, temperature=1.0, seed=5) != alone
    assert draws(50, temperature=1.0) != draws(50, temperature=1.0)


def test_company_with_a_cut_changes_no_draws() -> None:
    """Neither a neighbour's top_p nor its log probabilities touch a request's draws."""
    alone = draws(50, temperature=1.0, seed=3)
    sampler = Sampler(Sampling(1.0, seed=3))
    beside = [
        Sampler(Sampling(1.0, 0.5, seed=4)),
        Sampler(Sampling(logprobs=3)),
        Sampler(Sampling(0.7, seed=9)),
    ]
    logits = LOGITS[[1, 1, 1, 0]]
    drawn = [choose(logits, [*beside, sampler])[3] for _ in range(50)]
    assert [each.token for each in drawn] == alone
    assert drawn[0].item == [alone[0]]


def test_impossible_tokens_are_never_drawn() -> None:
    """A token without any probability is not drawn, at the edges of chance either."""
    low = float("-inf")
    logits = torch.tensor([[low, 0.0, low, 0.0, low]])
    for top_p in (1.0, 0.9):
        sampler = Sampler(Sampling(1.0, top_p, seed=1))
        for chance in (0.0, 0.5, 1 - 1e-16):
            Sampler.chance, kept = lambda _, it=chance: it, Sampler.chance
            try:
                assert choose(logits, [sampler])[0].token in (1, 3)
            finally:
                Sampler.chance = kept


def test_draws_follow_the_logits() -> None:
    """Many draws are spread as softmax says."""
    counts = Counter(draws(4000, temperature=1.0, seed=1))
    weights = torch.softmax(LOGITS[0], dim=-1)
    for token, weight in enumerate(weights.tolist()):
        assert abs(counts[token] / 4000 - weight) < 0.04


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.0, {1}), (0.6, {1}), (0.7, {1, 2}), (0.95, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_draws_from_the_likeliest(top_p: float, tokens: set[int]) -> None:
    """Only the likeliest tokens that have this much together are ever drawn."""
    assert set(draws(600, temperature=1.0, top_p=top_p, seed=1)) == tokens


def test_logprobs_are_those_of_the_model() -> None:
    """They are of the logits as they are, whatever the temperature draws."""
    sampler = Sampler(Sampling(temperature=5.0, seed=1, logprobs=2))
    (emitted,) = choose(LOGITS[:1], [sampler])
    expected = torch.log_softmax(LOGITS[0], dim=-1).tolist()
    item = emitted.item
    assert item["token"] == emitted.token
    assert math.isclose(item["logprob"], expected[item["token"]], rel_tol=1e-5)
    assert [token for token, _ in item["top"]] == [1, 2]
    assert all(math.isclose(p, expected[t], rel_tol=1e-5) for t, p in item["top"])


def test_no_likeliest_are_told_unless_asked() -> None:
    """Zero log probabilities still tell the token's own."""
    (emitted,) = choose(LOGITS[:1], [Sampler(Sampling(logprobs=0))])
    assert emitted.item["top"] == []
    assert emitted.item["logprob"] < 0


def test_step_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However its requests draw: each question would wait for the device once more."""
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
    assert len(choose(LOGITS[[0, 1, 0]], samplers)) == 3
    assert read == [3]


@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.0, 5e-324])
@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 1e-308, 5e-324])
def test_temperature_of_next_to_nothing_draws_the_largest(
    temperature: float, top_p: float
) -> None:
    """Also where a logit divided by it is more than a float can hold."""
    sampler = Sampler(Sampling(temperature, top_p, seed=1))
    logits = torch.tensor(
        [[1.0, 30.0, -math.inf, 29.0, -5.0], [-9.0, -3.0, -5, -8, -7]]
    )
    drawn = choose(logits, [sampler, sampler])
    assert [each.token for each in drawn] == [1, 1]
