"""Payloads: boxes that are emptied once, and mappings that are stripped in place.

A suspended frame keeps every local it has, for as long as a stream lasts.
Writing into frames from outside stopped working with CPython 3.14, so the
library never lets a payload into a frame: what circulates is a box.
"""

from __future__ import annotations

import gc
import traceback
from array import array
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from typing import Any, Final, Generic, Literal, TypeVar, cast, final

from ._checks import Unique, whole

T = TypeVar("T")

_GONE: Final[Any] = object()
# Leaves, though they look like lists: their bytes are not ours to resize.
_RAW: Final = (bytearray, array)


def forget_frames(error: BaseException) -> None:
    """Clear the locals of the finished frames that *error* came through.

    A traceback holds its frames and a frame holds its locals: without this an
    error that is kept, logged or stored keeps the payload that it was about. Its
    causes, contexts and members of a group are treated alike; tracebacks and their
    lines stay, and so does what a frame needs that has not finished.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        exc = pending.pop()
        if exc is None or id(exc) in seen:
            continue
        seen.add(id(exc))
        for frame, _line in traceback.walk_tb(exc.__traceback__):
            # Clearing a suspended frame closes its coroutine up to CPython 3.12.
            # The collector tells: a frame shows it its locals once it owns them,
            # which is when it is finished, and its trace function at any time.
            trace = frame.f_trace
            if any(held is not trace for held in gc.get_referents(frame)):
                frame.clear()
        pending += [exc.__cause__, exc.__context__]
        if isinstance(exc, BaseExceptionGroup):
            pending += exc.exceptions


@final
class Payload(Unique, Generic[T]):
    """A box that gives its value away once.

    Put the value in where it is created and pass the box around. Whoever hands
    the payload over calls `take`; whatever still refers to the box afterwards
    refers to nothing.

    Args:
        value: Anything. The box must be its only holder for the promise to hold.
        nbytes: Size of the value in bytes, for accounting.
        on_release: Called once, with how the box was emptied.

    Raises:
        ValueError: *nbytes* is negative or not a whole number.
    """

    __slots__ = ("__weakref__", "_on_release", "_value", "nbytes")

    forget = staticmethod(forget_frames)

    def __init__(
        self,
        value: T,
        *,
        nbytes: int = 0,
        on_release: Callable[[Literal["taken", "cleared"]], None] | None = None,
    ) -> None:
        self._value = value
        self.nbytes = whole("nbytes", nbytes)
        self._on_release = on_release

    @property
    def taken(self) -> bool:
        """Whether the box is empty."""
        return self._value is _GONE

    def take(self) -> T:
        """Return the value and forget it.

        Raises:
            RuntimeError: The box was emptied before.
        """
        value = self._empty("taken")
        if value is _GONE:
            raise RuntimeError("the payload was taken or cleared before; take it once")
        return cast("T", value)

    def clear(self) -> None:
        """Forget the value, if it is still there."""
        self._empty("cleared")

    def _empty(self, how: Literal["taken", "cleared"]) -> object:
        value, self._value = self._value, _GONE
        if value is not _GONE:
            on_release, self._on_release = self._on_release, None
            if on_release is not None:
                on_release(how)
        return value

    def __repr__(self) -> str:
        return f"<Payload of {self.nbytes} bytes{', taken' if self.taken else ''}>"


def strip(payload: MutableMapping[str, Any], *, keep: Iterable[str] = ()) -> None:
    """Empty *payload* in place, but for the paths to *keep*.

    For the engine side, when the prefill that needed the tensors is done. In
    place, and down through nested mappings and lists, because somebody else may
    hold one of them. What is kept is not touched, wherever else it appears.

    Args:
        payload: A mapping by strings, nested to any depth.
        keep: Paths of dotted keys, such as
            ``"mrope_config.mrope_position_deltas"``. What lies under a kept path
            is kept whole.

    Raises:
        KeyError: A path to keep leads nowhere; nothing was changed.
        TypeError: *keep* is one string; nothing was changed.
    """
    if isinstance(keep, str):
        raise TypeError(f"keep is a list of paths, as in [{keep!r}], not one string")
    done: set[int] = set()
    kept: dict[int, set[str]] = {}
    for path in keep:
        found: Any = payload
        for key in path.split("."):
            if not isinstance(found, MutableMapping) or key not in found:
                raise KeyError(f"no {path!r} in the payload; nothing was stripped")
            kept.setdefault(id(found), set()).add(key)
            found = found[key]
        _containers(found, done)
    for container in _containers(payload, done):
        if id(container) not in kept:
            container.clear()
            continue
        for key in container.keys() - kept[id(container)]:
            del container[key]


def _containers(root: object, done: set[int]) -> list[Any]:
    # All that can be emptied from *root* downwards, each once and none that is done.
    found: list[Any] = []
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, MutableMapping):
            inside: Iterable[object] = value.values()
        elif isinstance(value, MutableSequence) and not isinstance(value, _RAW):
            inside = value
        else:
            continue
        if id(value) not in done:  # by identity: it may be in many places
            done.add(id(value))
            found.append(value)
            pending += inside
    return found
