"""Unreleased checkpoints: sizes and options of a family, drawn at random."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def change_for(family: str, folder: Path, seed: int) -> Any:
    """A function that changes a config of a family, and its image processor with it."""
    rng = random.Random(f"{family} {seed}")

    def change(config: Any) -> Any:
        _text(config, rng, sections=family.endswith("_vl"))
        if family == "llava":
            _squares(config, rng, folder)
        elif family.endswith("_vl"):
            _tower(config, rng, folder, family)
        elif rng.random() < 0.5:
            return _other_text(config, rng)
        return config

    return change


def _text(config: Any, rng: random.Random, *, sections: bool) -> None:
    """Heads, their keys and width, layers, tied ends, a bias, stretched positions."""
    text = config.get_text_config()
    heads = rng.choice([2, 4, 6, 8])
    width = rng.choice([16, 32])
    text.num_attention_heads = heads
    text.num_key_value_heads = rng.choice([n for n in (1, 2, 3, 4) if heads % n == 0])
    text.hidden_size = heads * width
    if config.model_type != "qwen2_5_vl":  # which has none of its own
        text.head_dim = width
        text.attention_bias = rng.random() < 0.5
        text.hidden_size = heads * rng.choice([8, 16])
    text.intermediate_size = rng.choice([80, 128])
    text.num_hidden_layers = layers = rng.choice([1, 2, 3, 4])
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * layers
    text.rms_norm_eps = rng.choice([1e-6, 1e-5])
    text.tie_word_embeddings = config.tie_word_embeddings = rng.random() < 0.5
    text.rope_parameters = _rope(rng)
    if sections:
        half, least = width // 2, width // 8
        parts = [half - 2 * least, least, least]
        text.rope_parameters["mrope_section"] = parts
        text.rope_parameters["mrope_interleaved"] = config.model_type == "qwen3_vl"


def _rope(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["default", "linear", "yarn", "llama3"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([1e4, 1e6])}
    if kind != "default":
        rope["factor"] = 4.0
    if kind in {"yarn", "llama3"}:
        rope["original_max_position_embeddings"] = 64
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rope


def _other_text(config: Any, rng: random.Random) -> Any:
    """The same sizes as another model of text."""
    from transformers import MistralConfig, Qwen2Config

    names = ("vocab_size", "intermediate_size", "num_hidden_layers", "eos_token_id")
    names += ("num_attention_heads", "num_key_value_heads", "initializer_range")
    names += ("tie_word_embeddings", "rope_parameters", "max_position_embeddings")
    sizes = {name: getattr(config, name) for name in names}
    sizes["hidden_size"] = config.head_dim * config.num_attention_heads
    if rng.random() < 0.5:
        return Qwen2Config(**sizes)
    return MistralConfig(**sizes, sliding_window=None, head_dim=config.head_dim)


def _tower(config: Any, rng: random.Random, folder: Path, family: str) -> None:
    """Patches, merging, depth, windows; which layers go where."""
    vision, text = config.vision_config, config.text_config
    vision.patch_size = patch = rng.choice([8, 14, 16])
    vision.spatial_merge_size = merge = rng.choice([1, 2, 3, 4])
    vision.temporal_patch_size = rng.choice([1, 2])
    vision.depth = depth = rng.choice([1, 2, 3])
    vision.hidden_size, vision.num_heads = rng.choice([32, 64]), rng.choice([1, 2, 4])
    vision.out_hidden_size = text.hidden_size
    if family == "qwen2_5_vl":
        vision.window_size = merge * patch * rng.choice([1, 2, 3, 4])
        full = rng.sample(range(depth), rng.randint(0, depth))
        vision.fullatt_block_indexes = sorted(full)
    else:
        most = min(depth, text.num_hidden_layers)
        deep = rng.sample(range(depth), rng.randint(0, most))
        vision.deepstack_visual_indexes = sorted(deep)
        vision.num_position_embeddings = rng.choice([16, 144, 256])
    side = (patch * merge) ** 2
    _processor(
        folder,
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": 2 * side, "longest_edge": 30 * side},
    )


def _squares(config: Any, rng: random.Random, folder: Path) -> None:
    """Squares that the patches do not fill, features of other layers, another tower."""
    from transformers import SiglipVisionConfig

    vision = config.vision_config
    vision.num_hidden_layers = rng.choice([1, 2, 3])
    vision.image_size, vision.patch_size = rng.choice([56, 70, 75]), rng.choice([7, 20])
    config.vision_feature_select_strategy = rng.choice(["default", "full"])
    config.vision_feature_layer = rng.choice([-1, -2, [-1], [-2, -1], [0, -1]])
    config.multimodal_projector_bias = rng.random() < 0.5
    if rng.random() < 0.5:
        config.vision_config = SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_hidden_layers=vision.num_hidden_layers,
            image_size=vision.image_size,
            patch_size=vision.patch_size,
        )
    side = vision.image_size
    crop = {"height": side, "width": side}
    _processor(folder, size={"shortest_edge": side}, crop_size=crop)


def _processor(folder: Path, **settings: Any) -> None:
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
