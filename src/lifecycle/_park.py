"""One waiting task, and how to wake it from anywhere.

anyio offers events, not futures, and an event costs several microseconds per
wait and knows its own thread only. The line of a gate needs less and more: a
wake-up that may come from any thread or from a finaliser.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.lowlevel import Abort, RaiseCancelT, Task


class Waiter(Protocol):
    """Parks the task that made it until `wake`."""

    def wake(self) -> bool:
        """Let the task run again; ``False`` if it is on its way out already.

        Any thread. Idempotent.
        """

    async def park(self) -> None:
        """Wait for `wake`; always yields to the scheduler at least once.

        Cancellation:
            Raises at once. A `wake` that came first is not undone: the caller
            looks at what was decided for it.
        """


class _AsyncioWaiter:
    __slots__ = ("_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> bool:
        if self._future.done():
            # Only this class sets results, and only once it was granted.
            return not self._future.cancelled()
        if asyncio._get_running_loop() is self._loop:
            self._set()
        else:
            try:
                self._loop.call_soon_threadsafe(self._set)
            except RuntimeError:  # the loop is closed, and its tasks with it
                return False
        return True

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def park(self) -> None:
        if self._future.done():
            # A done future would not yield, and whoever was granted before
            # this task must run before it.
            await asyncio.sleep(0)
        else:
            await self._future


class _TrioWaiter:
    __slots__ = ("_gone", "_task", "_token", "_woken")

    def __init__(self) -> None:
        lowlevel = sys.modules["trio"].lowlevel
        self._token = lowlevel.current_trio_token()
        self._task: Task | None = None
        self._woken = False
        self._gone = False

    def wake(self) -> bool:
        if self._gone:
            return False
        self._woken = True
        trio = sys.modules["trio"]
        if trio.lowlevel.in_trio_run() and (
            trio.lowlevel.current_trio_token() is self._token
        ):
            self._reschedule()
        else:
            try:
                self._token.run_sync_soon(self._reschedule)
            except trio.RunFinishedError:
                return False
        return True

    def _reschedule(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            sys.modules["trio"].lowlevel.reschedule(task)

    def _abort(self, _raise_cancel: RaiseCancelT) -> Abort:
        self._task = None
        self._gone = True
        aborted: Abort = sys.modules["trio"].lowlevel.Abort.SUCCEEDED
        return aborted

    async def park(self) -> None:
        lowlevel = sys.modules["trio"].lowlevel
        if self._woken:
            await lowlevel.checkpoint()
            return
        self._task = lowlevel.current_task()
        await lowlevel.wait_task_rescheduled(self._abort)


def new_waiter() -> Waiter:
    """A waiter for the running task.

    Raises:
        RuntimeError: No event loop runs in this thread.
    """
    loop = asyncio._get_running_loop()
    return _TrioWaiter() if loop is None else _AsyncioWaiter(loop)


def current_task() -> object | None:
    """The running task as an opaque identity, or ``None`` outside of any."""
    if asyncio._get_running_loop() is not None:
        return asyncio.current_task()
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        task: object = trio.lowlevel.current_task()
        return task
    return None


def loop_clock() -> Callable[[], float]:
    """The running loop's own clock, without anyio's look-up at each reading."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return loop.time
    clock: Callable[[], float] = sys.modules["trio"].current_time
    return clock
