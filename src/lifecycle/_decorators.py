"""The promises of the library as decorators on functions that stream."""

# ruff: noqa: SLF001 - what is made here has parts that know each other
from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import ref

from ._checks import cost as whole_cost, expect, whole
from ._outcome import outcome_of
from ._payload import Payload, forget_frames
from ._stream import Stream

if TYPE_CHECKING:
    from ._gate import Gate
    from ._session import Session
    from ._sessions import SessionRegistry

T = TypeVar("T")
_First = Callable[[], Awaitable[T]]
# What a stream gives up with its first item, the last one first.
_Held = list[Callable[[], object]]


class Decorator(Protocol):
    """Turns a function that streams into one that returns a `Stream`."""

    # Callers give no lease and no session, and a payload without its box; types
    # have no word for a parameter that is taken away by its name.
    def __call__(
        self, function: Callable[..., AsyncIterator[T] | Awaitable[AsyncIterator[T]]], /
    ) -> Callable[..., Stream[T]]: ...


def scrub(
    *names: str,
) -> Callable[[Callable[..., AsyncIterator[T]]], Callable[..., Scrubbed[T]]]:
    """Keep the named arguments of an async generator function out of its frames.

    They are put into `Payload` boxes at the call, which the body empties with
    ``take()`` where it hands them over. What is left in the boxes is cleared at
    the first item, at close, or with the last reference. Later items cost no
    frame of ours. The caller's own variables are the caller's: pass a temporary.

    Args:
        names: Parameters that carry payloads. ``None`` is passed on unboxed.

    Raises:
        TypeError: The function has no such parameter, or is no async generator
            function; or a name is no string.
    """
    if not all(isinstance(name, str) for name in names):
        # Else the payload of the first call would be taken for the function.
        raise TypeError('scrub takes names of parameters: write @scrub("picture")')

    def decorate(
        function: Callable[..., AsyncIterator[T]],
    ) -> Callable[..., Scrubbed[T]]:
        if not inspect.isasyncgenfunction(function):
            what = f"{_name(function)} is not an async generator function; a coroutine"
            how = "function that returns a stream is decorated with @managed(scrub=...)"
            raise TypeError(f"{what} {how}")
        visible, bind = _boxing(function, names)

        # A plain function: its frame is gone before iteration begins.
        def call(*args: Any, **kwargs: Any) -> Scrubbed[T]:
            bound, held = bind(*args, **kwargs)
            generator = function(*bound.args, **bound.kwargs)
            return Scrubbed(generator, held, generator.__anext__)

        return _wrapped(function, call, visible)

    return decorate


def managed(
    _bare: None = None,
    /,
    *,
    gate: Gate | None = None,
    cost: int | Callable[..., int] = 0,
    slots: int = 1,
    sessions: SessionRegistry | None = None,
    key: Callable[..., str] | None = None,
    scrub: tuple[str, ...] | str = (),
) -> Decorator:
    """Admit, track and scrub a function that streams, in the right order.

    For async generator functions, and for the two-phase form that needs no care: a
    coroutine function that hands its payload over and *returns* the stream, so that its
    frame is gone before the first item. Where that is a `Session.stream`, its deadlines
    end the caller's ``async with`` block, if that is entered before the first item.

    The call returns a `Stream` and takes nothing yet. With the first item asked for, a
    session is opened, a lease is admitted, and then the function runs. Parameters named
    ``lease`` and ``session`` are given these; callers do not see them. The lease is
    released and the boxes are cleared when a two-phase function returns, at the first
    item of a generator, at ``lease.release()``, or when a start that goes on alone has
    settled. Until then, to wait for another stream of the same gate is refused: it
    would wait for itself. Left before its end, as by ``break``, it counts as cancelled.

    Args:
        gate: Admits each stream.
        cost: Bytes to ask of the gate, or a plain function of the call's arguments.
        slots: Slots to ask of it.
        sessions: Tracks each stream as a session.
        key: Session id, as a function of the call's arguments.
        scrub: Parameters that carry payloads; see `lifecycle.scrub`.

    Raises:
        TypeError: The function neither is an async generator function nor a
            coroutine function, or lacks a parameter to scrub; *sessions* comes without
            *key*, or *cost* without *gate*; or an argument is of another kind.
        ValueError: *cost* or *slots* is negative or not a whole number.
    """
    expect(_bare is None, "managed needs parentheses, as in @managed()", _bare)
    _confirm(gate, cost, slots, sessions, key)
    names = (scrub,) if isinstance(scrub, str) else tuple(scrub)
    givers = {"lease": gate, "session": sessions}
    given = tuple(name for name, giver in givers.items() if giver is not None)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        streams = inspect.isasyncgenfunction(function)
        if not streams and not inspect.iscoroutinefunction(function):
            what = f"{_name(function)} is neither an async generator function nor"
            how = "a coroutine function that returns a stream; make it `async def`"
            raise TypeError(f"{what} {how}")
        visible, bind = _boxing(function, names, given)

        def call(*args: Any, **kwargs: Any) -> Stream[Any]:
            bound, held = bind(*args, **kwargs)
            nbytes = cost(*args, **kwargs) if callable(cost) else cost
            id_ = "" if key is None else key(*args, **kwargs)

            async def first_item(stream: _ManagedStream[Any]) -> Any:
                session = lease = None
                if sessions is not None:
                    session = stream._session = sessions.open(id_)
                    session._led = ref(stream)
                if gate is not None:
                    admitted = await gate.admit(bytes=nbytes, slots=slots)
                    lease = admitted.__enter__()
                    held.append(functools.partial(lease.__exit__, None, None, None))
                if session is not None:
                    session.lease = lease
                    session._confirm()
                gifts = {"lease": lease, "session": session}
                bound.arguments.update((name, gifts[name]) for name in given)
                source = function(*bound.args, **bound.kwargs)
                bound.arguments.clear()  # what the function lets go of is gone
                if not streams:
                    source = await source
                    _give_up(held)
                stream._source = source = _items(source, function)
                if isinstance(source, Stream):  # its deadlines end the caller's block
                    source._scope, source._errors = stream._scope, stream._errors
                return await anext(source)

            return _ManagedStream(first_item, held)

        return _wrapped(function, call, visible)

    return decorate


def _wrapped(function: Any, call: Any, seen: inspect.Signature) -> Callable[..., Any]:
    @functools.wraps(function)
    def whole(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            del args, kwargs  # with these, an error that is kept keeps the payload
            forget_frames(error)
            raise

    whole.__signature__ = seen  # type: ignore[attr-defined]
    return whole


def _confirm(gate: Any, cost: Any, slots: Any, sessions: Any, key: Any) -> None:
    is_gate, tracks = hasattr(gate, "admit"), hasattr(sessions, "open")
    expect(is_gate or gate is None, "managed takes a Gate", gate)
    expect(tracks or sessions is None, "managed takes a SessionRegistry", sessions)
    if (sessions is None) != (key is None):
        raise TypeError("sessions and key go together")
    expect(callable(key) or key is None, "key must be a function of arguments", key)
    if inspect.iscoroutinefunction(cost) or inspect.isasyncgenfunction(cost):
        raise TypeError("cost is a plain function; to decorate, write @gate.admits()")
    if gate is None and (cost != 0 or slots != 1):
        raise TypeError("cost and slots are asked of a gate; name one by gate=")
    whole_cost(slots, whole("cost", 1 if callable(cost) else cost))


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _items(source: Any, function: object) -> AsyncIterator[Any]:
    if not hasattr(type(source), "__aiter__"):
        what = f"{_name(function)} returned {type(source).__name__}"
        raise TypeError(f"{what}; return the stream, or make it yield")
    return aiter(source)


def _boxing(
    function: Callable[..., Any], names: tuple[str, ...], given: tuple[str, ...] = ()
) -> tuple[inspect.Signature, Callable[..., tuple[inspect.BoundArguments, _Held]]]:
    # What callers see, and what binds a call to it, with what clears the boxes.
    whole = inspect.signature(function)
    seen = [p for p in whole.parameters.values() if p.name not in given]
    visible = whole.replace(parameters=seen)
    of_kind = {p.kind: p.name for p in seen}
    rest = of_kind.get(inspect.Parameter.VAR_KEYWORD, "")
    # What a caller leaves out travels in a box, too; most leave out `None`.
    defaults = [p.default for p in seen if p.name in names]
    fill = any(d is not None and d is not inspect.Parameter.empty for d in defaults)
    collecting = (rest, of_kind.get(inspect.Parameter.VAR_POSITIONAL))
    for name in names:
        if name in collecting or not (rest or name in visible.parameters):
            raise TypeError(f"{_name(function)} has no parameter {name!r} to scrub")

    def bind(*args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, _Held]:
        bound = visible.bind(*args, **kwargs)
        if fill:
            bound.apply_defaults()
        arguments = bound.arguments
        held: _Held = [arguments.clear]
        for values in (arguments, arguments.get(rest, {})):
            for name in names:
                value = values.get(name)
                if value is not None:
                    box = value if isinstance(value, Payload) else Payload(value)
                    values[name] = box
                    held.append(box.clear)
        return inspect.BoundArguments(whole, arguments), held

    return visible, bind


class Scrubbed(Generic[T]):
    """An async generator whose payload is in boxes; what `scrub` returns."""

    # The interpreter fetches `__anext__` from the type as a descriptor, and the
    # descriptor of a slot returns what is stored in the instance: from the
    # second item on that is the generator's own method, without a frame between.
    __slots__ = ("__anext__", "__weakref__", "_held", "_inner")

    __anext__: _First[T]

    def __init__(
        self, inner: AsyncGenerator[T, None] | None, held: _Held, first: _First[T]
    ) -> None:
        self._inner = inner
        self._held = held
        # A weak reference: a bound method in the slot would be a cycle, and would
        # leave a generator that is never iterated to the collector.
        self.__anext__ = functools.partial(_first_item, ref(self), held, first)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def aclose(self) -> None:
        """Clear the boxes and close the generator.

        Cancellation:
            Goes through to the generator.
        """
        _give_up(self._held)
        if self._inner is not None:
            await self._inner.aclose()

    def __repr__(self) -> str:
        return f"<Scrubbed {self._inner!r}>"


async def _first_item(owner: ref[Scrubbed[T]], held: _Held, first: _First[T]) -> T:
    scrubbed = owner()
    if scrubbed is not None and scrubbed._inner is not None:
        scrubbed.__anext__ = first
    del scrubbed
    try:
        return await first()
    except BaseException as error:
        forget_frames(error)
        raise
    finally:
        _give_up(held)


def _give_up(held: _Held) -> None:
    if held:
        try:
            held.pop()()
        finally:  # also where a callback of the user raises
            _give_up(held)


class _ManagedStream(Stream[T]):
    """A stream that ends its session."""

    _session: Session | None = None

    def __init__(self, first_item: Callable[..., Any], held: _Held) -> None:
        me = ref(self)
        super().__init__(Scrubbed(None, held, lambda: first_item(me())))

    def _finish(self, error: BaseException | None) -> None:
        super()._finish(error)
        if self._session is not None:
            # A deadline of the source comes as a cancellation of the block.
            end = (*self._errors, error or GeneratorExit())[0]
            self._session.close(outcome_of(end, self._session.cancelled_as))

    def _lose(self) -> bool:
        if self._session is not None:
            self._session._lose()
        return self._session is not None
