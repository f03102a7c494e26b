from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lifecycle_engine.chats.sim_processor import SimProcessor
from lifecycle_engine.dialects.openai_wire import Usage
from lifecycle_engine.dialects.texts import StopStrings, Texts


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """A text by its pieces, as a client would see it, and whether a stop came."""
    strings = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += strings.push(piece)
        if strings.hit:
            return shown, True
    return shown + strings.flush(), False


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["one two", " three"], ["two"], "one "),
        (["one t", "w", "o three"], ["two"], "one "),
        (["one t", "w", "e"], ["two"], "one twe"),
        (["aab"], ["ab", "b"], "a"),
        (["a", "a", "b"], ["aab"], ""),
        (["aa", "ab"], ["aab"], "a"),
        (["ab", "cd"], ["abcd", "c"], "ab"),
        (["abcd"], ["abcd", "c"], "ab"),
        (["abc"], ["bc", "abc", "c"], ""),
        (["x"], [], "x"),
    ],
)
def test_text_ends_before_the_first_stop(
    pieces: list[str], stops: list[str], shown: str
) -> None:
    """Wherever the pieces are cut, nothing of a stop string is ever shown."""
    assert cut(pieces, stops)[0] == shown


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_pieces_are_cut_as_the_whole(pieces: list[str], stops: list[str]) -> None:
    """Piece by piece nothing else is shown than of the text up to its first stop."""
    text = "".join(pieces)
    ends = [(text.find(each) + len(each), each) for each in stops if each in text]
    shown, hit = cut(pieces, stops)
    assert hit == bool(ends)
    assert (shown, hit) == cut([text], stops)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(each in shown for each in stops)
        assert any(text[len(shown) :].startswith(each) for _, each in ends)


def test_nothing_is_held_without_need() -> None:
    """Only what a stop string may begin with waits for further text."""
    strings = StopStrings(["STOP"])
    seen: list[Any] = [strings.push(piece) for piece in ("a S", "T", "A", "R", "x")]
    assert seen == ["a ", "", "STA", "R", "x"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("told", "counted"), [(3, 3), (9, 5)])
async def test_no_more_is_cached_than_was_asked(told: int, counted: int) -> None:
    """Whatever an engine says: what was read of a prompt is never less than nothing."""
    usage = Usage(prompt_tokens=5)

    async def items() -> AsyncIterator[Any]:
        yield {"cached_tokens": told}
        yield [104]
        yield {"finish_reason": "stop"}

    texts = Texts(items(), SimProcessor().detokenizer(), usage, ())
    assert "".join([piece.text async for piece in texts]) == "h"
    assert (usage.cached_tokens, usage.completion_tokens) == (counted, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("together", [True, False])
async def test_no_token_behind_a_stop_is_counted(together: bool) -> None:
    """Tokens that wait for a slow reader come at once; what is told is the same."""
    usage = Usage(prompt_tokens=1)

    async def items() -> AsyncIterator[Any]:
        tokens = list(b"one STOP two")
        for each in [tokens] if together else [[token] for token in tokens]:
            yield each
        yield {"finish_reason": "length"}

    texts = Texts(items(), SimProcessor().detokenizer(), usage, ["STOP"])
    assert "".join([piece.text async for piece in texts]) == "one "
    assert (usage.completion_tokens, texts.finish_reason) == (8, "stop")
