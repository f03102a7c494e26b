"""Chats for a checkpoint, by its own tokenizer, chat template and image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from lifecycle_engine.images import images
from lifecycle_engine.images.image_side import image_side_of
from lifecycle_engine.models._hf import (
    config_of,
    generation_file,
    hf,
    in_a_sentence,
)
from lifecycle_engine.processor import BadChat, Chat, Empty, Prepared, bare

from .detokenizer import ByteDetokenizer
from .token_bytes import token_bytes


class ChatProcessor:
    """Chats to token ids, and images to what the checkpoint's family takes."""

    # transformers scales, normalises and reorders as a whole, each into a new array.
    copies = 2

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        max_pixels: int = 40_000_000,
        empty: Empty | None = None,
    ) -> None:
        """Load tokenizer and image processor of a local checkpoint.

        Args:
            checkpoint: The folder.
            max_pixels: An encoded image of more pixels is refused; a smaller one
                is scaled to the checkpoint's own limits.
            empty: Makes the buffers of pixels; ``None``: in ordinary memory.

        Raises:
            ValueError: A tokenizer or an image processor of an unknown kind, or no
                chat template.
        """
        folder = Path(checkpoint)
        with in_a_sentence("tokenizer"):
            self._tokenizer: Any = hf("AutoTokenizer").from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        if self._tokenizer.chat_template is None:
            self._tokenizer.chat_template = _old_template(folder)
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "the checkpoint has no chat template; put that of the model as "
                "chat_template.jinja into its folder"
            )
        self._images = image_side_of(folder)
        self._max_pixels = max_pixels
        self._empty = empty
        self._pad: int | None = None
        if self._images is not None:
            self._pad = self._tokenizer.convert_tokens_to_ids(self._images.token)
        added = self._tokenizer.added_tokens_decoder
        self._control = tuple(
            token.content for token in added.values() if token.special
        )
        self._bytes_of, self._strips = token_bytes(self._tokenizer)
        self._stop_ids = _stop_ids(folder, self._tokenizer)

    @bare
    def prepare(self, chat: Chat) -> Prepared:
        """Build the prompt and the payload of a chat; runs in a worker thread.

        Raises:
            BadChat: The chat's text holds a control token of the model, or it
                has an image and the model takes none.
            BadImage: An image cannot be decoded, or is too large or too thin.
        """
        encoded: list[bytes] = []
        messages = [
            {"role": message.role, "content": self._content(message.content, encoded)}
            for message in chat.messages
        ]
        text = self._filled(messages)
        # Some templates write the token that begins a text, others leave it to the
        # tokenizer.
        begin = self._tokenizer.bos_token
        special = begin is not None and not text.startswith(begin)
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        tensors = self._tensors(encoded) if encoded else {}
        if tensors:
            ids = self._expand(ids, tensors)
        stop_ids = [] if chat.ignore_eos else self._stop_ids
        return Prepared(chat.request(ids, stop_ids), tensors, len(ids))

    def detokenizer(self) -> ByteDetokenizer:
        """Return a fresh detokenizer for one stream."""
        return ByteDetokenizer(self._bytes_of, strip=self._strips)

    def _filled(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Fill in the chat template, which may refuse who speaks, or in which turn."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            told = str(error)
            # Only what the template says itself: it may quote a message as well.
            why = f": {told}" if told in str(self._tokenizer.chat_template) else ""
        else:
            return text
        raise BadChat(f"the model's chat template refuses the conversation{why}")

    def _content(
        self, content: Sequence[str | bytes], encoded: list[bytes]
    ) -> list[dict[str, str]] | str:
        # Joined, as the template joins them: a token in two halves is one there.
        self._refuse_control(
            "".join(part if isinstance(part, str) else "\n" for part in content)
        )
        parts = []
        for part in content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            elif self._images is None:
                raise BadChat("the model takes no images; send text only")
            else:
                encoded.append(part)
                parts.append({"type": "image"})
        if self._images is None:
            # Templates of models for text alone know of nothing else.
            return "".join(part["text"] for part in parts)
        return parts

    def _refuse_control(self, text: str) -> None:
        """Refuse text that would be read as the template's own control tokens."""
        for token in self._control:
            if token in text:
                raise BadChat(
                    f"a message holds the control token {token}, which only the chat "
                    "template may write; remove it or break it up"
                )

    def _tensors(self, encoded: list[bytes]) -> dict[str, np.ndarray]:
        assert self._images is not None
        parts = []
        for at, data in enumerate(encoded, 1):
            # One by one: a decoded image is gone before the next one is decoded.
            image = images.decode(data, at, max_pixels=self._max_pixels)
            parts.append(self._images.tensors(image, at))
            del image
        if len(parts) == 1 and self._empty is None:
            return parts[0]
        return {name: self._join(name, parts) for name in list(parts[0])}

    def _join(self, name: str, parts: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
        arrays = [part.pop(name) for part in parts]
        if self._empty is None or name != "pixel_values":
            return np.concatenate(arrays)
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        target: np.ndarray = self._empty(shape, arrays[0].dtype)
        return np.concatenate(arrays, out=target)

    def _expand(self, ids: list[int], tensors: dict[str, np.ndarray]) -> list[int]:
        """Give every image as many tokens as it takes."""
        assert self._images is not None
        counts = self._images.counts(tensors)
        places = sum(token == self._pad for token in ids)
        if places != len(counts):
            raise BadChat(
                f"the chat template has {places} places for {len(counts)} images; the "
                "model does not take images there"
            )
        left = iter(counts)
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (next(left) if token == self._pad else 1)
        return expanded


def _old_template(folder: Path) -> str | None:
    """The chat template where older checkpoints keep it: beside the tokenizer's."""
    path = folder / "chat_template.json"
    if not path.exists():
        return None
    template: str = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    return template


def _stop_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """The ids that end a turn: what the generation config names, else the tokenizer's.

    Not what the class of a config has where its file names none: that is seldom the
    model's, and `generate`, which then ends nothing, does not know of it either.
    """
    path = checkpoint / generation_file(checkpoint)
    ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return []
    ids = ids if isinstance(ids, list) else [ids]
    # Some configs name one that cannot be drawn, to have none.
    size = config_of(checkpoint).get_text_config().vocab_size
    return sorted(token for token in ids if 0 <= token < size)
