"""An error that is kept does not keep the input that it is about."""

from __future__ import annotations

import ast
import asyncio
import http.client
import json
import re
import subprocess
import tomllib
import weakref
from collections.abc import Callable, Generator
from functools import partial
from http import HTTPStatus
from pathlib import PurePath
from typing import Any, NoReturn

import anyio
import pytest

from lifecycle import Payload, SessionRegistry

pytestmark = pytest.mark.anyio


class Text(str):  # noqa: SLOT000 - has to be watched
    """A string that can have a mark."""


class Bytes(bytes):
    """Bytes that can have a mark."""


class Picture:
    """Something that is no text at all."""

    mark: object = None


class OfAUser(KeyError):
    """An exception whose fields its author reads."""


def stop(value: object) -> NoReturn:
    """Return the value from a generator that nobody expected to end."""

    def generate() -> Generator[int, None, object]:
        yield from ()
        return value

    try:
        next(generate())
    except StopIteration as error:
        raise OSError("short read") from error
    raise AssertionError


def fail(kind: Callable[..., Exception], *arguments: Any) -> NoReturn:
    """Raise an exception of these arguments."""
    raise kind(*arguments)


def note(value: str) -> NoReturn:
    """Raise an exception with a note of the value."""
    error = ValueError()
    error.add_note(value)
    raise error


def several(value: object) -> NoReturn:
    """Raise a group whose member is about the value."""
    raise ExceptionGroup("several", [ExceptionGroup("inner", [KeyError(value)])])


RAISES: dict[str, tuple[Callable[[Any], object], object]] = {
    "decode": (lambda it: it.decode("ascii"), Bytes(b"\xff\xff")),
    "encode": (lambda it: it.encode("ascii"), Text("\xff")),
    "translate": (
        lambda it: fail(UnicodeTranslateError, it, 0, 1, "no"),
        Text("\xff"),
    ),
    "json": (json.loads, Text("{")),
    "toml": (lambda it: fail(tomllib.TOMLDecodeError, "no", it, 0), Text("=")),
    "pattern": (re.compile, Text("(")),
    "syntax": (lambda it: fail(SyntaxError, "no", ("a.py", 1, 1, it)), Text("a b")),
    "literal": (ast.literal_eval, Text("a b")),
    "key": (lambda it: {}[it], Text("prompt")),
    "argument": (partial(fail, ValueError, "no picture"), Picture()),
    "nested": (lambda it: fail(LookupError, ("of", (it, 1))), Picture()),
    "attribute": (lambda it: it.pixels, Picture()),
    "value": (stop, Picture()),
    "file": (open, Text("/nowhere/at/all")),
    "number": (int, Text("twelve")),
    "command": (
        lambda it: fail(subprocess.CalledProcessError, 1, ["false", it]),
        Text("prompt"),
    ),
    "partial": (lambda it: fail(asyncio.IncompleteReadError, it, 9), Bytes(b"half")),
    "chunk": (lambda it: fail(http.client.IncompleteRead, it, 9), Bytes(b"half")),
    "status": (lambda it: fail(http.client.BadStatusLine, it), Text("HTP")),
    "note": (note, Text("prompt")),
    "group": (several, Picture()),
}


@pytest.mark.parametrize("name", RAISES)
async def test_frees_the_input_of_a_failed_start(name: str, no_collector: None) -> None:
    """The payload dies once the start has failed, though its error is kept."""
    raises, example = RAISES[name]
    kind: Any = type(example)
    payload = kind() if kind is Picture else kind(example)
    payload.mark = Picture()  # dies with it: nothing can watch bytes themselves
    alive = weakref.ref(payload.mark)
    kept = None

    async def send(it: Any) -> object:
        await anyio.lowlevel.checkpoint()
        return raises(it)

    opening = partial(send, payload)
    del payload
    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            starting = session.start(opening)
            del opening
            try:
                await starting
            except Exception as error:  # noqa: BLE001 - whatever was raised
                kept = error
            finally:
                del starting
    assert kept is not None
    assert alive() is None
    assert str(kept) is not None  # an error can be printed without its input


def forgotten(raises: Callable[[], object]) -> Exception:
    """Return what *raises* raised, without its payload."""
    try:
        raises()
    except Exception as error:  # noqa: BLE001 - whatever was raised
        Payload.forget(error)
        return error
    raise AssertionError


def test_keeps_what_explains_an_error() -> None:
    """Messages, numbers, paths and constants are those of the error as raised."""
    missing = forgotten(partial(open, "/nowhere/at/all"))
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.filename) == (2, "/nowhere/at/all")
    assert str(missing) == "[Errno 2] No such file or directory: '/nowhere/at/all'"
    arguments = ("a", b"b", 3, 0.5, None, HTTPStatus.OK, PurePath("x"), (4, int))
    assert forgotten(partial(fail, ValueError, *arguments)).args == arguments
    doc = forgotten(partial(json.loads, '{"a": no}'))
    assert isinstance(doc, json.JSONDecodeError)
    assert (doc.doc, doc.pos, doc.colno) == ("", 6, 7)
    assert str(doc).endswith("line 1 column 7 (char 6)")
    code = forgotten(partial(ast.literal_eval, "a b"))
    assert isinstance(code, SyntaxError)
    assert (code.text, code.lineno, code.msg) == (None, 1, "invalid syntax")


def test_keeps_a_long_message_in_part() -> None:
    """A text that may be the whole input is cut at 16 KiB."""
    (text,) = forgotten(partial(fail, ValueError, "ab" * 10_000)).args
    assert text == "ab" * 8192
    (raw,) = forgotten(partial(fail, ValueError, b"ab" * 10_000)).args
    assert raw == b"ab" * 8192


def test_leaves_exceptions_of_others_as_they_are() -> None:
    """An author's own exception keeps its arguments; whoever catches it reads them."""
    detail = {"reason": "quota"}
    assert forgotten(partial(fail, OfAUser, detail)).args == (detail,)
    assert forgotten(partial(fail, OfAUser, detail)).args[0] is detail


def test_empties_a_field_that_a_subclass_inherits() -> None:
    """What the standard library's class refers to goes, from its arguments as well."""

    class OfALibrary(UnicodeDecodeError):
        pass

    error = forgotten(partial(fail, OfALibrary, "ascii", b"\xff", 0, 1, "no"))
    assert isinstance(error, OfALibrary)
    assert error.object == b""
    assert error.args == ("ascii", b"", 0, 1, "no")


def test_leaves_a_cancellation_as_it_is() -> None:
    """The message of a cancellation belongs to who cancels."""
    detail = object()
    error = asyncio.CancelledError(detail)
    Payload.forget(error)
    assert error.args == (detail,)


def test_forgets_the_rest_of_an_error_that_cannot_be_changed() -> None:
    """An exception that refuses to be changed does not replace the one that is raised."""

    class Frozen(AttributeError):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "obj":
                raise AttributeError(name)
            super().__setattr__(name, value)

    try:
        raise Frozen("no") from KeyError(Picture())
    except Frozen as error:
        Payload.forget(error)
        assert error.__cause__ is not None
        assert error.__cause__.args == (Picture,)
