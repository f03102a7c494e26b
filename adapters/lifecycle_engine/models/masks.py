"""Which positions a token sees: all before it, or in some layers the last ones only.

A row holds every position, whatever a layer sees of it, so that rows are packed,
kept and resumed alike in all layers. What a window would save of them is not saved.
"""

from __future__ import annotations

from typing import Any

import torch

from .graphs import Inputs

_FULL, _NEAR = "full_attention", "sliding_attention"
KINDS = (_FULL, _NEAR)


def kinds_of(text: Any) -> list[str]:
    """Return what each layer of a language model sees, by transformers' words.

    Models whose layers are all alike have no list of them.
    """
    listed = getattr(text, "layer_types", None)
    if listed:
        return list(listed)
    windowed = getattr(text, "sliding_window", None) is not None
    return [_NEAR if windowed else _FULL] * text.num_hidden_layers


class Masks:
    """Makes what a forward pass of a model takes as ``attention_mask``.

    Args:
        text: Config of a language model with layers of `KINDS`.
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
