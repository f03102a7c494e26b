"""The promises of the library as decorators on functions that stream."""

# ruff: noqa: SLF001 - a managed stream is a friend of its session
from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, final, overload
from weakref import ref

from ._outcome import outcome_of
from ._scrub import Scrubbed, boxing, name_of
from ._stream import Stream

if TYPE_CHECKING:
    from ._gate import Gate
    from ._payload import Payload
    from ._session import Session
    from ._sessions import SessionRegistry

P = ParamSpec("P")
T = TypeVar("T")


class Decorator(Protocol):
    """Turns a function that streams into one that returns a `Stream`."""

    @overload
    def __call__(
        self, function: Callable[P, AsyncIterator[T]], /
    ) -> Callable[P, Stream[T]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Awaitable[AsyncIterator[T]]], /
    ) -> Callable[P, Stream[T]]: ...


def managed(
    *,
    gate: Gate | None = None,
    cost: int | Callable[..., int] = 0,
    slots: int = 1,
    sessions: SessionRegistry | None = None,
    key: Callable[..., str] | None = None,
    scrub: tuple[str, ...] | str = (),
) -> Decorator:
    """Admit, track and scrub a function that streams, in the right order.

    For async generator functions, and for the two-phase form that needs no care:
    a coroutine function that hands its payload over and *returns* the stream, so
    that its frame is gone before the first item.

    The call returns a `Stream` and takes nothing yet. With the first item that
    is asked for, a session is opened, a lease is admitted, and then the function
    runs. Parameters named ``lease`` and ``session`` are given these; callers do
    not see them. The lease is released and the boxes are cleared when a two-phase
    function returns, at the first item of a generator, at ``lease.release()``, or
    when a start that goes on alone has settled. Until then, to wait for another
    stream of the same gate is refused: it would wait for itself. A stream that is
    left before its end, as by ``break``, counts as cancelled.

    Args:
        gate: Admits each stream.
        cost: Bytes to ask of the gate, or a function of the call's arguments.
        slots: Slots to ask of the gate.
        sessions: Tracks each stream as a session.
        key: Session id, as a function of the call's arguments.
        scrub: Parameters that carry payloads; see `lifecycle.scrub`.

    Raises:
        TypeError: The function neither is an async generator function nor a
            coroutine function, or lacks a parameter to scrub; or *sessions*
            comes without *key*.
    """
    if (sessions is None) != (key is None):
        raise TypeError("sessions and key go together")
    names = (scrub,) if isinstance(scrub, str) else tuple(scrub)
    given = {name for name, by in (("lease", gate), ("session", sessions)) if by}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not (
            inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{name_of(function)} is neither an async generator function nor a "
                f"coroutine function that returns a stream; make it `async def`"
            )
        visible, bind = boxing(function, names, given)

        async def open_(
            bound: inspect.BoundArguments,
            nbytes: int,
            id_: str,
            stream: _ManagedStream[Any],
            held: ExitStack,
        ) -> AsyncIterator[Any]:
            held.callback(bound.arguments.clear)
            lease = None
            if sessions is not None:
                session = bound.arguments["session"] = sessions.open(id_)
                stream._session = session
                session._lead(ref(stream))
            if gate is not None:
                lease = held.enter_context(await gate.admit(bytes=nbytes, slots=slots))
                bound.arguments["lease"] = lease
            if sessions is not None:
                session.lease = lease
                session._confirm()
            opened = function(*bound.args, **bound.kwargs)
            bound.arguments.clear()  # what the function lets go of is gone
            if inspect.isawaitable(opened):
                opened = await opened
                held.close()
            return aiter(opened)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Stream[Any]:
            nbytes = cost(*args, **kwargs) if callable(cost) else cost
            id_ = "" if key is None else key(*args, **kwargs)
            bound, boxes = bind(*args, **kwargs)
            return _ManagedStream(functools.partial(open_, bound, nbytes, id_), boxes)

        call.__signature__ = visible  # type: ignore[attr-defined]
        return call

    return decorate


@final
class _ManagedStream(Stream[T]):
    """A stream that ends its session."""

    _session: Session | None = None

    def __init__(self, opening: Callable[..., Any], boxes: list[Payload[Any]]) -> None:
        me = ref(self)
        super().__init__(Scrubbed(None, boxes, lambda held: opening(me(), held)))

    def _finish(self, error: BaseException | None) -> None:
        super()._finish(error)
        if self._session is not None:
            end = GeneratorExit() if error is None else error
            self._session.close(outcome_of(end, self._session.cancelled_as))

    def _lose(self) -> bool:
        if self._session is not None:
            self._session._lose()
        return self._session is not None
