"""The ledger for every thread, and for whoever interrupts it half-way."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from ._ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._line import Line
    from .events import Event

# Another thread is done with its change within microseconds. Only a caller that
# interrupts its own thread's change waits for so long, and then goes without.
_PATIENCE: Final = 0.25


class Books(Ledger):
    """A ledger that is changed from any thread and at any moment.

    A release may come from another thread, or from a finaliser or signal
    handler that interrupts a change half-way (since CPython 3.12 the collector
    runs between bytecodes). A lock that waits would deadlock on the latter, so
    a change that finds the books locked goes into a mailbox, and whoever holds
    the lock empties the mailbox before going.

    Args:
        capacity: Slots and bytes.
        line: Who is next.
        emit: Told of events after the books are unlocked, never while locked:
            an observer may use the gate.
    """

    __slots__ = ("_lock", "_mail", "_outbox", "emit")

    def __init__(
        self,
        capacity: Sequence[float],
        line: Line,
        emit: Callable[[Event], None] | None,
    ) -> None:
        super().__init__(capacity, line)
        self.emit = emit
        self._lock = threading.Lock()
        # Appending to and popping from a deque is atomic in CPython.
        self._mail: deque[Callable[[], object]] = deque()
        self._outbox: deque[Event] = deque()

    def lock(self) -> bool:
        """Lock the books; ``False`` if this very thread has them locked."""
        return self._lock.acquire(timeout=_PATIENCE)

    def unlock(self) -> None:
        """Unlock, then make the changes and tell the events that came meanwhile."""
        self._lock.release()
        self._drain()

    def apply(self, change: Callable[[], object]) -> None:
        """Make *change* now, or leave it to whoever has the books locked."""
        self._mail.append(change)
        self._drain()

    def tell(self, event: Event) -> None:
        """Put *event* down, to be told once the books are unlocked."""
        if self.emit is not None:
            self._outbox.append(event)

    def _drain(self) -> None:
        mail, lock = self._mail, self._lock
        # Looked at again after each unlocking: a change that was posted while
        # the books were locked has nobody else to make it.
        while mail and lock.acquire(blocking=False):
            try:
                while mail:
                    mail.popleft()()
            finally:
                lock.release()
        if self._outbox and self.emit is not None:
            with contextlib.suppress(IndexError):  # another thread was faster
                while self._outbox:
                    self.emit(self._outbox.popleft())
