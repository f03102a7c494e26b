"""Estimates the memory of a checkpoint from its config, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lifecycle_engine.model.families import max_positions
from lifecycle_engine.model.kv_cache import slot_bytes
from lifecycle_engine.model.loader import load_config
from lifecycle_engine.model.transformers_runner import MAX_LENGTH


@dataclass(frozen=True, slots=True)
class CheckpointMemory:
    """Memory of a checkpoint on the device that it would be served on.

    Attributes:
        dtype: The dtype that it would be loaded with.
        max_length: Tokens of a slot.
        slot: Bytes of each KV slot; padding takes one more slot.
        weights: Bytes of its weight files.
    """

    dtype: str
    max_length: int
    slot: int
    weights: int


def estimate_memory(
    checkpoint: Path, *, cuda: bool, max_length: int | None = None
) -> CheckpointMemory:
    """Estimate the memory of a checkpoint folder.

    Args:
        checkpoint: The folder.
        cuda: Whether it would be served on a GPU, in its own dtype.
        max_length: Tokens of a slot; ``None`` is the default of `serve`.

    Raises:
        OSError: The folder holds no checkpoint.
        ValueError: The checkpoint is not supported.
    """
    config = load_config(checkpoint)
    text = config.get_text_config()
    dtype = torch.float32
    if cuda:
        dtype = config.dtype or text.dtype or dtype
    length = max_length or min(max_positions(text), MAX_LENGTH)
    return CheckpointMemory(
        str(dtype).removeprefix("torch."),
        length,
        slot_bytes(text, max_length=length, dtype=dtype),
        sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")),
    )
