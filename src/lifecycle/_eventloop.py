"""What differs between asyncio and trio: waiting, waking, clocks and plain tasks.

anyio offers events, not futures, and an event costs several microseconds per
wait and knows its own thread only. The queue of a gate needs less and more: a
wake-up that may come from any thread or from a finaliser.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

import anyio.abc

if TYPE_CHECKING:
    from collections.abc import Generator

    from trio.lowlevel import Abort, RaiseCancelT, Task

# A coroutine that awaits these enters a block.
_ENTERING = ("__aenter__", "enter_async_context")
NativeCancelled = asyncio.CancelledError
# Raises nothing where no loop runs.
get_running_loop = asyncio._get_running_loop  # noqa: SLF001
# The running task of a loop, without a frame of Python: CPython 3.11 has one there.
running_task: Callable[[Any], asyncio.Task[Any] | None] = (
    asyncio.current_task
    if sys.version_info >= (3, 12)
    else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # noqa: SLF001
)


class _AsyncioWaiter:
    __slots__ = ("_future", "_loop", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = get_ident()
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> bool:
        """Let the task run; ``False`` if it is cancelled. Any thread. Idempotent."""
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
        # A done future would not yield, and tasks that were granted before this
        # one must run before it.
        future = self._future
        return asyncio.sleep(0).__await__() if future.done() else future.__await__()


class _TrioWaiter:
    __slots__ = ("_gone", "_owner", "_token", "_waiting", "_woken", "waits_again")

    def __init__(self) -> None:
        lowlevel = sys.modules["trio"].lowlevel
        self._token = lowlevel.current_trio_token()
        self._owner: Task = lowlevel.current_task()
        # The code that removes the task decides about it: removal is atomic, and
        # a finaliser may wake in the middle of an abort.
        self._waiting: dict[None, Task] = {}
        self._woken = False
        self._gone = False
        self.waits_again = False  # after a wait that was cut

    def wake(self) -> bool:
        """Let the task run; ``False`` if it is cancelled. Any thread. Idempotent."""
        if self._gone:
            return False
        self._woken = True
        lowlevel = sys.modules["trio"].lowlevel
        # At once only from other tasks: code that interrupts the scheduler, or the
        # owner that is about to wait, must leave it to the loop.
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
        task = self._waiting.pop(None, None)
        if task is not None:
            sys.modules["trio"].lowlevel.reschedule(task)

    def _abort(self, _raise_cancel: RaiseCancelT) -> Abort:
        aborts: type[Abort] = sys.modules["trio"].lowlevel.Abort
        waits = self._waiting.pop(None, None) is not None
        self._gone = waits and not self.waits_again
        return aborts.SUCCEEDED if waits else aborts.FAILED

    def __await__(self) -> Generator[Any, Any, None]:
        lowlevel = sys.modules["trio"].lowlevel
        if self._woken:
            waiting = lowlevel.checkpoint()
        else:
            self._waiting[None] = self._owner
            waiting = lowlevel.wait_task_rescheduled(self._abort)
        steps: Generator[Any, Any, None] = waiting.__await__()
        return steps


# Suspends the task that made it, when awaited, until `wake`; yields to the scheduler
# at least once. Cancelled, it raises at once: a `wake` that came first is not
# undone, and the caller looks at what was decided for it.
Waiter = _AsyncioWaiter | _TrioWaiter


def new_waiter() -> Waiter:
    """Return a waiter for the running task, on asyncio or trio.

    Raises:
        RuntimeError: No event loop runs in this thread.
    """
    loop = get_running_loop()
    if loop is not None:
        return _AsyncioWaiter(loop)
    if current_task() is None:
        raise RuntimeError(
            "a gate can be waited for in an event loop only; use try_admit elsewhere"
        )
    return _TrioWaiter()


async def wait_until(waiter: Waiter, deadline: float, *, last: bool = True) -> None:
    """Wait, but at most until *deadline* by the loop's clock.

    A cancel scope would do, and takes four times as long.

    Args:
        waiter: Of this task.
        deadline: When the wait ends.
        last: The task waits no more after it, so that a `Waiter.wake` in that moment
            comes too late.
    """
    loop = get_running_loop()
    if loop is None:
        trio_waiter = cast("_TrioWaiter", waiter)
        trio_waiter.waits_again = not last
        await _wait_on_trio_until(trio_waiter, deadline)
        return
    timer = loop.call_at(deadline, waiter.wake)
    try:
        await waiter
    finally:
        timer.cancel()


async def _wait_on_trio_until(waiter: _TrioWaiter, deadline: float) -> None:
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


def asyncio_task() -> asyncio.Task[Any] | None:
    """The running task of asyncio, or ``None`` elsewhere."""
    loop = get_running_loop()
    return None if loop is None else running_task(loop)


def current_task() -> object | None:
    """The running task as an opaque identity, or ``None`` outside of any."""
    loop = get_running_loop()
    if loop is not None:
        return running_task(loop)
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        task: object = trio.lowlevel.current_task()
        return task
    return None


def current_loop() -> object | None:
    """The running event loop, as an identity, or ``None`` outside of any."""
    loop: object | None = get_running_loop()
    trio = sys.modules.get("trio")
    if loop is None and trio is not None and trio.lowlevel.in_trio_run():
        loop = trio.lowlevel.current_trio_token()
    return loop


def in_async_generator() -> bool:
    """Whether a block that the caller enters is of the body of an async generator.

    Such a body may leave it in another task, or never: no scope may span its items. An
    `asynccontextmanager` does not count, but where that is entered does.
    """
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and (frame := frame.f_back) is not None:
        flags, reader = frame.f_code.co_flags, frame.f_back
        if flags & inspect.CO_ASYNC_GENERATOR:
            if reader is None or reader.f_globals.get("__name__") != "contextlib":
                return True
        elif flags & inspect.CO_COROUTINE and frame.f_code.co_name not in _ENTERING:
            return False
    return False


def call_if_cancelled(call: Callable[[], object]) -> Callable[[], object]:
    """Call *call* once the running task has ended by a cancellation; on asyncio only.

    For what a task may leave suspended: an error's traceback keeps it until the
    collector comes. Trio cuts such cycles, and has no such callback.

    Returns:
        What revokes this.
    """
    task = asyncio_task()
    if task is None:
        return lambda: None

    def ended(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            call()

    task.add_done_callback(ended)
    return partial(task.remove_done_callback, ended)


def forget_loop() -> None:
    """Let code of this thread start an event loop, in a context copied from one."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:  # trio and older versions of anyio ask it
        sniffio.current_async_library_cvar.set(None)


def threadsafe_call() -> Callable[[Callable[[], object]], None]:
    """What runs a function in the running loop, soon, from any thread."""
    loop: Any = current_loop()
    post = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def post_soon(call: Callable[[], object]) -> None:
        # After the end of the loop nothing is left to do. Trio's
        # RunFinishedError is one of these, and asyncio raises it itself.
        with contextlib.suppress(RuntimeError):
            post(call)

    return post_soon


def call_soon() -> Callable[[Callable[[], object]], object]:
    """What runs a function in the next turn of the running loop, from its own tasks."""
    loop: Any = current_loop()
    post: Callable[..., object] = getattr(loop, "call_soon", None) or loop.run_sync_soon
    return post


def event_loop_clock() -> Callable[[], float]:
    """The running loop's own clock, without anyio's look-up at each reading."""
    loop = get_running_loop()
    if loop is not None:
        return loop.time
    clock: Callable[[], float] = sys.modules["trio"].current_time
    return clock


def fallback_clock(clock: Callable[[], float]) -> Callable[[], float]:
    """What *clock* says or, in a thread that has no loop to ask, said last."""
    default, read = clock is anyio.current_time, 0.0

    def now() -> float:
        nonlocal read
        # What anyio asks in the end: its own way there costs a microsecond.
        loop = get_running_loop() if default else None
        try:  # noqa: SIM105 - `suppress()` costs as much as all the rest
            read = clock() if loop is None else loop.time()
        except RuntimeError:
            pass
        return read

    return now


def task_factory() -> Callable[..., Any] | None:
    """What makes a plain task of the running loop; ``None`` on trio, which has none."""
    loop = get_running_loop()
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


Run = Callable[..., Coroutine[Any, Any, None]]


class TaskSupervisor:
    """Tasks that are never cancelled, beside a group that ends after them.

    anyio gives each task of a group a handle, an event and a scope, which cost several
    times what the task of a start does; a start brings the one scope that it needs.

    Each task runs in a copy of the context that it was spawned in, and not before its
    spawner waits. On trio they are the group's own.

    Args:
        group: What is cancelled where one of them fails. Entered by this task.

    Attributes:
        errors: What some have raised, to be raised where the group is left.
    """

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self.errors: list[BaseException] = []
        self._group = group
        self._running: set[object] = set()
        self._when_idle: Callable[[], object] | None = None
        create = task_factory()
        if create is None:
            spawn = partial(self._spawn_in_nursery, innermost_nursery())
        else:
            spawn = partial(self._spawn_in_loop, create)
        self.spawn: Callable[..., None] = spawn

    def on_idle(self, call: Callable[[], object]) -> None:
        """Call *call* once no task is left, now or later."""
        self._when_idle = call
        self._remove(None)

    def _spawn_in_loop(
        self, create: Callable[..., Any], run: Run, *args: object
    ) -> None:
        running = run(*args)
        try:
            task = create(running, name=run.__qualname__)
        except BaseException:
            running.close()
            raise
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        # One that is cancelled was so before its first step: the rest catch it.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(error)
        if error is not None or task.cancelled():
            self._group.cancel_scope.cancel()
        self._remove(task)

    def _spawn_in_nursery(self, nursery: Any, run: Run, *args: object) -> None:
        self._running.add(run)
        nursery.start_soon(self._run_in_nursery, run, *args, name=run.__qualname__)

    async def _run_in_nursery(self, run: Run, *args: object) -> None:
        try:
            await run(*args)
        finally:
            self._remove(run)

    def _remove(self, task: object) -> None:
        self._running.discard(task)
        if self._when_idle is not None and not self._running:
            self._when_idle()


class LoopWaiter:
    """Holds at most one waiting task of one event loop, again and again.

    For a wait once per token: an event of anyio takes several microseconds, and a
    `Waiter` is for one wait and for every thread.

    Args:
        like: A waiter of the same loop; looking for the running loop is a system call.

    Attributes:
        waiting: What `wake` has to wake: a future of asyncio, a task of trio.
    """

    __slots__ = ("loop", "waiting")
    loop: asyncio.AbstractEventLoop | None

    def __init__(self, like: LoopWaiter | None = None) -> None:
        self.loop = get_running_loop() if like is None else like.loop
        self.waiting: Any = None

    def wait(self) -> Awaitable[None]:
        """Wait for `wake`; the caller then checks its condition again.

        Raises:
            RuntimeError: Another task waits here.

        Cancellation:
            At any time.
        """
        if self.loop is None:
            return self._wait_on_trio()
        # A done future was cancelled with its task: `wake` removes the others.
        if self.waiting is not None and not self.waiting.done():
            raise _already_waiting()
        self.waiting = future = self.loop.create_future()
        return future

    def wake(self) -> None:
        """Let the waiting task run, if there is one. In the event loop only."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return
        if self.loop is None:
            sys.modules["trio"].lowlevel.reschedule(waiting)
        elif not waiting.done():
            waiting.set_result(None)

    async def _wait_on_trio(self) -> None:
        if self.waiting is not None:
            raise _already_waiting()
        lowlevel = sys.modules["trio"].lowlevel
        self.waiting = lowlevel.current_task()
        await lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: RaiseCancelT) -> Abort:
        self.waiting = None
        succeeded: Abort = sys.modules["trio"].lowlevel.Abort.SUCCEEDED
        return succeeded


def _already_waiting() -> RuntimeError:
    return RuntimeError("another task is waiting for an item of this stream")


class ThreadsafeEvent:
    """An auto-reset event: set by any thread, awaited in the loop that made it.

    Several calls of `set` before `wait` returns count as one.
    """

    __slots__ = ("_post", "_set", "_waiter")

    def __init__(self) -> None:
        self._waiter = LoopWaiter()
        self._post = threadsafe_call()
        self._set = False

    def set(self) -> None:
        """Let `wait` return, now or at its next call. A closed loop is ignored."""
        if not self._set:
            self._set = True
            self._post(self._waiter.wake)

    async def wait(self) -> None:
        """Wait until `set` was called since the last call returned.

        Cancellation:
            At any time; no `set` is lost.
        """
        while not self._set:
            await self._waiter.wait()
        self._set = False
