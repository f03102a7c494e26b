"""Decode attention on the key and value heads as they are stored.

Where several query heads share a key head, transformers before 5.23 copies the
keys and values of a masked step once for each of them: many times what the step
has to read. With one query token the heads that share can stand where a query's
tokens stand, and nothing is copied; later releases do so by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._hf import hf

_NAME = "lifecycle_shared_heads"
_SDPA = "integrations.sdpa_attention"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one token of each lane, ``(lanes, heads, 1, head_dim)``.

    Returns:
        ``(lanes, 1, heads, head_dim)``, and no weights.
    """
    del module
    lanes, heads, _tokens, width = query.shape
    together = query.reshape(lanes, key.shape[1], -1, width)
    made = torch.nn.functional.scaled_dot_product_attention(
        together, key, value, attn_mask=attention_mask, scale=scaling
    )
    return made.reshape(lanes, 1, heads, width), None


def shared_heads(text: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what a decode step of a language model runs in; it may do nothing."""
    try:
        hf("pack_gqa", _SDPA)
    except AttributeError:
        return register(text)
    return contextlib.nullcontext


def register(text: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Make `attend` known to transformers; it is used inside what is returned."""
    hf("AttentionInterface").register(_NAME, attend)
    config = text.config

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        before = config._attn_implementation  # noqa: SLF001  # has no public name
        config._attn_implementation = _NAME  # noqa: SLF001
        try:
            yield
        finally:
            config._attn_implementation = before  # noqa: SLF001

    return within
