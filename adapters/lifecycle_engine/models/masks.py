"""Which positions a token sees: all before it, or in some layers the last ones only.

A row holds every position, whatever a layer sees of it, so that rows are packed,
kept and resumed alike in all layers. What a window would save of them is not saved.
"""

from __future__ import annotations

from typing import Any

import torch

from .graphs import Inputs

_FULL, _NEAR = "full_attention", "sliding_attention"
_KINDS = (_FULL, _NEAR)
# The caches of transformers give a window of one position all of them back.
_LEAST = 2


def kinds_of(text: Any) -> list[str]:
    """Return what each layer of a language model sees, by transformers' words.

    Models whose layers are all alike have no list of them.
    """
    listed = getattr(text, "layer_types", None)
    if listed:
        return list(listed)
    windowed = getattr(text, "sliding_window", None) is not None
    return [_NEAR if windowed else _FULL] * text.num_hidden_layers


def refuse_sight(text: Any) -> None:
    """Refuse a language model whose tokens see what is not known here.

    Raises:
        ValueError: Layers of another kind, a window that is none, or tokens that see
            those behind them.
    """
    kinds = set(kinds_of(text))
    if unknown := kinds - set(_KINDS):
        raise ValueError(
            f"the model has layers of {', '.join(sorted(unknown))}; known are "
            f"{', '.join(_KINDS)}"
        )
    window = getattr(text, "sliding_window", None)
    if _NEAR in kinds and (window is None or window < _LEAST):
        raise ValueError(
            f"the model has a sliding_window of {window}; known are {_LEAST} or more"
        )
    causal = getattr(text, "is_causal", None) is not False
    if not causal or getattr(text, "use_bidirectional_attention", None):
        raise ValueError(
            "the model has tokens that see those behind them; known are models whose "
            "tokens see those before them alone"
        )


class Masks:
    """Makes what a forward pass of a model takes as ``attention_mask``.

    Args:
        text: Config of a language model that `refuse_sight` lets pass.
    """

    def __init__(self, text: Any) -> None:
        kinds = set(kinds_of(text))
        self._window: int | None = text.sliding_window if _NEAR in kinds else None
        self._listed = bool(getattr(text, "layer_types", None))

    def chunk(self, start: int, stop: int, device: torch.device) -> Any:
        """For positions ``start .. stop - 1`` of a row; ``None`` is all before each."""
        at = torch.arange(start, stop, device=device)[:, None]
        seen = torch.arange(stop, device=device)[None]
        full = (seen <= at)[None, None] if start else None
        if self._window is None:
            return full
        near = (seen <= at) & (seen > at - self._window)
        return self._of_layers(full, near[None, None])

    def step(self, inputs: Inputs) -> Any:
        """For one position of each lane; asks the device for nothing."""
        if self._window is None:
            return inputs.mask
        seen = torch.arange(inputs.stop, device=inputs.positions.device)
        near = seen > inputs.positions[:, None] - self._window
        return self._of_layers(inputs.mask, inputs.mask & near[:, None, None])

    def _of_layers(self, full: Any, near: Any) -> Any:
        # Models with kinds of layers look theirs up; in others all layers are alike.
        return {_FULL: full, _NEAR: near} if self._listed else near
