"""The types of decorated functions: their parameters, but for what is given to them.

A lease and a session are given by name at run time. Types can take parameters away by
position only: the first ones, and those of a method behind ``self``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import (
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    final,
    overload,
)

from ._stream import Stream

A = TypeVar("A")
G = TypeVar("G")
H = TypeVar("H")
P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Source: TypeAlias = AsyncIterator[T] | Awaitable[AsyncIterator[T]] | Iterator[T]


class Decorator(Protocol):
    """Turns a function that streams into one that returns a `Stream`.

    Its arguments are checked at run time: types have no word for a parameter that is
    taken away, or put into a box, by its name.
    """

    def __call__(
        self, function: Callable[..., Source[T]], /
    ) -> Callable[..., Stream[T]]:
        """Decorate *function*."""


class StreamFunction(Protocol[P, T_co]):
    """A decorated function, or a method."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Stream[T_co]:
        """Return a stream, and take nothing yet."""

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(
        self: StreamFunction[Concatenate[A, Q], T],
        instance: A,
        owner: type | None = None,
        /,
    ) -> StreamFunction[Q, T]: ...


@final
class _Any:
    """What no parameter is annotated with: one that takes it may take anything.

    Type checkers find that a parameter of type ``Any`` or ``object`` takes a lease. Of
    a function that begins with such parameters the arguments are not checked.
    """


class GivingDecorator(Protocol[G]):
    """A `Decorator` that gives a value to a function whose first parameter it is.

    Or the second, as of a method.
    """

    @overload
    def __call__(
        self, function: Callable[Concatenate[_Any, P], Source[T]], /
    ) -> StreamFunction[..., T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[G, P], Source[T]], /
    ) -> StreamFunction[P, T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, _Any, P], Source[T]], /
    ) -> StreamFunction[..., T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, G, P], Source[T]], /
    ) -> StreamFunction[Concatenate[A, P], T]: ...
    @overload
    def __call__(self, function: Callable[P, Source[T]], /) -> StreamFunction[P, T]: ...


class GivingBothDecorator(Protocol[G, H]):
    """A `GivingDecorator` of two values, in this order or the other."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[_Any, P], Source[T]], /
    ) -> StreamFunction[..., T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[G, H, P], Source[T]], /
    ) -> StreamFunction[P, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[H, G, P], Source[T]], /
    ) -> StreamFunction[P, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[G, P], Source[T]], /
    ) -> StreamFunction[P, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[H, P], Source[T]], /
    ) -> StreamFunction[P, T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, _Any, P], Source[T]], /
    ) -> StreamFunction[..., T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, G, H, P], Source[T]], /
    ) -> StreamFunction[Concatenate[A, P], T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, H, G, P], Source[T]], /
    ) -> StreamFunction[Concatenate[A, P], T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, G, P], Source[T]], /
    ) -> StreamFunction[Concatenate[A, P], T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[A, H, P], Source[T]], /
    ) -> StreamFunction[Concatenate[A, P], T]: ...
    @overload
    def __call__(self, function: Callable[P, Source[T]], /) -> StreamFunction[P, T]: ...
