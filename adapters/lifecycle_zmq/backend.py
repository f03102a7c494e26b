"""The `Backend` protocol: what an engine implements, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from lifecycle_zmq.protocol import Finish

# How items of a stream are queued while its reader has no credit: "concatenate" joins
# neighbours that are lists, "replace" keeps the latest item only, "never" keeps each
# apart. The queue is bounded in bytes.
Merge = Literal["concatenate", "replace", "never"]
MERGES: Final = (None, *get_args(Merge))
_METHODS: Final = ("start", "cancel", "end", "step", "status")
# Optional methods, and how many arguments each is called with.
_HOOKS: Final = {"pause": 1, "resume": 1, "started": 1, "ending": 1, "drive": 3}


class Output(NamedTuple):
    """The output of one step for one stream.

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
    """The engine behind an `EngineServer`; all calls come from its one thread.

    ``start`` may raise `RequestRejected`. Any other exception of ``start`` refuses that
    request alone, one of ``step`` fails all streams; both are followed by ``end``. The
    other methods must not raise: the process then exits, which releases everything.

    Optional methods:

    - ``pause(key)`` and ``resume(key)``: the reader of that stream has fallen far
      behind, so produce nothing for it, or has caught up. A cancelled stream finishes,
      paused or not.
    - ``started(key)``, if starting takes time: whether the request is accepted; it may
      still raise `RequestRejected`, and has then forgotten the stream.
    - ``ending(key)``, if ending takes time: whether something of a stream that was
      ended still runs. Until that is over, the key is in use and END is not confirmed.
    - ``drive(loop, transport, heartbeat)``, if the backend has an event loop of its
      own, in which it calls ``loop.turn()``: see `GeneratorBackend`.
    """

    def start(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> Merge | None:
        """Accept a request, or raise `RequestRejected`.

        The tensors are read-only and the backend's alone; the server keeps no reference
        to them. Large ones lie in the arena, which the client writes and reuses: a
        tensor's place there is in use until the last reference to the tensor, or to any
        array made over it, is gone. So drop references once they were read, and keep
        them while a device still copies.

        Returns:
            How the stream's items may be merged while its reader is behind:
            ``"concatenate"`` joins neighbours that are lists, ``"replace"`` keeps the
            latest item only, ``"never"``, or ``None``, keeps each apart.
        """

    def cancel(self, key: str) -> None:
        """Stop a stream at the next step; it then finishes ``cancelled``."""

    def end(self, key: str) -> None:
        """Forget a stream and release all it held; ignores unknown keys."""

    def step(self) -> Sequence[Output]:
        """Run one step for all streams and return their outputs."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to step; if not, the server sleeps."""

    def status(self) -> dict[str, Any]:
        """Return counters, of plain values."""


def check(backend: object) -> None:
    """Raise `TypeError` if a member of `Backend` is missing, misspelt or no method."""
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
    else:
        what = what or "".join(_misused_hooks(backend)[:1])
    if what:
        raise TypeError(f"{name} is no Backend: {what}")


def _misused_hooks(backend: object) -> list[str]:
    """Say which attributes have the name of an optional method by chance."""
    return [
        f"its {name} is not the optional method of that name, which takes {count} "
        f"argument{'s'[: count > 1]}; rename it"
        for name, count in _HOOKS.items()
        if not _takes(getattr(backend, name, None), count)
    ]


def _takes(hook: Any, count: int) -> bool:
    if hook is None:
        return True
    try:
        signature(hook, follow_wrapped=False).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some functions of C have none
        return True
    return True
