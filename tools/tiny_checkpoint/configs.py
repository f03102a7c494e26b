"""Configs of random checkpoints: the sizes that may change, the rest as released."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._transformers import hf
from .tokenizer import LLAVA_IMAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a random checkpoint; the defaults are what the tests use.

    Attributes:
        vocab_size: Tokens, the special ones included; at least 300, or 400 where
            a family's tokenizer falls back to bytes.
        hidden_size: Width of the language model; a multiple of ``16 * heads``.
        layers: Decoder layers.
        heads: Attention heads, an even number (two key/value heads).
        vision_hidden_size: Width of the vision tower, which has two layers.
        max_pixels: What the image processor scales larger images down to, where
            a family takes images of any size; the payload of an image is at most
            24 bytes times this.
        image_side: Pixels of a side, where all images are squares of one size; a
            multiple of 14.
    """

    vocab_size: int = 1024
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    vision_hidden_size: int = 32
    max_pixels: int = 1280 * 28 * 28
    image_side: int = 70

    def __post_init__(self) -> None:
        if self.vocab_size < 300:
            raise ValueError(f"vocab_size is {self.vocab_size}; at least 300 is needed")
        if self.heads % 2 or self.hidden_size % (16 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} with {self.heads} heads; heads must "
                "be even and hidden_size a multiple of 16 * heads"
            )
        if self.image_side % 14 or self.image_side < 14:
            raise ValueError(
                f"image_side is {self.image_side}; it must be a multiple of 14"
            )


def qwen2_5_vl(ids: dict[str, int], sizes: Sizes) -> Any:
    """Return the config of a Qwen2.5-VL."""
    vision = {
        **_qwen_vision(sizes),
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    text = _text(sizes) | {
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": _rope(sizes, mrope_section=_sections(sizes)),
    }
    return hf("Qwen2_5_VLConfig")(
        text_config=text, vision_config=vision, **_qwen_ids(ids)
    )


def qwen3_vl(ids: dict[str, int], sizes: Sizes) -> Any:
    """Return the config of a Qwen3-VL."""
    vision = {
        **_qwen_vision(sizes),
        "patch_size": 16,
        "num_position_embeddings": 144,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = _rope(sizes, mrope_section=_sections(sizes), mrope_interleaved=True)
    text = _text(sizes) | {
        "head_dim": sizes.hidden_size // sizes.heads,
        "eos_token_id": ids["<|im_end|>"],
        "rope_parameters": rope,
    }
    return hf("Qwen3VLConfig")(text_config=text, vision_config=vision, **_qwen_ids(ids))


def qwen3(ids: dict[str, int], sizes: Sizes) -> Any:
    """Return the config of a Qwen3 for text alone."""
    return hf("Qwen3Config")(
        **_text(sizes),
        head_dim=sizes.hidden_size // sizes.heads,
        eos_token_id=ids["<|im_end|>"],
        rope_parameters=_rope(sizes),
    )


def llama(ids: dict[str, int], sizes: Sizes) -> Any:
    """Return the config of a Llama for text alone."""
    return hf("LlamaConfig")(
        **_text(sizes) | {"bos_token_id": ids["<s>"]},
        eos_token_id=ids["</s>"],
        rope_parameters=_rope(sizes),
    )


def llava(ids: dict[str, int], sizes: Sizes) -> Any:
    """Return the config of a LLaVA 1.5."""
    width = sizes.vision_hidden_size
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": sizes.image_side,
        "patch_size": 14,
        # At the usual 1 a random tower lets every image through alike.
        "initializer_factor": 8.0,
    }
    return hf("LlavaConfig")(
        text_config=llama(ids, sizes).to_dict(),
        vision_config=vision,
        image_token_index=ids[LLAVA_IMAGE],
        image_seq_length=(sizes.image_side // 14) ** 2,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )


def write_grid_images(folder: Path, sizes: Sizes, *, patch: int) -> None:
    """Write the image processor of the Qwen models."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": sizes.max_pixels},
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": hf("OPENAI_CLIP_MEAN", "image_utils"),
        "image_std": hf("OPENAI_CLIP_STD", "image_utils"),
    }
    _write(folder, settings)


def write_square_images(folder: Path, sizes: Sizes) -> None:
    """Write the image processor of LLaVA 1.5."""
    side = sizes.image_side
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    _write(folder, settings)


def _write(folder: Path, settings: dict[str, Any]) -> None:
    # Written by hand because the class that a downloaded checkpoint names is the
    # torchvision one, which cannot be made where torchvision is missing.
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _text(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        # Random blocks at the usual 0.02 hardly look at what came before; wider
        # ones make tokens depend on the prompt, which the tests rely on.
        "initializer_range": 0.2,
        "bos_token_id": None,
    }


def _qwen_vision(sizes: Sizes) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": 2 * sizes.vision_hidden_size,
        "num_heads": 2,
        "out_hidden_size": sizes.hidden_size,
        "initializer_range": 0.2,  # as in `_text`, of the pixels
    }


def _qwen_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _rope(sizes: Sizes, **more: Any) -> dict[str, Any]:
    del sizes
    return {"rope_type": "default", "rope_theta": 10000.0, **more}


def _sections(sizes: Sizes) -> list[int]:
    half = sizes.hidden_size // sizes.heads // 2
    quarter, more = half // 4, half * 3 // 8
    return [quarter, more, half - quarter - more]
