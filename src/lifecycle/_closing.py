"""Closing a source whole: native cancellations by others wait until it has closed.

A task of asyncio is cancelled by cancelling what it waits for, and may wait for
anything that looks like a future. A `_Shield` takes the place of each future that a
source waits for while it closes, and decides which cancellations reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref

# What a task asks: also of what has no `get_loop`.
from asyncio.futures import _get_loop  # type: ignore[attr-defined]
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ._eventloop import asyncio_task

if TYPE_CHECKING:
    from collections.abc import Generator

# The marks of the streams whose source runs here, outermost first. Timers, callbacks
# and tasks run in a copy of the context that made them, and so show for whom they
# cancel.
sources: ContextVar[tuple[object, ...]] = ContextVar("lifecycle_sources", default=())
# Seconds until a task is looked at again that cannot be interrupted yet.
_LATER = 0.05


def leave_source(mark: tuple[object]) -> None:
    """Take *mark* out of `sources`, and leave what others have set meanwhile.

    Tasks may share a context. And the collector may close a coroutine in another one,
    where this changes nothing.
    """
    sources.set(tuple(each for each in sources.get() if each is not mark[0]))


def interrupt(task: Any, requests: int, again: Callable[[], object]) -> object | None:
    """Cancel a waiting task of asyncio and return it, or call *again* later.

    *requests* to cancel it are from before it waited.
    """
    if not isinstance(task, asyncio.Task):
        return None
    loop, waits_for = task.get_loop(), getattr(task, "_fut_waiter", None)
    arrived = isinstance(waits_for, asyncio.Future) and waits_for.done()
    if arrived or (waits_for is None and task is asyncio_task()):
        loop.call_soon(again)  # what has come is not to be lost
    elif task.cancelling() > requests or isinstance(waits_for, _Shield):
        # Others cancel it, but may be a timeout of the source, which goes on. Or it
        # closes a source: a request would be kept, and find another wait.
        loop.call_later(_LATER, again)
    else:
        return task if task.cancel("the stream was stopped") else None
    return None


async def run_to_end(closing: Awaitable[object], mark: tuple[object]) -> None:
    """Await *closing*, and raise a native cancellation only when that has ended.

    ``Task.cancel()`` and ``asyncio.timeout`` go through every shield. In a task of its
    own *closing* would be safe, but whatever it has entered (a scope, a timeout, a
    context variable) may be left in this task only.

    Args:
        closing: What closes a source.
        mark: What `sources` ends with where code of this source runs.

    Cancellation:
        Scopes of anyio and of trio get through, and so does what the source asked for:
        by itself, or by a timer or a task that was made where `sources` has *mark*. All
        others wait.
    """
    task = asyncio_task()
    if task is None:
        await closing
        return
    late = list[Any]()
    sources.set(sources.get() + mark)
    try:
        # Without a name: the traceback of what is raised here keeps this frame.
        await _Shield(closing, mark[0], task, late)
    except Exception as error:
        if not late:
            raise
        text = "closing a cancelled stream failed: %s"
        logging.getLogger("lifecycle").warning(text, type(error).__name__)
    except asyncio.CancelledError:  # noqa: ASYNC103 - the late ones are raised below
        if not late:
            raise
    finally:
        leave_source(mark)
        for message in late:
            task.cancel(message)
        del task  # which keeps what is raised
    if late:
        await asyncio.sleep(0)  # raises them


class _Shield:
    """Awaits what closes a source, as the future that the task waits for meanwhile."""

    # What the task clears once it waits for this, as for any future.
    _asyncio_future_blocking = False

    def __init__(
        self,
        closing: Awaitable[object],
        mark: object,
        task: asyncio.Task[Any],
        late: list[Any],
    ) -> None:
        self._closing, self._mark, self._late = closing, mark, late
        # Weak: the traceback of an error keeps this, and the task keeps the error.
        self._task = weakref.ref(task)
        self._future: Any = None
        # The task is cancelled already, at its next wait: not by the closing.
        self._pending = bool(getattr(task, "_must_cancel", False))

    def __await__(self) -> Generator[Any, Any, None]:
        """Take the steps of *closing* as ``yield from`` does, but yield this."""
        closing: Any = self._closing
        steps = closing if hasattr(closing, "send") else _as_coroutine(closing)
        # Errors keep this frame: one that had a name here would keep itself.
        errors = list[BaseException]()
        with contextlib.suppress(StopIteration):
            while True:
                future = steps.throw(errors.pop()) if errors else steps.send(None)
                awaited = self._take_place_of(future)
                del future  # as above: it may be a task that fails with that error
                try:
                    yield awaited
                except GeneratorExit:
                    steps.close()
                    raise
                except BaseException as error:  # noqa: ASYNC103, BLE001 - passed on
                    errors.append(error)
                self._future, self._pending = None, False

    def _take_place_of(self, future: Any) -> Any:
        self._is_bare = future is None
        if future is None:  # `asyncio.sleep(0)`: the task goes on in the next turn
            future = asyncio.get_running_loop().create_future()
            future.set_result(None)
        elif future is self._task() or not getattr(
            future, "_asyncio_future_blocking", False
        ):
            return future  # the task says what is wrong with it
        future._asyncio_future_blocking = False  # noqa: SLF001
        self._future, self._asyncio_future_blocking = future, True
        return self

    def get_loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = _get_loop(self._future)
        return loop

    def add_done_callback(self, call: Any, *, context: Any = None) -> None:
        self._future.add_done_callback(call, context=context)

    def done(self) -> bool:
        done: bool = self._future.done()
        return done

    def cancel(self, msg: Any = None) -> bool:
        """Pass a cancellation on, or keep it for later, as if it had not come yet."""
        task: Any = self._task()
        # The task clears the one, the closing may have taken back the other.
        pending = self._pending and getattr(task, "_must_cancel", False)
        by_scope = "cancel scope" in str(msg)
        if by_scope or (not pending and self._mark in sources.get()):
            return self._pass_on(msg, by_scope)
        self._late.append(msg)
        # Or a timeout within the closing would take its own cancellation for another's.
        task.uncancel()
        return True

    def _pass_on(self, msg: Any, by_scope: bool) -> bool:  # noqa: FBT001
        future = self._future
        # A scope of anyio leaves a task alone whose future is done, and comes back, so
        # that nothing is lost that has arrived. Behind a shield it does not see that.
        arrived = isinstance(future, asyncio.Future) and future.done()
        if by_scope and arrived and not self._is_bare:
            return True
        passed_on: bool = future.cancel(msg)
        return passed_on


async def _as_coroutine(awaitable: Awaitable[object]) -> None:
    await awaitable
