"""One change at a time, from any thread and at any moment."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from .events import Event

F = TypeVar("F", bound="Callable[..., object]")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_WRITING: set[CodeType] = set()


def writes(function: F) -> F:
    """Mark what has the pen: to wait for it from within could be for ever."""
    _WRITING.add(function.__code__)
    return function


class Monitor:
    """Books that only whoever has the pen may write in.

    A change may come from another thread, or from a finaliser or signal handler
    that interrupts one half-way (since CPython 3.12 the collector runs between
    bytecodes), and may wait for neither: it goes into a mailbox, and whoever has
    the pen empties it before going. Only what has to know an answer waits for
    another thread.

    Args:
        emit: Told of events once the pen is back: an observer may use the gate.
    """

    def __init__(self, emit: Callable[[Event], None] | None) -> None:
        # To pop and to append is atomic, and takes a quarter of the time of a
        # lock that knows its owner.
        self._pen: list[None] = [None]
        self._mail: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._outbox: deque[Event] = deque()
        self._emit = emit

    def _change(self, change: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make *change* now, or leave it to whoever has the pen."""
        self._mail.append((change, args))
        self._drain()

    @writes
    def _look(self, look: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return what *look* does; in the middle of a change, it sees half of it."""
        mine = self._take()
        try:
            return look(*args)
        finally:
            if mine:
                self._pen.append(None)
                self._drain()

    def _take(self) -> bool:
        """Have the pen; ``False`` if this thread interrupts a change of its own."""
        while True:
            try:
                self._pen.pop()
            except IndexError:
                if _interrupts(sys._getframe(2)):  # noqa: SLF001
                    return False
                done = threading.Lock()
                done.acquire()
                self._change(done.release)
                done.acquire()
            else:
                return True

    @writes
    def _drain(self) -> None:
        # Looked at again each time: what was posted while somebody had the pen
        # has nobody else to make it.
        while self._mail:
            try:
                self._pen.pop()
            except IndexError:
                return
            try:
                while self._mail:
                    change, args = self._mail.popleft()
                    change(*args)
            finally:
                self._pen.append(None)
        if self._outbox:
            self._speak()

    def _speak(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was faster
            while self._outbox and self._emit is not None:
                self._emit(self._outbox.popleft())


def _interrupts(frame: FrameType | None) -> bool:
    """Whether this thread is in the middle of a change, of whatever gate."""
    while frame is not None and frame.f_code not in _WRITING:
        if frame.f_code is Monitor._speak.__code__ and frame.f_back is not None:  # noqa: SLF001
            frame = frame.f_back.f_back  # these two have put the pen back
        frame = frame and frame.f_back
    return frame is not None
