"""What an exception keeps alive: frames with their locals, and the input that failed.

An error outlives the request that it is about: in a log record, in a debugger, in the
variable of whoever caught it. Its type, its message and its places are kept.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Generator
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final

# Fields of the standard library's exceptions that refer to what was read, decoded or
# parsed, by the module and the name of the class; looked up, so nothing is imported.
_INPUTS: Final = {
    ("builtins", "StopIteration"): ("value", None),
    ("builtins", "SyntaxError"): ("text", None),
    ("builtins", "UnicodeDecodeError"): ("object", b""),
    ("builtins", "UnicodeEncodeError"): ("object", ""),
    ("builtins", "UnicodeTranslateError"): ("object", ""),
    ("asyncio.exceptions", "IncompleteReadError"): ("partial", b""),
    ("http.client", "IncompleteRead"): ("partial", b""),
    ("http.client", "BadStatusLine"): ("line", ""),
    ("json.decoder", "JSONDecodeError"): ("doc", ""),
    ("re", "error"): ("pattern", None),
    ("re", "PatternError"): ("pattern", None),
    ("tomllib", "TOMLDecodeError"): ("doc", ""),
}
# Of an `OSError`, a `CalledProcessError`, and any.
_ARGUMENTS: Final = ("filename", "filename2", "cmd", "__notes__")
# What an argument may be. Whatever else stands there may be a payload.
_PLAIN: Final = (int, float, complex, type(None), type, Enum, PurePath)
_MOST_TEXT: Final = 16 * 1024


def clear_traceback_frames(
    error: BaseException, *, until: BaseException | None = None
) -> None:
    """Take the payload from the finished frames that *error* came through.

    A frame holds its locals and its function, and that holds defaults and a closure:
    without this an error that is kept keeps the payload that it was about. Its causes,
    contexts and members of a group are treated alike.

    An exception of the standard library refers to its input, too: a UnicodeDecodeError
    to the bytes, a KeyError to the key. Such fields are emptied. Of its arguments and
    notes, text and bytes are kept up to 16 KiB, numbers, paths and constants whole, and
    anything else becomes its type. Exceptions of other packages keep their fields and
    arguments: whoever catches them may need these.

    The traceback becomes a copy with the same files, names and lines: a debugger shows
    where the error was raised, and no variables of the frames that have finished.

    Args:
        error: The exception to clear.
        until: A context of *error* to leave as it is, with all behind it: what a
            caller was already handling.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = {id(until)}
    while pending:
        exc = pending.pop()
        if exc is None or id(exc) in seen:
            continue
        seen.add(id(exc))
        exc.with_traceback(_without_payload(exc.__traceback__))
        if isinstance(exc, Exception):  # a cancellation carries what its cause said
            _drop_input(exc)
        pending += [exc.__cause__, exc.__context__]
        if isinstance(exc, BaseExceptionGroup):
            pending += exc.exceptions


def _drop_input(error: Exception) -> None:
    with suppress(AttributeError):  # of a class that does not let itself be changed
        if isinstance(error, AttributeError):
            error.obj = type(error.obj)  # enough to suggest another name
        for base in type(error).__mro__:
            if field := _INPUTS.get((base.__module__, base.__name__)):
                _empty_field(error, *field)
        if type(error).__module__.partition(".")[0] in sys.stdlib_module_names:
            error.args = _plain(error.args)
            for name in _ARGUMENTS:
                if value := getattr(error, name, None):
                    setattr(error, name, _plain(value))


def _empty_field(error: Exception, name: str, empty: object) -> None:
    if (held := getattr(error, name, None)) is not None:
        setattr(error, name, empty)
        error.args = _replaced(error.args, held, empty)


def _replaced(value: Any, held: object, empty: object) -> Any:
    if type(value) is tuple:
        return tuple(_replaced(each, held, empty) for each in value)
    return empty if value is held else value


def _plain(value: Any) -> Any:
    """Return what an error may keep of *value*: at most its type."""
    if type(value) in (tuple, list):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, (str, bytes)):
        return value[:_MOST_TEXT]  # of a subclass, which may have attributes, too
    return value if isinstance(value, _PLAIN) else type(value)


def _without_payload(trace: TracebackType | None) -> TracebackType | None:
    """Copy *trace*, with a stand-in for each frame that has finished."""
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    copy = None
    for step in reversed(steps):
        frame, instruction = step.tb_frame, step.tb_lasti
        if _has_finished(frame):
            # From CPython 3.13 a running frame that a debugger wrote to looks so, too,
            # and refuses; it keeps its place.
            with suppress(RuntimeError):
                # Others may refer to it, such as frames that it called.
                frame.clear()
                # Its function stays even so: no frame can be made to forget that.
                frame, instruction = _stand_in_for(frame), -1
        copy = TracebackType(copy, frame, instruction, step.tb_lineno)
    return copy


def _has_finished(frame: FrameType) -> bool:
    # Clearing a suspended frame closes its coroutine up to CPython 3.12. The collector
    # tells: a frame shows it its locals and function once it owns them, which is when
    # it is finished, and its trace function at any time.
    trace = frame.f_trace
    return any(held is not trace for held in gc.get_referents(frame))


def _stand_in_for(frame: FrameType) -> FrameType:
    """Return a frame of the same place, that never ran."""
    code = frame.f_code
    place = _place.__code__.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno,
    )
    stand_in: FrameType = FunctionType(place, frame.f_globals)().gi_frame
    return stand_in


def _place() -> Generator[None]:
    yield  # pragma: no cover - a generator has a frame before it runs


def describe_error(error: BaseException) -> str:
    """Name an error's type and place without its text: ``ValueError at kv.py:7``.

    The text may quote a prompt or another payload; the type and the line never do.
    """
    name = type(error).__name__
    frames = [*traceback.walk_tb(error.__traceback__)]
    if not frames:
        return name
    frame, line = frames[-1]
    return f"{name} at {PurePath(frame.f_code.co_filename).name}:{line}"
