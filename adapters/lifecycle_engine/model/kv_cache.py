"""The KV cache: rows for continuous batching, and the mapping of requests to rows.

The cache has the interface of a transformers cache: one row for each slot, and one
reserved row that padded lanes of a decode step write to. So a batch can be padded to
any size without touching a request's row. A window, set before each forward pass, says
which rows and positions the pass writes and reads.

A decode step reads the rows ``0 .. width - 1`` in place. Gathering the lanes' rows
would copy every key and value of the batch in every layer of every step; keeping the
rows of a batch adjacent costs one `swap` when a request leaves.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lifecycle_engine._compat import hf
from lifecycle_engine.core.slots import PrefixContents
from lifecycle_engine.model.sampler import Sampler

_Cache: Any = hf("Cache", "cache_utils")
_CacheLayer: Any = hf("CacheLayerMixin", "cache_utils")


# Has the other ranks of a tensor parallel model do what the body of the block does.
# Takes its name, its numbers, and the features of images.
Together = Callable[..., AbstractContextManager[None]]


def alone(name: str, *_: Any) -> AbstractContextManager[None]:
    """Do nothing: there are no other ranks."""
    del name
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that this process has, and its ties to the others.

    Attributes:
        heads: Its key heads; ``None``: all.
        together: Has the other ranks do the same.
    """

    heads: int | None = None
    together: Together = alone


WHOLE = Part()
"""All of a model, in one process."""


@dataclass(frozen=True, slots=True)
class PrefillWindow:
    """A prefill pass: writes positions ``start .. stop - 1`` of one row."""

    row: int
    start: int
    stop: int

    def write(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Store ``(1, heads, tokens, head_dim)``; return what to attend to."""
        store[self.row, :, self.start : self.stop] = states[0]
        return store[self.row : self.row + 1, :, : self.stop]


@dataclass(frozen=True, slots=True)
class BatchWindow:
    """A pass over several rows: writes the positions of each lane's tokens.

    Attributes:
        rows: The row that each token is written to, ``(width, tokens)``: that of its
            lane, or the reserved row for padding.
        positions: Its position there, ``(width, tokens)``.
        stop: Attention reads the positions ``0 .. stop - 1``.
        lanes: The row that each lane reads. A slice reads them in place; a tensor
            copies them.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    stop: int
    lanes: slice | torch.Tensor
    start = 0

    def write(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Store ``(width, heads, tokens, head_dim)``; return what to attend to."""
        store[self.rows, :, self.positions] = states.transpose(1, 2)
        return store[self.lanes, :, : self.stop]


class SlotLayer(_CacheLayer):  # type: ignore[misc]  # a base of type Any
    """The KV rows of one decoder layer.

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
        """Do nothing: all memory is allocated with the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``(lanes, heads, tokens, head_dim)``; return what to attend to."""
        window = self._owner.window
        return (
            window.write(self.keys, key_states),
            window.write(self.values, value_states),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset; only used without a 4-D mask."""
        return self._owner.window.start + query_length, 0

    def get_seq_length(self) -> int:
        """Filled positions before the next forward pass."""
        return self._owner.window.start

    def get_max_length(self) -> int:
        """Positions of one row."""
        return int(self.keys.shape[2])


def cache_parameter(text: Any) -> str:
    """Return the name of the parameter by which a language model takes its cache.

    transformers calls it ``cache`` from 5.24 on, and ``past_key_values`` before.
    """
    parameters = inspect.signature(type(text).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class SlotCache(_Cache):  # type: ignore[misc]  # a base of type Any
    """The KV rows of a whole model.

    Attributes:
        reserved: The row for padded lanes: the last one, never a slot's.
        window: What the next forward pass writes and reads; set before each pass.
    """

    window: PrefillWindow | BatchWindow

    def __init__(
        self, model: Any, *, slots: int, max_length: int, part: Part = WHOLE
    ) -> None:
        """Allocate the rows for a loaded model, on its device.

        Args:
            model: The model.
            slots: Number of rows, without the reserved one.
            max_length: Positions of a row.
            part: What this process has of the model.

        Raises:
            ValueError: The rows do not fit into the device's memory.
        """
        self._together = part.together
        self.reserved = slots
        self.window = PrefillWindow(slots, 0, 0)
        count, heads, head_dim = _sizes(model.config.get_text_config())
        shape = (slots + 1, part.heads or heads, max_length, head_dim)
        options = {"dtype": model.dtype, "device": model.device}
        try:
            # Zeros, not empty: a masked key is still multiplied by a weight of zero,
            # and zero times a stale NaN is NaN.
            layers = [
                SlotLayer(
                    torch.zeros(shape, **options), torch.zeros(shape, **options), self
                )
                for _ in range(count)
            ]
        except torch.OutOfMemoryError:
            raise ValueError(
                f"{slots} KV slots of {max_length} positions do not fit beside the "
                f"model on {model.device}; take fewer slots, or shorter ones by "
                "max_length"
            ) from None
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Device memory of all rows, including the reserved one."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def clear(self, row: int, start: int, stop: int) -> None:
        """Zero a request's positions: no NaN or secret may outlive its request."""
        with self._together("clear", (row, start, stop)):
            for layer in self.layers:
                layer.keys[row, :, start:stop] = 0
                layer.values[row, :, start:stop] = 0

    def swap(self, row: int, other: int, length: int) -> None:
        """Exchange the first *length* positions of two rows."""
        with self._together("swap", (row, other, length)):
            for layer in self.layers:
                for store in (layer.keys, layer.values):
                    saved = store[other, :, :length].clone()
                    store[other, :, :length] = store[row, :, :length]
                    store[row, :, :length] = saved


def slot_bytes(text: Any, *, max_length: int, dtype: torch.dtype) -> int:
    """Return the bytes of one row for a language model's config."""
    nbytes: int = 2 * math.prod(_sizes(text)) * max_length * dtype.itemsize
    return nbytes


def _sizes(text: Any) -> tuple[int, int, int]:
    """Return the number of layers, of key heads, and the size of one key."""
    head_dim = getattr(text, "head_dim", None)
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, text.num_key_value_heads, head_dim


@dataclass(slots=True)
class RowState:
    """The state of the request in a slot.

    Attributes:
        row: Its row of the cache, which changes when a batch is packed.
        sampler: Samples its tokens.
        contents: What its positions were computed from, if a later turn may resume
            from the slot or drafts are made from it.
        length: Filled KV positions.
        token: The last generated token; negative during prefill.
        delta: Offset of its rotary positions while decoding.
    """

    row: int
    sampler: Sampler
    contents: PrefixContents | None = None
    length: int = 0
    token: int = -1
    delta: int = 0


class BatchRows:
    """Maps slots to rows of the cache, and packs the rows of a batch together.

    Args:
        cache: The rows.
        slots: Number of rows for requests, without the cache's reserved row.
        max_length: Positions of a row.
        tokens: Positions of a row that one decode step may write.
    """

    def __init__(
        self, cache: SlotCache, *, slots: int, max_length: int, tokens: int = 1
    ) -> None:
        self._cache, self._slots, self._max_length = cache, slots, max_length
        self._tokens = tokens
        self._states: dict[int, RowState] = {}

    def __getitem__(self, slot: int) -> RowState:
        return self._states[slot]

    def __len__(self) -> int:
        return len(self._states)

    def assign(
        self, slot: int, sampler: Sampler, contents: PrefixContents | None
    ) -> None:
        """Assign the first free row to a slot, discarding what the slot had."""
        self.free(slot)
        taken = {state.row for state in self._states.values()}
        row = next(row for row in range(self._slots) if row not in taken)
        self._states[slot] = RowState(row, sampler, contents)

    def resume(self, slot: int, sampler: Sampler, contents: PrefixContents) -> int:
        """Keep the prefix of a slot that a new request shares; return its length.

        At least one token is left to prefill: that pass yields the next token.
        """
        state = self._states[slot]
        shared = 0
        if state.contents is not None:
            shared = state.contents.common_prefix(contents)
        shared = self.truncate(slot, min(shared, len(contents.ids) - 1))
        self._states[slot] = RowState(state.row, sampler, contents, length=shared)
        return shared

    def truncate(self, slot: int, length: int) -> int:
        """Discard a slot's positions from *length* on; return how many it has."""
        state = self._states[slot]
        length = min(length, state.length)
        self._cache.clear(state.row, length, self._written(state))
        state.length, state.token = length, -1
        return length

    def free(self, slot: int) -> None:
        """Discard a slot's state and zero its row; an empty slot is a no-op."""
        state = self._states.pop(slot, None)
        if state is not None:
            self._cache.clear(state.row, 0, self._written(state))

    def pack(self, slots: Sequence[int], width: Callable[[int], int]) -> int:
        """Move the rows of a batch to the front; return the batch's width.

        Rows in prefill stay where they are and widen the batch until they are done.
        Rows of cached slots are swapped out of the way.

        Args:
            slots: The batch.
            width: Returns the width that a batch of that many lanes runs with.
        """
        batch = [self._states[slot] for slot in slots]
        prefilling = {state.row for state in self._states.values() if state.token < 0}
        front, room = 0, width(len(batch))
        while front < room:  # rows in prefill at the front widen the batch
            front = room
            room = width(len(batch) + sum(row < front for row in prefilling))
        fixed = {state.row for state in batch} | prefilling
        free = (row for row in range(front) if row not in fixed)
        for state in batch:
            if state.row >= front and (target := next(free, None)) is not None:
                self._swap(state, target)
        return width(max(state.row for state in batch) + 1)

    def _swap(self, state: RowState, target: int) -> None:
        occupants = [each for each in self._states.values() if each.row == target]
        for each in occupants:
            each.row = state.row
        written = max(self._written(each) for each in (state, *occupants))
        self._cache.swap(state.row, target, written)
        state.row = target

    def _written(self, state: RowState) -> int:
        # More: a step wrote drafts that were rejected, or failed half-way.
        return min(state.length + self._tokens, self._max_length)
