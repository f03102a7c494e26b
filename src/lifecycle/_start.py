"""Supervised start: open a stream in a task that no caller can cancel.

Every shield that a caller can put around an ``await`` has a hole: a second
native ``Task.cancel()`` cuts both ``asyncio.shield`` and anyio's, and a result
that arrives in the tick of the cancellation belongs to nobody. So a start runs
in a task of its own, and that same task ends what it started.
"""

# ruff: noqa: SLF001 - a session and its starts are one mechanism in two modules
from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, cast

import anyio

from ._checks import expect, seconds
from ._errors import StartTimeout
from ._lease import Lease
from ._park import Waiter, new_waiter
from ._payload import forget_frames
from .events import StartSettled

if TYPE_CHECKING:
    from ._session import Session

T = TypeVar("T")

How = Literal["started", "failed", "withheld", "unknown"]

# Opens a stream, and ends what was opened; the latter is given `None` where it is
# not known what was opened.
Open = Callable[[], Awaitable[T]]
End = Callable[[T | None], Awaitable[object] | None]
Pairs = Iterable[tuple[Open[T], End[T] | None]]

# Seconds in which a start may answer its cancellation: what it opened or raised
# then is still its caller's. A thread does not answer, and nobody waits for it.
_MOMENT: Final = 0.1


@dataclass(slots=True, eq=False)
class Start(Generic[T]):
    """One stream of a session, from the request for it until its end was sent.

    `run` is the whole life, in a task of the registry: open, settle, wait until
    the stream is over, end. Whatever happens it settles, and is ended only then.
    A session refers to its starts, so they refer to none.
    """

    open_: Open[T]
    end: End[T] | None
    began: float
    timeout: float
    told: Waiter  # the caller, who waits for all starts of the session
    how: How | None = None
    value: T | None = None
    error: Exception | None = None
    wanted: bool = True
    closed: bool = False
    done: bool = False
    _scope: anyio.CancelScope | None = None
    _due: float = math.inf
    _over: Waiter | None = None

    def close(self, *, cut: bool = False) -> None:
        """Withhold a start that has not begun; else end it, once it has settled.

        With *cut* it may not go on opening; what comes of that is then unknown.
        """
        self.closed = True
        if self.done:
            self.value = None  # there was no END for it, and it may be in a cycle
        if self._over is not None:
            self._over.wake()
        if self.how is None:
            self.told.wake()
            if cut and self._scope is not None:
                self._scope.cancel()

    def abort(self, session: Session) -> None:
        """Settle and end a start whose task never ran."""
        if self.how is None:
            self._settle(session, "withheld")
        self._leave(session)

    async def run(self, session: Session) -> None:
        """Live through the start.

        Cancellation:
            Only a native one gets through, or one of a task of the user's code. It
            stops the session, and the end is tried once. It goes no further: a
            child that ends cancelled would cancel the whole registry.
        """
        try:
            # Once, or twice where its first scope was cancelled.
            while self.how is None or self.end is not None:
                try:
                    await self._live(session)
                except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - see above
                    session.stop()
        except BaseException:
            self.close()
            await self._live(session)  # noqa: ASYNC102, ASYNC120 - has its own shield
            session.close("shutdown")
            raise
        finally:
            self._leave(session)

    def _leave(self, session: Session) -> None:
        if not self.done:
            del self.told  # on trio the caller's task, and the watchdog may know us yet
        self.done, self._scope, self._over, self._due = True, None, None, math.inf
        if self.closed:
            self.value = None
        session._registry._look_at(session)

    async def _live(self, session: Session) -> None:
        # One scope for all of it, if nothing goes wrong: each costs microseconds.
        with session._registry._new_scope(shield=True) as self._scope:
            if self.how is None:
                self._bound(session, self.began + self.timeout)
                await self._open(session, self._scope)
            if self.end is not None and not self._scope.cancel_called:
                await self._finish(self.end, session, self._scope)

    async def _finish(
        self, end: End[T], session: Session, scope: anyio.CancelScope
    ) -> None:
        registry = session._registry
        if not self.closed:
            self._due = math.inf
            self._over = new_waiter()
            await self._over
        value, self.value, self.end = self.value, None, None
        self._bound(session, registry._now() + registry._end_timeout)
        try:
            ending = end(value)
            if isawaitable(ending):
                await ending
        except Exception as error:  # noqa: BLE001 - the engine may have it still
            registry._end_failed(session, error)
        except anyio.get_cancelled_exc_class() as error:
            late = StartTimeout().with_traceback(error.__traceback__)
            registry._end_failed(session, late if scope.cancel_called else error)
            raise

    def _bound(self, session: Session, due: float) -> None:
        # A timer of its own would be dearer, and most are never due.
        self._due = due
        session._registry._watchdog.at(due, self._look)

    def _look(self, now: float) -> float:
        if now < self._due or self._scope is None:
            return self._due
        if self._scope.cancel_called:
            self.told.wake()
            return math.inf
        self._scope.cancel()
        self._due = now + _MOMENT if self.how is None else math.inf
        return self._due

    async def _open(self, session: Session, cut: anyio.CancelScope) -> None:
        how: How = "unknown"
        try:
            if self.closed:
                how = "withheld"
            else:
                self.value = await self._opened()
                how = "started"
        except Exception as error:  # noqa: BLE001 - raised for the caller
            forget_frames(error)
            # Without this very frame, which refers to what refers to the error: it
            # may be that nobody ever asks for it.
            here = error.__traceback__
            if self.wanted:
                self.error = error.with_traceback(here and here.tb_next)
            del here
            # A client that is cancelled often says that it lost its connection.
            how = "unknown" if cut.cancel_called else "failed"
        finally:
            self._settle(session, how)

    def _opened(self) -> Awaitable[T]:
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

    def _settle(self, session: Session, how: How) -> None:
        self.how = how
        del self.open_
        if how in ("failed", "withheld"):
            self.end = None
        last = all(start.how for start in session._starts)
        if last or how != "started":
            self.told.wake()
        try:
            if last and session.lease is not None:
                session.lease.release()
        finally:
            took = session._registry._now() - self.began
            session._tell(StartSettled, how=how, duration_s=took)


def begin(
    pairs: Pairs[T], session: Session, lease: Lease | None, timeout: float
) -> list[Start[T]]:
    """Begin the starts of *session*, each in a task of its registry."""
    registry, told = session._registry, new_waiter()
    if session.outcome is None:
        registry._confirm_here()
    # Found out in a task of the registry, it would end all of its tasks.
    timeout, now = seconds("timeout", timeout), registry._now()
    starts = [Start(open_, end, now, timeout, told) for open_, end in pairs]
    if not starts:
        return []
    fits = lease is None or isinstance(lease, Lease)
    expect(fits, "a start takes a lease, awaited", lease)
    for end in (start.end for start in starts):
        fits = end is None or callable(end)
        expect(fits, "a start takes end, a function that is not called yet", end)
    if session._starts:
        raise RuntimeError(f"session {session.id!r} was started before")
    session._confirm()
    if lease is not None and lease is not session.lease and not lease.held:
        raise RuntimeError("the lease was released before; admit one for this start")
    session._starts, session.lease = starts, lease
    if lease is not None:
        lease._passed_on = True
    for start in starts:
        registry._crew.spawn(start.run, session)
    return starts


async def results(starts: list[Start[T]], session: Session) -> list[T]:
    """Wait until all have opened, or one has not, or the session is closed."""
    if not starts:
        return []
    try:
        await starts[0].told
    except BaseException:
        # From CPython 3.12 an error that is kept keeps whoever awaited it, too.
        for start in starts:
            start.wanted, start.error = False, None
        raise
    if session.outcome is None and all(start.how == "started" for start in starts):
        return [cast("T", start.value) for start in starts]
    for start in starts:
        start.close()
    raise _why_not(starts, session)


def _why_not(starts: list[Start[T]], session: Session) -> Exception:
    errors = {start.how: start.error for start in reversed(starts)}
    for start in starts:
        start.wanted, start.error = False, None
    if (error := errors.get("failed")) is not None:
        return error
    if session.outcome is not None:
        return session._ended()
    words = f"the start was not done within {starts[0].timeout} s"
    late = StartTimeout(f"{words}; what it sent is being ended")
    late.__cause__ = errors.get("unknown")
    return late
