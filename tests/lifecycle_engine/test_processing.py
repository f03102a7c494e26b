"""Pieces of preprocessing: checked image tensors, and texts from tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lifecycle_engine.processing.image_processor import VisionShape, check_images
from lifecycle_engine.processing.processor import (
    ByteDetokenizer,
    byte_alphabet,
    token_bytes,
)

SHAPE = VisionShape(image_token=9, merge=2, patch_dim=6)


def tensors(*grids: tuple[int, int, int], rows: int | None = None) -> dict[str, Any]:
    """Tensors for the grids, with as many patches or another number."""
    count = sum(t * h * w for t, h, w in grids) if rows is None else rows
    return {
        "pixel_values": memoryview(np.zeros((count, 6), np.float32)),
        "image_grid_thw": memoryview(np.array(grids, np.int64).reshape(-1, 3)),
    }


def test_fitting_images_pass() -> None:
    """Two images whose runs of pads fit their grids are fine, as is plain text."""
    ids = [1, *[9] * 4, 2, *[9] * 2, 3]
    check_images(SHAPE, ids, tensors((1, 4, 4), (1, 2, 4)))
    check_images(SHAPE, [1, 2], {})
    check_images(None, [1, 9], {})


@pytest.mark.parametrize(
    ("ids", "given", "message"),
    [
        ([9], {}, "1 image places"),
        ([1], tensors((1, 2, 2)), r"places of \[\] tokens"),
        ([9, 9], tensors((1, 2, 2)), r"the grids need \[1\]"),
        ([9, 1, 9], tensors((1, 2, 4)), r"the grids need \[2\]"),
        ([9], tensors((1, 2, 2), rows=3), r"expected \(4, 6\)"),
        ([9], tensors((1, 2, 3)), "multiples of 2"),
        ([9], tensors((1, 0, 2)), "positive"),
        ([9], tensors((-1, 2, -2)), "positive"),
        ([9], {"pixel_values": tensors((1, 2, 2))["pixel_values"]}, "expected"),
        ([9], tensors((1, 2, 2)) | {"extra": b""}, "tensors are extra"),
        (
            [9],
            tensors((1, 2, 2)) | {"pixel_values": memoryview(np.zeros((4, 6)))},
            "float32",
        ),
        (
            [9],
            tensors((1, 2, 2)) | {"image_grid_thw": memoryview(np.ones((1, 3), "i4"))},
            "int64",
        ),
        (
            [9],
            tensors((1, 2, 2)) | {"image_grid_thw": memoryview(np.ones((3,), "i8"))},
            r"expected \(images, 3\)",
        ),
    ],
)
def test_unfitting_images_are_refused(ids: Any, given: Any, message: str) -> None:
    """Wrong counts, shapes, types and names are reported by their sizes."""
    with pytest.raises(ValueError, match=message):
        check_images(SHAPE, ids, given)


def test_text_model_refuses_images() -> None:
    """A model without a vision tower says that it takes none."""
    with pytest.raises(ValueError, match="takes no images"):
        check_images(None, [1], tensors((1, 2, 2)))
    assert VisionShape.of(object()) is None


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


def test_token_outside_of_the_byte_alphabet_is_its_own_text() -> None:
    """As in the tokenizer's own decoder."""
    decoders = pytest.importorskip("tokenizers.decoders")
    text = '{"decoder": {"type": "ByteLevel"}}'
    vocab = {"a": 0, "\u2581b": 1, "\u0120c": 2}
    tokenizer = SimpleNamespace(
        added_tokens_decoder={},
        backend_tokenizer=SimpleNamespace(to_str=lambda: text),
        get_vocab=lambda: vocab,
    )
    table, _ = token_bytes(tokenizer)
    oracle = decoders.ByteLevel()
    for token, id_ in vocab.items():
        assert table[id_].decode() == oracle.decode([token])
