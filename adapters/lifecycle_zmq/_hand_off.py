"""Giving a payload away: what holds it before, and what must not hold it after."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Protocol

from lifecycle import Payload


class Box(Protocol):
    """What holds the tensors until the hand-off, such as a `lifecycle.Payload`."""

    def take(self) -> Mapping[str, Any]:
        """Give up the value, once."""
        ...


def take(box: Box | None) -> Mapping[str, Any]:
    """Return what is in `box`, which is empty then.

    Raises:
        TypeError: It is no box; a plain map would go on holding the tensors.
    """
    if box is None:
        return {}
    if not hasattr(box, "take"):
        kind = type(box).__name__
        raise TypeError(f"tensors travel in a Payload, not {kind}: give Payload({{…}})")
    return box.take()


def forget_frames(error: BaseException, *, until: BaseException | None = None) -> None:
    """Empty the finished frames behind `error`, as `Payload.forget` does.

    Args:
        error: The exception on its way out.
        until: What was already being handled outside, which is not ours to empty.
    """
    last = error
    while last.__context__ is not None and last.__context__ is not until:
        last = last.__context__
    outside, last.__context__ = last.__context__, None
    try:
        Payload.forget(error)
    finally:
        last.__context__ = outside


def where(error: BaseException) -> str:
    """Say what was raised and where, without what it says, which may be content."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{type(error).__name__} at {PurePath(frame.f_code.co_filename).name}:{line}"


def complain(about: str, error: BaseException) -> None:
    """Say on standard error what was raised about what, and empty its frames."""
    # Without the message of the error and without locals, which may hold a prompt.
    sys.stderr.write(f"{about} raised {type(error).__name__}\n")
    traceback.print_tb(error.__traceback__)
    forget_frames(error)
