"""Sampling: the logits processors of a checkpoint, and tokens for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lifecycle_engine._compat import token_ids
from lifecycle_engine.core.model_runner import Emitted, Sampling
from lifecycle_engine.model.device_copies import small_tensor

# Marks a lane without a token.
_NO_TOKEN = -1


class Sampler:
    """Samples the tokens of one request; greedy at temperature 0.

    Each token uses one random number from the request's own generator on the CPU, so
    a seed gives the same tokens on every device and in every batch.

    Attributes:
        again: The next token uses the last random number, whose token was not valid.
    """

    __slots__ = ("_generator", "_number", "again", "sampling")

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.again, self._number = False, 0.0
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
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p exclude tokens."""
        options = self.sampling
        return options.top_p < 1 or options.top_k > 0 or options.min_p > 0

    def random(self) -> float:
        """Return the request's next random number in ``[0, 1)``."""
        if not self.again:
            number = torch.rand((), generator=self._generator, dtype=torch.float64)
            self._number = float(number)
        self.again = False
        return self._number


def sample_tokens(
    logits: torch.Tensor,
    samplers: Sequence[Sampler],
    unprocessed: torch.Tensor | None = None,
) -> list[Emitted | Exception]:
    """Sample a token for each lane, or return the error that replaces it.

    Args:
        logits: Processed logits, ``(lanes, vocab)``.
        samplers: The sampler of each lane.
        unprocessed: The model's own logits, for the reported log probabilities: a
            token that a processor forbids has none in *logits*. ``None``: the same.
    """
    largest, tokens = logits.max(dim=-1)
    # Truncated lanes are sampled in another order of the tokens. Sampling both kinds
    # apart keeps a lane's token independent of the other lanes.
    for truncated in (False, True):
        lanes = [
            lane
            for lane, sampler in enumerate(samplers)
            if not sampler.greedy and sampler.truncates == truncated
        ]
        if lanes:
            index = small_tensor(lanes, logits.device)
            chosen = [samplers[lane] for lane in lanes]
            tokens[index] = _sample(logits[index], chosen, truncate=truncated)
    # A NaN is the maximum of its lane; it travels with the tokens, in the same copy.
    tokens = tokens.masked_fill(~torch.isfinite(largest), _NO_TOKEN)
    # The only wait for the device in a step, unless log probabilities are requested.
    ids: list[int] = tokens.tolist()
    items = _logprob_items(
        logits if unprocessed is None else unprocessed, ids, samplers
    )
    return [
        FloatingPointError("the logits are not finite")
        if token == _NO_TOKEN
        else Emitted(items.get(lane, [token]), token)
        for lane, token in enumerate(ids)
    ]


def _sample(
    logits: torch.Tensor, samplers: Sequence[Sampler], *, truncate: bool
) -> torch.Tensor:
    """Return the tokens where the cumulative probability passes the random number."""
    numbers, temperatures = _columns(
        [(each.random(), each.sampling.temperature) for each in samplers],
        logits.device,
    )
    logits = logits.double()
    # Relative to the largest: a temperature near zero then gives minus infinity, which
    # has no weight.
    relative = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.softmax(relative / temperatures, dim=-1)
    order = None
    if truncate:
        weights, order = weights.sort(dim=-1, descending=True, stable=True)
        weights = _truncate(weights, [each.sampling for each in samplers])
    sums = weights.cumsum(dim=-1)
    # Strictly above the number, so that a token without weight is never sampled.
    index = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    index = index.clamp_max(logits.shape[1] - 1)
    tokens = index if order is None else order.gather(1, index)
    return tokens[:, 0]


def _truncate(weights: torch.Tensor, options: Sequence[Sampling]) -> torch.Tensor:
    """Apply top_k, top_p and min_p, in the order of transformers' `generate`.

    Args:
        weights: ``(lanes, vocab)``, each lane in descending order.
        options: Sampling parameters of each lane.
    """
    size = weights.shape[1]
    last_kept, top_p, min_p = _columns(
        [
            (min(each.top_k or size, size) - 1, each.top_p, each.min_p)
            for each in options
        ],
        weights.device,
    )
    smallest = weights.gather(1, last_kept.long())
    weights = weights.masked_fill(weights < smallest, 0)
    sums = weights.cumsum(dim=-1)
    before = sums - weights
    before[:, 0] = -1  # the most likely token stays, even at a top_p of 0
    excluded = (before >= top_p * sums[:, -1:]) | (weights < min_p * weights[:, :1])
    return weights.masked_fill(excluded, 0)


def _columns(
    rows: Sequence[tuple[float, ...]], device: torch.device
) -> list[torch.Tensor]:
    table = small_tensor(rows, device, torch.float64)
    return [column[:, None] for column in table.T]


def _logprob_items(
    logits: torch.Tensor, tokens: Sequence[int], samplers: Sequence[Sampler]
) -> dict[int, dict[str, Any]]:
    """Return the items of the lanes that requested log probabilities."""
    counts = {
        lane: sampler.sampling.logprobs
        for lane, sampler in enumerate(samplers)
        if sampler.sampling.logprobs is not None and tokens[lane] != _NO_TOKEN
    }
    if not counts:
        return {}
    lanes = list(counts)
    logprobs = torch.log_softmax(logits[lanes].float(), dim=-1)
    sampled = small_tensor([[tokens[lane]] for lane in lanes], logits.device)
    own = logprobs.gather(1, sampled)[:, 0].tolist()
    size = min(max(counts.values()), logits.shape[1])
    values, likeliest = (each.tolist() for each in logprobs.topk(size, dim=-1))
    return {
        lane: {
            "token": tokens[lane],
            "logprob": own[at],
            "top": [
                [token, logprob]
                for token, logprob in zip(likeliest[at], values[at], strict=True)
            ][: counts[lane]],
        }
        for at, lane in enumerate(lanes)
    }


# Options that change tokens and are not supported, with their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
_SUPPORTED = "repetition_penalty, min_length, min_new_tokens, suppress_tokens"
_SUPPORTED += " and begin_suppress_tokens"


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """The options of a generation config that change tokens.

    `generate()` applies them even to greedy decoding, and released checkpoints rely on
    them: Qwen2.5-VL repeats itself without its penalty. A checkpoint with an
    unsupported option is rejected when it is loaded.

    Attributes:
        penalty: Repetition penalty: positive logits of tokens that occurred are
            divided by it, negative ones multiplied.
        min_length: Tokens of prompt and answer before which no end token is sampled.
        min_new_tokens: The same for the answer alone.
        end_ids: Tokens that end a text.
        suppressed: Tokens that are never sampled.
        suppressed_first: Tokens that are never sampled first.
    """

    penalty: float = 1.0
    min_length: int = 0
    min_new_tokens: int = 0
    end_ids: Sequence[int] = ()
    suppressed: Sequence[int] = ()
    suppressed_first: Sequence[int] = ()

    @classmethod
    def from_config(cls, config: Any) -> GenerationRules:
        """Read the rules of a transformers ``GenerationConfig``.

        Raises:
            ValueError: The config has an unsupported option or an invalid value.
        """
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(config, name, None)
            if value is not None and value not in neutral:
                raise ValueError(
                    f"the generation config has {name}, which changes tokens; known "
                    f"are {_SUPPORTED}: take it out of generation_config.json, or of "
                    f"config.json where there is no such file"
                )
        penalty = config.repetition_penalty
        penalty = 1.0 if penalty is None else penalty
        if type(penalty) not in (int, float) or not penalty > 0:
            raise ValueError(f"repetition_penalty is {penalty!r}; it must be above 0")
        return cls(
            penalty=float(penalty),
            min_length=_token_count(config, "min_length"),
            min_new_tokens=_token_count(config, "min_new_tokens"),
            end_ids=token_ids(config.eos_token_id, "eos_token_id"),
            suppressed=token_ids(config.suppress_tokens, "suppress_tokens"),
            suppressed_first=token_ids(
                config.begin_suppress_tokens, "begin_suppress_tokens"
            ),
        )


class LogitsProcessors:
    """Applies a checkpoint's generation rules to the logits of a runner's slots.

    The default rules change nothing and need no memory.
    """

    def __init__(
        self,
        rules: GenerationRules,
        *,
        slots: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._rules, self._device = rules, device
        self._min_lengths = [0] * slots
        self._occurred: torch.Tensor | None = None
        if rules.penalty != 1:
            shape = (slots, vocab_size)
            self._occurred = torch.zeros(shape, dtype=torch.bool, device=device)
        self._ends, self._suppressed, self._suppressed_first = (
            _vocabulary_mask(ids, vocab_size).to(device)
            for ids in (rules.end_ids, rules.suppressed, rules.suppressed_first)
        )

    def first(self, slot: int, ids: Sequence[int], logits: torch.Tensor) -> Any:
        """Process the logits ``(1, vocab)`` after a prompt."""
        rules = self._rules
        self._min_lengths[slot] = max(rules.min_length, len(ids) + rules.min_new_tokens)
        if self._occurred is not None:
            self._occurred[slot] = False
            self._occurred[slot, small_tensor(ids, self._device)] = True
        processed = self._process([slot], [len(ids)], logits)
        if rules.suppressed_first:
            processed = processed.masked_fill(self._suppressed_first, -torch.inf)
        return processed

    def next(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        lengths: Sequence[int],
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Process the logits ``(lanes, vocab)`` of a decode step.

        Args:
            slots: The slot of each lane.
            tokens: The last token of each lane.
            lengths: Tokens of each lane, prompt and answer.
            logits: The model's own logits.
        """
        if self._occurred is not None:
            lanes = small_tensor([slots, tokens], self._device)
            self._occurred[lanes[0], lanes[1]] = True
        return self._process(slots, lengths, logits)

    def _process(
        self, slots: Sequence[int], lengths: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        if self._occurred is not None:
            # In float32 as `generate`: half precision would create other ties.
            logits = logits.float()
            penalty = self._rules.penalty
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            occurred = self._occurred[small_tensor(slots, self._device)]
            logits = torch.where(occurred, penalised, logits)
        if self._rules.suppressed:
            logits = logits.masked_fill(self._suppressed, -torch.inf)
        too_short = [
            length < self._min_lengths[slot]
            for slot, length in zip(slots, lengths, strict=True)
        ]
        if any(too_short):
            lanes = small_tensor(too_short, self._device)[:, None]
            logits = logits.masked_fill(lanes & self._ends, -torch.inf)
        return logits


def _token_count(config: Any, name: str) -> int:
    value = getattr(config, name) or 0
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; it must be a count of tokens")
    return value


def _vocabulary_mask(ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Return a mask ``(vocab,)`` of *ids*; ids outside the vocabulary are ignored."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[[token for token in ids if 0 <= token < vocab_size]] = True
    return mask
