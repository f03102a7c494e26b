"""Stream: the deterministic owner of one asynchronous iterator."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from typing import Any, Generic, Self, TypeVar

import anyio

from ._checks import Unique, expect, seconds

T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger("lifecycle")


class Stream(Unique, Generic[T_co]):
    """Owns an asynchronous iterator, so that it always ends, and ends here.

    Python leaves a loop that is broken off to the garbage collector, which ends
    the generator later, in another task, and one that never began not at all. A
    stream closes its source in the task that iterates, before ``async with`` is
    left.

    ``async with stream: async for item in stream: ...`` is the whole protocol.
    A stream that is over gives nothing; if it was stopped with an error, to enter
    it raises that. A cancellation is never replaced: what else goes wrong while a
    cancelled stream is closed is logged, by its type.

    Args:
        source: The iterator; closed by its ``close_nowait`` or ``aclose``, if any.
        on_close: Called once each, in order, when the stream ends in whatever
            way. Where one raises, the others are called all the same.
        grace: Seconds that the source may take to close.

    Raises:
        ValueError: *grace* is NaN.
        TypeError: *source* is no asynchronous iterator.

    Attributes:
        items: Items delivered so far.
        closed: Whether the stream has ended.
    """

    closed = True  # for the finaliser, should the stream not be made at all
    # A registry knows its loop, and gives what needs no look-up.
    _new_scope: Callable[..., anyio.CancelScope] = anyio.CancelScope
    _now: Callable[[], float] = staticmethod(anyio.current_time)

    def __init__(
        self,
        source: AsyncIterator[T_co],
        *,
        on_close: Iterable[Callable[[], object]] = (),
        grace: float = 5.0,
    ) -> None:
        what = "a stream needs what async generators give, an asynchronous iterator"
        expect(hasattr(type(source), "__anext__"), what, source)
        self._source: AsyncIterator[T_co] | None = source
        self._on_close = list(on_close)
        self._grace = seconds("grace", grace)
        self._stopped = self.closed = False
        self._errors: list[Exception] = []
        self._scope: anyio.CancelScope | None = None
        # Since when somebody waits for an item, by the clock of a watchdog, if any.
        self._since: float | None = None
        self._clock: Callable[[], float] | None = None
        self.items = 0

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
        if self._since is not None:
            raise RuntimeError("another task is waiting for an item of this stream")
        if self._stopped:
            await self._end_early()
            raise StopAsyncIteration
        clock = self._clock
        self._since = 0.0 if clock is None else clock()
        try:
            # Looked up each time: a source may step aside after its first item.
            item = await anext(self._source)  # type: ignore[arg-type]
        except BaseException as error:
            # The end, an error or a cancellation: the source is finished.
            self._since = None
            with _NeverInsteadOf(error):
                self._finish(error)
            raise
        self._since = None
        self.items += 1
        return item

    async def _end_early(self) -> None:
        await self.aclose()
        if self._errors:
            raise self._errors.pop()

    def stop(self, error: Exception | None = None) -> None:
        """Ask the stream to end, from any task of its loop. Idempotent.

        Under ``async with`` the block is left at once, with *error* if one is
        given. Otherwise the stream ends when the next item is asked for.
        """
        if not self._stopped:
            self._stopped = True
            self._errors += [] if error is None else [error]
            if self._scope is not None:
                self._scope.cancel()

    async def aclose(self) -> None:
        """Close the source and end the stream. Idempotent.

        While another task waits for an item, that task is told to stop and
        closes the source itself: an iterator that runs cannot be closed.

        Cancellation:
            Shielded for as long as *grace* seconds: the source gets its time.
        """
        if self._since is not None:
            self.stop()
            return
        source, self._source = self._source, None
        if source is None:
            return  # closed already, or about to be
        self._stopped = True
        try:
            # A scope with a deadline costs more than all the rest of closing.
            if (at_once := getattr(source, "close_nowait", None)) is not None:
                at_once()
            elif (close := getattr(source, "aclose", None)) is not None:
                with self._new_scope(deadline=self._now() + self._grace, shield=True):
                    await close()
        finally:
            self._finish(None)

    def _finish(self, error: BaseException | None) -> None:  # noqa: ARG002 - a hook
        """Note the end, by *error* of the source or else by whoever closed."""
        self.closed = self._stopped = True
        if self._on_close:
            with ExitStack() as calls:  # each is made, also where another raises
                while self._on_close:
                    calls.callback(self._on_close.pop())

    async def __aenter__(self) -> Self:
        if self._scope is not None:
            raise RuntimeError("a stream can be entered once")
        if self._stopped:
            await self._end_early()
        self._scope = self._new_scope().__enter__()
        return self

    async def __aexit__(self, *left_by: Any) -> bool:  # noqa: PYI036 - passed on
        scope, self._scope = self._scope, None
        assert scope is not None
        try:
            # A task that still waits for an item can only be one that the body
            # left behind; it was told to stop, and closes for itself.
            with _NeverInsteadOf(left_by[1]):
                await self.aclose()
        except BaseException as error:
            scope.__exit__(type(error), error, error.__traceback__)
            raise
        swallowed = bool(scope.__exit__(*left_by))
        if swallowed and self._errors:
            raise self._errors.pop()
        return swallowed

    def _lose(self) -> bool:
        """End in a finaliser, in whatever thread; tell whether that is a loss."""
        if owed := bool(self._on_close):
            self._finish(None)
        return owed

    def __del__(self) -> None:
        if not (self.closed or sys.is_finalizing()) and self._lose():
            what = f"a stream was dropped after {self.items} items without being closed"
            self._warn(f"{what}; use it in an async with block")

    def __repr__(self) -> str:
        state = "idle" if self.items else "new"
        if self.closed or self._since is not None:
            state = "closed" if self.closed else "running"
        return f"<{type(self).__name__} {state}, {self.items} items>"


class _NeverInsteadOf:
    """Logs errors that would replace a cancellation or a like way out."""

    def __init__(self, error: BaseException | None) -> None:
        self._cancelled = not (error is None or isinstance(error, Exception))

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: object, _traceback: object) -> bool:
        logged = self._cancelled and isinstance(error, Exception)
        if logged:
            _log.warning("closing a cancelled stream failed: %s", type(error).__name__)
        return logged
