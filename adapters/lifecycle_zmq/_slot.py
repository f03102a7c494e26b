"""One waiting task, woken from another task of its event loop.

A reader waits once a token. anyio's event costs several microseconds for that, more
than all the rest of the way through this process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trio.lowlevel import Abort, RaiseCancelT, Task


class Slot(Protocol):
    """Holds at most one waiting task; made in the loop that it belongs to."""

    def wait(self) -> Awaitable[None]:
        """Wait for `wake`; whoever awaits looks again at what it waits for.

        Raises:
            RuntimeError: Another task waits here.

        Cancellation: at any time.
        """
        ...

    def wake(self) -> None:
        """Let the waiting task run, if there is one."""
        ...


class _AsyncioSlot:
    __slots__ = ("_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] | None = None

    def wait(self) -> Awaitable[None]:
        # One that is done was cancelled with its task: `wake` takes the others out.
        if self._future is not None and not self._future.done():
            raise _occupied()
        self._future = self._loop.create_future()
        return self._future

    def wake(self) -> None:
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)


class _TrioSlot:
    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: Task | None = None

    async def wait(self) -> None:
        if self._task is not None:
            raise _occupied()
        lowlevel = sys.modules["trio"].lowlevel
        self._task = lowlevel.current_task()
        await lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: RaiseCancelT) -> Abort:
        self._task = None
        succeeded: Abort = sys.modules["trio"].lowlevel.Abort.SUCCEEDED
        return succeeded

    def wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            sys.modules["trio"].lowlevel.reschedule(task)


def running_asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running loop of asyncio; ``None`` stands for trio."""
    return asyncio._get_running_loop()  # noqa: SLF001 - costs nothing


def new_slot() -> Slot:
    """Return a slot of the running event loop."""
    loop = running_asyncio_loop()
    return _TrioSlot() if loop is None else _AsyncioSlot(loop)


def _occupied() -> RuntimeError:
    return RuntimeError("another task is waiting for an item of this stream")
