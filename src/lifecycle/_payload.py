"""Payloads: boxes that are emptied once, and mappings that are stripped in place.

A suspended frame keeps every local it has, for as long as a stream lasts.
Writing into frames from outside stopped working with CPython 3.14, so the
library never lets a payload into a frame: what circulates is a box.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence
from typing import Any, Final, Generic, Literal, TypeVar, cast, final

T = TypeVar("T")

_GONE: Final[Any] = object()

_Path = tuple[str, ...]


@final
class Payload(Generic[T]):
    """A box that gives its value away once.

    Put the value in where it is created and pass the box around. Whoever hands
    the payload over calls `take`; whatever still refers to the box afterwards
    refers to nothing.

    Args:
        value: Anything. The box must be its only holder for the promise to hold.
        nbytes: Size of the value in bytes, for accounting.
        on_release: Called once, with how the box was emptied.
    """

    __slots__ = ("__weakref__", "_on_release", "_value", "nbytes")

    def __init__(
        self,
        value: T,
        *,
        nbytes: int = 0,
        on_release: Callable[[Literal["taken", "cleared"]], None] | None = None,
    ) -> None:
        self._value = value
        self.nbytes = nbytes
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
            raise RuntimeError(
                "the payload was taken or cleared before; take it once, and pass "
                "the value on from there"
            )
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

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a Payload cannot be pickled or copied; send what take() gives")

    def __repr__(self) -> str:
        return f"<Payload of {self.nbytes} bytes{', taken' if self.taken else ''}>"


def box(value: T | Payload[T]) -> Payload[T]:
    """Return *value* in a box, or the box that it is."""
    return value if isinstance(value, Payload) else Payload(value)


def forget_frames(error: BaseException) -> None:
    """Clear the locals of the finished frames that *error* came through.

    A traceback holds its frames and a frame holds its locals: without this an
    error that is kept, logged or stored keeps the payload that it was about.
    The traceback itself, with its lines, stays.

    Only frames that are finished are cleared. An error that was caught once and
    raised again elsewhere also names frames that are merely suspended, and
    clearing one of those closes its coroutine up to CPython 3.12. The collector
    can tell them apart: a frame shows it its locals only once it owns them,
    which is when it is finished. Its trace function it shows at any time.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        exc = pending.pop()
        if exc is None or id(exc) in seen:
            continue
        seen.add(id(exc))
        for frame, _line in traceback.walk_tb(exc.__traceback__):
            trace = frame.f_trace
            if any(held is not trace for held in gc.get_referents(frame)):
                frame.clear()
        pending += [exc.__cause__, exc.__context__]
        if isinstance(exc, BaseExceptionGroup):
            pending += exc.exceptions


def strip(payload: MutableMapping[str, Any], *, keep: Iterable[str] = ()) -> None:
    """Empty *payload* in place, but for the paths to *keep*.

    For the engine side, when the prefill that needed the tensors is done. In
    place, because somebody else may hold the mapping; and down through nested
    mappings and lists, because somebody may hold one of those. What is kept is
    not touched, wherever else it appears.

    Args:
        payload: A mapping by strings, possibly nested.
        keep: Paths of dotted keys, such as
            ``"mrope_config.mrope_position_deltas"``. What lies under a kept path
            is kept whole.

    Raises:
        KeyError: A path to keep leads nowhere; nothing was changed.
    """
    paths = [tuple(path.split(".")) for path in keep]
    kept: set[int] = set()
    for path in paths:
        _protect(_look_up(payload, path), kept)
    _strip(payload, [path for path in paths if path], kept)


def _look_up(payload: MutableMapping[str, Any], path: _Path) -> object:
    found: Any = payload
    for i, key in enumerate(path):
        if not isinstance(found, MutableMapping) or key not in found:
            raise KeyError(
                f"no {'.'.join(path[: i + 1])!r} in the payload; nothing was stripped"
            )
        found = found[key]
    return found


def _protect(value: object, kept: set[int]) -> None:
    if isinstance(value, MutableMapping | MutableSequence) and id(value) not in kept:
        kept.add(id(value))
        for child in _children(value):
            _protect(child, kept)


def _strip(value: object, paths: list[_Path], kept: set[int]) -> None:
    if id(value) in kept:
        return
    if isinstance(value, MutableMapping):
        whole = {path[0] for path in paths if len(path) == 1}
        for key in list(value):
            deeper = [path[1:] for path in paths if path[0] == key and len(path) > 1]
            if key in whole:
                continue
            if deeper:
                _strip(value[key], deeper, kept)
            else:
                _strip(value.pop(key), [], kept)
    elif isinstance(value, MutableSequence) and not isinstance(value, bytearray):
        children = list(value)
        value.clear()
        for child in children:
            _strip(child, [], kept)


def _children(value: MutableMapping[Any, Any] | MutableSequence[Any]) -> list[Any]:
    return list(value.values() if isinstance(value, MutableMapping) else value)
