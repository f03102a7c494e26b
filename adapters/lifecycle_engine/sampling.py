"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .runner import Emitted, Sampling


class Sampler:
    """How one request draws its tokens; greedy at temperature 0.

    Draws happen on the CPU with the request's own generator, so that a seed gives
    the same tokens on every device and whoever else is in the batch.
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
    def plain(self) -> bool:
        """Whether the largest logit decides, and nobody asks by how much."""
        return self._generator is None and self.sampling.logprobs is None

    def draw(self, logits: torch.Tensor, likeliest: int) -> Emitted:
        """Draw from the logits of one lane, ``(vocab,)``.

        Args:
            logits: As the model made them.
            likeliest: The token of the largest one.
        """
        logits = logits.float().cpu()
        token = likeliest if self._generator is None else self._sample(logits)
        if self.sampling.logprobs is None:
            return Emitted([token], token)
        return Emitted(_with_logprobs(logits, token, self.sampling.logprobs), token)

    def _sample(self, logits: torch.Tensor) -> int:
        scaled = logits.double() / self.sampling.temperature
        weights, tokens = torch.softmax(scaled, dim=-1).sort(descending=True)
        below = weights.cumsum(-1) - weights  # what stands before each token
        weights[below >= self.sampling.top_p] = 0
        weights[0] = weights[0].clamp_min(torch.finfo(weights.dtype).tiny)
        drawn = torch.multinomial(weights, 1, generator=self._generator)
        return int(tokens[drawn])


def _with_logprobs(logits: torch.Tensor, token: int, count: int) -> dict[str, object]:
    """The item of a token with its log probability and those of the likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top, tokens = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(tokens.tolist(), top.tolist(), strict=True)
    return {
        "token": token,
        "logprob": float(logprobs[token]),
        "top": [list(pair) for pair in pairs],
    }


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Emitted]:
    """Return a token for each lane of ``(lanes, vocab)``."""
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    return [
        Emitted([token], token) if sampler.plain else sampler.draw(logits[lane], token)
        for lane, (token, sampler) in enumerate(zip(likeliest, samplers, strict=True))
    ]
