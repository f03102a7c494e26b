"""Tiny random checkpoints, built offline and loaded like any other.

Only building knows that a checkpoint is tiny: what is written is a folder that
the `from_pretrained` of model, tokenizer and image processor read as they read a
downloaded one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import configs
from ._transformers import hf, quiet
from .configs import Sizes
from .tokenizer import (
    MIN_LLAMA_VOCAB,
    Trained,
    byte_fallback,
    byte_level,
)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a family is built.

    Attributes:
        model: The class of transformers.
        config: Makes its config.
        tokenizer: Writes its tokenizer.
        patch: Of an image processor with a grid; 0 for squares, ``None`` for none.
        min_vocab: What the tokenizer needs.
    """

    model: str
    config: Callable[[dict[str, int], Sizes], Any]
    tokenizer: Callable[[Path, int], Trained] = byte_level
    patch: int | None = None
    min_vocab: int = 300


_RECIPES = {
    "qwen2_5_vl": _Recipe(
        "Qwen2_5_VLForConditionalGeneration", configs.qwen2_5_vl, patch=14
    ),
    "qwen3_vl": _Recipe("Qwen3VLForConditionalGeneration", configs.qwen3_vl, patch=16),
    "llava": _Recipe(
        "LlavaForConditionalGeneration",
        configs.llava,
        byte_fallback,
        patch=0,
        min_vocab=MIN_LLAMA_VOCAB,
    ),
    "llama": _Recipe(
        "LlamaForCausalLM", configs.llama, byte_fallback, min_vocab=MIN_LLAMA_VOCAB
    ),
    "qwen3": _Recipe("Qwen3ForCausalLM", configs.qwen3),
}
FAMILIES = tuple(_RECIPES)


def build(
    out: str | Path,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    *,
    sizes: Sizes | None = None,
    dtype: str = "float32",
) -> Path:
    """Write a random checkpoint; the same arguments write the same bytes.

    Args:
        out: The folder to write; made where it is missing.
        family: One of `FAMILIES`.
        seed: Of the weights.
        sizes: Of model and images; by default tiny.
        dtype: Of the weights as they are written, by torch's name for it.

    Returns:
        The folder.

    Raises:
        ValueError: Unknown family, or a vocabulary too small for it.
    """
    recipe = _RECIPES.get(family)
    if recipe is None:
        raise ValueError(f"family is {family!r}; known are {', '.join(FAMILIES)}")
    sizes = sizes or Sizes()
    if sizes.vocab_size < recipe.min_vocab:
        raise ValueError(
            f"vocab_size is {sizes.vocab_size}; {family} needs {recipe.min_vocab}"
        )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        trained = recipe.tokenizer(folder, sizes.vocab_size)
        if recipe.patch:
            configs.write_grid_images(folder, sizes, patch=recipe.patch)
        elif recipe.patch is not None:
            configs.write_square_images(folder, sizes)
        config = recipe.config(trained.special, sizes)
        model = _build_model(recipe.model, config, trained, seed)
        model.to(dtype=_dtype(dtype)).save_pretrained(folder)
    return folder


def cached(family: str = "qwen2_5_vl", cache: Path | None = None) -> Path:
    """The tiny checkpoint in the cache folder, built there if it is missing.

    Args:
        family: One of `FAMILIES`.
        cache: Defaults to ``~/.cache/anyio-lifecycle``.

    Raises:
        OSError: The folder cannot be written.
        ValueError: Unknown family.
    """
    cache = cache or Path.home() / ".cache" / "anyio-lifecycle"
    folder = cache / f"tiny-{family}"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Built beside it and moved, so that a half-written one is never loaded.
        fresh = Path(tempfile.mkdtemp(dir=cache))
        try:
            build(fresh / "checkpoint", family)
            (fresh / "checkpoint").replace(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _build_model(name: str, config: Any, trained: Trained, seed: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf(name)(config)
    with torch.no_grad():
        # A zero row is never the largest logit: a random model then ends by
        # max_tokens and not by chance, and what it writes can be looked at.
        model.lm_head.weight[trained.unwritten] = 0
    model.generation_config = hf("GenerationConfig")(
        do_sample=False,
        eos_token_id=trained.ends[::-1],
        pad_token_id=trained.ends[0],
    )
    return model
