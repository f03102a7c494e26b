"""`managed` and `scrub`: decorators for functions that stream."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, ParamSpec, Protocol, TypeVar, overload

from ._gate import Gate
from ._lease import Lease
from ._managed_stream import (
    Call,
    ManagedStream,
    Options,
    Scrubbed,
    boxing,
    wrapped,
)
from ._session import Session
from ._sessions import SessionRegistry
from ._signatures import Decorator, GivingBothDecorator, GivingDecorator
from ._stream import Stream
from ._thread_iterator import ThreadIterator, asynchronous, is_generator_function
from ._validation import (
    UNSTATED,
    check,
    check_amount,
    check_cost,
    check_type,
    name_of,
)

T = TypeVar("T")
P = ParamSpec("P")
_COLLECTING: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class KeepingScrub(Protocol):
    """What `scrub` returns for no names: the parameters stay as they are."""

    def __call__(
        self, function: Callable[P, AsyncIterator[T] | Iterator[T]], /
    ) -> Callable[P, Scrubbed[T]]:
        """Decorate *function*."""


class BoxingScrub(Protocol):
    """What `scrub` returns for names; arguments are checked at run time."""

    # Callers give a payload without its box, and types have no word for that.
    def __call__(
        self, function: Callable[..., AsyncIterator[T] | Iterator[T]], /
    ) -> Callable[..., Scrubbed[T]]:
        """Decorate *function*."""


@overload
def scrub() -> KeepingScrub: ...
@overload
def scrub(*names: str) -> BoxingScrub: ...
def scrub(*names: str) -> Any:
    """Keep the named arguments of an async generator function out of its frames.

    They are put into `Payload` boxes at the call, which the body empties with
    ``take()`` where it hands them over. What is left in the boxes is cleared at
    the first item, at close, or with the last reference. Later items cost no
    frame of the library. The caller's own variables are the caller's: pass a temporary.

    Args:
        names: Parameters that carry payloads. ``None`` is passed on unboxed.

    Raises:
        TypeError: The function has no such parameter, or is no async generator
            function; or a name is no string.
    """
    if not all(isinstance(name, str) for name in names):
        # Else the payload of the first call would be taken for the function.
        raise TypeError('scrub takes names of parameters: write @scrub("picture")')

    def decorate(function: Callable[..., Any]) -> Callable[..., Scrubbed[Any]]:
        function = asynchronous(function)
        if not is_generator_function(function):
            what = f"{name_of(function)} is not a generator function; a"
            how = "coroutine function that returns a stream is decorated with"
            raise TypeError(f"{what} {how} @managed(scrub=...)")
        visible, bind = boxing(function, names)

        # A plain function: its frame is gone before iteration begins.
        def call(*args: Any, **kwargs: Any) -> Scrubbed[Any]:
            bound, held = bind(*args, **kwargs)
            generator = function(*bound.args, **bound.kwargs)
            if isinstance(generator, ThreadIterator):
                generator.hold(held)
            return Scrubbed(generator, held, generator.__anext__)

        return wrapped(function, call, visible)

    return decorate


@overload
def managed(
    *,
    gate: Gate,
    cost: int | Callable[..., int] = 0,
    slots: int = 1,
    sessions: None = None,
    key: None = None,
) -> GivingDecorator[Lease]: ...
@overload
def managed(
    *,
    gate: None = None,
    sessions: SessionRegistry,
    key: Callable[..., str],
) -> GivingDecorator[Session]: ...
@overload
def managed(
    *,
    gate: Gate,
    cost: int | Callable[..., int] = 0,
    slots: int = 1,
    sessions: SessionRegistry,
    key: Callable[..., str],
) -> GivingBothDecorator[Lease, Session]: ...
@overload
def managed(
    *,
    gate: Gate | None = None,
    cost: int | Callable[..., int] = 0,
    slots: int = 1,
    sessions: SessionRegistry | None = None,
    key: Callable[..., str] | None = None,
    scrub: tuple[str, ...] | str,
) -> Decorator: ...
def managed(
    _bare: None = None,
    /,
    *,
    gate: Gate | None = None,
    cost: int | Callable[..., int] = UNSTATED,
    slots: int = 1,
    sessions: SessionRegistry | None = None,
    key: Callable[..., str] | None = None,
    scrub: tuple[str, ...] | str = (),
) -> Any:
    """Admit, track and scrub a function that streams, in the right order.

    For async generator functions, and for the two-phase form that needs no care: a
    coroutine function that hands its payload over and *returns* the stream, so that its
    frame is gone before the first item. Deadlines of a `Session.stream` end the
    caller's wait, or its ``async with`` block if entered before the first item.

    The call returns a `Stream` and takes nothing yet. With the first item asked for, a
    session is opened, a lease is admitted, and then the function runs. Parameters named
    ``lease`` and ``session`` are given these; callers do not see them. The lease is
    released and the boxes are cleared when a two-phase function returns, at the first
    item of a generator, at ``lease.release()``, or when a start that goes on alone has
    settled. Until then, waiting for another stream of the same gate would be a
    deadlock, and raises `RuntimeError`. A stream that its caller leaves early, as by
    ``break``, counts as cancelled.

    Args:
        gate: Admits each stream.
        cost: Bytes to ask of the gate, or a plain function of the call's arguments.
        slots: Slots to ask of it.
        sessions: Tracks each stream as a session.
        key: Session id, as a function of the call's arguments.
        scrub: Parameters that carry payloads; see `lifecycle.scrub`.

    Raises:
        TypeError: The function neither is an async generator function nor a
            coroutine function, or lacks a parameter to scrub; there is nothing to do,
            *sessions* comes without *key*, or *cost* or *slots* without *gate*; or an
            argument is of another kind.
        ValueError: *cost* or *slots* is negative or not a whole number.
    """
    check(_bare is None, "managed needs options, as in @managed(gate=gate)", _bare)
    check_type(tuple | list | str, "scrub takes names of parameters", scrub)
    names = (scrub,) if isinstance(scrub, str) else tuple(scrub)
    how = Options(
        gate=gate, cost=cost, slots=slots, sessions=sessions, key=key, scrub=names
    )
    _check_options(how)
    return functools.partial(_manage, how)


def _check_options(how: Options) -> None:
    gate, sessions, key, cost = how.gate, how.sessions, how.key, how.cost
    check_type(Gate | None, "managed takes a Gate", gate)
    check_type(SessionRegistry | None, "managed takes a SessionRegistry", sessions)
    if (sessions is None) != (key is None):
        raise TypeError("sessions and key go together: key returns a session's id")
    check(callable(key) or key is None, "key must be a function of arguments", key)
    for name, function in (("cost", cost), ("key", key)):
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{name} is called, not awaited: make it a plain function")
    if gate is None and (cost != 0 or how.slots != 1):
        raise TypeError("cost and slots are asked of a gate; name one by gate=")
    if gate is None and sessions is None and not how.scrub:
        raise TypeError("managed has nothing to do; name gate=, sessions= or scrub=")
    check_cost(how.slots, check_amount("cost", 1 if callable(cost) else cost))


def _manage(how: Options, function: Callable[..., Any]) -> Callable[..., Stream[Any]]:
    function = asynchronous(function)
    streams = is_generator_function(function)
    if not streams and not inspect.iscoroutinefunction(function):
        what = f"{name_of(function)} is neither a generator function nor"
        remedy = "a coroutine function that returns a stream; make it `async def`"
        other = "or, if it returns a blocking iterator, decorate it with @in_thread"
        raise TypeError(f"{what} {remedy}, {other}")
    givers = {"lease": how.gate, "session": how.sessions}
    given = tuple(name for name, giver in givers.items() if giver is not None)
    visible, bind = boxing(function, how.scrub, given)
    for option, asked in (("cost", how.cost), ("key", how.key)):
        if callable(asked):
            _check_arguments(option, asked, function, visible)
    returns = f"what key returns for {name_of(function)} must be a string"
    costs = f"what cost returns for {name_of(function)}"

    def call(*args: Any, **kwargs: Any) -> Stream[Any]:
        bound, held = bind(*args, **kwargs)
        nbytes, id_ = how.cost, ""
        if callable(nbytes):
            nbytes = check_amount(costs, nbytes(*args, **kwargs))
        if how.key is not None:
            id_ = how.key(*args, **kwargs)
            check(isinstance(id_, str), returns, id_)
        return ManagedStream(Call(how, function, streams, bound, held, nbytes, id_))

    return wrapped(function, call, visible)


def _check_arguments(
    option: str, asked: Callable[..., Any], function: object, visible: inspect.Signature
) -> None:
    """Raise `TypeError` if *asked* takes the arguments of no call of *function*."""
    seen = visible.parameters.values()
    try:  # what it takes itself: a wrapper may give what it wraps more than it gets
        takes = inspect.signature(asked, follow_wrapped=False)
    except ValueError:  # some functions of C have none
        return
    if any(each.kind in _COLLECTING for each in (*seen, *takes.parameters.values())):
        return  # calls may be of any shape
    given = [each.name for each in seen if each.default is each.empty]
    needed = [p for p in takes.parameters.values() if p.default is p.empty]
    # By place or by name; those by place come first.
    splits = range(len(given) + 1)
    if len(needed) <= len(seen) and any(_binds(takes, given, n) for n in splits):
        return
    names = ", ".join(visible.parameters)
    what = f"{option} {name_of(asked)} cannot take the arguments of {name_of(function)}"
    raise TypeError(f"{what}; write {option}=lambda {names}: ...")


def _binds(takes: inspect.Signature, names: list[str], by_place: int) -> bool:
    try:
        takes.bind_partial(*names[:by_place], **dict.fromkeys(names[by_place:]))
    except TypeError:
        return False
    return True
