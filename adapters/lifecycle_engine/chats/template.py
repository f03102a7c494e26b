"""A checkpoint's chat template: found, checked when it is loaded, and filled in."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from lifecycle_engine.models._hf import in_a_sentence
from lifecycle_engine.processor import BadChat

# What a template raises of itself, beside the errors of jinja.
_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,  # of what jinja makes of it
    TypeError,
    ValueError,
)


class BrokenTemplate(BadChat):
    """The template itself is wrong, or cannot take this kind of conversation."""


class ChatTemplate:
    """The template by which a tokenizer makes a prompt of a conversation.

    Args:
        folder: Of the checkpoint.
        tokenizer: Of transformers; given the template where it knows of none.

    Raises:
        ValueError: There is none.
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

    def filled(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Make the prompt of a conversation.

        Raises:
            BadChat: The template refuses who speaks, or in which turn.
            BrokenTemplate: It fails.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, *_FAULTS) as error:
            refusal = self._refusal(error)
        else:
            return text
        raise refusal

    def _refusal(self, error: Exception) -> BadChat:
        told = str(error)
        if type(error) is TemplateError:  # by its `raise_exception`
            # Only what the template says itself: it may quote a message as well.
            why = f": {told}" if told in self._text else ""
            return BadChat(f"the model's chat template refuses the conversation{why}")
        line = _line(error)
        where = f"{self._name}, line {line}" if line else self._name
        # What any other error says may be of a message, too.
        what = f": {told}" if isinstance(error, TemplateSyntaxError) else ""
        return BrokenTemplate(
            f"the model's chat template fails: {type(error).__name__} in {where}{what}"
        )


def _line(error: Exception) -> int | None:
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (f.lineno for f in reversed(frames) if f.filename == "<template>"), None
    )


def _name(folder: Path) -> str:
    """The file that transformers takes the template from."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return next((name for name in names if (folder / name).exists()), "the tokenizer")


def _old_template(folder: Path) -> str | None:
    """The chat template where older checkpoints keep it: beside the tokenizer's."""
    path = folder / "chat_template.json"
    if not path.exists():
        return None
    with in_a_sentence("chat template"):
        template: str = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
        return template
