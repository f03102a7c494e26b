"""Where an exception came from, without anything that it says."""

from __future__ import annotations

import traceback

# Longer chains and stacks are recursion; their ends say enough.
_MOST_ERRORS = 8
_MOST_PLACES = 32


def places(error: BaseException) -> tuple[str, ...]:
    """The places that *error* and its causes came through, the oldest first.

    Each is ``file:line in function``, and each exception's type stands behind its
    own. Of a group, the first one in it is followed.
    """
    chain: list[BaseException] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(chain) < _MOST_ERRORS:
        chain.append(at)
        seen.add(id(at))
        at = _before(at)
    told: list[str] = []
    for each in reversed(chain):
        told += _frames(each)
        told.append(type(each).__name__)
    return tuple(told)


def _before(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _frames(error: BaseException) -> list[str]:
    found = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return found[-_MOST_PLACES:]
