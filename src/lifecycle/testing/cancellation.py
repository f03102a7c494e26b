"""Cancel a coroutine at each point where it can be cancelled."""

from __future__ import annotations

import asyncio
import importlib.util
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Literal, final

import anyio

_Kind = Literal["scope", "native"]

Attempt = Callable[
    [Coroutine[Any, Any, object]], Awaitable[Literal["completed", "cancelled"]]
]
"""What `cancel_everywhere` gives a scenario: runs a coroutine and cancels it."""


def cancel_everywhere(
    scenario: Callable[[Attempt], Awaitable[object]],
    *,
    backends: tuple[str, ...] | None = None,
    kinds: tuple[_Kind, ...] = ("scope", "native"),
    double: bool = False,
    most: int = 200,
    timeout: float = 5.0,
) -> dict[str, int]:
    """Run *scenario* again and again, cancelled at another point each time.

    A scenario builds fresh state, calls ``await attempt(coroutine)`` once, and
    checks what must hold afterwards, however the coroutine ended. It is run
    for each suspension of the coroutine in turn, and for each of them

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
        timeout: Seconds that one run may take.

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
        for kind in kinds:
            if kind == "native" and backend != "asyncio":
                continue
            for late in (False, True):
                name = f"{backend} {kind} {'late' if late else 'early'}"
                make = partial(_CancelledRun, kind, late)
                run = partial(_run, scenario, make, name, backend, timeout)
                twice = double and kind == "native"
                points[name] = _cancel_each(run, twice=twice, most=most)
    return points


def _cancel_each(run: Callable[..., int], *, twice: bool, most: int) -> int:
    for at in range(1, most + 1):
        points = run(at)
        if points < at:
            return at - 1
        again = at
        while twice and points > again:
            again += 1
            points = run(at, again)
    raise AssertionError(
        f"more than {most} suspension points; raise most= or wait less"
    )


def _run(
    scenario: Callable[[Attempt], Awaitable[object]],
    make: Callable[..., _CancelledRun],
    name: str,
    backend: str,
    timeout: float,
    *at: int,
) -> int:
    attempt = make(at)

    async def main() -> None:
        with anyio.fail_after(timeout):
            await scenario(attempt)

    try:
        anyio.run(main, backend=backend)
    except BaseException as error:
        # Outside of the loop no task is left to be cancelled.
        what = f"{name} at {' and '.join(map(str, at))}: {error!r}"
        raise AssertionError(what) from error  # noqa: ASYNC104
    if not attempt.used:
        raise AssertionError("the scenario never awaited its attempt")
    return attempt.points


def _nothing() -> None: ...


@final
class _CancelledRun:
    """One attempt: counts the suspensions of a coroutine and cancels it at some."""

    def __init__(self, kind: _Kind, late: bool, at: tuple[int, ...]) -> None:  # noqa: FBT001
        self.points = 0
        self.used = self.cancelled = False
        self._kind, self._late, self._at = kind, late, at
        self._cancel: Callable[[], object] = _nothing
        # Due as soon as the coroutine resumes: what "late" means on trio.
        self._due: Callable[[], object] = _nothing

    async def __call__(
        self, coroutine: Coroutine[Any, Any, object]
    ) -> Literal["completed", "cancelled"]:
        if self.used:
            coroutine.close()
            raise RuntimeError("a scenario can make one attempt")
        self.used = True
        if self._kind == "scope":
            with anyio.CancelScope() as scope:
                self._cancel = scope.cancel
                await _watched(coroutine, self)
            return "cancelled" if scope.cancelled_caught else "completed"
        task = asyncio.current_task()
        assert task is not None
        self._cancel = task.cancel
        try:
            await _watched(coroutine, self)
        except asyncio.CancelledError:  # noqa: ASYNC103 - our own
            if not self.cancelled:
                raise  # not this one's
            while task.uncancel():
                pass
            return "cancelled"  # noqa: ASYNC104 - our own
        assert not self.cancelled, "the coroutine swallowed its cancellation"
        return "completed"

    def suspended(self, awaited: object) -> None:
        """Take note of a suspension, and cancel if this is the one."""
        self.points += 1
        if self.points not in self._at:
            return
        self.cancelled = True
        if not self._late:
            self._cancel()
        elif asyncio.isfuture(awaited):
            # Called before the task's own wake-up, which is added after this.
            awaited.add_done_callback(lambda _: self._cancel())
        elif awaited is None:  # a bare yield of asyncio
            asyncio.get_running_loop().call_soon(self._cancel)
        else:
            self._due = self._cancel

    def resumed(self) -> None:
        """Take note that the coroutine runs again."""
        due, self._due = self._due, _nothing
        due()


@types.coroutine
def _watched(
    coroutine: Coroutine[Any, Any, object], attempt: _CancelledRun
) -> Generator[Any, Any, None]:
    """Drive *coroutine* step by step and notify *attempt* of each of them."""
    step: Callable[[Any], object] = coroutine.send
    value: object = None
    while True:
        attempt.resumed()
        try:
            awaited = step(value)
        except StopIteration:
            return
        attempt.suspended(awaited)
        try:
            step, value = coroutine.send, (yield awaited)
        except BaseException as error:  # noqa: ASYNC103, BLE001 - passed on
            step, value = coroutine.throw, error
