"""Payloads: boxes that are emptied once, and mappings that are stripped in place.

A suspended frame keeps every local it has, for as long as a stream lasts.
Writing into frames from outside stopped working with CPython 3.14, so the
library never lets a payload into a frame: what circulates is a box.
"""

from __future__ import annotations

from array import array
from collections.abc import (
    Callable,
    Iterable,
    MutableMapping,
    MutableSequence,
)
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    cast,
    final,
)

from ._error_payload import clear_traceback_frames
from ._validation import NoCopy, brief, check, check_amount, check_callable

T = TypeVar("T")

_GONE: Final[Any] = object()
_TAKE: Final = "; its value is what take() returns"
# Leaves, though they look like lists: buffers of others must not be resized.
_RAW: Final = (bytearray, array)


@final
class Payload(NoCopy, Generic[T]):
    """A single-use container for a large value, so that no suspended frame keeps it.

    Put the value in where it is created and pass the box around. The code that hands
    the payload over calls `take`; references to the box that are left then refer to
    an empty one.

    Args:
        value: Anything. The box must be its only holder for the promise to hold.
        nbytes: Size of the value in bytes, for accounting.
        on_release: Called once, with how the box was emptied.

    Raises:
        ValueError: *nbytes* is negative or not a whole number.
    """

    __slots__ = ("__weakref__", "_on_release", "_value", "nbytes")

    forget = staticmethod(clear_traceback_frames)

    def __init__(
        self,
        value: T,
        *,
        nbytes: int = 0,
        on_release: Callable[[Literal["taken", "cleared"]], None] | None = None,
    ) -> None:
        self.nbytes = check_amount("nbytes", nbytes)
        self._value = value
        self._on_release = on_release
        if on_release is not None:
            check_callable(on_release=on_release)

    @property
    def taken(self) -> bool:
        """Whether the box is empty."""
        return self._value is _GONE

    def take(self) -> T:
        """Return the value and drop the reference to it.

        Raises:
            RuntimeError: The box was emptied before.
        """
        value = self._empty("taken")
        if value is _GONE:
            raise RuntimeError("the payload was taken or cleared before; take it once")
        return cast("T", value)

    def clear(self) -> None:
        """Drop the value, if it is still there."""
        self._empty("cleared")

    def _empty(self, how: Literal["taken", "cleared"]) -> object:
        value, self._value = self._value, _GONE
        if value is not _GONE:
            on_release, self._on_release = self._on_release, None
            if on_release is not None:
                on_release(how)
        return value

    # Type checkers are to find that there is none of these.
    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"a Payload has no {name!r}{_TAKE}")

        def __len__(self, *_: object) -> NoReturn:
            raise TypeError(f"a Payload is a box{_TAKE}")

        __iter__ = __getitem__ = __contains__ = __bytes__ = __array__ = __len__

        def __bool__(self) -> bool:
            return True

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a Payload cannot be pickled or copied{_TAKE}")

    def __repr__(self) -> str:
        if not hasattr(self, "nbytes"):  # that was refused
            return "<Payload, not made>"
        return f"<Payload of {brief(self.nbytes)} bytes{', taken' * self.taken}>"


def strip(payload: MutableMapping[str, Any], *, keep: Iterable[str] = ()) -> None:
    """Empty *payload* in place, but for the paths to *keep*.

    For the engine side, when the prefill that needed the tensors is done. In
    place, and down through nested mappings and lists, because other code may hold
    one of them. What is kept is not touched, wherever else it appears.

    Args:
        payload: A mapping by strings, nested to any depth.
        keep: Paths of dotted keys, such as
            ``"mrope_config.mrope_position_deltas"``. What lies under a kept path
            is kept whole.

    Raises:
        KeyError: A path to keep leads nowhere. All the rest was stripped before: a
            misspelt path must not keep a payload in memory.
        TypeError: *payload* is no such mapping, *keep* is one string, or a path in it
            is none; nothing was changed.
    """
    what = "strip takes a mapping that can be changed"
    check(isinstance(payload, MutableMapping), what, payload)
    if isinstance(keep, str):
        raise TypeError(f"keep is a list of paths, as in [{keep!r}], not one string")
    done: set[int] = set()
    kept: dict[int, set[str]] = {}
    absent: list[str] = []
    for path in keep:
        check(isinstance(path, str), "each path to keep is a string", path)
        found: Any = payload
        steps: list[tuple[int, str]] = []
        for key in path.split("."):
            if not isinstance(found, MutableMapping) or key not in found:
                absent.append(path)
                break
            steps.append((id(found), key))
            found = found[key]
        else:
            for container_id, key in steps:
                kept.setdefault(container_id, set()).add(key)
            _containers(found, done)
    for container in _containers(payload, done):
        if id(container) not in kept:
            container.clear()
            continue
        for key in container.keys() - kept[id(container)]:
            del container[key]
    if absent:
        listed = ", ".join(map(repr, absent))
        raise KeyError(f"no {listed} in the payload; the rest was stripped")


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
