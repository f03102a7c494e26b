"""Tiny random checkpoints, built offline and loaded like any other.

Only building knows that a checkpoint is tiny: what is written is a folder that
the `from_pretrained` of model, tokenizer and image processor read as they read a
downloaded one.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2_5_vl",)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# English prose and code that every Python has; the order decides the merges.
_CORPUS = (
    "argparse",
    "ast",
    "datetime",
    "decimal",
    "email.message",
    "inspect",
    "logging",
    "statistics",
    "tarfile",
    "textwrap",
    "typing",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(
    out: str | Path,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    *,
    vocab_size: int = 1024,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    max_pixels: int = 1280 * 28 * 28,
) -> Path:
    """Write a random checkpoint; the same arguments write the same bytes.

    Args:
        out: The folder to write; made where it is missing.
        family: One of `FAMILIES`.
        seed: Of the weights.
        vocab_size: Tokens, the eight special ones included; at least 300.
        hidden_size: Width of the language model; a multiple of ``16 * heads / 4``
            that leaves heads of an even width of at least 16.
        layers: Decoder layers.
        heads: Attention heads, a multiple of two (two key/value heads).
        max_pixels: What the image processor scales larger images down to; the
            payload of an image is at most 24 bytes times this.

    Returns:
        The folder.

    Raises:
        ValueError: Unknown family, or sizes that do not fit together.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; known are {', '.join(FAMILIES)}")
    head_dim, rest = divmod(hidden_size, heads)
    if rest or heads % 2 or head_dim % 16:
        raise ValueError(
            f"hidden_size {hidden_size} with {heads} heads; heads must be even and "
            "hidden_size a multiple of 16 * heads"
        )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    ids = _build_tokenizer(folder, vocab_size)
    _build_image_processor(folder, max_pixels)
    config = _config(ids, vocab_size, hidden_size, layers, heads)
    _build_model(folder, config, ids, seed)
    return folder


def _corpus() -> Iterator[str]:
    for name in _CORPUS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).read_text(encoding="utf-8")


def _build_tokenizer(folder: Path, vocab_size: int) -> dict[str, int]:
    """Train a byte-level BPE and return the ids of the special tokens."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    if vocab_size < 300:
        raise ValueError(f"vocab_size is {vocab_size}; at least 300 is needed")
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    trained = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    return dict(zip(SPECIAL_TOKENS, ids, strict=True))


def _build_image_processor(folder: Path, max_pixels: int) -> None:
    # Written by hand because the class that a downloaded checkpoint names is the
    # torchvision one, which cannot be made where torchvision is missing.
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": max_pixels},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _config(
    ids: dict[str, int], vocab_size: int, hidden_size: int, layers: int, heads: int
) -> Any:
    from transformers import Qwen2_5_VLConfig

    half = hidden_size // heads // 2
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        # Random blocks at the usual 0.02 let every image through alike; wider
        # ones make tokens depend on pixels, which the tests rely on.
        "initializer_range": 0.2,
    }
    text = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [
                half // 4,
                half * 3 // 8,
                half - half // 4 - half * 3 // 8,
            ],
        },
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _build_model(folder: Path, config: Any, ids: dict[str, int], seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        # A zero row is never the largest logit: a random model then ends by
        # max_tokens and not by chance, and never writes control tokens.
        model.lm_head.weight[list(ids.values())] = 0
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=ends, pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(folder)
