"""From a checkpoint folder to a model, or to a sentence that says why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ._hf import config_of, generation_file, hf, in_a_sentence, quiet
from .families import family_of, takes_images
from .generation import Rules

_ATTENTION = "sdpa"


def load_config(checkpoint: str | Path) -> Any:
    """Read the config of a checkpoint folder, if the model can run here.

    Raises:
        OSError: No checkpoint there.
        ValueError: One that cannot run here.
    """
    config = config_of(checkpoint)
    _refuse_quantised(config)
    family_of(config)
    with in_a_sentence("generation config"):
        generation = hf("GenerationConfig").from_pretrained(
            str(checkpoint),
            config_file_name=generation_file(checkpoint),
            local_files_only=True,
        )
    Rules.of(generation)
    return config


def load_model(checkpoint: str | Path, *, device: str, dtype: str) -> Any:
    """Load a checkpoint folder through `from_pretrained`, never a network.

    Args:
        checkpoint: A local folder.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: Name of a torch dtype, or ``"auto"`` for the checkpoint's own.

    Raises:
        OSError: No checkpoint there.
        ValueError: No such device, or a checkpoint that cannot run, or not all of one.
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
    with quiet(), in_a_sentence("model"):
        model, told = hf(auto).from_pretrained(
            str(checkpoint),
            dtype=weights,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _refuse_missing(told["missing_keys"])
        # One that the config names itself would stand.
        model.set_attn_implementation(_ATTENTION)
        return model.to(device).eval()


def _refuse_quantised(config: Any) -> None:
    """Refuse weights that are not numbers as the model's own code takes them."""
    for each in (config, config.get_text_config()):
        told = getattr(each, "quantization_config", None)
        if told is not None:
            named = told if isinstance(told, dict) else vars(told)
            method = named.get("quant_method", "in a way without a name")
            raise ValueError(
                f"the checkpoint is quantised ({method}); known are weights of "
                f"float32, bfloat16 and float16: take the checkpoint it was made of"
            )


def _refuse_missing(keys: Any) -> None:
    """Refuse what transformers fills with numbers drawn at random, and warns of."""
    if keys:
        raise ValueError(
            f"the checkpoint lacks {len(keys)} of the model's weights, "
            f"{min(keys)} for one; take a whole one, of a model that writes text"
        )
