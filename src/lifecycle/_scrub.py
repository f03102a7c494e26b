"""Generators that never hold their payload in a frame."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Generic, ParamSpec, TypeVar, final
from weakref import ref

from ._payload import Payload, box, forget_frames

P = ParamSpec("P")
T = TypeVar("T")

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Boxer:
    """Puts named arguments of a call into boxes.

    Args:
        function: The function that will be called.
        names: Its parameters that carry payloads.

    Raises:
        TypeError: The function has no such parameter.
    """

    __slots__ = ("_at", "_names")

    def __init__(self, function: Callable[..., object], names: tuple[str, ...]) -> None:
        parameters = inspect.signature(function).parameters
        collecting = {
            p.name: p.kind
            for p in parameters.values()
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        any_keyword = inspect.Parameter.VAR_KEYWORD in collecting.values()
        for name in names:
            if name in collecting or not (any_keyword or name in parameters):
                raise TypeError(
                    f"{function.__qualname__} has no parameter {name!r} to scrub"
                )
        self._names = names
        self._at = frozenset(
            i
            for i, p in enumerate(parameters.values())
            if p.name in names
            and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Arguments, list[Payload[Any]]]:
        """Return the arguments with payloads in boxes, and the boxes.

        ``None`` is no payload and stays as it is.
        """
        boxes: list[Payload[Any]] = []

        def boxed(value: object) -> object:
            if value is None:
                return None
            payload = box(value)
            boxes.append(payload)
            return payload

        new_args = tuple(
            boxed(arg) if i in self._at else arg for i, arg in enumerate(args)
        )
        new_kwargs = {
            name: boxed(arg) if name in self._names else arg
            for name, arg in kwargs.items()
        }
        return (new_args, new_kwargs), boxes


def scrub(
    *names: str,
) -> Callable[[Callable[P, AsyncGenerator[T, None]]], Callable[P, Scrubbed[T]]]:
    """Keep the named arguments of an async generator function out of its frames.

    They are put into `Payload` boxes at the call, which the body empties with
    ``take()`` where it hands them over. What is left in the boxes is cleared at
    the first item, at close, or with the last reference. Later items cost no
    frame of ours.

    The caller's own variables are the caller's: pass a temporary, or a `Payload`.

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
            what = getattr(function, "__qualname__", type(function).__name__)
            raise TypeError(
                f"{what} is not an async generator function; a coroutine function "
                f"that returns a stream is decorated with @managed(scrub=...)"
            )
        boxer = Boxer(function, names)

        # A plain function: its frame is gone before iteration begins.
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Scrubbed[T]:
            (new_args, new_kwargs), boxes = boxer(args, kwargs)
            return Scrubbed(function(*new_args, **new_kwargs), boxes)

        return call

    return decorate


@final
class Scrubbed(Generic[T]):
    """An async generator whose payload is in boxes; what `scrub` returns."""

    # The interpreter fetches `__anext__` from the type as a descriptor, and the
    # descriptor of a slot returns what is stored in the instance: from the
    # second item on that is the generator's own method, without a frame between.
    __slots__ = ("__anext__", "__weakref__", "_boxes", "_generator")

    __anext__: Callable[[], Awaitable[T]]

    def __init__(
        self, generator: AsyncGenerator[T, None], boxes: list[Payload[Any]]
    ) -> None:
        self._generator = generator
        self._boxes = boxes
        # A weak reference: a bound method in the slot would be a cycle, and
        # would leave a generator that is never iterated to the collector.
        self.__anext__ = functools.partial(_first_item, ref(self), generator, boxes)

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
        await self._generator.aclose()

    def __repr__(self) -> str:
        return f"<Scrubbed {self._generator!r}>"


async def _first_item(
    owner: ref[Scrubbed[T]],
    generator: AsyncGenerator[T, None],
    boxes: list[Payload[Any]],
) -> T:
    scrubbed = owner()
    if scrubbed is not None:
        scrubbed.__anext__ = generator.__anext__
        del scrubbed
    try:
        return await generator.__anext__()
    except BaseException as error:
        forget_frames(error)
        raise
    finally:
        for payload in boxes:
            payload.clear()
