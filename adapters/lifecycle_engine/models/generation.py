"""What a checkpoint's generation config makes of logits before a token is drawn.

`generate()` keeps to it also where nothing is sampled, and released checkpoints count
on it: Qwen2.5-VL repeats itself without its penalty. Options that change tokens and are
not here are refused when a checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._hf import token_ids
from .uploads import small

# What leaves the tokens alone, beside leaving the option out.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": (),
    "stop_strings": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
_KNOWN = "repetition_penalty, min_length, min_new_tokens, suppress_tokens"
_KNOWN += " and begin_suppress_tokens"


@dataclass(frozen=True, slots=True)
class Rules:
    """The options of a generation config that change tokens and are known here.

    Attributes:
        penalty: Logits of tokens that are there already are divided by it where they
            are above zero, and multiplied below.
        length: Tokens of prompt and answer before which none of *ends* is drawn.
        new: The same, of the answer alone.
        ends: Tokens that end a text.
        never: Tokens that are not drawn.
        never_first: Tokens that an answer does not begin with.
    """

    penalty: float = 1.0
    length: int = 0
    new: int = 0
    ends: Sequence[int] = ()
    never: Sequence[int] = ()
    never_first: Sequence[int] = ()

    @classmethod
    def of(cls, config: Any) -> Rules:
        """Read them off a generation config.

        Raises:
            ValueError: It asks for more than is known here.
        """
        for name, neutral in _REFUSED.items():
            value = getattr(config, name, None)
            if value is not None and value not in neutral:
                raise ValueError(
                    f"the generation config has {name}, which changes tokens; known "
                    f"are {_KNOWN}: take it out of generation_config.json, or of "
                    f"config.json where there is no such file"
                )
        penalty = config.repetition_penalty
        penalty = 1.0 if penalty is None else penalty
        if type(penalty) not in (int, float) or not penalty > 0:
            raise ValueError(f"repetition_penalty is {penalty!r}; it must be above 0")
        return cls(
            penalty=float(penalty),
            length=_count(config, "min_length"),
            new=_count(config, "min_new_tokens"),
            ends=token_ids(config.eos_token_id, "eos_token_id"),
            never=token_ids(config.suppress_tokens, "suppress_tokens"),
            never_first=token_ids(
                config.begin_suppress_tokens, "begin_suppress_tokens"
            ),
        )


class Ruled:
    """Logits by the rules of a checkpoint, for the requests in a runner's slots.

    Args:
        rules: The rules; by default none, and nothing is changed or kept.
        slots: Requests at a time.
        vocab_size: Logits of each.
        device: Of the logits.
    """

    def __init__(
        self, rules: Rules, *, slots: int, vocab_size: int, device: torch.device
    ) -> None:
        self._rules, self._device = rules, device
        self._least = [0] * slots
        self._there: torch.Tensor | None = None
        if rules.penalty != 1:
            shape = (slots, vocab_size)
            self._there = torch.zeros(shape, dtype=torch.bool, device=device)
        self._ends, self._never, self._never_first = (
            _marked(ids, vocab_size).to(device)
            for ids in (rules.ends, rules.never, rules.never_first)
        )

    def first(self, slot: int, ids: Sequence[int], logits: torch.Tensor) -> Any:
        """Return logits ``(1, vocab)`` behind a prompt by the rules."""
        rules = self._rules
        self._least[slot] = max(rules.length, len(ids) + rules.new)
        if self._there is not None:
            self._there[slot] = False
            self._there[slot, small(ids, self._device)] = True
        ruled = self._ruled([slot], [len(ids)], logits)
        if rules.never_first:
            ruled = ruled.masked_fill(self._never_first, -torch.inf)
        return ruled

    def next(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        lengths: Sequence[int],
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits ``(lanes, vocab)`` of a step by the rules.

        Args:
            slots: Of the lanes.
            tokens: The last one of each.
            lengths: Tokens of each, prompt and answer.
            logits: As the model made them.
        """
        if self._there is not None:
            lanes = small([slots, tokens], self._device)
            self._there[lanes[0], lanes[1]] = True
        return self._ruled(slots, lengths, logits)

    def _ruled(
        self, slots: Sequence[int], lengths: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        if self._there is not None:
            # As `generate` does: in half precision other tokens would be level.
            logits = logits.float()
            penalty = self._rules.penalty
            less = torch.where(logits < 0, logits * penalty, logits / penalty)
            there = self._there[small(slots, self._device)]
            logits = torch.where(there, less, logits)
        if self._rules.never:
            logits = logits.masked_fill(self._never, -torch.inf)
        early = [
            length < self._least[slot]
            for slot, length in zip(slots, lengths, strict=True)
        ]
        if any(early):
            lanes = small(early, self._device)[:, None]
            logits = logits.masked_fill(lanes & self._ends, -torch.inf)
        return logits


def _count(config: Any, name: str) -> int:
    value = getattr(config, name) or 0
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; it must be a count of tokens")
    return value


def _marked(ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Those of the vocabulary that are among *ids*."""
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[[token for token in ids if 0 <= token < vocab_size]] = True
    return marks
