"""A scripted engine, an observer that records, and a check that nothing is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar, final

import anyio
import anyio.lowlevel

from lifecycle import EngineLost, Gate, SessionRegistry
from lifecycle.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What an engine does with one request.

    Delays are in seconds, ``math.inf`` is never; ``_at`` is the index of an item.
    """

    start_delay: float = 0.0  #: until START is answered
    refuse: Exception | None = None  #: raised in answer to START
    items: Sequence[Any] = (0, 1, 2)  #: what the stream gives
    item_delay: float = 0.0  #: before each item, and before the end of them
    fail_at: int | None = None  #: *error* is raised in its place
    error: Exception | None = None  #: by default a `RuntimeError`
    hang_at: int | None = None  #: nothing ever comes in its place
    die_at: int | None = None  #: the whole engine dies in its place
    end_delay: float = 0.0  #: until END is answered
    end_error: Exception | None = None  #: raised in answer to END


@final
class ScriptedEngine:
    """Plays scripts, dies and restarts on command, and counts calls.

    ``session.start(partial(engine.start, session.key), end=end)`` uses it, where
    ``end`` calls ``engine.end(session.key)``. A session is in the engine from
    the call of `start`, answered or not, until that of `end` or its death.

    Args:
        script: For every request, or a function from the key to one.
    """

    def __init__(self, script: Script | Callable[[str], Script] | None = None) -> None:
        self._script = script or Script()
        self.alive = True  #: whether requests are taken
        self.incarnation = 1  #: how often it was started
        self.live: set[str] = set()  #: keys of the sessions in it
        self.starts = self.ends = 0  #: calls, but for starts while it was dead
        self.early_ends = 0  #: ends before START was sent or answered
        self.double_ends = 0  #: ends of what had been ended before
        self._answered: set[str] = set()
        self._ended: set[str] = set()
        self._death = _IncarnationEnd()

    async def start(self, key: str, payload: object = None) -> ScriptedStream:
        """Take a request. The payload is dropped at once, as if it were sent.

        Raises:
            EngineLost: The engine is dead, or died before it answered.
            Exception: The script refuses.

        Cancellation:
            At any time. The session stays in the engine, as it would if the
            answer were lost on its way.
        """
        del payload
        script, death = self._script_of(key), self._death
        if not self.alive:
            raise death.error()
        self.starts += 1
        self.live.add(key)
        try:
            await death.let_pass(script.start_delay)
        finally:
            self._answered.add(key)
        if script.refuse is not None:
            self.live.discard(key)
            raise script.refuse
        return ScriptedStream(self, key, script, death)

    async def end(self, key: str) -> None:
        """Forget a session. One that is not in the engine is no error.

        Raises:
            Exception: The script's *end_error*.

        Cancellation:
            At any time. END has arrived all the same.
        """
        self.ends += 1
        self.early_ends += key not in self._answered
        self.double_ends += key in self._ended
        self._ended.add(key)
        if key in self.live:
            self.live.discard(key)
            script = self._script_of(key)
            with suppress(EngineLost):
                await self._death.let_pass(script.end_delay)
                if script.end_error is not None:
                    raise script.end_error

    def die(self, reason: str = "killed") -> None:
        """Lose every session; waiting tasks get `lifecycle.EngineLost`."""
        if self.alive:
            self.alive = False
            self.live.clear()
            self._death.reason = reason
            self._death.come.set()

    def restart(self) -> None:
        """Take requests again; what an earlier incarnation had stays lost."""
        if not self.alive:
            self.alive = True
            self.incarnation += 1
            self._death = _IncarnationEnd()

    def _script_of(self, key: str) -> Script:
        return self._script if isinstance(self._script, Script) else self._script(key)


class _IncarnationEnd:
    """The end of one incarnation."""

    def __init__(self) -> None:
        self.come = anyio.Event()
        self.reason = ""

    def error(self) -> EngineLost:
        what = f"the scripted engine died: {self.reason}"
        return EngineLost(what, reason=self.reason)

    async def let_pass(self, seconds: float) -> None:
        """Let *seconds* go by, unless the engine dies meanwhile."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
        elif not self.come.is_set():
            with anyio.CancelScope(deadline=anyio.current_time() + seconds):
                await self.come.wait()
        if self.come.is_set():
            raise self.error()


@final
class ScriptedStream:
    """The items of one request; what `ScriptedEngine.start` returns."""

    def __init__(
        self, engine: ScriptedEngine, key: str, script: Script, death: _IncarnationEnd
    ) -> None:
        self._engine, self._key = engine, key
        self._script, self._death = script, death
        self.given = 0  #: items given so far
        self.closed = False  #: whether `aclose` was called

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next item; a cancellation does not lose it."""
        script, at = self._script, self.given
        if self.closed:
            raise StopAsyncIteration
        delay = math.inf if at == script.hang_at else script.item_delay
        await self._death.let_pass(delay)
        if at == script.die_at:
            self._engine.die()
            raise self._death.error()
        if at == script.fail_at:
            raise script.error or RuntimeError("the script fails here")
        if at >= len(script.items) or self._key not in self._engine.live:
            raise StopAsyncIteration
        self.given += 1
        return script.items[at]

    async def aclose(self) -> None:
        """End the iteration; the session stays in the engine until `end`."""
        self.closed = True


E = TypeVar("E", bound=Event)


@final
class RecordingObserver:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []  #: events so far, oldest first

    def __call__(self, event: Event, /) -> None:
        """Keep *event*."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one *kind*, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def names(self) -> list[str]:
        """The class names of all events, oldest first."""
        return [type(event).__name__ for event in self.events]


def assert_quiescent(*holders: Gate | SessionRegistry) -> None:
    """Check that nothing in *holders* is held or left to do, and say what is.

    A gate is quiescent when no lease is live and no request waits; a registry when
    no session is live, no start and no END is under way and no payload is in a
    box. The counters of both must balance.

    Raises:
        AssertionError: Something is left; the message has one line for each.
    """
    left: list[str] = []
    for holder in holders:
        if isinstance(holder, Gate):
            left += (f"gate {holder.name!r}: {what}" for what in _left_in(holder))
        else:
            left += (f"sessions: {what}" for what in _left_among(holder))
    if left:
        raise AssertionError("not quiescent:\n  " + "\n  ".join(left))


def _left_in(gate: Gate) -> Iterator[str]:
    now = gate.statistics()
    leases = now.admitted - now.released
    slots, nbytes = now.slots_in_use, now.bytes_in_use
    if leases or slots or nbytes:
        yield f"{leases} live leases of {slots} slots and {nbytes} bytes"
    if now.waiting:
        yield f"{now.waiting} requests waiting"
    if leases < 0 or now.cancelled < 0:
        yield f"the counters do not balance: {now}"


def _left_among(sessions: SessionRegistry) -> Iterator[str]:
    now = sessions.statistics()
    for session in sessions.live():
        yield f"live session {session.key!r} ({session.phase})"
    if now.closing:
        yield f"{now.closing} closed sessions with a start or an END under way"
    if now.payloads or now.payload_bytes:
        yield f"{now.payloads} payloads of {now.payload_bytes} bytes in boxes"
    if now.opened != now.live + sum(now.outcomes.values()):
        yield f"the counters do not balance: {now}"
