"""The registry: every live session, and the tasks that outlive their owners."""

# ruff: noqa: SLF001 - a session and its registry are one mechanism in two modules
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Self, final
from weakref import ref

import anyio
from anyio.abc import TaskGroup

from . import events
from ._checks import Unique, expect, seconds, whole
from ._crew import Crew
from ._decorators import Decorator, managed
from ._errors import GateClosed, SessionExists, SessionNotFound
from ._outcome import OUTCOMES, expect_outcome
from ._park import current_loop, current_task, loop_clock, loop_post
from ._session import Session
from ._watchdog import Watchdog
from .events import Observer, Outcome

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
    outcomes: Mapping[Outcome, int]


@final
class SessionRegistry(Unique):
    """Opens sessions, and finishes what their owners left behind.

    ``async with SessionRegistry() as sessions:`` lives as long as the server;
    another event loop or thread gets a `RuntimeError`. It can be made before any loop
    runs, for decorators to refer to, and be entered again once it was left. Starts and
    ENDs run in its task group: no cancellation of a request can tear them. Leaving ends
    all sessions with ``"shutdown"`` and waits until each END is done or out of time.

    Args:
        end_timeout: Seconds that the END of one session may take.
        max_quarantined: Sessions whose END failed that are remembered.
        observer: Told of sessions, starts, payloads and drains.

    Attributes:
        draining: Whether `drain` was called, or the registry is being left.
    """

    def __init__(
        self,
        *,
        end_timeout: float = 5.0,
        max_quarantined: int = 1000,
        observer: Observer | None = None,
    ) -> None:
        self.draining = False
        self._end_timeout = seconds("end_timeout", end_timeout)
        self._emit = events.guarded(observer)
        # Weakly: whoever works on a session, or has to end it, refers to it.
        self._live: dict[str, ref[Session]] = {}
        self._closing: set[Session] = set()
        self._outcomes: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self._quarantined: dict[str, str] = {}
        self._max_quarantined = whole("max_quarantined", max_quarantined)
        self._opened = self._ends_failed = 0
        self._changed: anyio.Event | None = None
        self._tasks: TaskGroup | None = None
        self._now: Callable[[], float] = anyio.current_time

    def open(self, id_: str) -> Session:
        """Open a session with an id that no live one has; enter it with ``with``.

        An id is free as soon as its session is closed: no key is ever used again.

        Raises:
            SessionExists: A live session has this id.
            GateClosed: The registry drains.
            RuntimeError: The registry is not entered, or in another event loop.
        """
        self._confirm_here()
        expect(isinstance(id_, str), "the id of a session is a string", id_)
        if self.draining:
            raise GateClosed("the server is shutting down; ask another one")
        if id_ in self._live:
            found = f"a live session has id {id_!r}"
            raise SessionExists(f"{found}; choose another, or wait for its end")
        self._opened = number = self._opened + 1
        session = Session(self, id_, number, f"{id_}#{number}", self._now())
        self._live[id_] = ref(session)
        session._tell(events.SessionOpened)
        return session

    def _confirm_here(self) -> None:
        if self._tasks is None:
            raise RuntimeError("enter the SessionRegistry with async with first")
        if current_loop() is not self._loop:
            raise RuntimeError("a SessionRegistry is for the loop it was entered in")

    async def open_when_free(self, id_: str) -> Session:
        """As `open`, but wait until no session has this id and none is closing.

        For engines that know sessions by the plain id.

        Raises:
            SessionExists: The END of a session with this id failed, so the engine
                may still have it; see `quarantined`.

        Cancellation:
            At any time; nothing was opened.
        """
        await self._until(
            lambda: id_ not in self._live and all(s.id != id_ for s in self._closing)
        )
        if id_ in self._quarantined.values():
            found = f"the engine may still have a session {id_!r}, whose END failed"
            how = "choose another id, or release() its key once it has not"
            raise SessionExists(f"{found}; {how}")
        return self.open(id_)

    def quarantined(self) -> list[str]:
        """Keys of sessions whose END failed: the engine may still have them."""
        return list(self._quarantined)

    def release(self, *keys: str) -> None:
        """Forget quarantined *keys*: the engine, or a new one, is clean of them."""
        for key in keys:
            self._quarantined.pop(key, None)

    def get(self, id_: str | None = None, *, key: str | None = None) -> Session:
        """Return the live session with this id, or with this *key*.

        Raises:
            SessionNotFound: There is none.
        """
        session = self._live.get(id_ or (key or "").rpartition("#")[0], lambda: None)()
        if session is None or key not in (None, session.key):
            raise SessionNotFound(f"no live session has id {key or id_!r}")
        return session

    def live(self) -> list[Session]:
        """The live sessions, oldest first."""
        return [s for found in list(self._live.values()) if (s := found())]

    def statistics(self) -> SessionStatistics:
        """The registry as it is now. Any thread."""
        # Copied, each in one step: another thread may ask, as a scrape does.
        boxes = [box for s in self.live() for box in list(s._boxes.values())]
        return SessionStatistics(
            opened=self._opened,
            live=len(self._live),
            closing=len(self._closing),
            payloads=len(boxes),
            payload_bytes=sum(box.nbytes for box in boxes),
            ends_failed=self._ends_failed,
            outcomes=dict(self._outcomes),
        )

    def track(self, key: Callable[..., str]) -> Decorator:
        """Decorate a function that streams: each stream is a session here.

        Its id is what *key* returns for the call's arguments. See `managed`.
        """
        return managed(sessions=self, key=key)

    async def cancel(self, id_: str) -> None:
        """End a session with ``"cancelled"`` and wait until its engine is quiet.

        Raises:
            SessionNotFound: No live session has this id.

        Cancellation:
            The session is ended all the same; only the waiting stops.
        """
        (session := self.get(id_)).stop()
        await session.quiet()

    def close_all(self, outcome: Outcome = "cancelled") -> int:
        """End every live session, of which none starts anything then; say how many."""
        expect_outcome(outcome)
        sessions = self.live()
        for closing in self._closing if outcome == "shutdown" else ():
            for start in closing._starts:  # its caller has left, and it goes on
                start.close(cut=True)
        with ExitStack() as calls:  # each is made, also where an observer raises
            for session in reversed(sessions):
                calls.callback(session.stop, outcome)
        return len(sessions)

    async def drain(self, deadline: float) -> int:
        """Open nothing new, let sessions finish, then end the rest.

        Returns how many had to be ended, when all engines are quiet: every END has a
        deadline of its own.

        Args:
            deadline: Seconds until the rest is ended with ``"shutdown"``.

        Raises:
            ValueError: *deadline* is NaN; the registry stays open.

        Cancellation:
            At any time. Nothing is opened any more all the same.
        """
        if self._tasks is not None:
            self._confirm_here()
        began, deadline = self._now(), seconds("deadline", deadline)
        self.draining = True
        if self._emit is not None:
            self._emit(events.DrainStarted(live=len(self._live)))
        with anyio.move_on_after(deadline):
            await self._until(lambda: not self._live)
        cut = self.close_all("shutdown")
        await self._until(lambda: not self._closing)
        if self._emit is not None:
            self._emit(events.DrainFinished(cut=cut, duration_s=self._now() - began))
        return cut

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()

    def _look_at(self, session: Session) -> None:
        if session.phase == "quiet":
            self._closing.discard(session)
            if session._quiet is not None:
                session._quiet.set()
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def _end_failed(self, session: Session, error: BaseException) -> None:
        kind = type(error).__name__
        # Not its words: they are the user's, and may be about a payload.
        *_, (frame, line) = walk_tb(error.__traceback__)
        text = "END of session %r failed with %s at %s:%s; the engine may still hold it"
        _log.warning(text, session.key, kind, frame.f_code.co_filename, line)
        self._ends_failed += 1
        self._quarantined[session.key] = session.id
        if len(self._quarantined) > self._max_quarantined:
            del self._quarantined[next(iter(self._quarantined))]
        session._tell(events.EndFailed, error=kind)

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("a SessionRegistry has one block at a time; make two")
        self.draining, self._changed, self._loop = False, None, current_loop()
        self._now, self._post = loop_clock(), loop_post()
        self._watchdog = Watchdog(self._now)
        # A server that is cancelled may still drain, shielded.
        self._watching = anyio.CancelScope(shield=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        # The loop's own class: anyio looks for the loop at each scope.
        self._crew, self._new_scope = Crew(self._tasks), type(self._watching)
        self._tasks.start_soon(self._watch, current_task())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self.draining = self._tasks, True
        assert tasks is not None
        try:
            try:
                self.close_all("shutdown")
            finally:
                self._crew.end(self._watching.cancel)
                try:
                    # Without the error of the block, which it would put in a group.
                    # Every task in it has a deadline, for which it is watched.
                    await tasks.__aexit__(None, None, None)  # noqa: ASYNC102
                finally:  # also where this task is cancelled meanwhile
                    if not self._watching.cancel_called:  # cancelled before it ran
                        await self._watch(current_task())  # noqa: ASYNC102, ASYNC120
                    errors, self._crew.errors = self._crew.errors, []
                    if errors:
                        raise BaseExceptionGroup("aborted", errors)
        except BaseExceptionGroup as group:
            # One failure must never reach anybody as a group of one.
            raise group.exceptions[0] if not group.exceptions[1:] else group from None
        finally:
            for session in list(self._closing):
                for start in session._starts:  # whose task never ran
                    start.abort(session)
            self._tasks = None

    async def _watch(self, host: Any) -> None:
        with self._watching:
            while True:
                try:
                    await self._watchdog.run()
                except anyio.get_cancelled_exc_class():  # noqa: ASYNC103
                    # A native one is not heeded, as what is left to do goes by its
                    # deadlines; unless whoever entered has gone without leaving.
                    if self._watching.cancel_called or host.done():
                        raise
