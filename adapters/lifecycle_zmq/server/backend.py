"""What an engine has to do for the server: the `Backend` protocol and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from lifecycle_zmq import _options

# What becomes of the items of a stream whose reader has no credit for them:
# "concatenate" joins neighbours that are lists, "replace" keeps the latest item only,
# "never" keeps each apart. All of it up to a number of bytes.
Merge = Literal["concatenate", "replace", "never"]
Reason = Literal["completed", "cancelled", "failed"]
_REASONS: Final = get_args(Reason)
MERGES: Final = (None, *get_args(Merge))
_METHODS: Final = ("start", "cancel", "end", "step", "status")


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended.

    Attributes:
        reason: ``"failed"`` reaches the reader as `EngineFailed`; after the other two
            the stream just ends.
        code: One word for metrics and status codes, of a failure.
        message: A sentence without any of the request's content, of a failure.
    """

    reason: Reason
    code: str = ""
    message: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for another reason, which no client would understand."""
        _options.one_of(_REASONS, reason=self.reason)


class Output(NamedTuple):
    """What one tick produced for one stream.

    Attributes:
        key: The stream.
        items: New items in order, of plain values; may be empty. Lists of tokens,
            which are integers of 32 bits, cost the least.
        finish: Set on the last output of the stream.
    """

    key: str
    items: Sequence[Any] = ()
    finish: Finish | None = None

    def __repr__(self) -> str:
        """Show the key and how many items there are, never an item."""
        return f"<Output {self.key!r} items={len(self.items)} finish={self.finish!r}>"


class Backend(Protocol):
    """The engine behind an `EngineServer`; every call comes from its one thread.

    ``start`` may raise `RequestRejected`. Any other exception of ``start`` refuses that
    request alone, one of ``step`` fails all streams; both are followed by ``end``. The
    other methods must not raise: the process then exits, which releases everything.

    A backend may have two more methods, ``pause(key)`` and ``resume(key)``: the reader
    of that stream has fallen far behind, so it shall produce nothing, or has caught up.
    A cancelled stream finishes, paused or not.

    Two more are for one that takes its time. ``started(key)``: whether a request that
    was taken is accepted; it may still raise `RequestRejected`, and has then forgotten
    the stream. ``ending(key)``: whether something of a stream that it was told to
    forget still runs; until that is over, the key is in use, and whoever asked for the
    end is not told of it.

    And ``drive(loop, transport, pulse)`` is for one with an event loop of its own, in
    which it calls ``loop.turn()``: see `GeneratorBackend`.
    """

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> Merge | None:
        """Take a request, or raise `RequestRejected`.

        The tensors are read-only and the backend's alone; the server keeps no reference
        to them. Large ones lie in the arena, which the client writes and reuses: what
        a tensor takes there is in use until the last reference to the tensor, or to
        any array made over it, is gone. So let go of them when they were read, and
        hold them while a device still copies.

        Returns:
            How the stream's items may be merged while its reader is behind:
            ``"concatenate"`` joins neighbours that are lists, ``"replace"`` keeps the
            latest item only, ``"never"``, or ``None``, keeps each apart.
        """
        ...

    def cancel(self, key: str) -> None:
        """Stop a stream at the next step; it then finishes ``cancelled``."""
        ...

    def end(self, key: str) -> None:
        """Forget a stream and release all it held; an unknown key is fine."""
        ...

    def step(self) -> Sequence[Output]:
        """Run one tick for all streams and return what they produced."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there is anything to step; if not, the server sleeps."""
        ...

    def status(self) -> dict[str, Any]:
        """Return counters, of plain values."""
        ...


def check(backend: object) -> None:
    """Raise `TypeError` where something of a `Backend` is missing or misspelt."""
    name = getattr(backend, "__name__", type(backend).__name__)
    what = ""
    for method in _METHODS:
        if not callable(getattr(backend, method, None)):
            what = f"it has no method {method}"
    if isinstance(backend, type):
        what = f"it is a class; make one: {name}()"
    elif "busy" not in dir(backend):
        what = what or "it has no property busy"
    elif callable(getattr(type(backend), "busy", None)):
        what = "busy is a method, which is always true; make it a property"
    if what:
        raise TypeError(f"{name} is no Backend: {what}")
