"""JSON bodies that are parsed in steps, with the result of one step."""

import base64
import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import pydantic_core
import pytest
from hypothesis import example, given, settings, strategies as st

from lifecycle_asgi import json_body
from lifecycle_asgi.json_body import LongText, beginning_of, parse_json, pieces_of
from lifecycle_asgi.media_memory import _decode_base64

strict = partial(pydantic_core.from_json, allow_inf_nan=False, cache_strings="keys")
PARSERS = pytest.mark.parametrize("parse", [json.loads, strict])
LONG = 2**18
Parse = Callable[[bytes], Any]


class Longest:
    """Records the longest body that a parser was given."""

    def __init__(self, parse: Parse) -> None:
        self.parse = parse
        self.bytes = 0

    def __call__(self, body: bytes) -> Any:
        self.bytes = max(self.bytes, len(body))
        return self.parse(body)


def outcome(parse: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and text of what a call returns, or raises."""
    try:
        value = parse()
    except (ValueError, RecursionError) as error:
        return type(error).__name__, str(error)
    return "value", repr(value)


def same(body: bytes, parse: Parse, *, longest: int = 2**40) -> None:
    """Check that *body* is parsed as if at once."""
    expected = outcome(lambda: parse(body))
    found = outcome(lambda: parse_json(body, parse, longest=longest))
    assert found == expected, f"{found[0]} instead of {expected[0]}"


# What strings are made of: text, every escape, halves of pairs, and what is no JSON.
PIECES = [
    *(b"a", b"0", b" ", b",", b"\xe4\xb8\xad", b"\xf0\x9f\x98\x80", b"\\u4e2d"),
    *(b"\\ud83d\\ude00", b"\\\\", b'\\"', b"\\/", b"\\n", b"\\u0041", b"\\uD7FF"),
]
WRONG = [
    *(b"\\ud83d", b"\\ude00", b"\n", b"\x00", b"\xff", b"\xed\xa0\xbd", b"\\x"),
    *(b'"', b"\\", b"\\u12", b'":"', b'","', b"]", b"Q0"),
]


@st.composite
def strings(draw: st.DrawFn) -> bytes:
    """Long strings of a repeated piece, with something at odd places."""
    pieces = st.sampled_from(PIECES + (WRONG if draw(st.booleans()) else []))
    text = b"".join(
        draw(pieces) * draw(st.sampled_from([1, 2, 13, 60, 300]))
        for _ in range(draw(st.integers(1, 5)))
    )
    return b'"' + text + b'"'


def documents() -> st.SearchStrategy[bytes]:
    """JSON, or nearly so, of long strings as values and as names."""
    numbers = st.sampled_from([b"1", b"-0.5", b"1" * 200, b"null", b"[" + b"1," * 99])
    return st.recursive(
        strings() | numbers,
        lambda inner: (
            st.lists(inner, max_size=4).map(
                lambda found: b"[" + b",".join(found) + b"]"
            )
            | st.lists(st.tuples(strings(), inner), max_size=4).map(
                lambda found: b"{" + b",".join(b"%b : %b" % e for e in found) + b"}"
            )
        ),
        max_leaves=8,
    )


# One name, of which a part is taken for a long string or not, by where it is.
NAME = b'"' + b"Q0" * 12 + rb"\\" * 6 + b'"'
TEXT = b'"a' + rb"\ud83d\ude00" * 2 + b'a"'
TWICE = b'{"a" : "a",%b : 1,%b : %b,%b : 1}' % (NAME, NAME, TEXT, NAME)


@pytest.mark.thorough
@PARSERS
@example(body=TWICE, around=b"")
@settings(max_examples=300, deadline=None)
@given(
    body=documents(),
    around=st.sampled_from([b"", b" " * 100, b"\xef\xbb\xbf", b"\n" * 70]),
)
def test_parses_in_steps_as_at_once(parse: Parse, body: bytes, around: bytes) -> None:
    """Slices as short as can be, so that every piece lies across one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_SLICE", 64)
        patch.setattr(json_body, "_MIN_BODY", 0)
        same(around + body + around.removeprefix(b"\xef"), parse)


def padded(text: bytes) -> list[bytes]:
    """Return bodies with *text* at each of some places around two slices."""
    places = [*range(2**14 - 9, 2**14 + 9), *range(2**15 - 9, 2**15 + 9)]
    return [b'{"x":["%b%b%b"]}' % (b"A" * at, text, b"A" * LONG) for at in places]


@PARSERS
@pytest.mark.parametrize("text", [*PIECES, *WRONG])
def test_divides_no_character_escape_or_pair(parse: Parse, text: bytes) -> None:
    """Wherever a string is divided, what stands there is read as before."""
    for body in padded(text * 3):
        same(body, parse)


LONG_A = b"A" * LONG
PLANTED = {
    "same name twice": b'{"%b":1,"b":2,"%b":"%b"}' % (LONG_A, LONG_A, LONG_A),
    "long numbers": b'{"a":"%b","b":[%b1]}' % (LONG_A, b"1," * LONG),
    "a number": b'{"a":"%b","b":%b}' % (LONG_A, b"1" * LONG),
    "space within": b'{"a":"%b","b":%b1}' % (LONG_A, b" " * LONG),
    "space in a string": b'{"a":"%b"}' % (b" " * LONG),
    "space around": b'%b{"a":1}%b' % (b" \n\t\r" * LONG, b"\t " * LONG),
    "space and a byte order mark": b'%b\xef\xbb\xbf{"a":1}' % (b" " * LONG),
    "space and sixteen bits": b" " * LONG + '{"a":1}'.encode("utf-16-be"),
    "nothing but space": b" " * LONG,
    "form feed": b'{"a":1}%b' % (b"\f" * LONG),
    "no end": b'{"a":"%b' % LONG_A,
    "no end of the body": b'{"a":"%b"' % LONG_A,
    "something after": b'{"a":"%b"} x' % LONG_A,
    "word": b'{"a":"%b","b":Q0}' % LONG_A,
    "not a number": b'{"a":"%b","b":NaN}' % LONG_A,
    "byte order mark": b'\xef\xbb\xbf{"a":"%b"}' % LONG_A,
    "another mark": '{"a":"%b"}'.encode("utf-16") + b"A\0" * LONG,
    "sixteen bits": ('{"a":"%s"}' % ("A" * LONG)).encode("utf-16-le"),
    # Its bytes look like two long strings, :"AAA, and two marks keep its alignment.
    "sixteen bits like eight": (
        '{"a":"%s"}' % (2 * ("\u223a" + "\u4141" * LONG))
    ).encode("utf-16-le"),
    "thirty-two bits": ('{"a":"%s"}' % ("A" * LONG)).encode("utf-32"),
    "zero inside": b'{"a":"%b\0"}' % LONG_A,
    "a string alone": b'"%b"' % LONG_A,
    "nested": b'{"a":"%b","b":%b1%b}' % (LONG_A, b"[" * 5000, b"]" * 5000),
    "nested a little": b'{"a":"%b","b":%b1%b}' % (LONG_A, b"[" * 150, b"]" * 150),
    "ends like a name": b'{"a":"%b,","b":["x:",%b1]}' % (LONG_A, b"1," * LONG),
    "quotes": b'["%b"]' % (b'\\"' * LONG),
    "backslashes": b'["%b"]' % (b"\\\\" * LONG),
}


@PARSERS
@pytest.mark.parametrize("name", PLANTED)
def test_parses_planted_bodies_as_at_once(parse: Parse, name: str) -> None:
    """Bodies that a division, a mark or a guess could have changed."""
    same(PLANTED[name], parse)


@PARSERS
def test_confuses_no_mark_of_a_client(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark is drawn at random for each body; who knew it could read another string."""
    drawn: list[str] = []
    plain = secrets.token_hex

    def draw(length: int) -> str:
        drawn.append(plain(length))
        return drawn[-1]

    monkeypatch.setattr(secrets, "token_hex", draw)
    parse_json(PLANTED["space in a string"], parse)
    mark = f"Q{drawn[0]}000000".encode()
    same(b'{"a":"%b","b":"%b"}' % (LONG_A, mark), parse)
    assert len(set(drawn)) == 2
    assert len(drawn[0]) == 32


REST = {
    "picture": b'{"u":"data:image/png;base64,%b=="}' % (LONG_A * 8),
    "slashes": b'{"u":"%b"}' % ((b"A" * 62 + b"\\/") * 2**15),
    "escapes": b'{"u":"%b"}' % (b"\\u4e2d" * 2**18),
    "quotes": b'{"u":"%b"}' % (b'say \\"no\\", ' * 2**17),
    "characters": b'{"u":"%b"}' % ("中".encode() * 2**18),
    "many": b'{"u":[%b0]}' % (b'"%b" , ' % (b"A" * 100_000) * 20),
    "space": b'%b{"u":1}%b' % (b" " * 2**20, b" \n" * 2**19),
}


@PARSERS
@pytest.mark.parametrize("name", REST)
def test_parses_no_large_part_at_once(parse: Parse, name: str) -> None:
    """However its strings are spelled, most of a body is parsed slice by slice."""
    longest = Longest(parse)
    parse_json(REST[name], longest)
    assert longest.bytes < len(REST[name]) / 4


@PARSERS
def test_looks_at_few_of_many_quotes(parse: Parse) -> None:
    """Millions of short strings take no longer than one parse and a few steps."""
    body = b"[%b0]" % (b'"",' * 2**20)
    calls = 0

    def counted(part: bytes) -> Any:
        nonlocal calls
        calls += 1
        return parse(part)

    assert len(parse_json(body, counted)) == 2**20 + 1
    assert calls < 3 * len(body) / json_body._SLICE


def test_copies_strings_up_to_a_length() -> None:
    """A longer one stays in the body, and tells nothing of itself in a log."""
    body = b'{"a":"%b","b":"%b"}' % (LONG_A, LONG_A + b"A")
    found = parse_json(body, json.loads, longest=LONG)
    assert found["a"] == "A" * LONG
    assert isinstance(found["b"], LongText)
    assert len(found["b"]) == LONG + 1
    assert str(found["b"]) == "A" * (LONG + 1)
    assert "AAA" not in repr(found["b"])


def plain_decode(text: str) -> bytes:
    """Decode at once."""
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("AB+/=-\n é0"), max_size=40),
    cuts=st.integers(1, 9),
)
@example(text="AA==AAAA", cuts=2)
@example(text="=AAAA", cuts=1)
def test_decodes_in_steps_as_at_once(text: str, cuts: int) -> None:
    """Base64 with line breaks and padding anywhere, however it is divided."""
    pieces = (text[at : at + cuts] for at in range(0, len(text), cuts))
    assert _decode_base64(pieces, len(text)) == plain_decode(text)


def test_gives_the_pieces_after_a_place() -> None:
    """Of a text that stays in the body as of any other."""
    body = b'{"a":"0123%b"}' % LONG_A
    long = parse_json(body, json.loads)["a"]
    assert isinstance(long, LongText)
    for start in (0, 3, 2**14 + 5):
        expected = str(long)[start:]
        assert "".join(pieces_of(long, start)) == expected
        assert "".join(pieces_of(str(long), start)) == expected
        assert beginning_of(long, start) == beginning_of(str(long), start)
    assert str("head," + long) == "head," + str(long)
