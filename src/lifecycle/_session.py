"""One session: from the arrival of a request until its engine is quiet."""

# ruff: noqa: SLF001 - a session and its registry are one mechanism in two modules
from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, final
from weakref import ref

import anyio
from anyio.lowlevel import checkpoint

from ._checks import Unique
from ._errors import SessionEnded
from ._lease import Lease
from ._outcome import expect_outcome, outcome_of
from ._payload import Payload, forget_frames
from ._start import End, Open, Pairs, Start, begin, results
from ._stream import Stream
from ._watchdog import Deadlines
from .events import Event, Outcome, PayloadReleased, SessionClosed, StreamEnded

if TYPE_CHECKING:
    from ._sessions import SessionRegistry

T = TypeVar("T")


@final
@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Session(Unique):
    """One request of one client, from `SessionRegistry.open` until its end.

    Entered with ``with`` by the task that works on the request. Leaving never
    waits: what the engine still has to be told is told by the registry. One that is
    lost, not entered and with no END to come, is closed with a `ResourceWarning`.

    Attributes:
        id: The id that the outside world knows.
        generation: Tells sessions apart that had the same id, one after another.
        key: ``"id#generation"``: never used twice, so what is said about it
            late cannot hit a newer session. Use it towards the engine.
        opened_at: By the event loop's clock, in seconds.
        cancelled_as: What a cancellation of the owner is counted as.
        lease: What starts take over, unless given another; `managed` sets it.
        outcome: How the session ended, or ``None`` while it is live.
    """

    _registry: SessionRegistry
    id: str
    generation: int
    key: str
    opened_at: float
    cancelled_as: Outcome = "cancelled"
    lease: Lease | None = None
    outcome: Outcome | None = None
    _boxes: dict[object, Payload[Any]] = field(default_factory=dict)
    _starts: list[Start[Any]] = field(default_factory=list)
    _scope: anyio.CancelScope | None = None
    # Of a decorated function, without a block: no scope may span its items.
    _led: ref[Stream[Any]] | None = None
    _stopped: bool = False
    _quiet: anyio.Event | None = None  # half a kilobyte: only where somebody waits

    def box(self, value: T, *, nbytes: int = 0) -> Payload[T]:
        """Box *value*, of *nbytes* bytes, to be emptied when the session closes.

        Drop every other reference to it.

        Raises:
            ValueError: *nbytes* is negative or not a whole number.
        """
        release = partial(self._unboxed, place := object())
        self._boxes[place] = payload = Payload(value, nbytes=nbytes, on_release=release)
        if self.outcome is not None:
            payload.clear()
        return payload

    def _unboxed(self, place: object, how: Any) -> None:
        nbytes = self._boxes.pop(place).nbytes
        if self._registry._emit is not None:
            event = PayloadReleased(session=self.id, bytes=nbytes, how=how)
            self._registry._emit(event)

    async def start(
        self,
        open_: Open[T],
        *,
        end: End[T] | None = None,
        lease: Lease | None = None,
        timeout: float = 30.0,
    ) -> T:
        """Open a stream in a task of the registry and return what it gives.

        Once it began, *open_* runs to its end with or without its caller; what it
        opened is then ended exactly once, after the session has closed or this
        call has failed. It never begins for a session that is closed.

        Args:
            open_: Hands the payload to the engine and returns the stream.
            end: Ends what *open_* returned, and is given ``None`` where that is not
                known; ``async`` or not. Not called where *open_* raised or never began.
            lease: The start's from the call on, whatever happens; released the
                moment that *open_* has settled: the hand-off.
            timeout: Seconds after which *open_* is cancelled; ``math.inf`` is no
                limit. The caller is told within 0.1 s, also where *open_* goes on
                regardless, as in a thread; *end* and the lease wait for that.

        Raises:
            StartTimeout: *timeout* went by; what was sent is ended by key.
            SessionEnded: The session was closed by somebody else.
            RuntimeError: The session was started before, or *lease* is held no more.
            TypeError: *lease* is no lease, or *end* is not callable.
            ValueError: *timeout* is NaN.
            Exception: What *open_* raised; its frames have forgotten their locals.

        Cancellation:
            Raised at once. The start goes on without the caller.
        """
        starting = self.start_all([(open_, end)], lease=lease, timeout=timeout)
        del open_, end  # this frame must not keep what they close over
        return (await starting)[0]

    async def start_all(
        self, starts: Pairs[T], *, lease: Lease | None = None, timeout: float = 30.0
    ) -> list[T]:
        """Open several streams, all of them or none: one request, many answers.

        As `start` for each pair of *open_* and *end* in *starts*, in their order. The
        first that fails ends the others, whether they have opened or are still at
        it, and its error is raised. The *lease* is released when the last of them
        has settled; where there is none to open, it stays the caller's.

        Cancellation:
            Raised at once. The starts go on without the caller.
        """
        if lease is None and not self._starts:
            lease = self.lease
        try:
            opening = begin(starts, self, lease, timeout)
        except BaseException as error:
            forget_frames(error)
            if isinstance(lease, Lease):
                lease.release()
            raise
        finally:
            del starts
        return await results(opening, self)

    def stream(
        self,
        source: AsyncIterator[T],
        *,
        first_item: float | None = None,
        idle: float | None = None,
        total: float | None = None,
        grace: float = 5.0,
    ) -> Stream[T]:
        """Own *source* as a `Stream` whose ``async with`` block deadlines may end.

        In seconds: until the first item, between later ones, for the whole stream,
        and as *grace* for the source to close.

        Raises:
            ValueError: One of them is NaN.
        """
        stream, registry = _SessionStream(source, grace=grace), self._registry
        stream.session = self
        stream._new_scope, stream._now = registry._new_scope, registry._now
        if (first_item, idle, total) != (None, None, None):
            limits = Deadlines(first_item=first_item, idle=idle, total=total)
            registry._watchdog.add(stream, limits)
        return stream

    def close(self, outcome: Outcome = "completed") -> bool:
        """End the session, unless it has ended; say whether it was this call.

        Synchronous. The id is free at once, the engine is told by the registry.

        Raises:
            ValueError: There is no such *outcome*.
        """
        return self._close(outcome, stop=False)

    def stop(self, outcome: Outcome = "cancelled") -> None:
        """As `close`, from outside: also cancels the owner's ``with`` block.

        The owner gets `SessionEnded` where it leaves the block.
        """
        self._close(outcome, stop=True)

    def _close(self, outcome: Outcome, *, stop: bool) -> bool:
        expect_outcome(outcome)
        if self.outcome is not None:
            return False
        registry = self._registry
        registry._confirm_here()
        self.outcome, self._stopped = outcome, stop
        del registry._live[self.id]
        registry._outcomes[outcome] += 1
        registry._closing.add(self)
        registry._look_at(self)
        for start in self._starts:
            start.close(cut=outcome == "shutdown")
        if stop and self._scope is not None:
            self._scope.cancel()
        led = self._led() if stop and self._led is not None else None
        if led is not None:
            led.stop(self._ended())
        self._let_go()
        return True

    def _let_go(self) -> None:
        try:
            for payload in list(self._boxes.values()):
                payload.clear()
        finally:
            # An observer may raise whatever it likes, and is told last of all.
            if self._boxes:
                self._let_go()
            else:
                lived = self._registry._now() - self.opened_at
                self._tell(SessionClosed, outcome=self.outcome, duration_s=lived)

    async def quiet(self) -> None:
        """Wait until the session is closed and its engine has been told.

        Cancellation:
            At any time; changes nothing.
        """
        if self.phase == "quiet":
            await checkpoint()
            return
        self._registry._confirm_here()
        self._quiet = self._quiet or anyio.Event()
        await self._quiet.wait()

    @property
    def phase(self) -> Literal["open", "starting", "started", "closing", "quiet"]:
        """How far the session got."""
        if self.outcome is not None:
            return "quiet" if all(start.done for start in self._starts) else "closing"
        if not self._starts:
            return "open"
        return "started" if all(start.how for start in self._starts) else "starting"

    def __enter__(self) -> Self:
        if self._scope is not None:
            raise RuntimeError(f"session {self.id!r} can be entered once")
        self._scope = self._registry._new_scope().__enter__()
        if self.outcome is not None:
            self._stopped = True  # also by `close`: it was not this block
            self._scope.cancel()
        return self

    def __exit__(self, *left_by: Any) -> None:  # noqa: PYI036 - passed on as it is
        error: BaseException | None = left_by[1]
        assert self._scope is not None
        try:
            self.close(outcome_of(error, self.cancelled_as))
        finally:
            swallowed = self._scope.__exit__(*left_by)
        # Also where the owner was about to leave and nothing was raised yet.
        if self._stopped and (error is None or swallowed):
            raise self._ended()

    def _ended(self) -> SessionEnded:
        words = f"the session was ended from outside: {self.outcome}"
        return SessionEnded(words, outcome=str(self.outcome))

    def _confirm(self) -> None:
        if self.outcome is not None:
            raise self._ended()

    def _lose(self) -> None:
        # For finalisers, which may run in any thread.
        self._registry._post(partial(self.close, self.cancelled_as))

    def _tell(self, kind: Callable[..., Event], **facts: Any) -> None:
        if self._registry._emit is not None:
            event = kind(session=self.id, generation=self.generation, **facts)
            self._registry._emit(event)

    def __del__(self) -> None:
        if self.outcome is None and not sys.is_finalizing():
            self._lose()
            what = f"session {self.key!r} was dropped without being closed"
            how = "enter it with a with block, or keep it and call close()"
            self._warn(f"{what}; {how}")

    def __repr__(self) -> str:
        return f"<Session {self.key!r} {self.outcome or self.phase}>"


@final
class _SessionStream(Stream[T]):
    """A stream that tells its session how many items it had."""

    __slots__ = ("session",)
    session: Session

    def _finish(self, error: BaseException | None) -> None:
        again = self.closed
        super()._finish(error)
        if not again:
            self.session._tell(StreamEnded, items=self.items)
