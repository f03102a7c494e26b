"""Loads and checks a checkpoint, and estimates its memory without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lifecycle_engine._compat import (
    config_of,
    generation_file,
    hf,
    hide_progress_bars,
    readable_errors,
    slot_length,
)
from lifecycle_engine.model.families import family_of, takes_images
from lifecycle_engine.model.kv_cache import slot_bytes
from lifecycle_engine.model.sampler import GenerationRules

_ATTENTION = "sdpa"


def load_config(checkpoint: str | Path) -> Any:
    """Read and check the config of a checkpoint folder.

    Raises:
        OSError: The folder holds no checkpoint.
        ValueError: The checkpoint is not supported.
    """
    config = config_of(checkpoint)
    _check_not_quantized(config)
    family_of(config)
    with readable_errors("generation config"):
        generation = hf("GenerationConfig").from_pretrained(
            str(checkpoint),
            config_file_name=generation_file(checkpoint),
            local_files_only=True,
        )
    GenerationRules.from_config(generation)
    return config


def load_model(
    checkpoint: str | Path, *, device: str, dtype: str, distributed: Any = None
) -> Any:
    """Load a checkpoint folder with `from_pretrained`, without network access.

    Args:
        checkpoint: A local folder.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: Name of a torch dtype, or ``"auto"`` for the checkpoint's own.
        distributed: transformers' ``DistributedConfig``, to load a part of the model.

    Raises:
        OSError: The folder holds no checkpoint.
        ValueError: No such device, or an unsupported or incomplete checkpoint.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is cuda, but torch {torch.__version__} sees none; use cpu"
        )
    weights = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if weights != "auto" and not isinstance(weights, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; use auto, float32, bfloat16 or float16")
    images = takes_images(load_config(checkpoint))
    auto = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    with hide_progress_bars(), readable_errors("model"):
        model, report = hf(auto).from_pretrained(
            str(checkpoint),
            dtype=weights,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # other formats are programs that run when loaded
            output_loading_info=True,
            **({"distributed_config": distributed} if distributed else {}),
        )
        _check_complete(report["missing_keys"])
        # The config may name another implementation, which would take precedence.
        model.set_attn_implementation(_ATTENTION)
        return (model if distributed else model.to(device)).eval()


def _check_not_quantized(config: Any) -> None:
    """Reject quantized weights, which the model's own code cannot run."""
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            options = found if isinstance(found, dict) else vars(found)
            method = options.get("quant_method", "unnamed method")
            raise ValueError(
                f"the checkpoint is quantized ({method}); supported are weights of "
                f"float32, bfloat16 and float16: use the original checkpoint"
            )


def _check_complete(keys: Any) -> None:
    """Reject missing weights, which transformers would initialise at random."""
    if keys:
        raise ValueError(
            f"the checkpoint lacks {len(keys)} of the model's weights, for example "
            f"{min(keys)}; use a complete checkpoint of a model that generates text"
        )


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
    length = slot_length(text, max_length)
    return CheckpointMemory(
        str(dtype).removeprefix("torch."),
        length,
        slot_bytes(text, max_length=length, dtype=dtype),
        sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")),
    )
