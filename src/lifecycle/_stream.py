"""Stream: the deterministic owner of one asynchronous iterator, and its deadlines."""

from __future__ import annotations

import heapq
import logging
import math
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, Generic, NoReturn, Self, TypeVar
from weakref import ref

import anyio

from ._closing import interrupt, leave_source, run_to_end, sources
from ._eventloop import (
    NativeCancelled,
    current_loop,
    get_running_loop,
    in_async_generator,
    running_task,
)
from ._exceptions import StreamTimeout
from ._validation import NoCopy, check, check_callable, check_limit

# Bound once: looked up for each item, they take a fifth of its time.
_get_sources, _set_sources = sources.get, sources.set
T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger("lifecycle")


class Stream(NoCopy, Generic[T_co]):
    """Owns an asynchronous iterator, so that its cleanup always runs, and in this task.

    Without it, cleanup of a generator whose loop was left early runs only when the
    garbage collector finds it, in another task, if ever. A stream closes its source
    in the task that iterates, before ``async with`` is left.

    ``async with stream: async for item in stream: ...`` is the whole protocol.
    A stream that has ended yields nothing, and warns where it is iterated again; one
    that is dropped halfway warns, too. Entering one that was stopped with an error
    raises that error. A cancellation is never replaced: other errors while a cancelled
    stream is closed are logged, by their type.

    In an async generator, such as the body of a response, the block may be left by
    another task than entered it, and is not cancelled, as that of a `Session` is not.

    Args:
        source: The iterator; closed by its ``close_nowait`` or ``aclose``, if any.
        on_close: Called once each, in order, when the stream ends, also by an error.
            Where one raises, the others are called all the same.
        grace: Seconds that the source may take to close.

    Raises:
        ValueError: *grace* is negative or NaN.
        TypeError: *source* is no asynchronous iterator.

    Attributes:
        items: Items delivered so far.
        closed: Whether the stream has ended.
    """

    # For the finaliser and `repr`, should the stream not be made at all.
    closed, items = True, 0
    _reader: object = None
    # A registry knows its loop, and provides what needs no look-up.
    _new_scope: Callable[..., anyio.CancelScope] = anyio.CancelScope
    _now: Callable[[], float] = staticmethod(anyio.current_time)

    def __init__(
        self,
        source: AsyncIterator[T_co],
        *,
        on_close: Iterable[Callable[[], object]] = (),
        grace: float = 5.0,
    ) -> None:
        what = "source must be an asynchronous iterator"
        check(hasattr(type(source), "__anext__"), what, source)
        self._source: AsyncIterator[T_co] | None = source
        self._on_close = list(on_close)
        for each in self._on_close:
            check_callable(on_close=each)
        self._grace = check_limit("grace", grace)
        self._stopped = self.closed = False
        self._errors: list[Exception] = []
        self._block: anyio.CancelScope | None = None
        # What `stop` cancels: the block, or on trio a scope of one wait.
        self._scope: anyio.CancelScope | None = None
        self._loop: Any = None  # where it is asyncio's
        self._reader: Any = None  # while a task waits: its scope, or else itself
        self._requests = 0  # to cancel that task, from before it waited
        self._interrupted: Any = None  # the task that `stop` cancelled
        self._since = 0.0  # when that began, by the clock of a watchdog, if any
        self._clock: Callable[[], float] | None = None
        self.items = 0
        # Tells cancellations by the source itself from others: see `sources`. What
        # closes at once is never cancelled meanwhile.
        self._mark = (object(),)
        self._marks_items = not hasattr(source, "close_nowait")

    def __aiter__(self) -> Self:
        if self.closed and self.items:
            what = f"this stream has ended after {self.items} items, and yields nothing"
            warnings.warn(f"{what} more; make another", RuntimeWarning, stacklevel=2)
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
        busy = self._reader is not None or self._stopped
        if busy or (reader := self._scope or self._task()) is None:
            return await (self._end_early() if busy else self._next_in_scope())
        self._reader = reader
        if (clock := self._clock) is not None:
            self._since = clock()
        if marks := self._marks_items:
            around = _get_sources()
            inside = around + self._mark
            _set_sources(inside)
        try:
            # Looked up each time: a source may step aside after its first item.
            item = await anext(self._source)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: ASYNC103 - of `stop`, not of others
            # The end, an error or a cancellation: the source is finished.
            if not await self._ended(error):  # noqa: ASYNC102 - to be cancelled
                raise
        else:
            if marks and _get_sources() is inside:
                _set_sources(around)
            elif marks:
                leave_source(self._mark)
            self._reader = None
            if self._interrupted is not None:
                self._take_back()
            self.items += 1
            return item
        return await self._end_early()

    async def _ended(self, error: BaseException) -> bool:
        """End by *error* of the source; return whether `stop` has another to raise."""
        if self._marks_items:
            leave_source(self._mark)
        self._reader = None
        interrupted, alone = self._interrupted is not None, self._take_back()
        with _SuppressDuringCancellation(error):
            self._finish(error)
        if isinstance(error, StopAsyncIteration):
            return bool(self._errors)  # or what was cut would seem whole
        if not (interrupted and isinstance(error, NativeCancelled)):
            return False
        if not alone and anyio.current_effective_deadline() == -math.inf:
            # Their one error says that it is ours: a scope of anyio cancels again.
            await anyio.sleep_forever()
        return alone

    def _task(self) -> Any:
        """Return the task of asyncio that waits, `None` on trio, `True` if unknown."""
        if (loop := self._loop) is None:
            loop = self._loop = get_running_loop()
        if loop is None or (task := running_task(loop)) is None:
            return None if loop is None and current_loop() is not None else True
        if requests := task.cancelling():
            # One that is still to come is not from before.
            requests -= task._must_cancel  # type: ignore[attr-defined]  # noqa: SLF001
        self._requests = requests
        return task

    async def _next_in_scope(self) -> T_co:
        # Trio has no other way to cancel a task; on asyncio this would be slow.
        try:
            with self._new_scope() as self._scope:
                return await self.__anext__()
        finally:
            self._scope = None
        return await self._end_early()

    async def _end_early(self) -> NoReturn:
        if self._reader is not None:
            raise RuntimeError("another task is waiting for an item of this stream")
        await self.aclose()
        raise self._errors.pop() if self._errors else StopAsyncIteration

    def stop(self, error: Exception | None = None) -> None:
        """Ask the stream to end, from any task of its loop. Idempotent.

        Under ``async with`` the block is left at once, with *error* if one is given.
        Without, a wait for an item ends at once, with *error*. Otherwise the stream
        ends when the next item is asked for.

        On asyncio such a wait ends by ``Task.cancel()``, which goes through shields
        of the source. It waits while others cancel the task, or that closes a source.
        """
        if not self._stopped:
            self._stopped = True
            self._errors += [] if error is None else [error]
            self._interrupt()

    def _interrupt(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
        else:
            self._interrupted = interrupt(self._reader, self._requests, self._interrupt)

    def _take_back(self) -> bool:
        """Uncancel what `stop` cancelled; return whether no other task has."""
        task, self._interrupted = self._interrupted, None
        return task is not None and task.uncancel() <= self._requests

    async def aclose(self) -> None:
        """Close the source and end the stream. Idempotent.

        While another task waits for an item, that task is stopped and closes the
        source itself: an iterator that runs cannot be closed.

        Cancellation:
            Shielded for *grace* seconds, also from ``Task.cancel()`` and
            ``asyncio.timeout``: the source gets its time. Raised once it has closed.
        """
        if self._reader is not None:
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
                    await run_to_end(close(), self._mark)
        finally:
            self._finish(None)

    def _join_block(
        self, scope: anyio.CancelScope | None, errors: list[Exception]
    ) -> None:
        """Let deadlines of this stream end the block of the one around it."""
        self._block = self._scope = scope
        self._errors = errors

    def _finish(self, error: BaseException | None) -> None:  # noqa: ARG002 - a hook
        """Note the end: by *error* of the source, or because the stream was closed."""
        self.closed = self._stopped = True
        if self._on_close:
            with ExitStack() as calls:  # each is made, also where another raises
                while self._on_close:
                    calls.callback(self._on_close.pop())

    async def __aenter__(self) -> Self:
        if self._block is not None:
            raise RuntimeError("a stream can be entered once; make another")
        if self._stopped:
            with suppress(StopAsyncIteration):
                await self._end_early()
        if not in_async_generator():  # no scope may span its items
            self._block = self._scope = self._new_scope().__enter__()
        return self

    async def __aexit__(self, *left_by: Any) -> bool:  # noqa: PYI036 - passed on
        scope, self._block, self._scope = self._block, None, None
        try:
            # A task that still waits for an item can only be one that the body
            # left behind; it was stopped, and closes the source itself.
            with _SuppressDuringCancellation(left_by[1]):
                await self.aclose()
        except BaseException as error:
            if scope is not None:
                scope.__exit__(type(error), error, error.__traceback__)
            raise
        swallowed = scope is not None and bool(scope.__exit__(*left_by))
        if swallowed and self._errors:
            raise self._errors.pop()
        return swallowed

    def _lose(self) -> bool:
        """End in a finaliser, in any thread; return whether cleanup was still due."""
        if owed := bool(self._on_close):
            self._finish(None)
        return owed

    def __del__(self) -> None:
        if self.closed or sys.is_finalizing():
            return
        if self._lose() or self.items:  # what has begun has something to clean up
            what = f"a stream was dropped after {self.items} items without being closed"
            self._warn(f"{what}; use it in an async with block")

    def __repr__(self) -> str:
        state = "idle" if self.items else "new"
        if self.closed or self._reader is not None:
            state = "closed" if self.closed else "running"
        return f"<{type(self).__name__} {state}, {self.items} items>"


class _SuppressDuringCancellation:
    """Logs an error that would replace a cancellation or another `BaseException`."""

    def __init__(self, error: BaseException | None) -> None:
        self._cancelled = not (error is None or isinstance(error, Exception))

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: object, _traceback: object) -> bool:
        logged = self._cancelled and isinstance(error, Exception)
        if logged:
            _log.warning("closing a cancelled stream failed: %s", type(error).__name__)
        return logged


# Below this many entries a sweep is not worth its while.
_SWEEP_AT: Final = 128
# No stream is checked more often, or one with a deadline of 0 s would be checked
# for ever, and nothing else.
_SHORTEST_INTERVAL: Final = 0.001


class StreamDeadlines(dict[str, float]):
    """Limits of a stream in seconds: first_item, idle, total; ``None`` is no limit."""

    def __init__(self, **limits: float | None) -> None:
        for name, limit in limits.items():
            if limit is not None:
                self[name] = check_limit(name, limit)


class WatchedStream(Stream[T_co]):
    """A stream of a session: it knows its loop, its deadlines and what to report."""

    def __init__(
        self,
        source: AsyncIterator[T_co],
        deadlines: StreamDeadlines,
        *,
        grace: float,
        watchdog: DeadlineWatchdog,
        new_scope: Callable[..., anyio.CancelScope],
        on_end: Callable[[int], None],
    ) -> None:
        super().__init__(source, grace=grace)
        self._new_scope, self._now = new_scope, watchdog.clock
        self._on_end = on_end
        if deadlines:
            self._clock, began = watchdog.clock, watchdog.clock()
            look = partial(_look, ref(self), deadlines, began)
            watchdog.watch(look(began), look)

    def _finish(self, error: BaseException | None) -> None:
        again = self.closed
        super()._finish(error)
        if not again:
            self._on_end(self.items)

    def enforce(self, deadlines: StreamDeadlines, began: float, now: float) -> float:
        """Stop if a deadline is broken; return when to check again, `inf` for never."""
        kind = "idle" if self.items else "first_item"
        since = math.inf if self._reader is None else self._since
        total, wait, idle = (
            deadlines.get(each, math.inf) for each in ("total", kind, "idle")
        )
        at, deadline = min((began + total, "total"), (since + wait, kind))
        if at > now:
            # A wait that begins after this check can be late no earlier than that.
            return min(at, now + wait, now + idle)
        seconds, items = deadlines[deadline], self.items
        what = f"{deadline} deadline of {seconds} s after {items} items"
        self.stop(StreamTimeout(f"the stream broke its {what}", deadline=deadline))
        return math.inf


def _look(
    watched: ref[WatchedStream[Any]],
    deadlines: StreamDeadlines,
    began: float,
    now: float,
) -> float:
    # A weak reference: a stream that is dropped is not kept until its deadline.
    stream = watched()
    if stream is None or stream.closed:
        return math.inf
    return stream.enforce(deadlines, began, now)


class DeadlineWatchdog:
    """One watchdog for all streams and starts of a registry.

    A cancel scope around every item costs microseconds per item and can cut the
    consumer instead of the source. A watchdog costs one reading of the clock per
    item, and checks a stream only when its deadline may have been broken.

    Args:
        clock: Monotonic seconds, the same that ``anyio.sleep_until`` goes by.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int, Callable[[float], float]]] = []
        self._serial = 0
        self._sweep_at = _SWEEP_AT
        self._earlier = anyio.Event()

    def watch(self, due: float, look: Callable[[float], float]) -> None:
        """Call *look* with the time when it is *due*; it returns when to call again."""
        if len(self._heap) >= self._sweep_at:
            # Most of what is watched ends long before its deadline would find it.
            swept, self._heap, now = self._heap, [], self.clock()
            for _due, _serial, each in swept:
                self._push(each(now), each)
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._heap))
        self._push(due, look)

    async def run(self) -> None:
        """Watch for ever.

        Cancellation:
            At any time; nothing needs to be cleaned up.
        """
        while True:
            self._earlier = anyio.Event()
            due = self._heap[0][0] if self._heap else math.inf
            with anyio.CancelScope(deadline=due):
                await self._earlier.wait()
            now = self.clock()
            while self._heap and self._heap[0][0] <= now:
                _due, _serial, look = heapq.heappop(self._heap)
                self._push(max(look(now), now + _SHORTEST_INTERVAL), look)

    def _push(self, due: float, look: Callable[[float], float]) -> None:
        if due < math.inf:
            if not self._heap or due < self._heap[0][0]:
                self._earlier.set()
            self._serial += 1
            heapq.heappush(self._heap, (due, self._serial, look))
