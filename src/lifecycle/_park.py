"""One waiting task, and how to wake it from anywhere.

anyio offers events, not futures, and an event costs several microseconds per
wait and knows its own thread only. The line of a gate needs less and more: a
wake-up that may come from any thread or from a finaliser.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from trio.lowlevel import Abort, RaiseCancelT, Task


class _AsyncioWaiter:
    __slots__ = ("_future", "_loop", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = get_ident()
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> bool:
        """Let the task run again; ``False`` if it is on its way out already.

        Any thread. Idempotent.
        """
        future, loop = self._future, self._loop
        # Outside of its tasks the loop may be asleep, and a signal handler that
        # runs in the middle of that does not wake it. (To ask for the running
        # loop is a system call.)
        if get_ident() == self._thread and asyncio.current_task(loop) is not None:
            try:
                future.set_result(None)
            except asyncio.InvalidStateError:
                # Only this class sets results, and only once it was granted.
                return not future.cancelled()
        else:
            try:
                loop.call_soon_threadsafe(self._set)
            except RuntimeError:  # the loop is closed, and its tasks with it
                return False
        return not future.cancelled()

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, Any, None]:
        # A done future would not yield, and whoever was granted before this
        # task must run before it.
        future = self._future
        return asyncio.sleep(0).__await__() if future.done() else future.__await__()


class _TrioWaiter:
    __slots__ = ("_gone", "_owner", "_parked", "_token", "_woken")

    def __init__(self) -> None:
        lowlevel = sys.modules["trio"].lowlevel
        self._token = lowlevel.current_trio_token()
        self._owner: Task = lowlevel.current_task()
        # Whoever takes the task out decides what becomes of it: taking is
        # atomic, and a finaliser may wake in the middle of an abort.
        self._parked: dict[None, Task] = {}
        self._woken = False
        self._gone = False

    def wake(self) -> bool:
        """As on asyncio."""
        if self._gone:
            return False
        self._woken = True
        lowlevel = sys.modules["trio"].lowlevel
        # Straight away only from other tasks: whoever interrupts the scheduler,
        # or the owner on its way to park, must wait until they are done.
        if (
            lowlevel.in_trio_task()
            and lowlevel.current_trio_token() is self._token
            and lowlevel.current_task() is not self._owner
        ):
            self._reschedule()
        else:
            try:
                self._token.run_sync_soon(self._reschedule)
            except RuntimeError:  # trio's RunFinishedError is one
                return False
        return True

    def _reschedule(self) -> None:
        task = self._parked.pop(None, None)
        if task is not None:
            sys.modules["trio"].lowlevel.reschedule(task)

    def _abort(self, _raise_cancel: RaiseCancelT) -> Abort:
        aborts: type[Abort] = sys.modules["trio"].lowlevel.Abort
        self._gone = self._parked.pop(None, None) is not None
        return aborts.SUCCEEDED if self._gone else aborts.FAILED

    def __await__(self) -> Generator[Any, Any, None]:
        lowlevel = sys.modules["trio"].lowlevel
        if self._woken:
            waiting = lowlevel.checkpoint()
        else:
            self._parked[None] = self._owner
            waiting = lowlevel.wait_task_rescheduled(self._abort)
        steps: Generator[Any, Any, None] = waiting.__await__()
        return steps


# Parks the task that made it, when awaited, until `wake`; yields to the scheduler
# at least once. Cancelled, it raises at once: a `wake` that came first is not
# undone, and the caller looks at what was decided for it.
Waiter = _AsyncioWaiter | _TrioWaiter


def new_waiter() -> Waiter:
    """A waiter for the running task, in whatever event loop it runs."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return _AsyncioWaiter(loop)
    if current_task() is None:
        raise RuntimeError(
            "a gate can be waited for in an event loop only; use try_admit elsewhere"
        )
    return _TrioWaiter()


async def park_until(waiter: Waiter, deadline: float) -> None:
    """Park, but at most until *deadline* by the loop's clock.

    A cancel scope would do, and takes four times as long.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        await _park_on_trio(waiter, deadline)
        return
    timer = loop.call_at(deadline, waiter.wake)
    try:
        await waiter
    finally:
        timer.cancel()


async def _park_on_trio(waiter: Waiter, deadline: float) -> None:
    trio, cut = sys.modules["trio"], None
    try:
        with trio.CancelScope(deadline=deadline):
            try:
                await waiter
            except trio.Cancelled as error:
                cut = error
                raise
        if cut is not None:
            # Trio keeps it until the task's next step, and from CPython 3.12 its
            # frames keep those of all callers.
            cut.__traceback__ = None
    finally:
        del cut  # its traceback holds this frame


def current_task() -> object | None:
    """The running task as an opaque identity, or ``None`` outside of any."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return asyncio.current_task(loop)
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        task: object = trio.lowlevel.current_task()
        return task
    return None


def current_loop() -> object | None:
    """The running event loop, as an identity, or ``None`` outside of any."""
    loop: object | None = asyncio._get_running_loop()
    trio = sys.modules.get("trio")
    if loop is None and trio is not None and trio.lowlevel.in_trio_run():
        loop = trio.lowlevel.current_trio_token()
    return loop


def loop_post() -> Callable[[Callable[[], object]], None]:
    """What runs a function in the running loop, soon, from any thread."""
    loop: Any = current_loop()
    post = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def post_soon(call: Callable[[], object]) -> None:
        # After the end of the loop nothing is left to do. Trio's
        # RunFinishedError is one of these, and asyncio raises it itself.
        with contextlib.suppress(RuntimeError):
            post(call)

    return post_soon


def loop_clock() -> Callable[[], float]:
    """The running loop's own clock, without anyio's look-up at each reading."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return loop.time
    clock: Callable[[], float] = sys.modules["trio"].current_time
    return clock


def readable(clock: Callable[[], float]) -> Callable[[], float]:
    """What *clock* says or, in a thread that has no loop to ask, said last."""
    read = 0.0

    def now() -> float:
        nonlocal read
        with contextlib.suppress(RuntimeError):
            read = clock()
        return read

    return now


def task_factory() -> Callable[..., Any] | None:
    """What makes a plain task of the running loop; ``None`` on trio, which has none."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return None
    # An eager one would run the start within its caller.
    eager = getattr(asyncio, "eager_task_factory", None)
    code = getattr(loop.get_task_factory(), "__code__", None)
    if code is not None and code is getattr(eager, "__code__", None):
        return functools.partial(asyncio.Task, loop=loop)
    return loop.create_task


def innermost_nursery() -> Any:
    """The nursery that this task opened last, on trio."""
    return sys.modules["trio"].lowlevel.current_task().child_nurseries[-1]
