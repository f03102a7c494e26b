"""One change at a time, from any thread and at any moment.

A change may come from another thread, or from a finaliser or signal handler that
interrupts one half-way (since CPython 3.12 the collector runs between bytecodes).
Code that needs no answer, such as a release, does not wait for the lock where it is
held: it appends its change to a deque of deferred changes, which the holder makes
before it goes. (It may wait for a thread that acquires the lock in the same moment,
which takes microseconds.)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVarTuple
from weakref import WeakSet

Ts = TypeVarTuple("Ts")

# Seconds that code that needs an answer waits for another thread. A change takes
# microseconds: one that takes longer is most likely made further down the stack of this
# very thread, which interrupts it and would wait for ever.
LONGEST_WAIT: Final = 1.0


class ChangeLock:
    """A lock whose holder makes the changes of all that came too early.

    Attributes:
        mutex: Held for one change. It is acquired by ``with`` alone, and only where it
            was seen free: ``with`` leaves no moment at which a KeyboardInterrupt would
            leave it locked, and code that interrupts its holder never blocks on it.
        deferred: Changes that could not be made at once.
    """

    __slots__ = ("__weakref__", "deferred", "mutex")

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.deferred: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        _locks.add(self)

    def apply(self, change: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make *change* now, or leave it to the holder."""
        self.deferred.append((change, args))
        self.make_deferred_changes()

    def make_deferred_changes(self) -> None:
        """Make all deferred changes, unless the holder will."""
        # Checked again each time: a change that is appended while the lock is held is
        # left to the holder, who comes here once the lock is free.
        while self.deferred and not self.mutex.locked():
            with self.mutex:
                while self.deferred:
                    change, args = self.deferred.popleft()
                    change(*args)

    def usable(self) -> bool:
        """Whether the lock, which was held, was free within `LONGEST_WAIT` seconds.

        ``False`` most likely means that this very thread holds it.
        """
        finished = threading.Lock()
        finished.acquire()
        self.apply(finished.release)
        return finished.acquire(timeout=LONGEST_WAIT)


# To free locks after a fork.
_locks: WeakSet[ChangeLock] = WeakSet()


def _free_after_fork() -> None:
    """Free all locks: the threads that held them do not exist in the child."""
    for lock in list(_locks):
        if lock.mutex.locked():
            # A new one: this very thread may be in the middle of a change, and
            # releases the old one.
            lock.mutex = threading.Lock()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_free_after_fork)
