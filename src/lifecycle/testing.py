"""Tools to test what is built on the library, and the library itself."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, final

import anyio

from lifecycle import Gate, SessionRegistry

from .events import Event

__all__ = ("Attempt", "RecordingObserver", "assert_quiescent", "cancel_everywhere")

E = TypeVar("E", bound=Event)

_Kind = Literal["scope", "native"]

Attempt = Callable[
    [Coroutine[Any, Any, object]], Awaitable[Literal["completed", "cancelled"]]
]
"""What `cancel_everywhere` gives a scenario: runs a coroutine and cancels it."""


@final
class RecordingObserver:
    """An observer that keeps every event, oldest first.

    Attributes:
        events: What was told so far.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event, /) -> None:
        """Keep it."""
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one *kind*, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def names(self) -> list[str]:
        """The class names of all events, oldest first."""
        return [type(event).__name__ for event in self.events]


def assert_quiescent(*holders: Gate | SessionRegistry) -> None:
    """Check that nothing is held, waited for or left to do, and say what is.

    A gate is quiescent when no lease is live and nobody waits; a registry when
    no session is live, no start and no END is under way and no payload is in a
    box. The books of both must balance.

    Args:
        holders: The gates and registries to look at.

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
    if leases or now.slots_in_use or now.bytes_in_use:
        yield (
            f"{leases} live leases of {now.slots_in_use} slots and "
            f"{now.bytes_in_use} bytes"
        )
    if now.waiting:
        yield f"{now.waiting} requests waiting in line"
    if leases < 0 or now.cancelled < 0:
        yield f"the books do not balance: {now}"


def _left_among(sessions: SessionRegistry) -> Iterator[str]:
    now = sessions.statistics()
    for session in sessions.live():
        yield f"live session {session.key!r} ({session.phase})"
    if now.closing:
        yield f"{now.closing} closed sessions with a start or an END under way"
    if now.payloads or now.payload_bytes:
        yield f"{now.payloads} payloads of {now.payload_bytes} bytes in boxes"
    if now.opened != now.live + sum(now.outcomes.values()):
        yield f"the books do not balance: {now}"


@dataclass(frozen=True, slots=True)
class _Strike:
    """When and how to cancel: at the *at*-th suspension, and *again* later."""

    kind: _Kind
    late: bool
    at: int = 1
    again: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {'late' if self.late else 'early'}"

    def point(self) -> str:
        return f"{self.at} and {self.again}" if self.again else f"{self.at}"


def cancel_everywhere(
    scenario: Callable[[Attempt], Awaitable[object]],
    *,
    backends: tuple[str, ...] | None = None,
    kinds: tuple[_Kind, ...] = ("scope", "native"),
    double: bool = False,
    most: int = 200,
    patience: float = 10.0,
) -> dict[str, int]:
    """Run *scenario* again and again, cancelled at another point each time.

    A scenario builds fresh state, calls ``await attempt(coroutine)`` once, and
    checks what must hold afterwards, whatever became of the coroutine. It is run
    for the first suspension of the coroutine, the second, and so on until the
    coroutine has no more; each of them

    - *early*: cancelled as soon as the coroutine is suspended, and *late*: what
      it waits for has happened, but it has not run since (on trio, where no
      cancellation can land there, as it resumes);
    - by *scope*: an anyio cancel scope, which keeps cancelling, and *native*:
      one ``Task.cancel()`` of asyncio, which hits once and cuts every shield.

    Runs event loops of its own, so it is for synchronous tests.

    Args:
        scenario: Called with the attempt to make.
        backends: ``"asyncio"`` and ``"trio"``; by default those installed.
        kinds: Ways to cancel; ``"native"`` is for asyncio only.
        double: Cancel natively a second time, at every later suspension.
        most: Suspensions after which to give up.
        patience: Seconds that one run may take.

    Returns:
        How many suspension points were tried, by ``"asyncio scope early"`` and
        so on.

    Raises:
        AssertionError: A run failed, hung, or swallowed a native cancellation;
            the message names the point.
    """
    points: dict[str, int] = {}
    trio = ("trio",) if importlib.util.find_spec("trio") else ()
    for backend in backends or ("asyncio", *trio):
        run = partial(_run, scenario, backend, patience)
        for kind in kinds:
            for late in (False, True):
                if kind == "scope" or backend == "asyncio":
                    first = _Strike(kind, late)
                    points[f"{backend} {first}"] = _strike_each(
                        run, first, double=double, most=most
                    )
    return points


def _strike_each(
    run: Callable[[_Strike], _Victim], first: _Strike, *, double: bool, most: int
) -> int:
    for at in range(1, most + 1):
        strike = replace(first, at=at)
        victim = run(strike)
        if victim.points < at:
            return at - 1
        again = at
        while double and first.kind == "native" and victim.points > again:
            again += 1
            victim = run(replace(strike, again=again))
    raise AssertionError(
        f"more than {most} suspension points; raise most= or wait less"
    )


def _run(
    scenario: Callable[[Attempt], Awaitable[object]],
    backend: str,
    patience: float,
    strike: _Strike,
) -> _Victim:
    victim = _Victim(strike)

    async def main() -> None:
        with anyio.fail_after(patience):
            await scenario(victim)

    try:
        anyio.run(main, backend=backend)
    except BaseException as error:
        # Outside of the loop nobody is left to hear of a cancellation.
        what = f"{backend} {strike} at {strike.point()}: {error!r}"
        raise AssertionError(what) from error  # noqa: ASYNC104
    if not victim.used:
        raise AssertionError("the scenario never awaited its attempt")
    return victim


def _nothing() -> None: ...


@final
class _Victim:
    """One attempt: counts the suspensions of a coroutine and cancels it."""

    def __init__(self, strike: _Strike) -> None:
        self.points = 0
        self.used = self.struck = False
        self._strike = strike
        self._cancel: Callable[[], object] = _nothing
        # Due as soon as the coroutine resumes: what "late" means on trio.
        self.on_resume: Callable[[], object] = _nothing

    async def __call__(
        self, coroutine: Coroutine[Any, Any, object]
    ) -> Literal["completed", "cancelled"]:
        if self.used:
            coroutine.close()
            raise RuntimeError("a scenario can make one attempt")
        self.used = True
        if self._strike.kind == "native":
            return await self._natively(coroutine)
        with anyio.CancelScope() as scope:
            self._cancel = scope.cancel
            await _Watched(coroutine, self)
        return "cancelled" if scope.cancelled_caught else "completed"

    async def _natively(
        self, coroutine: Coroutine[Any, Any, object]
    ) -> Literal["completed", "cancelled"]:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = task.cancel
        try:
            await _Watched(coroutine, self)
        except asyncio.CancelledError:  # noqa: ASYNC103 - our own
            if not self.struck:
                raise  # somebody else's
            while task.uncancel():
                pass
            return "cancelled"  # noqa: ASYNC104 - our own
        if self.struck:
            raise AssertionError("the coroutine swallowed its cancellation")
        return "completed"

    def suspended(self, awaited: object) -> None:
        """Take note of a suspension, and cancel if this is the one."""
        self.points += 1
        if self.points not in (self._strike.at, self._strike.again):
            return
        self.struck = True
        if not self._strike.late:
            self._cancel()
        elif isinstance(awaited, asyncio.Future):
            # Called before the task's own wake-up, which is added after this.
            awaited.add_done_callback(lambda _: self._cancel())
        elif awaited is None:  # a bare yield of asyncio
            asyncio.get_running_loop().call_soon(self._cancel)
        else:
            self.on_resume = self._cancel


@final
class _Watched(Generator[Any, Any, Any]):
    """Drives a coroutine step by step and tells the victim of each suspension."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], victim: _Victim) -> None:
        self._coroutine = coroutine
        self._victim = victim

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: object, /) -> object:
        return self._step(self._coroutine.send, value)

    def throw(self, error: Any, /, *_: object) -> object:
        return self._step(self._coroutine.throw, error)

    def _step(self, advance: Callable[[Any], object], value: object) -> object:
        on_resume, self._victim.on_resume = self._victim.on_resume, _nothing
        on_resume()
        awaited = advance(value)
        self._victim.suspended(awaited)
        return awaited
