"""A thread that waits for sockets, for calls from other threads, and for its next turn.

No event loop of asyncio or trio: the gate serves threads as well, and must answer while
the loop of its own worker is busy.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

_PAUSE: Final = 0.1


class HasDescriptor(Protocol):
    """A socket or a descriptor's owner."""

    def fileno(self) -> int:
        """Return the descriptor."""


class Loop:
    """Runs all callbacks in one thread.

    Args:
        turn: Called after each batch of callbacks; returns after how many seconds to
            call it again at the latest, or ``None`` at the end.
        hindered: Called after an OSError, as where no descriptors are left; the loop
            goes on after a pause.
        failed: Called at the end after another error, which the thread then ends with.
        name: Of the thread.
    """

    def __init__(
        self,
        turn: Callable[[], float | None],
        hindered: Callable[[OSError], object],
        failed: Callable[[], object],
        name: str,
    ) -> None:
        self._turn, self._hindered, self._failed = turn, hindered, failed
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not in `close`: another thread may be about to ring, and its number may be
        # that of another file by then.
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._selector.register(self._bell, selectors.EVENT_READ, self._answer)
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        # A daemon: it must not keep a process that ends, and its end needs no care.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call *function* in the thread of the loop, soon. Any thread; never waits."""
        self._calls.append((function, args))
        # The next batch looks anyway, where the loop is what calls.
        if threading.get_ident() != self._thread.ident:
            os.eventfd_write(self._bell, 1)

    def watch(
        self,
        what: HasDescriptor,
        on_ready: Callable[[], object],
        *,
        write: bool = False,
    ) -> None:
        """Call *on_ready* whenever *what* can be read or, with *write*, written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        key = self._selector.get_map().get(what.fileno())
        if key is None:
            self._selector.register(what.fileno(), events, on_ready)
        elif key.events != events:
            self._selector.modify(what.fileno(), events, on_ready)

    def unwatch(self, what: HasDescriptor) -> None:
        """Watch *what* no more; before it is closed."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(what.fileno())

    def close(self) -> None:
        """Close the selector: at the end, or the copy of it in a forked child."""
        self._selector.close()

    def _answer(self) -> None:
        os.eventfd_read(self._bell)

    def _run(self) -> None:
        seconds: float | None = 0.0
        try:
            while seconds is not None:
                try:
                    seconds = self._step(seconds)
                except OSError as error:
                    self._hindered(error)
                    time.sleep(_PAUSE)  # it may come again at once
        except BaseException:
            self._failed()
            raise
        finally:
            self.close()

    def _step(self, seconds: float) -> float | None:
        # A call from the loop itself has rung no bell.
        for key, _ in self._selector.select(0 if self._calls else seconds):
            key.data()
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)
        return self._turn()
