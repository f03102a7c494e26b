"""What a runner made, looked at before anything is booked by it.

A runner may be a user's own. Whatever it returns in the place of an item fails the
request that the item is of, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lifecycle_engine.runner import Emitted, Runner


class BadItem(Exception):
    """What a runner returned is not what its protocol has; quotes nothing of it."""


def told(error: Exception) -> str:
    """Return what a client may read of it: of a runner's own error, its kind alone."""
    return str(error) if isinstance(error, BadItem) else type(error).__name__


def one(made: Any, *, left: int) -> Emitted | None:
    """Return what a chunk of a prompt made.

    Args:
        made: What `Runner.prefill` returned.
        left: Prompt tokens behind the chunk.

    Raises:
        BadItem: An item came before the last chunk, none from it, or something else.
    """
    if made is None and left:
        return None
    if left or made is None:
        what = "an item" if left else "None"
        raise BadItem(f"prefill returned {what} with {left} tokens left")
    emitted = _checked(made)
    if isinstance(emitted, Exception):
        raise emitted
    return emitted


def each(made: Iterable[Any], count: int) -> list[Emitted | Exception]:
    """Return what a step made for each of its slots, or why that is nothing.

    Args:
        made: What `Runner.decode` returned.
        count: Slots.

    Raises:
        BadItem: There are more or fewer. What a lazy *made* raises passes through.
    """
    items = list(made)
    if len(items) != count:
        raise BadItem(f"decode returned {len(items)} items for {count} slots")
    return [_checked(item) for item in items]


def counters(runner: Runner) -> dict[str, Any]:
    """Return what a runner counts; it is asked between steps, and fails nobody's."""
    try:
        return runner.status()
    except Exception as error:  # noqa: BLE001  # costs its numbers, whatever it is
        return {"error": type(error).__name__}


def _checked(made: Any) -> Emitted | Exception:
    if isinstance(made, Exception):
        return made
    if not isinstance(made, Emitted):
        return BadItem(f"the runner returned a {type(made).__name__}, not an Emitted")
    for name, known in (("token", (int, type(None))), ("last", (bool,))):
        kind = type(getattr(made, name))
        if kind not in known:
            words = " or ".join(each.__name__ for each in known)
            return BadItem(f"{name} of an Emitted is a {kind.__name__}, not {words}")
    return made
