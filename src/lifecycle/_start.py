"""Supervised start: open a stream in a task that no caller can cancel.

Every shield that a caller can put around an ``await`` has a hole: a second
native ``Task.cancel()`` cuts both ``asyncio.shield`` and anyio's, and a result
that arrives in the tick of the cancellation belongs to nobody. So the start runs
in a task of its own, and that same task ends what it started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import anyio

from ._errors import StartTimeout
from ._payload import forget_frames

if TYPE_CHECKING:
    from ._lease import Lease

T = TypeVar("T")

How = Literal["started", "failed", "withheld", "unknown"]

# Opens a stream, and ends what was opened; the latter is given `None` where it is
# not known what was opened.
Open = Callable[[], Awaitable[T]]
End = Callable[[T | None], Awaitable[object]]


class Start(Generic[T]):
    """One start, from the request for it until its end was sent.

    `run` is the whole life, in a task of the registry: open, settle, wait until
    the session is closed, end. The barrier `init_done` is set whatever happens,
    and nothing is ended before it.

    Args:
        open_: Sends the payload and returns the stream; runs at most once.
        end: Ends what was started, given the stream, or ``None`` where the
            outcome is unknown; runs at most once. ``None``: nothing to end.
        lease: Released the moment that *open_* has settled.
        timeout: Seconds that *open_* may take.
        on_settled: Told once how the start came out.
    """

    __slots__ = (
        "_end",
        "_lease",
        "_on_settled",
        "_open",
        "_opening",
        "_timeout",
        "closed",
        "error",
        "how",
        "init_done",
        "value",
    )

    def __init__(
        self,
        open_: Open[T],
        *,
        end: End[T] | None,
        lease: Lease | None,
        timeout: float,
        on_settled: Callable[[How], object],
    ) -> None:
        self._open: Open[T] | None = open_
        self._end = end
        if lease is not None:
            lease._pass_on()  # noqa: SLF001 - a friend
        self._lease = lease
        self._timeout = timeout
        # Given up once used: it refers to the session, which refers to this.
        self._on_settled: Callable[[How], object] | None = on_settled
        self._opening: anyio.CancelScope | None = None
        self.how: How | None = None
        self.value: T | None = None
        self.error: BaseException | None = None
        # Let go once it is set: sessions are many and events are not small.
        self.init_done = anyio.Event()
        self.closed = anyio.Event()

    def close(self, *, cut: bool = False) -> None:
        """The session is over: withhold the start if it has not begun; end it.

        Args:
            cut: Do not let *open_* finish either; its outcome is then unknown.
        """
        self.closed.set()
        if cut and self._opening is not None:
            self._opening.cancel()

    def abort(self) -> None:
        """Settle a start whose task will never run."""
        self._settle("withheld")

    def result(self) -> T:
        """Return what was opened, or raise why it was not, if it was not withheld.

        Raises:
            StartTimeout: The start took too long; what it sent is ended.
            BaseException: Whatever *open_* raised, as it was raised.
        """
        error, self.error = self.error, None
        try:
            if self.how == "unknown":
                raise StartTimeout(
                    f"the start was not done within {self._timeout} s; "
                    f"what it sent is being ended"
                ) from error
            if error is not None:
                raise error
            return self.value  # type: ignore[return-value]
        finally:
            del error  # its traceback holds this frame

    async def run(
        self, *, end_timeout: float, on_cut: Callable[[], object]
    ) -> BaseException | None:
        """Live through the start.

        Args:
            end_timeout: Seconds that the end may take.
            on_cut: Called where a cancellation gets through, to stop the owner.

        Returns:
            Why the end failed, or ``None``. Errors of the start itself are for
            `result`.

        Cancellation:
            Only a native ``Task.cancel()`` gets through, and one that user code
            was given by a task of its own. The outcome is then unknown and the
            end is tried once. It ends here: a child that ends cancelled would
            cancel everything else in the registry.
        """
        try:
            await self._begin()
            with anyio.CancelScope(shield=True):
                await self.closed.wait()
        except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - see above
            on_cut()
            self._settle("unknown")
        except BaseException:
            self._settle("unknown")
            # It has a shield of its own, with a deadline.
            await self._finish(end_timeout)  # noqa: ASYNC102, ASYNC120
            raise
        return await self._finish(end_timeout)

    async def _begin(self) -> None:
        open_, self._open = self._open, None
        if self.closed.is_set() or open_ is None:
            self._settle("withheld")
            return
        deadline = anyio.current_time() + self._timeout
        self._opening = anyio.CancelScope(shield=True, deadline=deadline)
        try:
            with self._opening:
                self.value = await _opened_by(open_)
                self.how = "started"
        except Exception as error:  # noqa: BLE001 - raised for the caller by `result`
            forget_frames(error)
            # Without this very frame, which refers to what refers to the error: it
            # may be that nobody ever asks for it.
            here = error.__traceback__
            self.error = error.with_traceback(here and here.tb_next)
            del here
            # A client that is cancelled often says that it lost its connection.
            self.how = "unknown" if self._opening.cancel_called else "failed"
        finally:
            self._opening = None
            del open_
            self._settle("unknown")

    def _settle(self, how: How) -> None:
        if self.how is None:
            self.how = how
        self._open = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        on_settled, self._on_settled = self._on_settled, None
        if on_settled is not None:
            self.init_done.set()
            del self.init_done
            on_settled(self.how)

    async def _finish(self, end_timeout: float) -> BaseException | None:
        end, self._end = self._end, None
        value, self.value = self.value, None
        if end is None or self.how in ("failed", "withheld"):
            return None
        deadline = anyio.current_time() + end_timeout
        try:
            with anyio.CancelScope(shield=True, deadline=deadline):
                await end(value)
                return None
        except Exception as error:  # noqa: BLE001 - the registry reports it
            forget_frames(error)
            return error
        except anyio.get_cancelled_exc_class() as error:  # noqa: ASYNC103 - as in `run`
            forget_frames(error)
            return error  # noqa: ASYNC104
        # Only the deadline of the scope leads here.
        return StartTimeout(f"END was not done within {end_timeout} s")


def _opened_by(open_: object) -> Awaitable[Any]:
    # An `await` of something else says only that it cannot be awaited.
    if not callable(open_):
        raise TypeError(
            f"open_ has to be a function that the registry calls, not "
            f"{type(open_).__name__}; pass the function itself, without calling it"
        )
    opening = open_()
    if not isawaitable(opening):
        raise TypeError(
            f"open_ returned {type(opening).__name__}, which cannot be awaited; make "
            f"it an `async def` without yield that returns the stream"
        )
    return opening


class Siblings:
    """Starts of which all have to succeed.

    Args:
        lease: Released when the last of them has settled.

    Attributes:
        decided: Set when all have succeeded or one has not.
    """

    __slots__ = ("_lease", "_open", "decided")

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease
        self._open = 0
        self.decided = anyio.Event()

    def expect(self, on_settled: Callable[[How], object]) -> Callable[[How], object]:
        """Count one more in; return what it has to be told through."""
        self._open += 1
        if self._lease is not None:
            self._lease._pass_on()  # noqa: SLF001 - a friend

        def settled(how: How) -> None:
            self._open -= 1
            if not self._open and self._lease is not None:
                self._lease.release()
                self._lease = None
            if not self._open or how != "started":
                self.decided.set()
            on_settled(how)

        return settled
