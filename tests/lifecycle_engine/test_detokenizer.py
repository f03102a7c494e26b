from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lifecycle_engine.chats.detokenizer import ByteDetokenizer, byte_alphabet

BYTES = {byte: bytes([byte]) for byte in range(256)}


@given(st.text(), st.data())
def test_text_survives_any_split(text: str, data: st.DataObject) -> None:
    """However the bytes are split, the pieces are the text, and none has a half."""
    ids = list(text.encode())
    detokenizer = ByteDetokenizer(BYTES)
    pieces = []
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        pieces.append(detokenizer.push(ids[:size]))
        del ids[:size]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@given(st.binary())
def test_any_bytes_decode_as_a_whole(data: bytes) -> None:
    """One byte at a time or all at once, broken bytes become the same text."""
    detokenizer = ByteDetokenizer(BYTES)
    pieces = [detokenizer.push([byte]) for byte in data]
    assert "".join(pieces) + detokenizer.flush() == data.decode(errors="replace")


def test_flush_tells_half_a_character() -> None:
    """A stream cut inside a character ends with one replacement character."""
    detokenizer = ByteDetokenizer(BYTES)
    assert detokenizer.push("世".encode()[:2]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_unknown_and_control_ids_are_no_text() -> None:
    """Control tokens and rows that only pad the vocabulary write nothing."""
    detokenizer = ByteDetokenizer({0: b"a", 1: b""})
    assert detokenizer.push([0, 1, 99, 0]) == "aa"


def test_byte_alphabet_is_a_bijection() -> None:
    """Every byte has one letter, and none of them is a blank or a control."""
    letters = byte_alphabet()
    assert sorted(letters.values()) == list(range(256))
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)


@settings(deadline=None)
@given(data=st.data())
def test_streams_like_the_tokenizer_decodes(
    processor: Any, data: st.DataObject
) -> None:
    """Any ids of a real tokenizer, pushed one by one, read as it decodes them whole."""
    tokenizer = processor._tokenizer
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    detokenizer = processor.detokenizer()
    pieces = [detokenizer.push([id_]) for id_ in ids]
    whole = tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert "".join(pieces) + detokenizer.flush() == whole


@pytest.mark.parametrize(
    "text", ["Grüße, 世界! 😀👩‍👩‍👧", "def f():\n\treturn 1\r\n\n"]
)
def test_real_text_round_trips(processor: Any, text: str) -> None:
    """Text that is encoded by the tokenizer comes back letter by letter."""
    ids = processor._tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer = processor.detokenizer()
    assert "".join(detokenizer.push([id_]) for id_ in ids) == text
