"""JSON bodies, parsed in steps between which other threads get their turn.

A parser holds the interpreter lock until it has finished, so a large body stops the
event loop even if a thread parses it. Nearly all of such a body is in a few long
strings, as pictures are, or in the space around it. `parse_json` checks those strings
slice by slice, and parses the rest at once, in which a mark stands for each of them.
They stay in the body, as `LongText`: a copy of one takes as long as its parser did.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

Parse = Callable[[bytes], Any]

# Parsed at once in a fraction of a millisecond. Shorter strings stay in the rest.
_SLICE: Final = 2**14
# Shorter bodies are parsed as they are.
_MIN_BODY: Final = 2**18
_STEP: Final = 2**20
# Characters of a text in memory that are looked at together.
_PIECE: Final = 2**18
_SPACES: Final = b" \t\r\n"
_BLANK: Final = b" " * _SLICE
# Where a string may be divided: after six bytes without a backslash, or after an escape
# that is no half of a surrogate pair; and not within a character of UTF-8.
_WINDOW: Final = 64
_DIVISION: Final = re.compile(
    rb".*[^\\](?:[^\\]{6}|\\u(?![dD])[0-9a-fA-F]{4})(?=[^\x80-\xbf])", re.DOTALL
)
# What precedes a quote that opens a string, or that is a character of one. What follows
# any other quote is no string, though numbers may look like one.
_BEFORE_INSIDE: Final = (b":", b",", b"[", b"{", b"\\")


@dataclass(frozen=True, slots=True)
class _Run:
    """A part of a string, in the slices that were parsed."""

    body: bytes
    parse: Parse
    divisions: tuple[int, ...]
    length: int

    def pieces(self) -> Iterator[str]:
        for start, stop in pairwise(self.divisions):
            yield self.parse(b'"%b"' % self.body[start:stop])


class LongText:
    """A string that stays in the body, since to copy it would take long.

    ``str`` copies it, and ``len`` returns its length.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[str | _Run]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(
            part.length if isinstance(part, _Run) else len(part) for part in self._parts
        )

    def __radd__(self, head: str) -> LongText:
        return LongText([head, *self._parts])

    def __str__(self) -> str:
        return "".join(self.pieces())

    def __repr__(self) -> str:
        return f"LongText({len(self)} characters)"  # a prompt is in no log

    def pieces(self) -> Iterator[str]:
        """Yield the string piece by piece, each of a few kilobytes."""
        for part in self._parts:
            if isinstance(part, _Run):
                yield from part.pieces()
            else:
                yield part


def pieces_of(text: str | LongText, start: int = 0) -> Iterator[str]:
    """Yield what follows *start* in *text*, piece by piece."""
    if isinstance(text, str):
        yield from (text[at : at + _PIECE] for at in range(start, len(text), _PIECE))
        return
    for piece in text.pieces():
        yield piece[start:]
        start = max(0, start - len(piece))


def beginning_of(text: str | LongText, length: int) -> str:
    """Return the first *length* characters of *text*."""
    if isinstance(text, str):
        return text[:length]
    found, left = [], length
    for piece in text.pieces():
        found.append(piece[:left])
        left -= len(found[-1])
        if not left:
            break
    return "".join(found)


def parse_json(body: bytes, parse: Parse, *, longest: int = 0) -> Any:
    """Return what ``parse(body)`` returns, but for `LongText` in place of long strings.

    Raises what that raises. Other threads run meanwhile, unless the body is invalid or
    has no long strings.

    Args:
        body: JSON.
        parse: Parses JSON, such as `json.loads`. It has to refuse unknown words, and
            to decode strings as that does.
        longest: Characters of the longest string to copy.
    """
    if len(body) < _MIN_BODY or not json.detect_encoding(body).startswith("utf-8"):
        return parse(body)
    strings = _LongStrings(body, parse, longest)
    # A mark outside of a string is invalid, so whatever was taken for a string is one.
    # An error names a place, which only the whole body has: it is parsed once more, as
    # is one where a long name comes again, and has a mark here but none there.
    with suppress(ValueError, RecursionError):
        return strings.restore(parse(strings.rest))
    return parse(body)


class _LongStrings:
    """The long strings of a body.

    Attributes:
        rest: The body, with a mark in place of each.
    """

    def __init__(self, body: bytes, parse: Parse, longest: int) -> None:
        self._longest = longest
        # No client can guess it, and it continues no number, word or escape.
        self._mark = "Q" + secrets.token_hex(16)
        self._marks = re.compile(f"{self._mark}([0-9]{{6}})")
        self._runs: list[_Run] = []
        at, end = _trimmed(body)
        rest = []
        for run in _runs(body, at, end, parse):
            mark = f"{self._mark}{len(self._runs):06}"
            rest += [body[at : run.divisions[0]], mark.encode()]
            self._runs.append(run)
            at = run.divisions[-1]
        self.rest = b"".join([*rest, body[at:end]])

    def restore(self, document: Any) -> Any:
        """Return *document* with the strings in place of the marks."""
        whole = [document]
        # Not by recursion: parsers accept more nesting than Python has calls.
        containers: list[Any] = [whole] if self._runs else []
        while containers:
            container = containers.pop()
            if isinstance(container, dict):
                self._restore_names(container)
                items: Iterable[tuple[Any, Any]] = list(container.items())
            else:
                items = enumerate(container)
            for key, value in items:
                if isinstance(value, dict | list):
                    containers.append(value)
                elif isinstance(value, str) and self._mark in value:
                    text = self._text(value)
                    short = len(text) <= self._longest
                    container[key] = str(text) if short else text
        return whole[0]

    def _restore_names(self, fields: dict[str, Any]) -> None:
        if any(self._mark in name for name in fields):
            items = [(str(self._text(name)), each) for name, each in fields.items()]
            fields.clear()
            fields.update(items)
            if len(fields) < len(items):
                raise ValueError("one name has several values; the last one counts")

    def _text(self, marked: str) -> LongText:
        # Every second part is the number of a mark.
        parts: list[str | _Run] = [*self._marks.split(marked)]
        parts[1::2] = [self._runs[int(str(number))] for number in parts[1::2]]
        return LongText([part for part in parts if part])


def _runs(body: bytes, at: int, end: int, parse: Parse) -> Iterator[_Run]:
    """Yield each long string, or most of it."""
    while at + _SLICE <= end:
        divisions, length = [at], 0
        while (stop := _division(body, at, end)) is not None:
            try:
                length += len(parse(b'"%b"' % body[at:stop]))
            except ValueError:  # the string ends here, or this is none
                break
            divisions.append(stop)
            at = stop
        if length:
            yield _Run(body, parse, tuple(divisions), length)
        at = _next_string(body, at, end)


def _division(body: bytes, at: int, end: int) -> int | None:
    """Return the end of a slice at which a string may be divided."""
    stop = at + _SLICE
    found = _DIVISION.match(body, stop - _WINDOW, stop) if stop <= end else None
    return found and found.end()


def _next_string(body: bytes, at: int, end: int) -> int:
    """Return where the last string begins within a slice, or the next one after it."""
    quote = body.rfind(b'"', at, at + _SLICE)
    if quote < 0:
        quote = _find_quote(body, at + _SLICE, end)
    before = body[max(0, quote - _WINDOW) : quote].rstrip(_SPACES)
    if not before.endswith(_BEFORE_INSIDE):
        quote = _find_quote(body, quote + 1, end)
    return quote + 1


def _find_quote(body: bytes, at: int, end: int) -> int:
    """Return where the next quote is, or the end."""
    for start in range(at, end, _STEP):
        quote = body.find(b'"', start, min(start + _STEP, end))
        if quote >= 0:
            return quote
    return end


def _trimmed(body: bytes) -> tuple[int, int]:
    """Return where the body begins and ends without the space around it."""
    start, end = 0, len(body)
    while start < end and _is_space(body[start : start + _SLICE]):
        start += _SLICE
    while start < end and _is_space(body[max(start, end - _SLICE) : end]):
        end -= _SLICE
    # Some of it stays: what begins the rest began the body, and tells its encoding.
    return max(0, start - 4), max(start, end)


def _is_space(part: bytes) -> bool:
    return part == _BLANK or not part.strip(_SPACES)  # the latter takes longer
