"""What a checkpoint will take of memory, read off its config without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .families import longest_of
from .kv import slot_bytes
from .loading import load_config
from .transformers_runner import MAX_LENGTH


@dataclass(frozen=True, slots=True)
class Sizing:
    """Bytes of a checkpoint on the device that it would be served on.

    Attributes:
        dtype: As it would be loaded.
        max_length: Tokens of a slot.
        slot: Bytes of each KV slot; there is one more, for padding.
        weights: Bytes of its files of weights.
    """

    dtype: str
    max_length: int
    slot: int
    weights: int


def size_up(checkpoint: Path, *, cuda: bool, max_length: int | None = None) -> Sizing:
    """Read the sizes of a checkpoint folder.

    Args:
        checkpoint: The folder.
        cuda: Whether it would be served on a device, and so in its own dtype.
        max_length: Tokens of a slot; ``None`` is what `serve` takes.

    Raises:
        OSError: No checkpoint there.
        ValueError: A family that cannot be served.
    """
    config = load_config(checkpoint)
    text = config.get_text_config()
    dtype = torch.float32
    if cuda:
        dtype = config.dtype or text.dtype or dtype
    length = max_length or min(longest_of(text), MAX_LENGTH)
    return Sizing(
        str(dtype).removeprefix("torch."),
        length,
        slot_bytes(text, max_length=length, dtype=dtype),
        sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")),
    )
