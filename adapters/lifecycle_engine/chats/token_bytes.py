"""The bytes that each token of a tokenizer stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .detokenizer import byte_alphabet

_SPACE = "\u2581"
_LONE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any) -> tuple[dict[int, bytes], bool]:
    """Read the bytes of each token off a tokenizer's own decoder.

    Returns:
        The bytes by id, none for control tokens; and whether a text loses the
        space that it begins with.

    Raises:
        ValueError: A decoder that is not known here.
    """
    added = tokenizer.added_tokens_decoder
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        letters = byte_alphabet()
        table = {
            id_: _letters(token, letters)
            for token, id_ in tokenizer.get_vocab().items()
            if id_ not in added
        }
    elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        table = {
            id_: _word(token)
            for token, id_ in tokenizer.get_vocab().items()
            if id_ not in added
        }
    else:
        names = ", ".join(map(str, kinds))
        raise ValueError(
            f"the tokenizer's decoder is {names}; expected ByteLevel, or words with a "
            "fall-back to bytes"
        )
    for id_, token in added.items():
        table[id_] = b"" if token.special else token.content.encode()
    return table, kinds[3:] == ["Strip"]


def _letters(token: str, letters: Mapping[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:  # the decoder, too, takes such a one as it is
        return token.encode()


def _word(token: str) -> bytes:
    lone = _LONE.fullmatch(token)
    if lone is not None:
        return bytes.fromhex(lone[1])
    return token.replace(_SPACE, " ").encode()
