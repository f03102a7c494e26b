"""The processor of a checkpoint: its tokenizer and chat template."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from PIL import Image

from lifecycle_asgi import MediaProfile
from lifecycle_engine._compat import (
    config_of,
    generation_options,
    hf,
    readable_errors,
    slot_length,
    token_ids,
)
from lifecycle_engine.errors import BadChat, BadImage, ChatTooLong
from lifecycle_engine.multimodal import decode
from lifecycle_engine.processing.image_processor import image_preprocessor_for
from lifecycle_engine.processing.processor import (
    ByteDetokenizer,
    Chat,
    Empty,
    Message,
    Prepared,
    token_bytes,
    without_traceback,
)

# Errors that a template can raise beside those of jinja.
_TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,  # in the Python code that jinja generates
    TypeError,
    ValueError,
)


class TemplateFailed(BadChat):
    """The template failed, or does not support this kind of conversation."""


class ChatTemplate:
    """A checkpoint's chat template, which turns a conversation into a prompt.

    Args:
        folder: Folder of the checkpoint.
        tokenizer: Tokenizer of transformers; gets the template if it has none.

    Raises:
        ValueError: The checkpoint has no chat template.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._name = _name(folder)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _old_template(folder)
        if tokenizer.chat_template is None:
            raise ValueError(
                "the checkpoint has no chat template; put that of the model as "
                "chat_template.jinja into its folder"
            )
        self._tokenizer = tokenizer
        # Of several, the one for conversations without tools.
        self._text: str = tokenizer.get_chat_template()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a conversation.

        Raises:
            BadChat: The template refuses the conversation, such as its order of roles.
            TemplateFailed: The template fails.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            refusal = self._refusal(error)
        else:
            return text
        raise refusal

    def _refusal(self, error: Exception) -> BadChat:
        message = str(error)
        if type(error) is TemplateError:  # by its `raise_exception`
            # Only text of the template itself: it may quote a message of the chat, too.
            why = f": {message}" if message in self._text else ""
            return BadChat(f"the model's chat template refuses the conversation{why}")
        line = _line(error)
        where = f"{self._name}, line {line}" if line else self._name
        # The text of any other error may quote the chat, too.
        detail = f": {message}" if isinstance(error, TemplateSyntaxError) else ""
        name = type(error).__name__
        return TemplateFailed(
            f"the model's chat template fails: {name} in {where}{detail}"
        )


def _line(error: Exception) -> int | None:
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (f.lineno for f in reversed(frames) if f.filename == "<template>"), None
    )


def _name(folder: Path) -> str:
    """Return the name of the file that transformers reads the template from."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return next((name for name in names if (folder / name).exists()), "the tokenizer")


def _old_template(folder: Path) -> str | None:
    """Return the template of an older checkpoint, which has a file of its own."""
    path = folder / "chat_template.json"
    if not path.exists():
        return None
    with readable_errors("chat template"):
        template: str = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
        return template


class ChatProcessor:
    """Turns chats into token ids and image tensors for one checkpoint."""

    # transformers scales, normalizes and reorders images, each into a new array.
    copies = 2

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        max_length: int | None = None,
        max_pixels: int = 40_000_000,
        empty: Empty | None = None,
    ) -> None:
        """Load tokenizer and image processor of a local checkpoint.

        Args:
            checkpoint: The folder.
            max_length: Tokens of a KV slot; ``None`` is the default of the engine.
            max_pixels: Images with more pixels are refused; others are scaled to the
                limits of the checkpoint.
            empty: Allocates the pixel buffers; ``None`` uses ordinary memory.

        Raises:
            ValueError: The tokenizer or the image processor is of an unknown kind or
                does not fit the model, or the chat template is missing or fails.
        """
        folder = Path(checkpoint)
        text = config_of(folder).get_text_config()
        size: int = text.vocab_size
        with readable_errors("tokenizer"):
            self._tokenizer: Any = hf("AutoTokenizer").from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        self._template = ChatTemplate(folder, self._tokenizer)
        self._images = image_preprocessor_for(folder)
        self.media = MediaProfile() if self._images is None else self._images.media
        self._max_pixels = max_pixels
        self._empty: Empty | None = None
        self._pad: int | None = None
        if self._images is not None:
            self._max_length = slot_length(text, max_length)
            self._pad = self._tokenizer.convert_tokens_to_ids(self._images.token)
        added = self._tokenizer.added_tokens_decoder
        self._control = tuple(
            token.content for token in added.values() if token.special
        )
        self._bytes_of, self._strips = token_bytes(self._tokenizer)
        self._stop_ids = _stop_ids(folder, self._tokenizer, size)
        self._check_setup(size)
        self._empty = empty  # only now: its engine does not run yet

    @without_traceback
    def prepare(self, chat: Chat) -> Prepared:
        """Build the prompt and the payload of a chat; runs in a worker thread.

        Raises:
            BadChat: The chat contains a control token of the model, or an image and
                the model takes none.
            BadImage: An image cannot be decoded, or is too large or too thin.
            ChatTooLong: The engine takes fewer tokens than the images are.
        """
        encoded: list[bytes] = []
        messages = [
            {"role": message.role, "content": self._content(message.content, encoded)}
            for message in chat.messages
        ]
        text = self._template.render(messages)
        # As in transformers: its tokenizers add no special tokens to the output of a
        # template; its image processors do, unless it starts with the BOS token.
        bos = self._tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)
        special = self._images is not None and not has_bos
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        tensors = self._tensors(encoded) if encoded else {}
        if tensors:
            ids = self._expand(ids, tensors)
        stop_ids = [] if chat.ignore_eos else self._stop_ids
        return Prepared(chat.request(ids, stop_ids), tensors, len(ids))

    def _check_setup(self, size: int) -> None:
        """Prepare one chat of each kind, so that errors show before the first request.

        Raises:
            ValueError: The template fails, or its tokens or image tensors do not fit a
                model with *size* tokens.
        """
        contents: list[list[str | bytes]] = [["."]]
        if self._images is not None:
            contents.append([_sample_image(), "."])
        for content in contents:
            chat = Chat([Message("user", content)], max_tokens=1)
            try:
                with readable_errors("tokenizer and image processor"):
                    prepared = self.prepare(chat)
            except TemplateFailed as error:
                raise ValueError(f"{error}; correct the template") from None
            except (BadChat, BadImage):
                # It needs other messages or smaller images, which requests may have.
                continue
            ids = prepared.request["input_ids"]
            if not ids or max(ids) >= size:
                raise ValueError(
                    f"a chat becomes {len(ids)} tokens up to {max(ids, default=0)}, "
                    f"the model has {size}: its tokenizer is missing or another model's"
                )
            if self._images is None:
                continue
            try:
                self._images.check(ids, prepared.tensors)
            except ValueError as error:
                raise ValueError(
                    f"the image processor does not fit the model: {error}; their "
                    f"files must be of one checkpoint"
                ) from None

    def detokenizer(self) -> ByteDetokenizer:
        """Return a fresh detokenizer for one stream."""
        return ByteDetokenizer(self._bytes_of, strip=self._strips)

    def _content(
        self, content: Sequence[str | bytes], encoded: list[bytes]
    ) -> list[dict[str, str]] | str:
        # Joined as in the template, where two halves of a token become one.
        self._check_control_tokens(
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
            # Templates of text-only models support only strings.
            return "".join(part["text"] for part in parts)
        return parts

    def _check_control_tokens(self, text: str) -> None:
        """Refuse text that would be read as the template's own control tokens."""
        for token in self._control:
            if token in text:
                raise BadChat(
                    f"a message contains the control token {token}, which only the "
                    "chat template may write; remove it or break it up"
                )

    def _tensors(self, encoded: list[bytes]) -> dict[str, np.ndarray]:
        assert self._images is not None
        parts, tokens = [], 0
        for at, data in enumerate(encoded, 1):
            # One at a time: each decoded image is freed before the next is decoded.
            image = decode.decode(data, at, max_pixels=self._max_pixels)
            parts.append(self._images.tensors(image, at))
            del image
            # And no more than can be used.
            tokens += sum(self._images.counts(parts[-1]))
            if tokens > self._max_length:
                raise ChatTooLong(
                    f"{at} of {len(encoded)} images are {tokens} tokens; the limit is "
                    f"{self._max_length}: send fewer images, or smaller ones"
                )
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
        """Repeat each image token as often as its image needs."""
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


def _sample_image() -> bytes:
    """Return an encoded image that is not square."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48)).save(out, "PNG")
    return out.getvalue()


def _stop_ids(checkpoint: Path, tokenizer: Any, size: int) -> list[int]:
    """Return the ids that end a turn: of the generation config, else the tokenizer's.

    Not the default of the config's class: it is seldom that of the model, and
    transformers' ``generate`` ignores it, too.
    """
    ids = generation_options(checkpoint).get("eos_token_id")
    ids = token_ids(tokenizer.eos_token_id if ids is None else ids, "eos_token_id")
    # Some configs name an id outside of the vocabulary to have none.
    return sorted(token for token in ids if 0 <= token < size)
