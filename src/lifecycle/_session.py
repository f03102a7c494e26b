"""One session: from the arrival of a request until its engine is quiet."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, final
from weakref import ref

import anyio
from anyio.lowlevel import checkpoint

from ._errors import SessionEnded
from ._outcome import OUTCOMES, outcome_of
from ._payload import Payload
from ._start import End, How, Open, Siblings, Start
from ._stream import Stream
from ._watchdog import Deadlines
from .events import Event, Outcome, PayloadReleased, StartSettled, StreamEnded

if TYPE_CHECKING:
    from types import TracebackType

    from ._lease import Lease

T = TypeVar("T")


class _Registry(Protocol):
    """What a session needs of its registry."""

    def emit(self, event: Event) -> None: ...
    def now(self) -> float: ...
    def spawn(self, session: Session, start: Start[Any]) -> None: ...
    def watch(self, stream: Stream[Any], limits: Deadlines) -> None: ...
    def closed(self, session: Session) -> None: ...
    def post(self, call: Callable[[], object]) -> None: ...
    def boxed(self, nbytes: int) -> None: ...
    def unboxed(self, nbytes: int) -> None: ...


@final
class Session:
    """One request of one client, from `SessionRegistry.open` until its end.

    Entered with ``with`` by the task that works on the request. Leaving never
    waits: what the engine still has to be told is told by the registry.

    Attributes:
        id: The id that the outside world knows.
        generation: Tells sessions apart that had the same id, one after another.
        key: ``"id#generation"``: never used twice, so what is said about it
            late cannot hit a newer session. Use it towards the engine.
        cancelled_as: What a cancellation of the owner is counted as.
        lease: What starts take over unless they are given another, and have
            taken over; set by `lifecycle.managed`.
        outcome: How the session ended, or ``None`` while it is live.
    """

    __slots__ = (
        "__weakref__",
        "_boxes",
        "_is_quiet",
        "_led",
        "_quiet",
        "_registry",
        "_running",
        "_scope",
        "_starts",
        "_stopped",
        "cancelled_as",
        "generation",
        "id",
        "key",
        "lease",
        "opened_at",
        "outcome",
    )

    def __init__(
        self, registry: _Registry, id_: str, generation: int, opened_at: float
    ) -> None:
        self._registry = registry
        self.id = id_
        self.generation = generation
        self.key = f"{id_}#{generation}"
        self.opened_at = opened_at
        self.cancelled_as: Outcome = "cancelled"
        self.lease: Lease | None = None
        self.outcome: Outcome | None = None
        self._boxes: dict[object, Payload[Any]] = {}
        self._starts: tuple[Start[Any], ...] = ()
        self._running = 0
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._led: ref[Stream[Any]] | None = None
        # An event only where somebody waits: it is half a kilobyte.
        self._quiet: anyio.Event | None = None
        self._is_quiet = False

    # What the owner calls.

    def box(self, value: T, *, nbytes: int = 0) -> Payload[T]:
        """Put *value* into a box that is emptied when the session closes.

        Args:
            value: The payload. Drop every other reference to it.
            nbytes: Its size in bytes, for the registry's statistics.

        Raises:
            ValueError: *nbytes* is negative or not a whole number.
        """
        place = object()
        payload = Payload(
            value, nbytes=nbytes, on_release=partial(self._unboxed, place, nbytes)
        )
        self._registry.boxed(nbytes)
        self._boxes[place] = payload
        if self.outcome is not None:
            payload.clear()
        return payload

    async def start(
        self,
        open_: Open[T],
        *,
        end: End[T] | None = None,
        lease: Lease | None = None,
        timeout: float = 30.0,
    ) -> T:
        """Open a stream in a task of the registry and return what it gives.

        *open_* is not cancelled with the caller. Once it began it runs to its
        end, and then everything it opened is ended, exactly once, after the
        session has closed. It never begins for a session that is closed.

        Args:
            open_: Hands the payload to the engine and returns the stream. Its
                frame ends before the first item, so nothing in it is retained.
            end: Ends what was opened, given what *open_* returned, or ``None``
                where that is not known. Runs in the registry, never before
                *open_* has settled; not at all where *open_* raised an ordinary
                error or never began.
            lease: Released the moment that *open_* has settled: the hand-off.
                From the call on the start owns it, whatever happens.
            timeout: Seconds that *open_* may take; ``math.inf`` is no limit.

        Returns:
            What *open_* returned.

        Raises:
            StartTimeout: *timeout* went by; what was sent is ended by key.
            SessionEnded: The session was closed by somebody else.
            RuntimeError: The session was started before.
            ValueError: *timeout* is NaN.
            Exception: What *open_* raised, as it was raised; its finished frames
                have lost their locals, so that it retains no payload.

        Cancellation:
            Raised at once. The start goes on without the caller.
        """
        self.lease = lease = lease or self.lease
        start = Start(
            open_,
            end=end,
            lease=lease,
            timeout=timeout,
            on_settled=partial(self._start_settled, self._registry.now()),
        )
        del open_, end, lease  # this frame must not keep what they close over
        init_done = start.init_done
        self._accept(start, timeout=timeout)
        await init_done.wait()
        return self._result_of(start)

    async def start_all(
        self,
        starts: Iterable[tuple[Open[T], End[T] | None]],
        *,
        lease: Lease | None = None,
        timeout: float = 30.0,
    ) -> list[T]:
        """Open several streams, all of them or none: one request, many answers.

        As `start` for each. The first that fails ends the others, whether they
        have opened or are still at it, and its error is raised. While the
        streams run they share the session: close it, and all are ended.

        Args:
            starts: An *open_* and its *end* for each stream.
            lease: Released the moment that every *open_* has settled; where there
                is none to open, it stays the caller's.
            timeout: Seconds that each *open_* may take; ``math.inf`` is no limit.

        Returns:
            What each *open_* returned, in the order of *starts*.

        Raises:
            Exception: As from `start`, of the first that failed.

        Cancellation:
            Raised at once. The starts go on without the caller.
        """
        self.lease = lease = lease or self.lease
        siblings = Siblings(lease)
        began = self._registry.now()
        opening = tuple(
            Start(
                open_,
                end=end,
                lease=None,
                timeout=timeout,
                on_settled=siblings.expect(partial(self._start_settled, began)),
            )
            for open_, end in starts
        )
        del starts, lease
        if not opening:
            return []
        self._accept(*opening, timeout=timeout)
        await siblings.decided.wait()
        failed = [start for start in opening if start.how not in (None, "started")]
        if failed:
            for start in opening:
                start.close()
        return [self._result_of(start) for start in (*failed, *opening)]

    def _result_of(self, start: Start[T]) -> T:
        if start.how != "failed" and self.outcome is not None:
            raise self._ended()
        return start.result()

    def stream(
        self,
        source: AsyncIterator[T],
        *,
        first_item: float | None = None,
        idle: float | None = None,
        total: float | None = None,
        grace: float = 5.0,
    ) -> Stream[T]:
        """Own *source* as a `Stream` whose deadlines the registry watches.

        Args:
            source: What `start` returned.
            first_item: Longest wait for the first item, in seconds.
            idle: Longest wait for any later item, in seconds.
            total: Longest life of the stream, in seconds.
            grace: Seconds that the source may take to close.

        Raises:
            ValueError: A deadline, or *grace*, is NaN.
        """
        limits = Deadlines(first_item=first_item, idle=idle, total=total)
        stream = _SessionStream(self, source, grace=grace)
        if limits:
            self._registry.watch(stream, limits)
        return stream

    def close(self, outcome: Outcome = "completed") -> bool:
        """End the session with *outcome*; the first to do so decides.

        Synchronous and idempotent. The id is free at once, the engine is told
        by the registry.

        Returns:
            Whether it was this call that ended the session.

        Raises:
            ValueError: There is no such outcome.
        """
        if outcome not in OUTCOMES:
            raise ValueError(
                f"no session can end as {outcome!r}; use one of {', '.join(OUTCOMES)}"
            )
        if self.outcome is not None:
            return False
        self.outcome = outcome
        for payload in list(self._boxes.values()):
            payload.clear()
        if not self._running:
            self._set_quiet()
        for start in self._starts:
            start.close(cut=outcome == "shutdown")
        self._registry.closed(self)
        return True

    # What others call.

    def stop(self, outcome: Outcome = "cancelled") -> None:
        """Close the session from outside and cancel the owner's ``with`` block.

        The owner gets `SessionEnded` where it leaves the block.
        """
        if self.close(outcome):
            self._stopped = True
            if self._scope is not None:
                self._scope.cancel()
            led = None if self._led is None else self._led()
            if led is not None:
                led.stop(self._ended())

    def _lead(self, stream: ref[Stream[Any]]) -> None:
        """Called by streams of decorated functions: stop *stream* with this session.

        Their session has no ``with`` block:
        a cancel scope must not span the items of a generator.
        """
        self._led = stream

    def _confirm(self) -> None:
        """Raise `SessionEnded` once it is closed: nothing begins for it any more."""
        if self.outcome is not None:
            raise self._ended()

    def _lose(self) -> None:
        """Called by finalisers, in any thread: close the session as cancelled, soon."""
        self._registry.post(partial(self.close, self.cancelled_as))

    async def quiet(self) -> None:
        """Wait until the session is closed and its engine has been told.

        Cancellation:
            At any time; changes nothing.
        """
        if self._is_quiet:
            await checkpoint()
            return
        if self._quiet is None:
            self._quiet = anyio.Event()
        await self._quiet.wait()

    @property
    def phase(self) -> Literal["open", "starting", "started", "closing", "quiet"]:
        """How far the session got."""
        if self._is_quiet:
            return "quiet"
        if self.outcome is not None:
            return "closing"
        if not self._starts:
            return "open"
        opening = any(start.how is None for start in self._starts)
        return "starting" if opening else "started"

    # The with block.

    def __enter__(self) -> Self:
        if self._scope is not None:
            raise RuntimeError(f"session {self.id!r} can be entered once")
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        if self.outcome is not None:
            self._scope.cancel()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(outcome_of(exc, self.cancelled_as))
        scope = self._scope
        assert scope is not None
        swallowed = scope.__exit__(exc_type, exc, traceback)
        # Also where the owner was about to leave and nothing was raised yet.
        if self._stopped and (exc is None or swallowed):
            raise self._ended()

    def _ended(self) -> SessionEnded:
        return SessionEnded(
            f"the session was ended from outside: {self.outcome}",
            outcome=self.outcome or "cancelled",
        )

    def _accept(self, *starts: Start[Any], timeout: float) -> None:
        try:
            # Found out in a task of the registry, it would end all of these.
            if math.isnan(timeout):
                raise ValueError("timeout must be a number of seconds, not NaN")
            if self._starts:
                raise RuntimeError(f"session {self.id!r} was started before")
            if self.outcome is not None:
                raise self._ended()
            for start in starts:
                self._registry.spawn(self, start)
        except BaseException:
            for start in starts:
                start.abort()
            raise
        self._starts = starts
        self._running = len(starts)

    def cut(self) -> None:
        """Called by the registry at its end: let no start finish either."""
        for start in self._starts:
            start.close(cut=True)

    def settled(self) -> bool:
        """Called by the registry: one start of this session is over and ended.

        Returns:
            Whether the engine has nothing of this session left.
        """
        self._running -= 1
        # Siblings of one that failed are ended while the session is still open.
        if self._running or self.outcome is None:
            return False
        self._set_quiet()
        return True

    def abort(self) -> None:
        """Called by the registry at its end: no task will ever run the starts."""
        for start in self._starts:
            start.abort()
        self._set_quiet()

    def _set_quiet(self) -> None:
        self._is_quiet = True
        if self._quiet is not None:
            self._quiet.set()

    def _start_settled(self, began: float, how: How) -> None:
        self._registry.emit(
            StartSettled(
                session=self.id,
                generation=self.generation,
                how=how,
                duration_s=self._registry.now() - began,
            )
        )

    def _unboxed(
        self, place: object, nbytes: int, how: Literal["taken", "cleared"]
    ) -> None:
        self._boxes.pop(place, None)
        self._registry.unboxed(nbytes)
        self._registry.emit(PayloadReleased(session=self.id, bytes=nbytes, how=how))

    def stream_ended(self, items: int) -> None:
        """Called by the session's streams."""
        self._registry.emit(
            StreamEnded(session=self.id, generation=self.generation, items=items)
        )

    def __repr__(self) -> str:
        return f"<Session {self.key!r} {self.outcome or self.phase}>"


@final
class _SessionStream(Stream[T]):
    """A stream that tells its session how many items it had."""

    __slots__ = ("_session",)

    def __init__(
        self, session: Session, source: AsyncIterator[T], *, grace: float
    ) -> None:
        super().__init__(source, grace=grace)
        self._session = session

    def _finish(self, error: BaseException | None) -> None:
        if not self.closed:
            self._session.stream_ended(self.items)
        super()._finish(error)
