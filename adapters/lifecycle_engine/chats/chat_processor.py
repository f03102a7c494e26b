"""Chats for a checkpoint, by its own tokenizer, chat template and image processor."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lifecycle_engine.images import images
from lifecycle_engine.images.image_side import image_side_of
from lifecycle_engine.models._hf import (
    config_of,
    generation_options,
    hf,
    in_a_sentence,
    token_ids,
)
from lifecycle_engine.processor import (
    BadChat,
    BadImage,
    Chat,
    Empty,
    Message,
    Prepared,
    bare,
)

from .detokenizer import ByteDetokenizer
from .template import BrokenTemplate, ChatTemplate
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
            ValueError: A tokenizer or an image processor of an unknown kind, or one
                that does not fit the model; a chat template that is missing, or fails.
        """
        folder = Path(checkpoint)
        size: int = config_of(folder).get_text_config().vocab_size
        with in_a_sentence("tokenizer"):
            self._tokenizer: Any = hf("AutoTokenizer").from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        self._template = ChatTemplate(folder, self._tokenizer)
        self._images = image_side_of(folder)
        self._max_pixels = max_pixels
        self._empty: Empty | None = None
        self._pad: int | None = None
        if self._images is not None:
            self._pad = self._tokenizer.convert_tokens_to_ids(self._images.token)
        added = self._tokenizer.added_tokens_decoder
        self._control = tuple(
            token.content for token in added.values() if token.special
        )
        self._bytes_of, self._strips = token_bytes(self._tokenizer)
        self._stop_ids = _stop_ids(folder, self._tokenizer, size)
        self._try(size)
        self._empty = empty  # only now: its engine is not there yet

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
        text = self._template.filled(messages)
        # As in transformers, whose tokenizers add nothing to what a template wrote, and
        # whose processors of images do, unless it wrote what a text begins with.
        begin = self._tokenizer.bos_token
        begun = begin is not None and text.startswith(begin)
        special = self._images is not None and not begun
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        tensors = self._tensors(encoded) if encoded else {}
        if tensors:
            ids = self._expand(ids, tensors)
        stop_ids = [] if chat.ignore_eos else self._stop_ids
        return Prepared(chat.request(ids, stop_ids), tensors, len(ids))

    def _try(self, size: int) -> None:
        """Prepare a chat of each kind: what fails now would fail whoever comes first.

        Raises:
            ValueError: The template fails, or what is made of it, or of pictures, is
                not what a model of *size* tokens takes.
        """
        contents: list[list[str | bytes]] = [["."]]
        if self._images is not None:
            contents.append([_picture(), "."])
        for content in contents:
            chat = Chat([Message("user", content)], max_tokens=1)
            try:
                with in_a_sentence("tokenizer and image processor"):
                    prepared = self.prepare(chat)
            except BrokenTemplate as error:
                raise ValueError(f"{error}; mend the template") from None
            except (BadChat, BadImage):
                # It wants more messages, or smaller pictures: there may be such.
                continue
            ids = prepared.request["input_ids"]
            if not ids or max(ids) >= size:
                raise ValueError(
                    f"a chat becomes {len(ids)} tokens up to {max(ids, default=0)}, "
                    f"the model has {size}: its tokenizer is missing, or another's"
                )
            if self._images is None:
                continue
            try:
                self._images.check(ids, prepared.tensors)
            except ValueError as error:
                raise ValueError(
                    f"pictures do not become what the model takes: {error}; their "
                    f"files must be of one checkpoint"
                ) from None

    def detokenizer(self) -> ByteDetokenizer:
        """Return a fresh detokenizer for one stream."""
        return ByteDetokenizer(self._bytes_of, strip=self._strips)

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


def _picture() -> bytes:
    """One to try with, larger one way than the other."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48)).save(out, "PNG")
    return out.getvalue()


def _stop_ids(checkpoint: Path, tokenizer: Any, size: int) -> list[int]:
    """The ids that end a turn: what the generation config names, else the tokenizer's.

    Not what the class of a config has where its file names none: that is seldom the
    model's, and `generate`, which then ends nothing, does not know of it either.
    """
    ids = generation_options(checkpoint).get("eos_token_id")
    ids = token_ids(tokenizer.eos_token_id if ids is None else ids, "eos_token_id")
    # Some configs name one that cannot be drawn, to have none.
    return sorted(token for token in ids if 0 <= token < size)
