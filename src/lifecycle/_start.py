"""Supervised start: open a stream in a task that no caller can cancel.

Every shield that a caller can put around an ``await`` has a hole: a second
native ``Task.cancel()`` cuts both ``asyncio.shield`` and anyio's, and a result
that arrives in the tick of the cancellation is lost. So a start runs in a task of
its own, and that same task ends what it started.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Final, Generic, Literal, TypeVar, final

import anyio

from ._error_payload import clear_traceback_frames
from ._eventloop import Waiter, new_waiter
from ._exceptions import StartTimeout
from ._validation import NoCopy, check, name_of, takes_one

T = TypeVar("T")

StartResult = Literal["started", "failed", "withheld", "unknown"]

# Opens a stream, and ends what was opened; the latter is given `None` where it is
# not known what was opened.
Open = Callable[[], Awaitable[T]]
End = Callable[[T | None], Awaitable[object] | None]
Pairs = Iterable[tuple[Open[T], End[T] | None]]

# Seconds in which a start may answer its cancellation: what it opened or raised
# then is still its caller's. A thread does not answer, and is not waited for.
_CANCEL_GRACE: Final = 0.1


@dataclass(frozen=True, slots=True, repr=False)
class StartEnvironment:
    """What all starts of a registry have in common.

    Attributes:
        watch: Calls a function with the time when that is due; see `DeadlineWatchdog`.
        end_timeout: Seconds that an END may take.
    """

    clock: Callable[[], float]
    new_scope: Callable[..., anyio.CancelScope]
    watch: Callable[[float, Callable[[float], float]], None]
    end_timeout: float


@dataclass(slots=True, eq=False, repr=False)
class StartContext:
    """What the starts of one session need of it.

    Attributes:
        environment: What they have in common with those of other sessions.
        on_settled: Called with each start once its outcome is decided, and with the
            seconds that it took.
        on_finished: Called when a start has nothing left to do.
        on_end_failed: Called with the error of an END, and the name of its function.
        close: Closes the session with an outcome; with ``stop=True`` also its block.
    """

    environment: StartEnvironment
    on_settled: Callable[[StartTask[Any], float], None]
    on_finished: Callable[[], None]
    on_end_failed: Callable[[BaseException, str], None]
    close: Callable[[Literal["cancelled", "shutdown"], bool], object]


@final
class InitDone(NoCopy):
    """The barrier in front of END: a flag, and what waits for it. Never unset.

    ``await init_done`` waits; ``init_done.is_set()``, or its truth, asks.
    """

    __slots__ = ("is_set", "wait")

    def __init__(
        self, is_set: Callable[[], bool], wait: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self.is_set = is_set
        self.wait = wait

    def __bool__(self) -> bool:
        return self.is_set()

    def __await__(self) -> Generator[Any, Any, None]:
        return self.wait().__await__()

    def __repr__(self) -> str:
        return f"<InitDone {'set' if self else 'not set'}>"


@dataclass(slots=True, eq=False, repr=False)
class StartTask(Generic[T]):
    """One stream of a session, from the request for it until its END was sent.

    `run` is the whole life, in a task of the registry: open, settle, wait until
    the stream is over, end. Whatever happens it settles, and is ended only then.
    A session refers to its starts, so they refer to none.
    """

    open_: Open[T]
    end: End[T] | None
    began: float
    timeout: float
    caller: Waiter  # waits for all starts of the session
    how: StartResult | None = None
    value: T | None = None
    error: Exception | None = None
    wanted: bool = True
    closed: bool = False
    done: bool = False
    _scope: anyio.CancelScope | None = None
    _due: float = math.inf
    _until_closed: Waiter | None = None

    def __repr__(self) -> str:
        state = "done" if self.done else self.how or "starting"
        return f"<StartTask {state}{', closed' if self.closed else ''}>"

    def close(self, *, cut: bool = False) -> None:
        """Withhold a start that has not begun; else end it, once it has settled.

        With *cut* it may not go on opening; its outcome is then unknown.
        """
        self.closed = True
        if self.done:
            self.value = None  # there was no END for it, and it may be in a cycle
        if self._until_closed is not None:
            self._until_closed.wake()
        if self.how is None:
            self.caller.wake()
            if cut and self._scope is not None:
                self._scope.cancel()

    def abandon(self) -> None:
        """Forget the error that the caller did not wait for."""
        self.wanted, self.error = False, None

    def abort(self, context: StartContext) -> None:
        """Settle and end a start whose task never ran."""
        if self.how is None:
            self._settle(context, "withheld")
        self._finish(context)

    async def run(self, context: StartContext) -> None:
        """Open the stream, wait until it is over, and end it.

        A native cancellation stops the session, and must not get to the registry.
        """
        try:
            # Once, or twice where its first scope was cancelled.
            while self.how is None or self.end is not None:
                try:
                    await self._live(context)
                except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - see above
                    context.close("cancelled", True)
        except BaseException as error:
            clear_traceback_frames(error)
            self.close()
            await self._live(context)  # noqa: ASYNC102, ASYNC120 - has its own shield
            context.close("shutdown", False)
            raise
        finally:
            self._finish(context)

    def _finish(self, context: StartContext) -> None:
        if not self.done:
            # On trio the caller's task; and the watchdog may refer to this start yet.
            del self.caller
        self.done, self._scope, self._until_closed = True, None, None
        self._due = math.inf
        if self.closed:
            self.value = None
        context.on_finished()

    async def _live(self, context: StartContext) -> None:
        # One scope for all of it, if nothing goes wrong: each costs microseconds.
        with context.environment.new_scope(shield=True) as self._scope:
            if self.how is None:
                self._bound(context, self.began + self.timeout)
                await self._open(context, self._scope)
            if self.end is not None and not self._scope.cancel_called:
                await self._end(self.end, context, self._scope)

    async def _end(
        self, end: End[T], context: StartContext, scope: anyio.CancelScope
    ) -> None:
        if not self.closed:
            self._due = math.inf
            self._until_closed = new_waiter()
            await self._until_closed
        value, self.value, self.end = self.value, None, None
        environment = context.environment
        self._bound(context, environment.clock() + environment.end_timeout)
        try:
            ending = end(value)
            if isawaitable(ending):
                await ending
        except Exception as error:  # noqa: BLE001 - the engine may have it still
            context.on_end_failed(error, name_of(end))
        except anyio.get_cancelled_exc_class() as error:
            late = StartTimeout().with_traceback(error.__traceback__)
            cause = late if scope.cancel_called else error
            context.on_end_failed(cause, name_of(end))
            raise

    def _bound(self, context: StartContext, due: float) -> None:
        # A timer of its own would cost more, and most are never due.
        self._due = due
        context.environment.watch(due, self._check_deadline)

    def _check_deadline(self, now: float) -> float:
        if now < self._due or self._scope is None:
            return self._due
        if self._scope.cancel_called:
            self.caller.wake()
            return math.inf
        self._scope.cancel()
        self._due = now + _CANCEL_GRACE if self.how is None else math.inf
        return self._due

    async def _open(self, context: StartContext, scope: anyio.CancelScope) -> None:
        how: StartResult = "unknown"
        try:
            if self.closed:
                how = "withheld"
            else:
                self.value = await self._opening()
                how = "started"
        except Exception as error:  # noqa: BLE001 - raised for the caller
            clear_traceback_frames(error)
            # Without this very frame, which refers to what refers to the error: the
            # caller may never ask for it.
            here = error.__traceback__
            if self.wanted:
                self.error = error.with_traceback(here and here.tb_next)
            del here
            # A client that is cancelled often says that it lost its connection.
            how = "unknown" if scope.cancel_called else "failed"
        finally:
            self._settle(context, how)

    def _opening(self) -> Awaitable[T]:
        open_: Any = self.open_
        opening: object = open_() if callable(open_) else None
        if isawaitable(opening):
            return opening
        # An `await` of it would say only that it cannot be awaited.
        what = f"must be a function, not {type(open_).__name__}"
        if callable(open_):
            what = f"returned {type(opening).__name__}"
        raise TypeError(
            f"open_ {what}; pass the function itself, without calling it: an `async "
            f"def` without yield that returns the stream"
        )

    def _settle(self, context: StartContext, how: StartResult) -> None:
        self.how = how
        del self.open_
        if how in ("failed", "withheld"):
            self.end = None
        context.on_settled(self, context.environment.clock() - self.began)


def make_starts(pairs: Pairs[T], now: float, timeout: float) -> list[StartTask[T]]:
    """Return a start for each pair of *pairs*, for the running task to wait for.

    Raises:
        TypeError: An end is not callable, or not with one argument.
    """
    caller = new_waiter()
    starts = [StartTask(open_, end, now, timeout, caller) for open_, end in pairs]
    for start in starts:
        fits = start.end is None or callable(start.end)
        check(fits, "a start takes end, a function that is not called yet", start.end)
        if not takes_one(start.end):
            what = (
                f"a start calls end with what open_ returned, and {name_of(start.end)}"
            )
            raise TypeError(f"{what} does not take one argument; give it a parameter")
    return starts


def start_error(starts: list[StartTask[T]], ended: Exception | None) -> Exception:
    """Return why not all *starts* opened: a failure, *ended*, or the timeout."""
    errors = {start.how: start.error for start in reversed(starts)}
    for start in starts:
        start.abandon()
    if (error := errors.get("failed")) is not None:
        return error
    if ended is not None:
        return ended
    what = f"the start was not done within {starts[0].timeout} s"
    late = StartTimeout(f"{what}; what it sent is being ended")
    late.__cause__ = errors.get("unknown")
    return late
