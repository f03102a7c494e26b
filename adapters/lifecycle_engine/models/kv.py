"""KV rows for continuous batching, shaped as a transformers cache.

One row a slot and one more that is reserved: padded lanes of a decode step write
to it, so that a batch can have any size without touching a request's row. Which
rows and positions a forward pass means is a `Window` set before it.

A decode step reads the rows ``0 .. width - 1`` where they lie. Picking the lanes'
rows out would copy every key and value of the batch in every layer of every step;
keeping the rows of a batch together costs one `swap` when a request leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ._hf import hf

_Cache: Any = hf("Cache", "cache_utils")
_CacheLayer: Any = hf("CacheLayerMixin", "cache_utils")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill pass: writes positions ``start .. stop - 1`` of one row."""

    row: int
    start: int
    stop: int

    def write(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Store ``(1, heads, tokens, head_dim)``; return what attention sees."""
        store[self.row, :, self.start : self.stop] = states[0]
        return store[self.row : self.row + 1, :, : self.stop]


@dataclass(frozen=True, slots=True)
class Step:
    """A decode pass: writes one position for each lane, reads rows from 0 on.

    Attributes:
        rows: Where each lane writes, ``(width,)``: its own number, or the
            reserved row if it is padding.
        positions: The position that it writes, ``(width,)``.
        stop: Positions ``0 .. stop - 1`` are returned to attention.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    stop: int
    start = 0

    def write(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Store ``(width, heads, 1, head_dim)``; return what attention sees."""
        store[self.rows, :, self.positions] = states[:, :, 0]
        return store[: states.shape[0], :, : self.stop]


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
            window.write(self.keys, key_states),
            window.write(self.values, value_states),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset; only asked where no 4-D mask is given."""
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
        reserved: The row for padded lanes; the last one, never a slot's.
        window: What the next pass writes and sees; set before each.
    """

    window: Chunk | Step

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
        self.window = Chunk(slots, 0, 0)
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

    @classmethod
    def of(cls, model: Any, *, slots: int, max_length: int) -> SlotCache:
        """Make the rows that a loaded model needs, on its device.

        Raises:
            ValueError: They do not fit there.
        """
        layers, heads, head_dim = _sizes(model.config.get_text_config())
        try:
            return cls(
                layers=layers,
                slots=slots,
                heads=heads,
                max_length=max_length,
                head_dim=head_dim,
                dtype=model.dtype,
                device=model.device,
            )
        except torch.OutOfMemoryError:
            raise ValueError(
                f"{slots} KV slots of {max_length} positions do not fit beside the "
                f"model on {model.device}; take fewer slots, or shorter ones by "
                "max_length"
            ) from None

    @property
    def nbytes(self) -> int:
        """Device memory of all rows, the reserved one included."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def clear(self, row: int, start: int, stop: int) -> None:
        """Zero what a request wrote: a NaN or secret must not outlive its request."""
        for layer in self.layers:
            layer.keys[row, :, start:stop] = 0
            layer.values[row, :, start:stop] = 0

    def swap(self, row: int, other: int, length: int) -> None:
        """Exchange what two rows hold in their first positions."""
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                kept = store[other, :, :length].clone()
                store[other, :, :length] = store[row, :, :length]
                store[row, :, :length] = kept


def slot_bytes(text: Any, *, max_length: int, dtype: torch.dtype) -> int:
    """Return the memory of one row for a language model of that config."""
    nbytes: int = 2 * math.prod(_sizes(text)) * max_length * dtype.itemsize
    return nbytes


def _sizes(text: Any) -> tuple[int, int, int]:
    """Layers, key heads, and numbers of one key."""
    head_dim = getattr(text, "head_dim", None)
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, text.num_key_value_heads, head_dim
