"""Stream: the deterministic owner of one asynchronous iterator."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

import anyio

from ._errors import StreamTimeout

if TYPE_CHECKING:
    from types import TracebackType

T_co = TypeVar("T_co", covariant=True)

_NEW: Final = 0
_IDLE: Final = 1
_RUNNING: Final = 2
_CLOSED: Final = 3


class Stream(Generic[T_co]):
    """Owns an asynchronous iterator, so that it always ends, and ends here.

    Python leaves a loop that is broken off to the garbage collector, which ends
    the generator later, in another task; and a generator that never began runs
    none of its ``finally``. A stream closes its source in the task that
    iterates, before ``async with`` is left, and calls *on_close* exactly once
    also where iteration never began.

    ``async with stream: async for item in stream: ...`` is the whole protocol.

    Args:
        source: The iterator; closed by its ``aclose``, if it has one.
        on_close: Called once each, synchronously, when the stream ends in
            whatever way, in order. They should not raise; where one does, the
            others are called all the same.
        grace: Seconds that the source may take to close.

    Raises:
        ValueError: *grace* is NaN.
        TypeError: *source* is no asynchronous iterator.

    Attributes:
        items: Items delivered so far.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_error",
        "_grace",
        "_next",
        "_on_close",
        "_scope",
        "_since",
        "_source",
        "_state",
        "_stopped",
        "items",
    )

    def __init__(
        self,
        source: AsyncIterator[T_co],
        *,
        on_close: Iterable[Callable[[], object]] = (),
        grace: float = 5.0,
    ) -> None:
        self._state = _CLOSED  # for the finaliser, should this end in an error
        if math.isnan(grace):
            raise ValueError("grace must be a number of seconds, not NaN")
        self._source: AsyncIterator[T_co] | None = source
        try:
            self._next = source.__anext__
        except AttributeError:
            raise TypeError(
                f"a stream needs an asynchronous iterator, not "
                f"{type(source).__name__}; give what an async generator function "
                f"returns"
            ) from None
        self._on_close = tuple(on_close)
        self._grace = grace
        self._state = _NEW
        self._stopped = False
        self._error: Exception | None = None
        self._scope: anyio.CancelScope | None = None
        # Both belong to a watchdog: when the wait for the next item began.
        self._clock: Callable[[], float] | None = None
        self._since: float | None = None
        self.items = 0

    @property
    def closed(self) -> bool:
        """Whether the stream has ended."""
        return self._state == _CLOSED

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        """Return the next item.

        Raises:
            StopAsyncIteration: The source has ended, or the stream was stopped.
            StreamTimeout: A deadline was broken.
            RuntimeError: Another task is waiting for an item already.

        Cancellation:
            Goes through to the source, and ends the stream.
        """
        if self._state > _IDLE or self._stopped:
            await self._refuse_item()
        self._state = _RUNNING
        if self._clock is not None:
            self._since = self._clock()
        try:
            item = await self._next()
        except BaseException as error:
            # The end, an error or a cancellation: the source is finished.
            self._finish(error)
            raise
        self._state = _IDLE
        self.items += 1
        return item

    async def _refuse_item(self) -> None:
        if self._state == _RUNNING:
            raise RuntimeError("another task is waiting for an item of this stream")
        error, self._error = self._error, None
        await self.aclose()
        if error is not None:
            raise error
        raise StopAsyncIteration

    def stop(self, error: Exception | None = None) -> None:
        """Ask the stream to end, from any task of its loop. Idempotent.

        Under ``async with`` the block is left at once, with *error* if one is
        given. Otherwise the stream ends when the next item is asked for.
        """
        if self._state == _CLOSED or self._stopped:
            return
        self._stopped = True
        self._error = error
        if self._scope is not None:
            self._scope.cancel()

    async def aclose(self) -> None:
        """Close the source and end the stream. Idempotent.

        While another task waits for an item, that task is told to stop and
        closes the source itself: an iterator that runs cannot be closed.

        Cancellation:
            Shielded for as long as *grace* seconds: the source gets its time.
        """
        if self._state == _RUNNING:
            self.stop()
            return
        source, self._source = self._source, None
        if source is None:
            return  # closed already, or about to be
        self._stopped = True
        del self._next  # it refers to the source
        try:
            close = getattr(source, "aclose", None)
            if close is not None:
                deadline = anyio.current_time() + self._grace
                with anyio.CancelScope(shield=True, deadline=deadline):
                    await close()
        finally:
            self._finish(None)

    def _finish(self, error: BaseException | None) -> None:  # noqa: ARG002 - a hook
        """Note the end, by *error* of the source or else by whoever closed."""
        self._state = _CLOSED
        on_close, self._on_close = self._on_close, ()
        with ExitStack() as calls:  # each is made, also where another raises
            for callback in reversed(on_close):
                calls.callback(callback)

    async def __aenter__(self) -> Self:
        if self._scope is not None:
            raise RuntimeError("a stream can be entered once")
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        if self._stopped:
            self._scope.cancel()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            # A task that still waits for an item can only be one that the body
            # left behind; it was told to stop, and closes for itself.
            await self.aclose()
        except BaseException as error:
            self._leave(error)
            raise
        swallowed = self._leave(exc)
        if swallowed:
            self._raise_error()
        return swallowed

    def _leave(self, exc: BaseException | None) -> bool:
        scope, self._scope = self._scope, None
        assert scope is not None
        if exc is None:
            scope.__exit__(None, None, None)
            return False
        return bool(scope.__exit__(type(exc), exc, exc.__traceback__))

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    # What a watchdog calls.

    def watch(self, clock: Callable[[], float]) -> None:
        """Called by a watchdog: note by *clock* when each wait for an item begins."""
        self._clock = clock

    def waiting_since(self) -> float | None:
        """Called by a watchdog: when the wait that goes on began, else ``None``."""
        return self._since if self._state == _RUNNING else None

    def expire(self, deadline: str, limit: float) -> None:
        """Called by a watchdog: stop, as *deadline* of *limit* seconds was broken."""
        self.stop(
            StreamTimeout(
                f"the stream broke its {deadline} deadline of {limit} s after "
                f"{self.items} items",
                deadline=deadline,
            )
        )

    def _lose(self) -> None:
        """End in a finaliser, in whatever thread that is."""
        self._finish(None)

    def _owes(self) -> bool:
        """Whether dropping the stream unclosed loses more than its source."""
        return bool(self._on_close)

    def __del__(self) -> None:
        if self._state == _CLOSED or sys.is_finalizing() or not self._owes():
            return
        self._lose()
        warnings.warn(
            f"a stream was dropped after {self.items} items without being closed; "
            f"use it in an async with block",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __repr__(self) -> str:
        state = ("new", "idle", "running", "closed")[self._state]
        return f"<{type(self).__name__} {state}, {self.items} items>"
