"""Functions that stream and never hold their payload in a frame."""

from __future__ import annotations

import functools
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
)
from contextlib import ExitStack
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import ref

from ._payload import Payload, box, forget_frames

P = ParamSpec("P")
T = TypeVar("T")
Opening = Callable[[ExitStack], Awaitable[AsyncIterator[T]]]
Bound = tuple[inspect.BoundArguments, list[Payload[Any]]]


def scrub(
    *names: str,
) -> Callable[[Callable[P, AsyncGenerator[T, None]]], Callable[P, Scrubbed[T]]]:
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
        function: Callable[P, AsyncGenerator[T, None]],
    ) -> Callable[P, Scrubbed[T]]:
        if not inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{name_of(function)} is not an async generator function; a coroutine "
                f"function that returns a stream is decorated with @managed(scrub=...)"
            )
        _signature, bind = boxing(function, names)

        # A plain function: its frame is gone before iteration begins.
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Scrubbed[T]:
            bound, boxes = bind(*args, **kwargs)
            return Scrubbed(function(*bound.args, **bound.kwargs), boxes)

        return call

    return decorate


def boxing(
    function: Callable[..., Any], names: tuple[str, ...], given: Collection[str] = ()
) -> tuple[inspect.Signature, Callable[..., Bound]]:
    """Return the signature without what is *given*, and what binds and boxes by it."""
    whole = inspect.signature(function)
    seen = [p for p in whole.parameters.values() if p.name not in given]
    visible = whole.replace(parameters=seen)
    of_kind = {p.kind: p.name for p in seen}
    rest = of_kind.get(inspect.Parameter.VAR_KEYWORD)
    collecting = (rest, of_kind.get(inspect.Parameter.VAR_POSITIONAL))
    for name in names:
        if name in collecting or not (rest or name in visible.parameters):
            raise TypeError(f"{name_of(function)} has no parameter {name!r} to scrub")

    def bind(*args: Any, **kwargs: Any) -> Bound:
        arguments = visible.bind(*args, **kwargs).arguments
        boxes: list[Payload[Any]] = []
        for name in names:
            direct = name in visible.parameters
            values = arguments if direct else arguments.get(rest or "", {})
            if values.get(name) is not None:
                values[name] = box(values[name])
                boxes.append(values[name])
        return inspect.BoundArguments(whole, arguments), boxes

    return visible, bind


def name_of(function: object) -> str:
    """As it is written, without its address."""
    name: str = getattr(function, "__qualname__", type(function).__name__)
    return name


class Scrubbed(Generic[T]):
    """An async generator whose payload is in boxes; what `scrub` returns."""

    # The interpreter fetches `__anext__` from the type as a descriptor, and the
    # descriptor of a slot returns what is stored in the instance: from the
    # second item on that is the generator's own method, without a frame between.
    __slots__ = ("__anext__", "__weakref__", "_boxes", "_inner")

    __anext__: Callable[[], Awaitable[T]]

    def __init__(
        self,
        inner: AsyncIterator[T] | None,
        boxes: list[Payload[Any]],
        opening: Opening[T] | None = None,
    ) -> None:
        self._inner = inner
        self._boxes = boxes
        # A weak reference: a bound method in the slot would be a cycle, and
        # would leave a generator that is never iterated to the collector.
        self.__anext__ = functools.partial(
            _first_item, ref(self), inner, boxes, opening
        )

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    def hand_off(self) -> None:
        """Clear what is left in the boxes. Idempotent."""
        for payload in self._boxes:
            payload.clear()

    async def aclose(self) -> None:
        """Clear the boxes and close the generator.

        Cancellation:
            Goes through to the generator.
        """
        self.hand_off()
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            await close()

    def __repr__(self) -> str:
        return f"<Scrubbed {self._inner!r}>"


async def _first_item(
    owner: ref[Scrubbed[T]],
    inner: AsyncIterator[T] | None,
    boxes: list[Payload[Any]],
    opening: Opening[T] | None,
) -> T:
    try:
        with ExitStack() as held:
            for payload in boxes:
                held.callback(payload.clear)
            if opening is not None:
                inner = await opening(held)
            assert inner is not None
            scrubbed = owner()
            if scrubbed is not None:
                scrubbed._inner = inner  # noqa: SLF001 - a part of it
                scrubbed.__anext__ = inner.__anext__
                del scrubbed
            return await inner.__anext__()
    except BaseException as error:
        forget_frames(error)
        raise
