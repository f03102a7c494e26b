"""What is given to constructors, looked at before anything comes of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from types import UnionType
from typing import cast

_Kinds = type | UnionType | tuple[type, ...]
_TEXT = (str, bytes, os.PathLike)


def expect(kinds: _Kinds, what: str, given: object) -> None:
    """Raise `TypeError` unless *given* is of one of *kinds*, which *what* names."""
    if not isinstance(given, kinds):
        raise TypeError(f"{what}, not {type(given).__name__}")


def callables(**given: object) -> None:
    """Raise `TypeError` unless each can be called."""
    for name, it in given.items():
        if not callable(it):
            kind = type(it).__name__
            raise TypeError(f"{name} must be something to call, not {kind}")


def flags(**given: object) -> None:
    """Raise `TypeError` for what is neither True nor False, as the text "no" is."""
    for name, it in given.items():
        expect(bool, f"{name} must be True or False", it)


def seconds(**given: object) -> None:
    """Raise unless each is a number of 0 or more; infinity is one."""
    for name, it in given.items():
        if isinstance(it, bool) or not isinstance(it, Real):
            kind = type(it).__name__
            raise TypeError(f"{name} must be a number of seconds, not {kind}")
        if not float(it) >= 0:
            raise ValueError(f"{name} must be 0 seconds or more, not {it}")


def whole(least: int = 0, **given: object) -> None:
    """Raise unless each is a whole number of at least so much."""
    for name, it in given.items():
        if isinstance(it, bool) or not hasattr(it, "__index__"):
            kind = type(it).__name__
            raise TypeError(f"{name} must be a whole number, not {kind}")
        if it.__index__() < least:
            raise ValueError(f"{name} must be {least} or more, not {it}")


def one_of(words: Sequence[object], **given: object) -> None:
    """Raise `ValueError` unless each is one of *words*."""
    for name, it in given.items():
        if it not in words:
            said = ", ".join(str(word) for word in words)
            raise ValueError(f"{name} {it!r} is none of {said}")


def command(argv: object) -> tuple[str, ...]:
    """Return a program and its arguments, each by itself; raise if that is not so."""
    if not isinstance(argv, Iterable) or isinstance(argv, str | bytes):
        kind = type(argv).__name__  # of a text each letter would be an argument
        raise TypeError(f"argv must be a list, not {kind}; shlex.split() makes one")
    words = tuple(argv)
    if not words:
        raise ValueError("argv is empty; name a program")
    for word in words:
        expect(_TEXT, "what argv lists must be text", word)
    return words


def environment(env: object) -> None:
    """Raise `TypeError` unless *env* is a map of text to text, or ``None``."""
    if env is not None:
        expect(Mapping, "env must be a map, or None", env)
        for it in chain.from_iterable(cast("Mapping[object, object]", env).items()):
            expect(_TEXT, "what env maps must be text", it)


def descriptors(pass_fds: object) -> tuple[int, ...]:
    """Return descriptors to be inherited; raise if they are none."""
    if not isinstance(pass_fds, Iterable):
        kind = type(pass_fds).__name__
        raise TypeError(f"pass_fds must be a list of descriptors, not {kind}")
    numbers = tuple(pass_fds)
    for number in numbers:
        whole(**{"what pass_fds lists": number})
    return numbers
