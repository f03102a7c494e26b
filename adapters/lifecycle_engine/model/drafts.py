"""Drafts: tokens that a step checks ahead of time (speculative decoding).

A pass over several tokens of a request takes hardly longer than a pass over one, so a
step that also runs drafts of the following tokens yields as many tokens as the drafts
are right, and one more. Which tokens it yields does not depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lifecycle_engine._compat import max_positions
from lifecycle_engine.core.model_runner import Prompt, Sampling
from lifecycle_engine.model.cuda_graphs import (
    Drafts,
    FixedShapeSteps,
    Lane,
    StepOptions,
    make_steps,
)
from lifecycle_engine.model.device_copies import small_tensor
from lifecycle_engine.model.families import (
    family_of,
    freeze_rope_frequencies,
    takes_images,
)
from lifecycle_engine.model.forward_pass import ForwardPass
from lifecycle_engine.model.kv_cache import BatchRows, SlotCache
from lifecycle_engine.model.loader import load_config, load_model
from lifecycle_engine.model.sampler import Sampler

_FOLDER = "draft="
# Numbers of last tokens that are looked for in the text before them.
_NGRAMS = (3, 2)
# A step of the model accepts all drafts and yields one more token, so that the draft
# model has two to run.
_BEHIND = 2
_GREEDY = Sampler(Sampling())


def make_drafts(
    speculative: str | None,
    tokens: int,
    model: Any,
    options: StepOptions,
    max_length: int,
) -> Drafts:
    """Make the drafts that an option names.

    Args:
        speculative: ``None``, ``"ngram"`` or ``"draft=FOLDER"``.
        tokens: Maximum number of drafts in a step.
        model: The model that checks them.
        options: How its steps run.
        max_length: Positions of its slots.

    Raises:
        OSError: The folder holds no checkpoint.
        ValueError: An unknown option, or a model that cannot draft for this one.
    """
    if tokens < 1:
        raise ValueError(f"draft_tokens is {tokens}; it must be 1 or more")
    if speculative is None:
        return Drafts()
    if speculative == "ngram":
        return NgramDrafts(slots=options.slots, max_length=max_length, tokens=tokens)
    folder = speculative.removeprefix(_FOLDER)
    if folder in ("", speculative):
        raise ValueError(
            f"speculative is {speculative!r}; use ngram, or draft=FOLDER with the "
            "checkpoint of a smaller model"
        )
    _check_draft(load_config(folder), max_length)
    dtype = str(model.dtype).removeprefix("torch.")
    draft = load_model(folder, device=str(model.device), dtype=dtype)
    sizes = {"max_length": max_length, "tokens": tokens}
    vocab_size = model.config.get_text_config().vocab_size
    return DraftModel(draft, options=options, vocab_size=vocab_size, **sizes)


def _check_draft(config: Any, max_length: int) -> None:
    if takes_images(config):
        raise ValueError(
            f"the draft model is a {config.model_type}, which takes images; use a "
            "model of text with the same tokenizer"
        )
    limit = max_positions(config.get_text_config())
    if limit < max_length:
        raise ValueError(
            f"the draft model takes {limit} positions and a slot has {max_length}; set "
            f"max_length to {limit} or less"
        )


class NgramDrafts(Drafts):
    """Repeats what followed the last tokens where they occurred before.

    Answers quote their prompts, and code and lists repeat themselves.
    """

    def __init__(self, *, slots: int, max_length: int, tokens: int) -> None:
        self._texts = np.zeros((slots, max_length), np.int32)
        self._lengths = [0] * slots
        self.tokens = tokens

    def truncate(self, slot: int, length: int) -> None:
        """Discard a slot's tokens from *length* on."""
        self._texts[slot, length:] = 0
        self._lengths[slot] = min(self._lengths[slot], length)

    def extend(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Copy the tokens that are new."""
        for slot, ids in zip(slots, texts, strict=True):
            known = self._lengths[slot]
            self._texts[slot, known : len(ids)] = ids[known:]
            self._lengths[slot] = len(ids)

    def propose(
        self, slots: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return what followed the last tokens of each text."""
        self.extend(slots, texts)
        return [
            find_continuation(self._texts[slot, : len(ids)], self.tokens)
            for slot, ids in zip(slots, texts, strict=True)
        ]


def find_continuation(text: np.ndarray, count: int) -> list[int]:
    """Return up to *count* tokens that once followed the last tokens of a text.

    Of several places, the latest with *count* tokens after it; if none has as many, the
    one with the most.
    """
    for size in _NGRAMS:
        if len(text) <= size:
            continue
        grams = np.lib.stride_tricks.sliding_window_view(text, size)[:-1]
        starts = np.flatnonzero((grams == text[-size:]).all(axis=1))
        if len(starts):
            whole = starts[starts + size + count <= len(text)]
            after = int(whole[-1] if len(whole) else starts[0]) + size
            found: list[int] = text[after : after + count].tolist()
            return found
    return []


class DraftModel(Drafts):
    """A smaller model that generates the drafts, with KV rows of its own.

    Whatever chunk the model prefills, this one prefills as well, so that both have read
    the same text at every step. Sizes are those of the model that it drafts for.
    """

    def __init__(
        self,
        model: Any,
        *,
        options: StepOptions,
        vocab_size: int,
        max_length: int,
        tokens: int,
    ) -> None:
        freeze_rope_frequencies(model)
        family = family_of(model.config)
        # Models of one tokenizer pad their vocabularies to different sizes.
        own: int = model.config.get_text_config().vocab_size
        self._shared = min(own, vocab_size)
        self.tokens, self._device = tokens, model.device
        # Drafts may go beyond the last position that the other model has room for.
        length, slots = max_length + tokens, options.slots
        self._cache = SlotCache(model, slots=slots, max_length=length)
        self._forward = ForwardPass(model, family, self._cache)
        self._rows = BatchRows(
            self._cache, slots=slots, max_length=length, tokens=tokens + 1
        )
        self._steps = make_steps(
            self._forward.decode,
            options,
            device=model.device,
            max_length=length,
            tokens=_BEHIND,
        )

    def truncate(self, slot: int, length: int) -> None:
        """Discard a slot's positions from *length* on."""
        if length:
            self._rows.truncate(slot, length)
        else:
            self._rows.assign(slot, _GREEDY, None)

    def extend(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Prefill the positions that are new."""
        parts = []
        for slot, ids in zip(slots, texts, strict=True):
            state = self._rows[slot]
            prompt = Prompt(self._known(ids), {})
            parts.append((state.row, prompt, state.length, len(ids)))
            state.length = len(ids)
            # Not negative: the slot may be cached after this chunk.
            state.token = ids[-1]
        self._forward.prefill(parts)

    def propose(
        self, slots: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Generate the most likely continuation of each text."""
        states = [self._rows[slot] for slot in slots]
        new = []
        for state, ids in zip(states, texts, strict=True):
            state.length = min(state.length, len(ids) - 1)  # without rejected drafts
            state.token = ids[-1]
            new.append(self._known(ids[state.length :]))
        width = self._rows.pack(slots, self._steps.width)
        drafts: list[list[int]] = [[] for _ in slots]
        for _ in range(self.tokens):
            lanes = [
                Lane(state.row, tokens, state.length, 0)
                for state, tokens in zip(states, new, strict=True)
            ]
            best = self._likeliest(lanes, width)
            for state, lane, draft, token in zip(
                states, lanes, drafts, best, strict=True
            ):
                state.length += len(lane.tokens)
                draft.append(token)
            new = [[token] for token in best]
        return drafts

    def free(self, slot: int) -> None:
        """Discard a slot's state and zero its row."""
        self._rows.free(slot)

    def capture(self) -> None:
        """Capture graphs of all shapes."""
        if isinstance(self._steps, FixedShapeSteps):
            self._steps.prepare()

    def _likeliest(self, lanes: Sequence[Lane], width: int) -> list[int]:
        places = [(lane.row, len(lane.tokens) - 1) for lane in lanes]
        rows, lasts = small_tensor(places, self._device).T
        logits = self._steps.run(lanes, width)[rows, lasts, : self._shared]
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        return tokens

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [min(token, self._shared - 1) for token in ids]
