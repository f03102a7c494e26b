"""Letting go of an exception without letting it hold on to anything.

A traceback keeps every frame it passed and so every local in them: an image, its
pixels, an encoder's output. Frames that point back at their exception even make
that a cycle, which only the garbage collector would find.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath


def release(error: BaseException) -> None:
    """Clear the frames of an exception, its causes and contexts, and detach them."""
    queue: list[BaseException | None] = [error]
    seen: set[int] = set()
    while queue:
        link = queue.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        queue += [link.__cause__, link.__context__]
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link.__cause__ = link.__context__ = None


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
