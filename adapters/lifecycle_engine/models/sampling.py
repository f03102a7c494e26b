"""Choosing the next token from logits, for a whole batch where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lifecycle_engine.runner import Emitted, Sampling

from .uploads import small

# In the place of a token, where there is none to draw.
_NONE = -1


class Sampler:
    """How one request draws its tokens; greedy at temperature 0.

    Chance is one number a token, from the request's own generator on the CPU, so
    that a seed gives the same tokens on every device and whoever else is in the
    batch.
    """

    __slots__ = ("_generator", "sampling")

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit decides."""
        return self._generator is None

    @property
    def cuts(self) -> bool:
        """Whether it leaves tokens out, by how likely they are beside others."""
        asked = self.sampling
        return asked.top_p < 1 or asked.top_k > 0 or asked.min_p > 0

    def chance(self) -> float:
        """Return the next number of the request, from 0 up to 1."""
        draw = torch.rand((), generator=self._generator, dtype=torch.float64)
        return float(draw)


def choose(
    logits: torch.Tensor,
    samplers: Sequence[Sampler],
    made: torch.Tensor | None = None,
) -> list[Emitted | Exception]:
    """Return a token for each lane of ``(lanes, vocab)``, or why it has none.

    Args:
        logits: What is drawn from.
        samplers: Of the lanes.
        made: The model's own, whose log probabilities are told: a token that the
            others forbid has none there. ``None``: the same.
    """
    most, drawn = logits.max(dim=-1)
    # Lanes with and without a cut are drawn in different orders of the tokens, so
    # each kind apart: what a lane draws must not depend on who is beside it.
    for cut in (False, True):
        lanes = [
            lane
            for lane, sampler in enumerate(samplers)
            if not sampler.greedy and sampler.cuts == cut
        ]
        if lanes:
            at = small(lanes, logits.device)
            drawn[at] = _draw(logits[at], [samplers[lane] for lane in lanes], cut=cut)
    # A NaN is the largest of its lane, and told with the tokens, in one copy.
    drawn = drawn.masked_fill(~torch.isfinite(most), _NONE)
    # The one place where a step waits for the device, unless somebody is told more.
    tokens: list[int] = drawn.tolist()
    told = _logprobs(logits if made is None else made, tokens, samplers)
    return [
        FloatingPointError("the logits are not finite")
        if token == _NONE
        else Emitted(told.get(lane, [token]), token)
        for lane, token in enumerate(tokens)
    ]


def _draw(
    logits: torch.Tensor, samplers: Sequence[Sampler], *, cut: bool
) -> torch.Tensor:
    """Draw where the summed probability passes each request's own chance."""
    chances, temperatures = _columns(
        [(each.chance(), each.sampling.temperature) for each in samplers],
        logits.device,
    )
    logits = logits.double()
    # From the largest down: what a temperature of next to nothing makes endless is
    # then minus, and has no weight.
    below = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.softmax(below / temperatures, dim=-1)
    order = None
    if cut:
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        weights = _cut(weights, [each.sampling for each in samplers])
    sums = weights.cumsum(dim=-1)
    # Strictly above the chance, so that a token without weight is never drawn.
    places = torch.searchsorted(sums, chances * sums[:, -1:], right=True)
    places = places.clamp_max(logits.shape[1] - 1)
    drawn = places if order is None else order.gather(1, places)
    return drawn[:, 0]


def _cut(weights: torch.Tensor, asked: Sequence[Sampling]) -> torch.Tensor:
    """Leave out what each request does not draw from, in the order of `generate`.

    Args:
        weights: Of the lanes, each from the largest down.
        asked: By each lane.
    """
    size = weights.shape[1]
    lasts, shares, least = _columns(
        [(min(each.top_k or size, size) - 1, each.top_p, each.min_p) for each in asked],
        weights.device,
    )
    weights = weights.masked_fill(weights < weights.gather(1, lasts.long()), 0)
    sums = weights.cumsum(dim=-1)
    before = sums - weights
    before[:, 0] = -1  # the likeliest stays, however small the share
    out = (before >= shares * sums[:, -1:]) | (weights < least * weights[:, :1])
    return weights.masked_fill(out, 0)


def _columns(
    rows: Sequence[tuple[float, ...]], device: torch.device
) -> list[torch.Tensor]:
    table = small(rows, device, torch.float64)
    return [column[:, None] for column in table.T]


def _logprobs(
    logits: torch.Tensor, tokens: Sequence[int], samplers: Sequence[Sampler]
) -> dict[int, dict[str, Any]]:
    """The items of the lanes that asked for log probabilities."""
    counts = {
        lane: sampler.sampling.logprobs
        for lane, sampler in enumerate(samplers)
        if sampler.sampling.logprobs is not None and tokens[lane] != _NONE
    }
    if not counts:
        return {}
    lanes = list(counts)
    logprobs = torch.log_softmax(logits[lanes].float(), dim=-1)
    drawn = small([[tokens[lane]] for lane in lanes], logits.device)
    own = logprobs.gather(1, drawn)[:, 0].tolist()
    size = min(max(counts.values()), logits.shape[1])
    top, likeliest = (each.tolist() for each in logprobs.topk(size, dim=-1))
    return {
        lane: {
            "token": tokens[lane],
            "logprob": own[at],
            "top": [
                [token, logprob]
                for token, logprob in zip(likeliest[at], top[at], strict=True)
            ][: counts[lane]],
        }
        for at, lane in enumerate(lanes)
    }
