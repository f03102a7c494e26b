"""One change at a time, from any thread and at any moment.

A change may come from another thread, or from a finaliser or signal handler that
interrupts one half-way (since CPython 3.12 the collector runs between bytecodes). The
lock knows the thread that holds it, which tells the two apart: no code ever waits for a
change further down its own stack. Code that needs no answer, such as a release, does
not wait for another thread either: it appends its change to a deque of deferred
changes, which the holder makes once it has unlocked. A thread that locks before that
makes them first: what a thread asks next, it asks after its own release.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakSet

# Seconds that code that needs an answer waits for another thread. A change takes
# microseconds. But that thread may be interrupted in the middle of it by code that
# waits for another gate, which this thread may be changing: both would wait for ever.
LONGEST_WAIT: Final = 1.0
# The seconds of a wait however long that thread takes.
FOR_EVER: Final = threading.TIMEOUT_MAX

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ChangeLock:
    """A lock whose holder makes the changes of all that came too early.

    Attributes:
        mutex: Held for one change. Acquire it inside a ``try`` whose ``finally`` calls
            its `release` first, and ignores the RuntimeError of one that was not
            acquired. CPython looks for signals after calls and at the start of
            functions: so a KeyboardInterrupt between ``acquire`` and its answer, or a
            function that would wrap this, cannot leave it locked.
        interrupted: Whether this very thread is in the middle of a change.
        deferred: Changes that could not be made at once.
    """

    # ruff: noqa: SIM105 - `suppress()` is such a call
    __slots__ = ("__weakref__", "deferred", "interrupted", "mutex")
    mutex: Any
    interrupted: Callable[[], bool]

    def __init__(self) -> None:
        self.renew()
        self.deferred: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        _locks.add(self)

    def renew(self) -> None:
        """Be free, whoever holds the lock."""
        self.mutex = threading.RLock()
        self.interrupted = self.mutex._is_owned  # noqa: SLF001 - has no public name

    def catch_up(self) -> None:
        """Make all deferred changes. For the holder, before what comes after them."""
        while self.deferred:
            change, args = self.deferred.popleft()
            change(*args)

    def make_deferred_changes(self) -> None:
        """Make all deferred changes, unless the holder will. Never waits."""
        mutex = self.mutex
        # Checked again each time: a change that is appended while the lock is held is
        # left to the holder, who comes here once the lock is free.
        while self.deferred and not self.interrupted():
            try:
                if not mutex.acquire(False):
                    return
                self.catch_up()
            finally:
                try:
                    mutex.release()
                except RuntimeError:
                    pass

    def ask(self, longest: float, question: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return what *question* returns while nothing changes.

        It sees half of a change by this very thread, or of one that takes *longest*.
        """
        mutex = self.mutex
        if self.interrupted():
            return question(*args)
        try:
            if (mutex.acquire(False) or mutex.acquire(True, longest)) and self.deferred:
                self.catch_up()
            return question(*args)
        finally:
            try:
                mutex.release()
            except RuntimeError:
                pass
            self.make_deferred_changes()


# To free locks after a fork.
_locks: WeakSet[ChangeLock] = WeakSet()


def _free_after_fork() -> None:
    """Free all locks: the threads that held them do not exist in the child."""
    for lock in list(_locks):
        # A new one: this very thread may be in the middle of a change, and releases
        # the old one.
        lock.renew()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_free_after_fork)
