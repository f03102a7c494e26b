"""The registry: every live session, and the tasks that outlive their owners."""

# ruff: noqa: SLF001 - the registry ends what its sessions started
from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, final
from weakref import ref

import anyio
from anyio.abc import TaskGroup

from . import events
from ._eventloop import (
    TaskSupervisor,
    current_loop,
    current_task,
    event_loop_clock,
    threadsafe_call,
)
from ._exceptions import GateClosed, SessionExists, SessionNotFound
from ._owner import owner
from ._session import RegistryState, Session, check_outcome
from ._start import StartEnvironment
from ._stream import DeadlineWatchdog
from ._validation import (
    NoCopy,
    check,
    check_amount,
    check_deadline,
    check_int,
    check_limit,
)
from .events import Observer, Outcome

_new = object.__new__


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
class SessionRegistry(NoCopy):
    """Opens sessions, and finishes what their owners left behind.

    ``async with SessionRegistry() as sessions:`` lives as long as the server;
    another event loop or thread gets a `RuntimeError`. It can be made before any loop
    runs, for decorators to refer to, and be entered again once it was left. Starts and
    ENDs run in its task group: no cancellation of a request can tear them. Leaving ends
    all sessions with ``"shutdown"`` and waits until each END is done or out of time.

    Args:
        end_timeout: Seconds that the END of one session may take.
        max_quarantined: Sessions whose END failed that are remembered.
        observer: Called with events of sessions, starts, payloads and drains.

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
        self._end_timeout = check_limit("end_timeout", end_timeout)
        max_quarantined = check_amount("max_quarantined", max_quarantined)
        self._state = RegistryState(max_quarantined, observer)
        self._opened = 0
        self._tasks: TaskGroup | None = None

    def open(self, id_: str) -> Session:
        """Open a session with an id that no live one has; enter it with ``with``.

        An id is free as soon as its session is closed: no key is ever used again.

        Raises:
            SessionExists: A live session has this id.
            GateClosed: The registry drains.
            RuntimeError: The registry is not entered, or in another event loop.
        """
        state = self._state
        state.check_loop()
        check(isinstance(id_, str), "the id of a session is a string", id_)
        if self.draining:
            raise GateClosed("the server is shutting down; ask another one")
        if id_ in state.live:
            found = f"a live session has id {id_!r}"
            raise SessionExists(f"{found}; choose another, or wait for its end")
        self._opened = number = self._opened + 1
        now = state.clock()
        session: Session = _new(Session)  # which cannot be called
        Session.__init__(session, state, id_, number, f"{id_}#{number}", now)
        state.live[id_] = ref(session)
        if (claim := owner.get()) is not None:
            claim(session)
        if state.emit is not None:
            state.emit(events.SessionOpened(session=id_, generation=number))
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
        live, closing = self._state.live, self._state.closing
        await self._state.until(
            lambda: id_ not in live and all(s.id != id_ for s in closing)
        )
        if id_ in self._state.quarantined.values():
            what = f"the engine may still have a session {id_!r}, whose END failed"
            raise SessionExists(f"{what}; choose another id, or release() its key")
        return self.open(id_)

    def quarantined(self) -> list[str]:
        """Keys of sessions whose END failed: the engine may still have them."""
        return list(self._state.quarantined)

    def release(self, *keys: str) -> None:
        """Take *keys* out of quarantine, once the engine has released them."""
        for key in keys:
            self._state.quarantined.pop(key, None)

    def get(self, id_: str | None = None, *, key: str | None = None) -> Session:
        """Return the live session with this id, or with this *key*.

        Raises:
            SessionNotFound: There is none.
            TypeError: Neither was given, or it is no string.
        """
        wanted = id_ or str(key or "").rpartition("#")[0]
        session = self._state.live.get(wanted, lambda: None)()
        if session is None or key not in (None, session.key):
            asked = key if id_ is None else id_
            check(isinstance(asked, str), "get takes an id or key=, a string", asked)
            raise SessionNotFound(f"no live session has id {key or id_!r}")
        return session

    def remove(
        self,
        session_or_id: Session | str,
        *,
        generation: int | None = None,
        outcome: Outcome = "completed",
    ) -> bool:
        """End this one session if it is live here; return whether it was this call.

        For clean-up that may come late or twice: it never ends a newer session with the
        same id. Without *generation*, an id stands for the session that has it now. It
        never waits: the registry sends END, after `Session.init_done`.

        Raises:
            TypeError: It is neither a session nor an id, or *generation* is no number.
            ValueError: There is no such *outcome*.
        """
        check_outcome(outcome)
        what = "remove takes a session or an id"
        check(isinstance(session_or_id, Session | str), what, session_or_id)
        if generation is not None:
            check_int(generation=generation)
        id_ = session_or_id if isinstance(session_or_id, str) else session_or_id.id
        session = self._state.live.get(id_, lambda: None)()
        if session is None or session_or_id not in (id_, session):
            return False
        if generation not in (None, session.generation):
            return False
        return session.close(outcome)

    def live(self) -> list[Session]:
        """The live sessions, oldest first."""
        return [s for found in list(self._state.live.values()) if (s := found())]

    def statistics(self) -> SessionStatistics:
        """The registry as it is now. Any thread."""
        # Copied, each in one step: another thread may ask, as a scrape does.
        boxes = [box for s in self.live() for box in list(s._boxes.values())]
        return SessionStatistics(
            opened=self._opened,
            live=len(self._state.live),
            closing=len(self._state.closing),
            payloads=len(boxes),
            payload_bytes=sum(box.nbytes for box in boxes),
            ends_failed=self._state.ends_failed,
            outcomes=dict(self._state.outcomes),
        )

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
        check_outcome(outcome)
        sessions = self.live()
        for closing in list(self._state.closing) if outcome == "shutdown" else ():
            closing._cut_starts()
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
        state = self._state
        if state.entered:
            state.check_loop()
        began, deadline = state.clock(), check_deadline("deadline", deadline)
        self.draining = True
        if state.emit is not None:
            state.emit(events.DrainStarted(live=len(state.live)))
        with anyio.move_on_after(deadline):
            await state.until(lambda: not state.live)
        cut = self.close_all("shutdown")
        await state.until(lambda: not state.closing)
        if state.emit is not None:
            duration_s = state.clock() - began
            state.emit(events.DrainFinished(cut=cut, duration_s=duration_s))
        return cut

    async def __aenter__(self) -> Self:
        state = self._state
        if state.entered:
            raise RuntimeError("this SessionRegistry is already entered; make another")
        self.draining, state.changed, state.loop = False, None, current_loop()
        state.clock, state.post = event_loop_clock(), threadsafe_call()
        state.watchdog = DeadlineWatchdog(state.clock)
        # A server that is cancelled may still drain, shielded.
        self._watching = anyio.CancelScope(shield=True)
        self._tasks = await anyio.create_task_group().__aenter__()
        # The loop's own class: anyio looks for the loop at each scope.
        state.new_scope = type(self._watching)
        state.starts = StartEnvironment(
            state.clock, state.new_scope, state.watchdog.watch, self._end_timeout
        )
        state.supervisor, state.entered = TaskSupervisor(self._tasks), True
        self._tasks.start_soon(self._watch, current_task())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, supervisor, self.draining = self._tasks, self._state.supervisor, True
        assert tasks is not None
        try:
            try:
                self.close_all("shutdown")
            finally:
                supervisor.on_idle(self._watching.cancel)
                try:
                    # Without the error of the block, which it would put in a group.
                    # Every task in it has a deadline, for which it is watched.
                    await tasks.__aexit__(None, None, None)  # noqa: ASYNC102
                finally:  # also where this task is cancelled meanwhile
                    if not self._watching.cancel_called:  # cancelled before it ran
                        await self._watch(current_task())  # noqa: ASYNC102, ASYNC120
                    errors, supervisor.errors = supervisor.errors, []
                    if errors:
                        raise BaseExceptionGroup("aborted", errors)
        except BaseExceptionGroup as group:
            # A single failure is raised as itself, never as a group of one.
            raise group.exceptions[0] if not group.exceptions[1:] else group from None
        finally:
            for session in list(self._state.closing):
                session._abort_starts()
            self._state.entered = False

    async def _watch(self, host: Any) -> None:
        with self._watching:
            while True:
                try:
                    await self._state.watchdog.run()
                except anyio.get_cancelled_exc_class():  # noqa: ASYNC103
                    # A native one is not heeded, as what is left to do goes by its
                    # deadlines; unless the task that entered is gone without leaving.
                    if self._watching.cancel_called or host.done():
                        raise
