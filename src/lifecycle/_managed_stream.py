"""Streams of decorated functions: payloads in boxes, admission, session and end."""

# ruff: noqa: SLF001 - what ends a managed stream and its session is not public
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from ._error_payload import clear_traceback_frames
from ._gate import Gate
from ._lease import Lease
from ._payload import Payload
from ._session import Session
from ._sessions import SessionRegistry
from ._stream import Stream
from ._thread_iterator import Held, ThreadIterator, give_up
from ._validation import name_of

T = TypeVar("T")
_First = Callable[[], Awaitable[T]]
# What a decorated function may be given, and by which option.
_GIVERS: Final = {"lease": "gate", "session": "sessions"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """Options of a decorated function; see `lifecycle.managed`."""

    gate: Gate | None
    cost: int | Callable[..., int]
    slots: int
    sessions: SessionRegistry | None
    key: Callable[..., str] | None
    scrub: tuple[str, ...]


def wrapped(function: Any, call: Any, visible: inspect.Signature) -> Callable[..., Any]:
    """Return *call* with the name, documentation and *visible* signature."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        outside = sys.exc_info()[1]
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            del args, kwargs  # with these, an error that is kept keeps the payload
            clear_traceback_frames(error, until=outside)
            raise
        finally:
            del outside

    guarded.__signature__ = visible  # type: ignore[attr-defined]
    return guarded


def boxing(
    function: Callable[..., Any], names: tuple[str, ...], given: tuple[str, ...] = ()
) -> tuple[inspect.Signature, Callable[..., tuple[inspect.BoundArguments, Held]]]:
    """Return what callers see, and what binds a call to it, with the boxes' clears.

    Args:
        function: The decorated function.
        names: Parameters that are put into `Payload` boxes.
        given: Parameters that callers do not see.
    """
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
            raise TypeError(f"{name_of(function)} has no parameter {name!r} to scrub")

    def bind(*args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, Held]:
        try:
            bound = visible.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name_of(function)}: {_with_remedy(error)}") from None
        if fill:
            bound.apply_defaults()
        arguments = bound.arguments
        held: Held = []
        for values in (arguments, arguments.get(rest, {})):
            for name in names:
                value = values.get(name)
                if value is not None:
                    box = value if isinstance(value, Payload) else Payload(value)
                    values[name] = box
                    held.append(box.clear)
        return inspect.BoundArguments(whole, arguments), held

    return visible, bind


def _with_remedy(error: TypeError) -> str:
    for name, option in _GIVERS.items():
        if str(error) == f"missing a required argument: {name!r}":
            return f"{error}; give it, or let managed give it with {option}="
    return str(error)


class Scrubbed(Generic[T]):
    """An async generator whose payload is in boxes; what `scrub` returns."""

    # The interpreter fetches `__anext__` from the type as a descriptor, and the
    # descriptor of a slot returns what is stored in the instance: from the
    # second item on that is the generator's own method, without a frame between.
    __slots__ = ("__anext__", "__weakref__", "_held", "_inner")

    __anext__: _First[T]

    def __init__(
        self, inner: AsyncGenerator[T, None] | None, held: Held, first: _First[T]
    ) -> None:
        self._inner = inner
        self._held = held
        # A weak reference: a bound method in the slot would be a cycle, and would
        # leave a generator that is never iterated to the collector.
        me = None if inner is None else ref(self)
        self.__anext__ = functools.partial(_first_item, me, held, first)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def asend(self, value: Any) -> T:
        """Resume the generator with *value* as the result of its ``yield``.

        Cancellation:
            Goes through to the generator.
        """
        return await self._resume("asend", value)

    async def athrow(self, *error: Any) -> T:
        """Raise *error* where the generator is suspended.

        Cancellation:
            Goes through to the generator.
        """
        return await self._resume("athrow", *error)

    async def _resume(self, method: str, *args: Any) -> T:
        resume = functools.partial(getattr(self._inner, method), *args)
        self.__anext__ = getattr(self._inner, "__anext__")  # noqa: B009 - a slot
        return await _first_item(None, self._held, resume)

    async def aclose(self) -> None:
        """Clear the boxes and close the generator.

        Cancellation:
            Goes through to the generator.
        """
        give_up(self._held)
        if self._inner is not None:
            await self._inner.aclose()

    def __repr__(self) -> str:
        return f"<Scrubbed {self._inner!r}>"


async def _first_item(
    owner: ref[Scrubbed[T]] | None, held: Held, first: _First[T]
) -> T:
    scrubbed = None if owner is None else owner()
    if scrubbed is not None:
        scrubbed.__anext__ = first
    del scrubbed
    outside = sys.exc_info()[1]  # what the caller is handling is the caller's
    try:
        return await first()
    except BaseException as error:
        clear_traceback_frames(error, until=outside)
        raise
    finally:
        del outside
        give_up(held)


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One call of a decorated function, whose first item has not been asked for."""

    how: Options
    function: Callable[..., Any]
    streams: bool  # whether it is an async generator function
    bound: inspect.BoundArguments
    held: Held
    nbytes: int
    id: str


class ManagedStream(Stream[T]):
    """A stream that begins with admission and ends its session."""

    _session: Session | None = None

    def __init__(self, call: Call) -> None:
        # A weak reference, or the stream would refer to itself.
        begin: Any = ManagedStream.begin
        # The call is given up with the first item: its function may close over payload.
        me, calls = ref(self), [call]
        super().__init__(Scrubbed(None, call.held, lambda: begin(me(), calls.pop())))

    async def begin(self, call: Call) -> Any:
        """Open a session, admit a lease, run the function and return its first item."""
        how, bound, session, lease = call.how, call.bound, None, None
        if how.sessions is not None:
            session = self._session = how.sessions.open(call.id)
            session._streams, session._managed = (ref(self),), True
        if how.gate is not None:
            admitted = await how.gate.admit(bytes=call.nbytes, slots=how.slots)
            lease = admitted.__enter__()
            call.held.append(functools.partial(lease.__exit__, None, None, None))
        if session is not None:
            session.lease = lease
            session._check_open()
        for name, value in (("lease", lease), ("session", session)):
            if value is not None:
                bound.arguments[name] = value
        source = call.function(*bound.args, **bound.kwargs)
        bound.arguments.clear()  # what the function lets go of is gone
        if isinstance(source, ThreadIterator):
            _hold_in_thread(source, call.held, lease)
        if not call.streams:
            source = await source
            give_up(call.held)
        self._source = source = _items(source, call.function)
        if isinstance(source, Stream):  # its deadlines end the caller's block
            source._join_block(self._block, self._errors)
        return await anext(source)

    def _finish(self, error: BaseException | None) -> None:
        super()._finish(error)
        if self._session is not None:
            # A deadline of the source comes as a cancellation of the block.
            end = (*self._errors, error or GeneratorExit())[0]
            self._session._close_after(end)

    def _lose(self) -> bool:
        if self._session is not None:
            self._session._lose()
        return self._session is not None


def _hold_in_thread(
    source: ThreadIterator[Any], held: Held, lease: Lease | None
) -> None:
    """Let the thread of *source* give up what is *held*: it cannot be interrupted."""
    leave = [] if lease is None else [held.pop()]  # the block is this task's
    if lease is not None:
        lease.owned_by_start = True
        held.append(lease.release)
    source.hold(held)
    held += leave


def _items(source: Any, function: object) -> AsyncIterator[Any]:
    if not hasattr(type(source), "__aiter__"):
        what = f"{name_of(function)} returned {type(source).__name__}"
        raise TypeError(f"{what}; return the stream, or make it yield")
    return aiter(source)
