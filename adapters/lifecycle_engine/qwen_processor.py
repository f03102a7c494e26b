"""Chats for the Qwen vision-language models, by their own tokenizer and images.

Tokenizer, chat template and image processor are transformers'. `AutoProcessor`
is not used: it insists on a video processor, which needs torchvision. Nothing
here needs torch; where torch is installed, transformers imports it all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import images
from ._hf import hf
from .detokenizer import ByteDetokenizer, byte_alphabet
from .processor import BadChat, BadImage, Chat, Empty, Prepared, bare

_IMAGE_PAD = "<|image_pad|>"
# By its class, which all of the family share: `AutoImageProcessor` asks for
# torchvision in some releases even where the PIL variant is wanted.
_IMAGE_PROCESSOR = (
    "Qwen2VLImageProcessorPil",
    "models.qwen2_vl.image_processing_pil_qwen2_vl",
)
# The image processor of the family refuses more, and late.
_MAX_ASPECT = 200


class QwenProcessor:
    """Chats to token ids and ``pixel_values`` with ``image_grid_thw``."""

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
            ValueError: The tokenizer is not a byte-level one.
        """
        where = str(checkpoint)
        self._tokenizer: Any = hf("AutoTokenizer").from_pretrained(
            where, local_files_only=True
        )
        self._images: Any = hf(*_IMAGE_PROCESSOR).from_pretrained(
            where, local_files_only=True
        )
        self._max_pixels = max_pixels
        self._empty = empty
        self._pad: int = self._tokenizer.convert_tokens_to_ids(_IMAGE_PAD)
        added = self._tokenizer.added_tokens_decoder
        self._control = tuple(
            token.content for token in added.values() if token.special
        )
        self._bytes_of = _token_bytes(self._tokenizer, added)
        self._stop_ids = _stop_ids(Path(checkpoint), self._tokenizer)

    @bare
    def prepare(self, chat: Chat) -> Prepared:
        """Build the prompt and the payload of a chat; runs in a worker thread.

        Raises:
            BadChat: The chat's text holds a control token of the model.
            BadImage: An image cannot be decoded, or is too large or too thin.
        """
        encoded: list[bytes] = []
        messages = [
            {"role": message.role, "content": self._parts(message.content, encoded)}
            for message in chat.messages
        ]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        tensors = self._pixels(encoded) if encoded else {}
        if tensors:
            ids = self._expand(ids, tensors["image_grid_thw"])
        request = {
            "input_ids": ids,
            "max_tokens": chat.max_tokens,
            "stop_ids": [] if chat.ignore_eos else list(self._stop_ids),
            "temperature": float(chat.temperature),
            "seed": chat.seed,
        }
        return Prepared(request, tensors, len(ids))

    def detokenizer(self) -> ByteDetokenizer:
        """Return a fresh detokenizer for one stream."""
        return ByteDetokenizer(self._bytes_of)

    def _parts(
        self, content: Sequence[str | bytes], encoded: list[bytes]
    ) -> list[dict[str, str]]:
        # Joined, as the template joins them: a token in two halves is one there.
        self._refuse_control(
            "".join(part if isinstance(part, str) else "\n" for part in content)
        )
        parts = []
        for part in content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
            else:
                encoded.append(part)
                parts.append({"type": "image"})
        return parts

    def _refuse_control(self, text: str) -> None:
        """Refuse text that would be read as the template's own control tokens."""
        for token in self._control:
            if token in text:
                raise BadChat(
                    f"a message holds the control token {token}, which only the chat "
                    "template may write; remove it or break it up"
                )

    def _pixels(self, encoded: list[bytes]) -> dict[str, np.ndarray]:
        parts = []
        for at, data in enumerate(encoded, 1):
            # One by one: a decoded image is gone before the next one is decoded.
            image = images.decode(data, at, max_pixels=self._max_pixels)
            parts.append(self._patches(image, at))
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

    def _patches(self, image: Any, position: int) -> dict[str, np.ndarray]:
        width, height = image.size
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise BadImage(
                f"image {position} has {width} x {height} pixels; the longer side may "
                f"be {_MAX_ASPECT} times the shorter one: crop it"
            )
        output = self._images(images=[image], return_tensors="np")
        return {name: output[name] for name in ("pixel_values", "image_grid_thw")}

    def _expand(self, ids: list[int], grids: np.ndarray) -> list[int]:
        """Give every image the tokens that its merged patches take."""
        merge = self._images.merge_size**2
        counts = iter([math.prod(grid) // merge for grid in grids.tolist()])
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (next(counts) if token == self._pad else 1)
        return expanded


def _token_bytes(tokenizer: Any, added: dict[int, Any]) -> dict[int, bytes]:
    """The bytes that each token id stands for; none for control tokens."""
    decoder = type(tokenizer.backend_tokenizer.decoder).__name__
    if decoder != "ByteLevel":
        raise ValueError(f"the tokenizer's decoder is {decoder}; expected ByteLevel")
    letters = byte_alphabet()
    table = {
        id_: bytes([letters[letter] for letter in token])
        for token, id_ in tokenizer.get_vocab().items()
        if id_ not in added
    }
    for id_, token in added.items():
        table[id_] = b"" if token.special else token.content.encode()
    return table


def _stop_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """The ids that end a turn: the generation config's, else the tokenizer's."""
    path = checkpoint / "generation_config.json"
    ids = None
    if path.exists():
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return []
    return sorted(ids) if isinstance(ids, list) else [ids]
