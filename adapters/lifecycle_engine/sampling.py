"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Sampler:
    """How one request draws its tokens; greedy at temperature 0.

    Draws happen on the CPU with the request's own generator, so that a seed gives
    the same tokens on every device and whoever else is in the batch.
    """

    __slots__ = ("_generator", "_temperature")

    def __init__(self, temperature: float, seed: int | None) -> None:
        self._temperature = temperature
        self._generator: torch.Generator | None = None
        if temperature > 0:
            self._generator = torch.Generator()
            if seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(seed)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit decides."""
        return self._generator is None

    def draw(self, logits: torch.Tensor) -> int:
        """Draw from the logits of one lane, ``(vocab,)``."""
        weights = torch.softmax(logits.float().cpu() / self._temperature, dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._generator))


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return one token for each lane of ``(lanes, vocab)``; extra lanes are padding."""
    tokens: list[int] = logits.argmax(dim=-1)[: len(samplers)].tolist()
    for lane, sampler in enumerate(samplers):
        if not sampler.greedy:
            tokens[lane] = sampler.draw(logits[lane])
    return tokens
