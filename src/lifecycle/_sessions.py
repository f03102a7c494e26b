"""The registry: every live session, and the tasks that outlive their owners."""

from __future__ import annotations

import logging
import math
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, final, get_args

import anyio

from ._decorators import Decorator, managed
from ._errors import GateClosed, SessionExists, SessionNotFound
from ._park import loop_clock, loop_post
from ._session import Session
from ._ticket import whole
from ._watchdog import Watchdog
from .events import (
    DrainFinished,
    DrainStarted,
    EndFailed,
    Event,
    Observer,
    Outcome,
    SessionClosed,
    SessionOpened,
    guarded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from anyio.abc import TaskGroup

    from ._start import Start
    from ._stream import Stream
    from ._watchdog import Deadlines

_log = logging.getLogger("lifecycle")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """A registry at one moment. ``opened = live + sum(outcomes.values())``.

    Attributes:
        opened: Sessions ever opened.
        live: Sessions open now.
        closing: Sessions that are closed but whose engine is not quiet yet.
        payloads: Boxes of sessions that are not empty.
        payload_bytes: Bytes in them.
        ends_failed: Sessions whose END failed; the engine may still hold them.
        outcomes: Sessions closed, by outcome.
    """

    opened: int
    live: int
    closing: int
    payloads: int
    payload_bytes: int
    ends_failed: int
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)


@final
class SessionRegistry:
    """Opens sessions, and finishes what their owners left behind.

    ``async with SessionRegistry() as sessions:`` lives as long as the server.
    Starts and ENDs run in its task group, so no cancellation of a request can
    tear them. Leaving the block ends every session with ``"shutdown"`` and waits
    until each END is done or its time is up. It can be made before any event
    loop runs, for decorators to refer to, and is entered once.

    Everything but the ``async with`` itself belongs to the registry's event loop.

    Args:
        end_timeout: Seconds that the END of one session may take.
        max_quarantined: Sessions whose END failed that are remembered.
        observer: Told of sessions, starts, payloads and drains.

    Raises:
        ValueError: *end_timeout* is NaN.
    """

    def __init__(
        self,
        *,
        end_timeout: float = 5.0,
        max_quarantined: int = 1000,
        observer: Observer | None = None,
    ) -> None:
        if math.isnan(end_timeout):
            raise ValueError("end_timeout must be a number of seconds, not NaN")
        self._end_timeout = end_timeout
        self._emit = guarded(observer)
        self._live: dict[str, Session] = {}
        self._closing: set[Session] = set()
        self._outcomes: dict[Outcome, int] = dict.fromkeys(get_args(Outcome), 0)
        self._generations = 0
        self._quarantined: dict[str, str] = {}
        self._most_quarantined = max_quarantined
        self._payloads = self._payload_bytes = self._ends_failed = 0
        self._draining = False
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._watchdog: Watchdog | None = None
        # Made on entry: anyio has no scopes outside of an event loop.
        self._watching: anyio.CancelScope
        self._clock: Callable[[], float] = anyio.current_time
        self._post: Callable[[Callable[[], object]], None]

    def open(self, id_: str) -> Session:
        """Open a session; enter it with ``with``.

        A session that is closed has given its id free, even while its engine is
        still being told: keys never repeat, so the two cannot meet.

        Args:
            id_: The id that the outside world knows.

        Raises:
            SessionExists: A live session has this id.
            GateClosed: The registry drains.
            RuntimeError: The registry is not entered.
        """
        if self._tasks is None:
            raise RuntimeError("enter the SessionRegistry with async with first")
        if self._draining:
            raise GateClosed("the server is shutting down; ask another one")
        if id_ in self._live:
            raise SessionExists(
                f"a live session has id {id_!r}; choose another, or wait for its end"
            )
        self._generations += 1
        session = Session(self, id_, self._generations, self._clock())
        self._live[id_] = session
        self.emit(SessionOpened(session=id_, generation=session.generation))
        return session

    async def open_when_free(self, id_: str) -> Session:
        """As `open`, but wait until no session has this id and none is closing.

        For engines that know sessions by the plain id.

        Raises:
            SessionExists: The END of a session with this id failed, so the engine
                may still have it; see `quarantined`.

        Cancellation:
            At any time; nothing was opened.
        """
        while id_ in self._live or any(s.id == id_ for s in self._closing):
            await self._changed.wait()
        if id_ in self._quarantined.values():
            raise SessionExists(
                f"the engine may still have a session with id {id_!r}, whose END "
                f"failed; choose another id, or release() its key once the engine is "
                f"known to be clean"
            )
        return self.open(id_)

    def quarantined(self) -> list[str]:
        """Keys of sessions whose END failed: the engine may still have them."""
        return list(self._quarantined)

    def release(self, *keys: str) -> None:
        """Forget quarantined keys: the engine is known to be clean of them.

        An engine process that was replaced is clean of all.
        """
        for key in keys:
            self._quarantined.pop(key, None)

    def get(self, id_: str) -> Session:
        """Return the live session with this id.

        Raises:
            SessionNotFound: There is none.
        """
        try:
            return self._live[id_]
        except KeyError:
            raise SessionNotFound(f"no live session has id {id_!r}") from None

    async def cancel(self, id_: str) -> None:
        """End a session with ``"cancelled"`` and wait until its engine is quiet.

        Raises:
            SessionNotFound: No live session has this id.

        Cancellation:
            The session is ended all the same; only the waiting stops.
        """
        session = self.get(id_)
        session.stop("cancelled")
        await session.quiet()

    def close_all(self, outcome: Outcome = "cancelled") -> int:
        """End every live session; what was open before starts nothing any more.

        Returns:
            How many sessions were ended.
        """
        sessions = list(self._live.values())
        for session in sessions:
            session.stop(outcome)
        if outcome == "shutdown":
            # Those whose callers have left may still be starting.
            for session in self._closing:
                session.cut()
        return len(sessions)

    def track(self, key: Callable[..., str]) -> Decorator:
        """Decorate a function that streams: each stream is a session here.

        Args:
            key: The session id, as a function of the call's arguments.

        See `lifecycle.managed`.
        """
        return managed(sessions=self, key=key)

    async def drain(self, deadline: float) -> int:
        """Open nothing new, let sessions finish, then end the rest.

        Args:
            deadline: Seconds until the rest is ended with ``"shutdown"``.

        Returns:
            How many sessions had to be ended.

        Cancellation:
            At any time. Nothing is opened any more all the same.
        """
        began = self._clock()
        self._draining = True
        self.emit(DrainStarted(live=len(self._live)))
        with anyio.move_on_after(deadline):
            await self._until(lambda: not self._live)
        cut = self.close_all("shutdown")
        # Every END has a deadline of its own, so this wait is bounded too.
        await self._until(lambda: not self._closing)
        self.emit(DrainFinished(cut=cut, duration_s=self._clock() - began))
        return cut

    @property
    def draining(self) -> bool:
        """Whether `drain` was called, or the registry is being left."""
        return self._draining

    def live(self) -> list[Session]:
        """The live sessions, oldest first."""
        return list(self._live.values())

    def statistics(self) -> SessionStatistics:
        """The registry as it is now."""
        return SessionStatistics(
            opened=self._generations,
            live=len(self._live),
            closing=len(self._closing),
            payloads=self._payloads,
            payload_bytes=self._payload_bytes,
            ends_failed=self._ends_failed,
            outcomes=dict(self._outcomes),
        )

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._changed.wait()

    def _has_changed(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # What a session calls.

    def emit(self, event: Event) -> None:
        """Called by sessions: tell the observer."""
        if self._emit is not None:
            self._emit(event)

    def _now(self) -> float:
        return self._clock()

    def now(self) -> float:
        """Called by sessions: seconds by the loop's clock."""
        return self._clock()

    def post(self, call: Callable[[], object]) -> None:
        """Called by finalisers, in any thread: make *call* in the registry's loop."""
        self._post(call)

    def spawn(self, session: Session, start: Start[Any]) -> None:
        """Called by sessions: run *start* in a task that its caller cannot cancel.

        Raises:
            RuntimeError: The registry is not entered.
        """
        assert self._tasks is not None, "else the session would be closed"
        self._tasks.start_soon(self._supervise, session, start)

    def watch(self, stream: Stream[Any], limits: Deadlines) -> None:
        """Called by sessions: watch the deadlines of *stream*."""
        assert self._watchdog is not None, "else there would be no session"
        self._watchdog.add(stream, limits)

    def closed(self, session: Session) -> None:
        """Called by *session*, once, while its id is its own: book it out."""
        assert session.outcome is not None
        del self._live[session.id]
        if session.phase != "quiet":
            self._closing.add(session)
        self._outcomes[session.outcome] += 1
        self._has_changed()
        self.emit(
            SessionClosed(
                session=session.id,
                generation=session.generation,
                outcome=session.outcome,
                duration_s=self._clock() - session.opened_at,
            )
        )

    def boxed(self, nbytes: int) -> None:
        """Called by sessions: count a payload in."""
        self._payload_bytes += whole("nbytes", nbytes)
        self._payloads += 1

    def unboxed(self, nbytes: int) -> None:
        """Called by sessions: count a payload out."""
        self._payloads -= 1
        self._payload_bytes -= nbytes

    async def _supervise(self, session: Session, start: Start[Any]) -> None:
        try:
            error = await start.run(end_timeout=self._end_timeout, on_cut=session.stop)
        finally:
            # Already closed, but where the loop itself is being torn down.
            if not start.closed.is_set():
                session.close("shutdown")
            if session.settled():
                self._quieten(session)
        if error is not None:
            # Else an END of a wrong form would fail for ever, and nobody would know.
            _log.warning(
                "END of session %r failed with %s; the engine may still hold it",
                session.key,
                _kind_and_place(error),
            )
            self._ends_failed += 1
            self._quarantined[session.key] = session.id
            if len(self._quarantined) > self._most_quarantined:
                del self._quarantined[next(iter(self._quarantined))]
            self.emit(
                EndFailed(
                    session=session.id,
                    generation=session.generation,
                    error=type(error).__name__,
                )
            )

    def _quieten(self, session: Session) -> None:
        self._closing.discard(session)
        self._has_changed()

    # The async with block.

    async def __aenter__(self) -> Self:
        if self._draining or self._tasks is not None:
            raise RuntimeError("a SessionRegistry can be entered once")
        self._clock = loop_clock()
        self._post = loop_post()
        self._watchdog = Watchdog(self._clock)
        # A server that is cancelled may still drain, shielded.
        self._watching = anyio.CancelScope(shield=True)
        tasks = anyio.create_task_group()
        self._tasks = await tasks.__aenter__()
        tasks.start_soon(self._watch_streams, self._watchdog)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        self._draining = True
        self.close_all("shutdown")
        self._watching.cancel()
        try:
            # Without the error of the block: a task group would wrap it, and
            # one failure must never reach anybody as a group of one. Every task
            # in it has a deadline.
            await tasks.__aexit__(None, None, None)  # noqa: ASYNC102
        except BaseExceptionGroup as group:
            raise _alone(group) from None
        finally:
            self._abort_rest()

    def _abort_rest(self) -> None:
        for session in list(self._closing):  # their tasks never ran
            session.abort()
            self._quieten(session)

    async def _watch_streams(self, watchdog: Watchdog) -> None:
        with self._watching:
            await watchdog.run()


def _alone(group: BaseExceptionGroup[BaseException]) -> BaseException:
    return group.exceptions[0] if len(group.exceptions) == 1 else group


def _kind_and_place(error: BaseException) -> str:
    # Not its words: they are the user's, and may be about a payload.
    kind, place = type(error).__name__, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = f" at {frame.f_code.co_filename}:{line}"
    return kind + place
