"""One waiting task, woken from another task of its event loop.

A reader waits once a token. anyio's event costs several microseconds for that, more
than all the rest of the way through this process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trio.lowlevel import Abort, RaiseCancelT


class Slot:
    """Holds at most one waiting task; made in the loop that it belongs to.

    Args:
        like: A slot of the same loop, to look for which is a system call.

    Attributes:
        waiter: What `wake` has to wake: a future of asyncio, a task of trio.
    """

    __slots__ = ("_loop", "waiter")
    _loop: asyncio.AbstractEventLoop | None

    def __init__(self, like: Slot | None = None) -> None:
        self._loop = running_asyncio_loop() if like is None else like._loop  # noqa: SLF001
        self.waiter: Any = None

    def wait(self) -> Awaitable[None]:
        """Wait for `wake`; whoever awaits looks again at what it waits for.

        Raises:
            RuntimeError: Another task waits here.

        Cancellation: at any time.
        """
        if self._loop is None:
            return self._wait_in_trio()
        # One that is done was cancelled with its task: `wake` takes the others out.
        if self.waiter is not None and not self.waiter.done():
            raise _occupied()
        self.waiter = future = self._loop.create_future()
        return future

    def wake(self) -> None:
        """Let the waiting task run, if there is one."""
        waiter, self.waiter = self.waiter, None
        if waiter is None:
            return
        if self._loop is None:
            sys.modules["trio"].lowlevel.reschedule(waiter)
        elif not waiter.done():
            waiter.set_result(None)

    async def _wait_in_trio(self) -> None:
        if self.waiter is not None:
            raise _occupied()
        lowlevel = sys.modules["trio"].lowlevel
        self.waiter = lowlevel.current_task()
        await lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: RaiseCancelT) -> Abort:
        self.waiter = None
        succeeded: Abort = sys.modules["trio"].lowlevel.Abort.SUCCEEDED
        return succeeded


def running_asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running loop of asyncio; ``None`` stands for trio."""
    return asyncio._get_running_loop()  # noqa: SLF001 - raises nothing


def _occupied() -> RuntimeError:
    return RuntimeError("another task is waiting for an item of this stream")
