"""Waking one task of an event loop from any thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lifecycle_zmq._slot import Slot, running_asyncio_loop


class Bell:
    """Rung by any thread, heard in the event loop that it was made in.

    Rings before `wait` returns count as one, so look at everything that one may have
    been for.
    """

    __slots__ = ("_post", "_rung", "_slot")

    def __init__(self) -> None:
        self._slot = Slot()
        self._post = _poster()
        self._rung = False

    def ring(self) -> None:
        """Let `wait` return, now or when it is called; a loop that is over is fine."""
        if not self._rung:
            self._rung = True
            self._post(self._slot.wake)

    async def wait(self) -> None:
        """Wait until it was rung since the last call returned.

        Cancellation: no ring is lost.
        """
        while not self._rung:
            await self._slot.wait()
        self._rung = False


def _poster() -> Callable[[Callable[[], None]], None]:
    """Return what lets the running loop call something, from any thread."""
    loop = running_asyncio_loop()
    if loop is not None:
        return _unless_over(loop.call_soon_threadsafe)
    trio: Any = sys.modules["trio"].lowlevel
    return _unless_over(trio.current_trio_token().run_sync_soon)


def _unless_over(post: Callable[..., object]) -> Callable[[Callable[[], None]], None]:
    def post_if_it_runs(wake: Callable[[], None]) -> None:
        try:
            post(wake)
        except RuntimeError:  # trio's RunFinishedError is one
            return

    return post_if_it_runs
