"""Tokenizers for random checkpoints, trained on text that every Python has.

Two kinds, as released models have them: byte-level pieces (Qwen, Llama 3) and
words with a fall-back to single bytes (Llama 2, LLaVA 1.5).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._transformers import hf

QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
LLAVA_IMAGE = "<image>"
# Three special tokens, every byte, and some letters that are words of their own.
MIN_LLAMA_VOCAB = 400
# English prose and code; the order decides the merges.
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
QWEN_TEMPLATE = (
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
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'ASSISTANT' if message['role'] == 'assistant' else message['role'].upper() }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} "
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a model has to know of its tokenizer.

    Attributes:
        special: Ids of the special tokens.
        unwritten: Ids that a random model shall not write: those, and the lone
            bytes that are no readable text.
        ends: Ids that end a turn; the first one also pads.
    """

    special: dict[str, int]
    unwritten: list[int]
    ends: list[int]


def byte_level(folder: Path, vocab_size: int) -> Trained:
    """Write a tokenizer as the Qwen models have it."""
    from tokenizers import pre_tokenizers, trainers

    qwen2_tokenizer = hf("Qwen2Tokenizer")
    backend = qwen2_tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(QWEN_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocab, merges = _train(backend, trainer)
    tokenizer = qwen2_tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL[1:]),
    )
    letters = [
        letter
        for byte, letter in hf("bytes_to_unicode", "convert_slow_tokenizer")().items()
        if not _readable(byte)
    ]
    return _saved(
        folder,
        tokenizer,
        QWEN_TEMPLATE,
        special=QWEN_SPECIAL,
        lone=letters,
        ends=("<|endoftext|>", "<|im_end|>"),
    )


def byte_fallback(folder: Path, vocab_size: int) -> Trained:
    """Write a tokenizer as Llama 2 and LLaVA 1.5 have it."""
    from tokenizers import trainers

    lone = [f"<0x{byte:02X}>" for byte in range(256)]
    fixed = [*LLAMA_SPECIAL, *lone]
    llama_tokenizer = hf("LlamaTokenizer")
    trainer = trainers.BpeTrainer(
        # One more is the image token, which every one of these has.
        vocab_size=vocab_size - len(fixed) - 1,
        limit_alphabet=90,
        show_progress=False,
    )
    pieces, merges = _train(llama_tokenizer().backend_tokenizer, trainer)
    vocab = {token: id_ for id_, token in enumerate(fixed)}
    vocab |= {token: len(fixed) + id_ for token, id_ in pieces.items()}
    tokenizer = llama_tokenizer(
        vocab=vocab,
        merges=merges,
        pad_token="<unk>",
        extra_special_tokens=[LLAVA_IMAGE],
    )
    return _saved(
        folder,
        tokenizer,
        LLAVA_TEMPLATE,
        special=(*LLAMA_SPECIAL, LLAVA_IMAGE),
        lone=[token for byte, token in enumerate(lone) if not _readable(byte)],
        ends=("</s>",),
    )


def _train(backend: Any, trainer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    # Line by line: a pretokenizer that does not split would count whole files.
    backend.train_from_iterator(_corpus(), trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _corpus() -> Iterator[str]:
    for name in _CORPUS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield from Path(spec.origin).read_text(encoding="utf-8").splitlines()


def _saved(
    folder: Path,
    tokenizer: Any,
    template: str,
    *,
    special: Sequence[str],
    lone: Sequence[str],
    ends: Sequence[str],
) -> Trained:
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(list(special))
    return Trained(
        dict(zip(special, ids, strict=True)),
        ids + tokenizer.convert_tokens_to_ids(list(lone)),
        tokenizer.convert_tokens_to_ids(list(ends)),
    )


def _readable(byte: int) -> bool:
    return byte == 0x0A or 0x20 <= byte < 0x7F
