"""Attention masks of the language models that the runner supports."""

from __future__ import annotations

from typing import Any

import torch

from lifecycle_engine.model.cuda_graphs import StepInputs

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SUPPORTED = (_FULL, _SLIDING)
# With a window of one position the caches of transformers return all positions.
_MIN_WINDOW = 2


def layer_types(text: Any) -> list[str]:
    """Return the attention type of each layer, in transformers' terms.

    Models whose layers are all of one type have no ``layer_types`` in their config.
    """
    listed = getattr(text, "layer_types", None)
    if listed:
        return list(listed)
    windowed = getattr(text, "sliding_window", None) is not None
    return [_SLIDING if windowed else _FULL] * text.num_hidden_layers


def check_attention(text: Any) -> None:
    """Reject a language model with an unsupported kind of attention.

    Raises:
        ValueError: Layers of another type, an invalid window, or attention that is not
            causal.
    """
    kinds = set(layer_types(text))
    if unknown := kinds - set(_SUPPORTED):
        raise ValueError(
            f"the model has layers of {', '.join(sorted(unknown))}; known are "
            f"{', '.join(_SUPPORTED)}"
        )
    window = getattr(text, "sliding_window", None)
    if _SLIDING in kinds and (window is None or window < _MIN_WINDOW):
        raise ValueError(
            f"the model has a sliding_window of {window}; the minimum is {_MIN_WINDOW}"
        )
    causal = getattr(text, "is_causal", None) is not False
    if not causal or getattr(text, "use_bidirectional_attention", None):
        raise ValueError(
            "the model has bidirectional attention; supported are causal models, whose "
            "tokens attend to earlier positions only"
        )


class AttentionMasks:
    """Builds the ``attention_mask`` of forward passes.

    A cache row holds every position even in layers with a sliding window, so that rows
    are packed, cached and resumed alike in all layers; a window saves no memory.

    Args:
        text: Config of a language model that passed `check_attention`.
    """

    def __init__(self, text: Any) -> None:
        kinds = set(layer_types(text))
        self._window: int | None = text.sliding_window if _SLIDING in kinds else None
        self._by_layer = bool(getattr(text, "layer_types", None))

    def prefill(self, start: int, stop: int, device: torch.device) -> Any:
        """Mask of positions ``start .. stop - 1`` of a row; ``None`` is causal."""
        at = torch.arange(start, stop, device=device)[:, None]
        visible = torch.arange(stop, device=device)[None]
        full = (visible <= at)[None, None] if start else None
        if self._window is None:
            return full
        local = (visible <= at) & (visible > at - self._window)
        return self._for_layers(full, local[None, None])

    def decode(self, inputs: StepInputs) -> Any:
        """Mask of one position of each lane; does not synchronise with the device."""
        if self._window is None:
            return inputs.mask
        visible = torch.arange(inputs.stop, device=inputs.positions.device)
        local = visible > inputs.positions[:, None] - self._window
        return self._for_layers(inputs.mask, inputs.mask & local[:, None, None])

    def _for_layers(self, full: Any, local: Any) -> Any:
        # A model with several types of layers looks its mask up by type.
        return {_FULL: full, _SLIDING: local} if self._by_layer else local
