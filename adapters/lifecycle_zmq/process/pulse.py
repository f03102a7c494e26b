"""The engine's end of the page: written by the thread that runs the server's loop."""

from __future__ import annotations

from typing import Protocol

from lifecycle_zmq.process import locks
from lifecycle_zmq.process.pages import Page, Phase


class Turns(Protocol):
    """Where the loop shows that it gets on."""

    def turn(self, *, idle: bool) -> None:
        """Begin a turn of the loop, or of sleep until a message comes."""
        ...


class Pulse:
    """Shows what the loop is at; takes the lock that tells of this thread's death.

    Args:
        page: Where; ``None`` shows nothing.
    """

    def __init__(self, page: Page | None) -> None:
        self._page = page
        if page is not None:
            locks.hold(page)
            page.enter(Phase.WORKING)

    def turn(self, *, idle: bool) -> None:
        """Begin a turn of the loop, or of sleep until a message comes."""
        if self._page is not None:
            self._page.enter(Phase.WAITING if idle else Phase.WORKING)

    def leave(self) -> None:
        """Say that the loop is over: nobody is answered any more."""
        if self._page is not None:
            self._page.enter(Phase.LEFT)
