"""Letting go of an exception without letting it hold on to anything.

A traceback keeps every frame it passed and so every local in them: an image, its
pixels, an encoder's output. Frames that point back at their exception even make
that a cycle, which only the garbage collector would find.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath

from lifecycle import Payload


def release(error: BaseException) -> None:
    """Clear the frames that an exception came through, and detach them from it."""
    Payload.forget(error)
    error.__traceback__ = error.__cause__ = error.__context__ = None


def where(error: BaseException) -> str:
    """Say what was raised and where, without what it says: ``ValueError at kv.py:7``.

    An exception's text may quote what it choked on, its type and line never do.
    """
    name = type(error).__name__
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return name
    frame, line = frames[-1]
    return f"{name} at {PurePath(frame.f_code.co_filename).name}:{line}"
