"""One session: from the arrival of a request until its END is done."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Self, TypeVar, cast, final, get_args
from weakref import ref

import anyio
from anyio.lowlevel import checkpoint

from . import events
from ._error_payload import clear_traceback_frames, describe_error
from ._eventloop import (
    TaskSupervisor,
    call_if_cancelled,
    current_loop,
    in_async_generator,
)
from ._exceptions import (
    EngineLost,
    Refused,
    SessionEnded,
    StartTimeout,
    StreamTimeout,
)
from ._lease import Lease
from ._payload import Payload
from ._start import (
    End,
    InitDone,
    Open,
    Pairs,
    StartContext,
    StartEnvironment,
    StartTask,
    make_starts,
    start_error,
)
from ._stream import DeadlineWatchdog, Stream, StreamDeadlines, WatchedStream
from ._validation import NoCopy, check, check_deadline, made_by
from .events import (
    Event,
    Observer,
    Outcome,
    PayloadReleased,
    SessionClosed,
    StreamEnded,
)

T = TypeVar("T")

_log = logging.getLogger("lifecycle")

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


def check_outcome(outcome: object) -> None:
    """Raise `ValueError` unless there is such an *outcome*."""
    if outcome not in OUTCOMES:
        known = ", ".join(OUTCOMES)
        raise ValueError(f"{outcome!r} is no outcome of a session; use one of {known}")


def outcome_of(exc: BaseException | None, cancelled_as: Outcome) -> Outcome:
    """Return what a session that is left by *exc* is counted as.

    Always an outcome that exists: code that leaves a block cannot handle an error.
    """
    outcome: str = "failed"
    match exc:
        case None | StopAsyncIteration():
            return "completed"
        case Refused():
            return "refused"
        case EngineLost():
            return "engine_lost"
        case StartTimeout() | StreamTimeout():
            return "deadline"
        case SessionEnded():
            outcome = exc.outcome
        case BaseExceptionGroup():
            each = {outcome_of(inner, cancelled_as) for inner in exc.exceptions}
            outcome = each.pop() if len(each) == 1 else "failed"
        case Exception():
            return "failed"
        case GeneratorExit():
            outcome = cancelled_as
        case _ if isinstance(exc, anyio.get_cancelled_exc_class()):
            outcome = cancelled_as
    return outcome if outcome in OUTCOMES else "failed"


class RegistryState:
    """What a registry and its sessions share.

    Attributes:
        live: Live sessions by id; weakly, as their owners and tasks refer to them.
        closing: Closed sessions whose END is not done.
        quarantined: Ids by key of sessions whose END failed.
        ends_failed: How many these ever were.
        changed: Set when a session closes or its END is done, if a task waits.
        entered: Whether the registry is entered; what follows is set then.
        post: Calls a function in the loop, from any thread.
        watchdog: Enforces the deadlines of streams and starts.
        starts: What all starts need of the loop and the registry.
    """

    loop: object
    post: Callable[[Callable[[], object]], None]
    watchdog: DeadlineWatchdog
    new_scope: Callable[..., anyio.CancelScope]
    supervisor: TaskSupervisor
    starts: StartEnvironment

    def __init__(self, max_quarantined: int, observer: Observer | None) -> None:
        self.live: dict[str, ref[Session]] = {}
        self.closing: set[Session] = set()
        self.outcomes: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self.quarantined: dict[str, str] = {}
        self.ends_failed = 0
        self.emit = events.guarded(observer)
        self.max_quarantined = max_quarantined
        self.entered = False
        self.clock: Callable[[], float] = anyio.current_time
        self.changed: anyio.Event | None = None

    def check_loop(self) -> None:
        """Raise unless the registry is entered, in this event loop."""
        if not self.entered:
            if hasattr(self, "loop"):
                what = "this SessionRegistry is closed, as its block was left"
                raise RuntimeError(f"{what}; enter it again with async with")
            raise RuntimeError("enter the SessionRegistry with async with first")
        if current_loop() is not self.loop:
            raise RuntimeError("a SessionRegistry is for the loop it was entered in")

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until *reached* returns true."""
        while not reached():
            self.changed = self.changed or anyio.Event()
            await self.changed.wait()

    def quarantine(self, key: str, id_: str) -> None:
        """Remember a session whose END failed, and forget the oldest beyond a bound."""
        self.ends_failed += 1
        self.quarantined[key] = id_
        if len(self.quarantined) > self.max_quarantined:
            del self.quarantined[next(iter(self.quarantined))]


class _NoScope:
    """Stands for the scope of a block in an async generator: none may span a yield.

    Args:
        lose: Called if the task that enters is cancelled: mostly it leaves the block
            behind. It cannot be seen whether it passed the generator on before.
    """

    def __init__(self, lose: Callable[[], object]) -> None:
        self._revoke = call_if_cancelled(lose)

    def cancel(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._revoke()


@final
@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Session(NoCopy):
    """One request of one client, from `SessionRegistry.open` until its end.

    Entered with ``with`` by the task that works on the request. Leaving never waits:
    the registry sends END to the engine. A session that is lost, not entered and with
    no END to come, is closed with a `ResourceWarning`.

    In an async generator, such as the body of a response, its block may be left by
    another task. So `stop` does not cancel such a block: it gets `SessionEnded` where
    it waits for an item of `stream`, or where it is left. On asyncio the session is
    closed as well if the task that entered it is cancelled, also where that task had
    passed the generator on: enter it in the task that reads the rest.

    Attributes:
        id: The id that clients know.
        generation: Distinguishes sessions that had the same id, one after another.
        key: ``"id#generation"``: never used twice, so a late message about it cannot
            hit a newer session. Use it towards the engine.
        opened_at: By the event loop's clock, in seconds.
        cancelled_as: What a cancellation of the owner is counted as.
        lease: What starts take over, unless given another; `managed` sets it.
        outcome: How the session ended, or ``None`` while it is live.
    """

    _state: RegistryState
    id: str
    generation: int
    key: str
    opened_at: float
    cancelled_as: Outcome = "cancelled"
    lease: Lease | None = None
    outcome: Outcome | None = None
    _boxes: dict[object, Payload[Any]] = field(default_factory=dict)
    _starts: list[StartTask[Any]] = field(default_factory=list)
    _scope: anyio.CancelScope | _NoScope | None = None
    # What `stop` ends, where there is no block to cancel.
    _streams: tuple[ref[Stream[Any]], ...] = ()
    _managed: bool = False  # the first of them spans all others
    _stopped: bool = False
    # Half a kilobyte each: only if a task waits for it.
    _settled: anyio.Event | None = None
    _quiet: anyio.Event | None = None
    __new__ = made_by("`sessions.open(id)`")

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
        if self._state.emit is not None:
            self._state.emit(PayloadReleased(session=self.id, bytes=nbytes, how=how))

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
                limit. This call raises within 0.1 s, also where *open_* goes on
                regardless, as in a thread; *end* and the lease wait for that.

        Raises:
            StartTimeout: *timeout* went by; what was sent is ended by key.
            SessionEnded: Another task closed the session.
            RuntimeError: The session was started before, or *lease* is held no more.
            TypeError: *lease* is no lease, or *end* cannot be called with one argument.
            ValueError: *timeout* is NaN.
            Exception: What *open_* raised; the locals of its frames are cleared.

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
        outside = sys.exc_info()[1]  # what the caller is handling is the caller's
        try:
            tasks = self._begin(starts, lease, timeout)
        except BaseException as error:
            clear_traceback_frames(error, until=outside)
            if isinstance(lease, Lease):
                lease.release()
            raise
        finally:
            del starts, outside
        return await self._opened(tasks)

    def _begin(
        self, pairs: Pairs[T], lease: Lease | None, timeout: float
    ) -> list[StartTask[T]]:
        """Begin the starts, each in a task of the registry."""
        state = self._state
        if self.outcome is None:
            state.check_loop()
        # An error found in a task of the registry would end all of its tasks.
        timeout = check_deadline("timeout", timeout)
        starts = make_starts(pairs, state.clock(), timeout)
        if not starts:
            return []
        fits = lease is None or isinstance(lease, Lease)
        check(fits, "a start takes a lease, awaited", lease)
        if self._starts:
            what = f"session {self.id!r} was started before"
            raise RuntimeError(f"{what}; open several streams with start_all")
        self._check_open()
        if lease is not None and lease is not self.lease and not lease.held:
            raise RuntimeError(
                "the lease was released before; admit one for this start"
            )
        self._starts, self.lease = starts, lease
        if lease is not None:
            lease.owned_by_start = True
        context, tasks = self._start_context(), iter(starts)
        try:
            for start in tasks:
                state.supervisor.spawn(start.run, context)
        except BaseException:
            for each in starts:
                each.close()  # what has a task is withheld there
            for each in (start, *tasks):
                each.abort(context)
            raise
        return starts

    def _start_context(self) -> StartContext:
        return StartContext(
            self._state.starts,
            self._start_settled,
            self._start_finished,
            self._end_failed,
            self._close,
        )

    async def _opened(self, starts: list[StartTask[T]]) -> list[T]:
        """Wait until all have opened, or one has not, or the session is closed."""
        if not starts:
            return []
        try:
            await starts[0].caller
        except BaseException:
            # From CPython 3.12 an error that is kept keeps its awaiting callers, too.
            for start in starts:
                start.abandon()
            raise
        if self.outcome is None and all(start.how == "started" for start in starts):
            return [cast("T", start.value) for start in starts]
        for start in starts:
            start.close()
        raise start_error(starts, None if self.outcome is None else self._ended())

    def _start_settled(self, start: StartTask[Any], duration_s: float) -> None:
        last = all(each.how for each in self._starts)
        if last and self._settled is not None:
            self._settled.set()
        if last or start.how != "started":
            start.caller.wake()
        try:
            if last and self.lease is not None:
                self.lease.release()
        finally:
            self._report(events.StartSettled, how=start.how, duration_s=duration_s)

    def _start_finished(self) -> None:
        if self.phase == "quiet":
            self._state.closing.discard(self)
            if self._settled is not None:  # also where there was no start
                self._settled.set()
            if self._quiet is not None:
                self._quiet.set()
        changed, self._state.changed = self._state.changed, None
        if changed is not None:
            changed.set()

    def _end_failed(self, error: BaseException, name: str) -> None:
        text = "END of session %r, %s, failed with %s; the engine may still hold it"
        _log.warning(text, self.key, name, describe_error(error))
        self._state.quarantine(self.key, self.id)
        self._report(events.EndFailed, error=type(error).__name__)

    def _cut_starts(self) -> None:
        """End starts at once whose caller has left, and which go on opening."""
        for start in self._starts:
            start.close(cut=True)

    def _abort_starts(self) -> None:
        """End starts whose tasks never ran."""
        for start in self._starts:
            start.abort(self._start_context())

    def stream(
        self,
        source: AsyncIterator[T],
        *,
        first_item: float | None = None,
        idle: float | None = None,
        total: float | None = None,
        grace: float = 5.0,
    ) -> Stream[T]:
        """Own *source* as a `Stream` whose block, or wait for an item, deadlines end.

        In seconds: until the first item, between later ones, for the whole stream,
        and as *grace* for the source to close.

        Raises:
            ValueError: One of them is negative or NaN.
        """
        deadlines = StreamDeadlines(first_item=first_item, idle=idle, total=total)
        stream = WatchedStream(
            source,
            deadlines,
            grace=grace,
            watchdog=self._state.watchdog,
            new_scope=self._state.new_scope,
            on_end=self._stream_ended,
        )
        if isinstance(self._scope, _NoScope) or not (self._scope or self._managed):
            self._streams = tuple(map(ref, [*self._open_streams(), stream]))
        return stream

    def _open_streams(self) -> list[Stream[Any]]:
        streams = [each() for each in self._streams]
        return [each for each in streams if each is not None and not each.closed]

    def _stream_ended(self, items: int) -> None:
        self._report(StreamEnded, items=items)

    def close(self, outcome: Outcome = "completed") -> bool:
        """End the session, unless it has ended; return whether it was this call.

        Synchronous. The id is free at once; the registry sends END to the engine.

        Raises:
            ValueError: There is no such *outcome*.
        """
        return self._close(outcome, False)

    def stop(self, outcome: Outcome = "cancelled") -> None:
        """As `close`, from outside: also cancels the owner's ``with`` block.

        The owner gets `SessionEnded` where it leaves the block.
        """
        self._close(outcome, True)

    def _close(self, outcome: Outcome, stop: bool) -> bool:  # noqa: FBT001
        check_outcome(outcome)
        if self.outcome is not None:
            return False
        state = self._state
        state.check_loop()
        self.outcome, self._stopped = outcome, stop
        del state.live[self.id]
        state.outcomes[outcome] += 1
        state.closing.add(self)
        self._start_finished()
        for start in self._starts:
            start.close(cut=outcome == "shutdown")
        if stop and self._scope is not None:
            self._scope.cancel()
        for stream in self._open_streams() if stop else ():
            stream.stop(self._ended())
        self._clear_boxes()
        return True

    def _clear_boxes(self) -> None:
        try:
            for payload in list(self._boxes.values()):
                payload.clear()
        finally:
            # An observer may raise a BaseException, and is called last of all.
            if self._boxes:
                self._clear_boxes()
            else:
                duration_s = self._state.clock() - self.opened_at
                self._report(SessionClosed, outcome=self.outcome, duration_s=duration_s)

    @property
    def init_done(self) -> InitDone:
        """Whether the engine has answered: the barrier that END waits for.

        Set once, whatever happens: when the start has opened its stream, has failed,
        was withheld, cancelled or given up; of several starts, with the last (each END
        waits for its own); or when a session closes that has started nothing. Nothing
        begins after it that END would miss. ``await session.init_done`` waits, and may
        be cancelled; ``session.init_done.is_set()`` asks, in any thread.
        """
        return InitDone(self._has_settled, self._until_settled)

    def _has_settled(self) -> bool:
        return (bool(self._starts) or self.outcome is not None) and all(
            start.how for start in self._starts
        )

    async def _until_settled(self) -> None:
        if self._has_settled():
            await checkpoint()
            return
        self._state.check_loop()
        self._settled = self._settled or anyio.Event()
        await self._settled.wait()

    async def quiet(self) -> None:
        """Wait until the session is closed and its END is done.

        Cancellation:
            At any time; changes nothing.
        """
        if self.phase == "quiet":
            await checkpoint()
            return
        self._state.check_loop()
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

    def _close_after(self, error: BaseException | None) -> None:
        """Close with the outcome that *error*, which left the block, stands for."""
        self.close(outcome_of(error, self.cancelled_as))

    def __enter__(self) -> Self:
        if self._scope is not None:
            raise RuntimeError(f"session {self.id!r} can be entered once; open another")
        if in_async_generator():
            self._check_open()
            self._scope = _NoScope(self._lose)
            return self
        self._scope = self._state.new_scope().__enter__()
        if self.outcome is not None:
            self._stopped = True  # also by `close`: it was not this block
            self._scope.cancel()
        return self

    def __exit__(self, *left_by: Any) -> None:  # noqa: PYI036 - passed on as it is
        error: BaseException | None = left_by[1]
        assert self._scope is not None
        try:
            self._close_after(error)
        finally:
            swallowed = self._scope.__exit__(*left_by)
        # Also where the owner was about to leave and nothing was raised yet.
        if self._stopped and (error is None or swallowed):
            raise self._ended()

    def _ended(self) -> SessionEnded:
        message = f"session {self.id!r} has ended: {self.outcome}; open another"
        if self._stopped:
            message = f"the session was ended from outside: {self.outcome}"
        return SessionEnded(message, outcome=str(self.outcome))

    def _check_open(self) -> None:
        if self.outcome is not None:
            raise self._ended()

    def _lose(self) -> None:
        # For finalisers, which may run in any thread.
        self._state.post(partial(self.close, self.cancelled_as))

    def _report(self, kind: Callable[..., Event], **facts: Any) -> None:
        if self._state.emit is not None:
            event = kind(session=self.id, generation=self.generation, **facts)
            self._state.emit(event)

    def __del__(self) -> None:
        if self.outcome is None and not sys.is_finalizing():
            self._lose()
            what = f"session {self.key!r} was dropped without being closed"
            how = "enter it with a with block, or keep it and call close()"
            self._warn(f"{what}; {how}")

    def __repr__(self) -> str:
        return f"<Session {self.key!r} {self.outcome or self.phase}>"
