"""KV rows for continuous batching, shaped as a transformers cache.

One row a slot and one more that is reserved: padded lanes of a decode step write
to it, so that a batch can have any size without touching a request's row. Which
rows and positions a forward pass means is a `Window` set before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._hf import hf

_Cache: Any = hf("Cache", "cache_utils")
_CacheLayer: Any = hf("CacheLayerMixin", "cache_utils")


@dataclass(slots=True)
class Window:
    """What the next forward pass writes and sees.

    Attributes:
        rows: Row of each lane, ``(lanes,)``, or one `int` for a prefill.
        positions: Where each lane's token goes, ``(lanes,)``; prefill: unused.
        start: First position of a prefill chunk; 0 for decode.
        stop: Positions ``0 .. stop - 1`` are returned to attention.
    """

    rows: torch.Tensor | int
    positions: torch.Tensor | None
    start: int
    stop: int


class SlotLayer(_CacheLayer):  # type: ignore[misc]  # a base of type Any
    """The rows of one decoder layer.

    Attributes:
        keys, values: ``(slots + 1, heads, max_length, head_dim)``.
    """

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, owner: SlotCache):
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._owner = owner

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Nothing is lazy: device memory is known once the model is loaded."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``(lanes, heads, tokens, head_dim)``; return what attention sees."""
        window = self._owner.window
        return (
            _write(self.keys, key_states, window),
            _write(self.values, value_states, window),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset; only asked where no 4-D mask is given (prefill)."""
        return self._owner.window.start + query_length, 0

    def get_seq_length(self) -> int:
        """Positions that are filled before the next forward pass."""
        return self._owner.window.start

    def get_max_length(self) -> int:
        """Positions of one row."""
        return int(self.keys.shape[2])

    # The abstract name that transformers before 5.20 asks for.
    get_max_cache_shape = get_max_length


class SlotCache(_Cache):  # type: ignore[misc]  # a base of type Any
    """The rows of a whole model.

    Attributes:
        reserved: The row for padded lanes; the last one, never a slot.
        window: Set by `prefill_window` or `decode_window` before each pass.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots + 1, heads, max_length, head_dim)
        self.reserved = slots
        self.window = Window(rows=0, positions=None, start=0, stop=0)
        # Zeros, not empty: a masked key still enters a product with weight zero,
        # and zero times an old NaN is a NaN.
        super().__init__(
            layers=[
                SlotLayer(
                    torch.zeros(shape, dtype=dtype, device=device),
                    torch.zeros(shape, dtype=dtype, device=device),
                    self,
                )
                for _ in range(layers)
            ]
        )

    @property
    def nbytes(self) -> int:
        """Device memory of all rows, the reserved one included."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def clear(self, slot: int, length: int) -> None:
        """Zero what a request wrote: a NaN or secret must not outlive its request."""
        for layer in self.layers:
            layer.keys[slot, :, :length] = 0
            layer.values[slot, :, :length] = 0

    def prefill_window(self, slot: int, start: int, stop: int) -> None:
        """The next pass writes positions ``start .. stop - 1`` of one slot."""
        self.window = Window(rows=slot, positions=None, start=start, stop=stop)

    def decode_window(
        self, rows: torch.Tensor, positions: torch.Tensor, stop: int
    ) -> None:
        """The next pass writes one position of each lane's row."""
        self.window = Window(rows=rows, positions=positions, start=0, stop=stop)


def _write(store: torch.Tensor, states: torch.Tensor, window: Window) -> torch.Tensor:
    if isinstance(window.rows, int):
        store[window.rows, :, window.start : window.stop] = states[0]
        return store[window.rows : window.rows + 1, :, : window.stop]
    store[window.rows, :, window.positions] = states[:, :, 0]
    return store[window.rows, :, : window.stop]
