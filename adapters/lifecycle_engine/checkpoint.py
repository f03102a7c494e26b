"""Tiny random checkpoints, built offline and loaded like any other.

Only building knows that a checkpoint is tiny: what is written is a folder that
the `from_pretrained` of model, tokenizer and image processor read as they read a
downloaded one.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._hf import hf, quiet
from .detokenizer import byte_alphabet

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a random checkpoint; the defaults are what the tests use.

    Attributes:
        vocab_size: Tokens, the eight special ones included; at least 300.
        hidden_size: Width of the language model; a multiple of ``16 * heads``.
        layers: Decoder layers.
        heads: Attention heads, an even number (two key/value heads).
        vision_hidden_size: Width of the vision tower, which has two layers.
        max_pixels: What the image processor scales larger images down to; the
            payload of an image is at most 24 bytes times this.
    """

    vocab_size: int = 1024
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    vision_hidden_size: int = 32
    max_pixels: int = 1280 * 28 * 28

    def __post_init__(self) -> None:
        if self.vocab_size < 300:
            raise ValueError(f"vocab_size is {self.vocab_size}; at least 300 is needed")
        if self.heads % 2 or self.hidden_size % (16 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} with {self.heads} heads; heads must "
                "be even and hidden_size a multiple of 16 * heads"
            )


def build(
    out: str | Path,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    *,
    sizes: Sizes | None = None,
) -> Path:
    """Write a random checkpoint; the same arguments write the same bytes.

    Args:
        out: The folder to write; made where it is missing.
        family: One of `FAMILIES`.
        seed: Of the weights.
        sizes: Of model and images; by default tiny.

    Returns:
        The folder.

    Raises:
        ValueError: Unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; known are {', '.join(FAMILIES)}")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sizes or Sizes()
    with quiet():
        ids, unwritten = _build_tokenizer(folder, sizes.vocab_size)
        _build_image_processor(folder, sizes.max_pixels)
        _build_model(folder, _config(ids, sizes), ids, unwritten, seed)
    return folder


def _corpus() -> Iterator[str]:
    for name in _CORPUS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).read_text(encoding="utf-8")


def _build_tokenizer(folder: Path, vocab_size: int) -> tuple[dict[str, int], list[int]]:
    """Train a byte-level BPE.

    Returns:
        The ids of the special tokens, and the ids that the model shall not write:
        those, and the lone bytes that are no readable text.
    """
    from tokenizers import pre_tokenizers, trainers

    qwen2_tokenizer = hf("Qwen2Tokenizer")
    backend = qwen2_tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    trained = json.loads(backend.to_str())["model"]
    tokenizer = qwen2_tokenizer(
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
    letters = byte_alphabet().items()
    lone = [
        tokenizer.convert_tokens_to_ids(letter)
        for letter, byte in letters
        if byte != 0x0A and not 0x20 <= byte < 0x7F
    ]
    return dict(zip(SPECIAL_TOKENS, ids, strict=True)), ids + lone


def _build_image_processor(folder: Path, max_pixels: int) -> None:
    # Written by hand because the class that a downloaded checkpoint names is the
    # torchvision one, which cannot be made where torchvision is missing.
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": max_pixels},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": hf("OPENAI_CLIP_MEAN", "image_utils"),
        "image_std": hf("OPENAI_CLIP_STD", "image_utils"),
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def _config(ids: dict[str, int], sizes: Sizes) -> Any:
    half = sizes.hidden_size // sizes.heads // 2
    vision = {
        "depth": 2,
        "hidden_size": sizes.vision_hidden_size,
        "intermediate_size": 2 * sizes.vision_hidden_size,
        "num_heads": 2,
        "out_hidden_size": sizes.hidden_size,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        # Random blocks at the usual 0.02 let every image through alike; wider
        # ones make tokens depend on pixels, which the tests rely on.
        "initializer_range": 0.2,
    }
    text = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
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
    return hf("Qwen2_5_VLConfig")(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _build_model(
    folder: Path, config: Any, ids: dict[str, int], unwritten: list[int], seed: int
) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf("Qwen2_5_VLForConditionalGeneration")(config)
    with torch.no_grad():
        # A zero row is never the largest logit: a random model then ends by
        # max_tokens and not by chance, and what it writes can be looked at.
        model.lm_head.weight[unwritten] = 0
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config = hf("GenerationConfig")(
        do_sample=False, eos_token_id=ends, pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(folder)
