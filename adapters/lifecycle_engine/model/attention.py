"""Attention masks, and decode attention over grouped heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lifecycle_engine._compat import hf
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


# The name under which transformers registers `grouped_attention`.
_NAME = "lifecycle_grouped_heads"
_SDPA = "integrations.sdpa_attention"


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one token of each lane, ``(lanes, heads, 1, head_dim)``.

    Where several query heads share a key head, transformers before 5.23 copies the
    keys and values of a masked step once for each query head. With one query token the
    heads of a group can take the place of the query tokens, and nothing is copied.

    Returns:
        The output ``(lanes, 1, heads, head_dim)``, and no weights.
    """
    del module
    lanes, heads, _tokens, width = query.shape
    grouped = query.reshape(lanes, key.shape[1], -1, width)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(lanes, 1, heads, width), None


def decode_attention(
    text: Any,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager for decode steps that avoids copies of grouped heads.

    It does nothing where transformers avoids the copies itself.
    """
    try:
        hf("pack_gqa", _SDPA)
    except AttributeError:
        return register_grouped_attention(text)
    return contextlib.nullcontext


def register_grouped_attention(
    text: Any,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Register `grouped_attention`; the returned context manager switches to it."""
    hf("AttentionInterface").register(_NAME, grouped_attention)
    config = text.config

    @contextlib.contextmanager
    def use_grouped_attention() -> Iterator[None]:
        before = config._attn_implementation  # noqa: SLF001  # has no public name
        config._attn_implementation = _NAME  # noqa: SLF001
        try:
            yield
        finally:
            config._attn_implementation = before  # noqa: SLF001

    return use_grouped_attention
