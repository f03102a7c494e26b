"""Heartbeat: shared page, death notice, and stall detector.

An engine's loop writes two numbers into a page that it shares with the API process.
Writing costs nothing, and reading works while the engine is in C code for seconds. The
API process reads plain numbers only, so a faulty engine can misreport itself and do no
other harm.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import platform
import selectors
import struct
import sys
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self

from lifecycle_zmq.process import ProcessState
from lifecycle_zmq.shared_memory import memfd

_PROCESS_SHARED = 1
_ROBUST = 1
_ATTRIBUTES_SIZE = 64

_WAITERS = 0x8000_0000
_OWNER_DIED = 0x4000_0000
_OWNER = 0x3FFF_FFFF

_Word = ctypes.c_uint32
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
if sys.platform != "linux" or sys.maxsize < 2**32:  # there they have other numbers
    _FUTEX = None
_WAIT, _WAKE = 0, 1
# The kernel wakes once. An engine that writes the word forever must not keep this
# thread busy forever; then the exit of the process is noticed instead.
_MAX_WAKES = 1000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# `close` wakes nothing if the thread is just about to sleep, so the thread looks again.
_NAP = _Timespec(1, 0)


def acquire_death_lock(page: HeartbeatPage) -> bool:
    """Hold the page's mutex while the calling thread lives; False if unsupported.

    When a thread ends, the kernel marks its robust mutexes and wakes their waiters
    *before* it releases the memory of the process. Every notice of the exit itself
    (a pidfd, the end of a pipe, ``waitpid``) comes after that, which takes tens of
    milliseconds for each gigabyte.
    """
    libc = ctypes.CDLL(None)
    memory = (ctypes.c_char * LOCK_SIZE).from_buffer(page.memory, LOCK_AT)
    lock = ctypes.byref(memory)
    attributes = ctypes.byref(ctypes.create_string_buffer(_ATTRIBUTES_SIZE))
    try:
        failed = (
            libc.pthread_mutexattr_init(attributes)
            or libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            or libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            or libc.pthread_mutex_init(lock, attributes)
            or libc.pthread_mutex_lock(lock)
        )
    except AttributeError:  # a C library without robust locks
        return False
    return not failed and _announce(page)


def _announce(page: HeartbeatPage) -> bool:
    # Only the C library knows which word of a mutex holds its owner.
    owner = threading.get_native_id()
    for at in range(LOCK_AT, LOCK_AT + LOCK_SIZE, 4):
        (word,) = struct.unpack_from("=I", page.memory, at)
        if word == owner:
            # No thread contends for the lock, so mark a waiter for the kernel.
            struct.pack_into("=I", page.memory, at, word | _WAITERS)
            page.publish_lock_word(at)
            return True
    return False


def watch_exit(page: HeartbeatPage, descriptor: int) -> ExitWatcher | None:
    """Watch the engine of a page; ``None`` where it, or the system, cannot."""
    at = page.lock_word
    if at is None or _FUTEX is None:
        return None
    try:
        return ExitWatcher(descriptor, at)
    except (OSError, RuntimeError):  # out of descriptors, or of threads
        return None


class ExitWatcher:
    """A thread that sleeps until an engine dies, and then makes a pipe readable.

    It only reads one word of the mutex and sleeps on it in the kernel (futex): a
    faulty engine can wake it too early, and do nothing worse.

    Attributes:
        pipe: Descriptor that becomes readable when the engine dies, or at `close`.
    """

    def __init__(self, descriptor: int, at: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Mapped once more, for as long as the thread needs it.
        memory = mmap.mmap(descriptor, SIZE)
        self._word: _Word | None = ctypes.c_uint32.from_buffer(memory, at)
        self._closed = False
        self.pipe, write = os.pipe()
        # A daemon: an engine that cannot be killed must not block the exit.
        thread = threading.Thread(
            target=self._sleep, args=(write,), name="engine-exit", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            os.close(self.pipe)
            os.close(write)
            raise

    def close(self) -> None:
        """Release the thread; it ends by itself."""
        self._closed = True
        os.close(self.pipe)
        word = self._word
        if word is not None:
            self._call(word, _WAKE, 1)

    def _sleep(self, write: int) -> None:
        word = self._word
        try:
            wakes = 0
            while wakes < _MAX_WAKES:
                if word is None or self._closed:
                    return
                seen = word.value
                if seen & _OWNER_DIED or not seen & _OWNER:
                    return
                wakes += self._call(word, _WAIT, seen)
        finally:
            # Unmaps the page even if this object is still referenced.
            self._word = None
            os.close(write)

    def _call(self, word: _Word, operation: int, value: int) -> bool:
        # Returns at once if the word has changed; the caller looks again. False when
        # nothing has happened for as long as a nap takes.
        nap = ctypes.byref(_NAP)
        address = ctypes.byref(word)
        ended = self._libc.syscall(_FUTEX, address, operation, value, nap, None, 0)
        return ended == 0 or ctypes.get_errno() != errno.ETIMEDOUT


SIZE = 4096
# The second half of the first 256 bytes is for the robust mutex.
LOCK_AT = 128
LOCK_SIZE = 128

# Words of eight bytes.
_PHASE, _TURNS, _LOCK_WORD = 0, 1, 2


class Phase(IntEnum):
    """Phase of the engine's loop."""

    UNKNOWN = 0
    """The loop has not begun, or the engine does not write the page."""
    WAITING = 1
    """The loop sleeps until a message arrives."""
    WORKING = 2
    """The loop handles messages or runs a step."""
    EXITED = 3
    """The loop has ended: no message is answered any more."""


class HeartbeatPage:
    """The shared page, mapped.

    The API process creates it before the spawn; the engine inherits its descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, SIZE)
        self._words = memoryview(self.memory)[:LOCK_AT].cast("Q")

    @classmethod
    def attach(cls, descriptor: int | None) -> Self | None:
        """Map an inherited page and close its descriptor; ``None`` without one."""
        if descriptor is None:
            return None
        try:
            return cls(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap it; it cannot be used afterwards."""
        self._words.release()
        self.memory.close()

    @property
    def phase(self) -> Phase:
        """Current phase of the engine's loop."""
        word = self._words[_PHASE]
        return Phase(word) if word <= Phase.EXITED else Phase.UNKNOWN

    @property
    def beats(self) -> int:
        """Number of phases that the loop has entered, modulo 2 ** 64."""
        return self._words[_TURNS]

    @property
    def lock_word(self) -> int | None:
        """Offset of the lock's word, if the engine holds the lock."""
        at = self._words[_LOCK_WORD]
        return at if LOCK_AT <= at < LOCK_AT + LOCK_SIZE and at % 4 == 0 else None

    def publish_lock_word(self, at: int) -> None:
        """Publish that the lock is held, and where its word is."""
        self._words[_LOCK_WORD] = at

    def enter(self, phase: Phase) -> None:
        """Enter a phase; counts as a beat."""
        self._words[_PHASE] = phase
        self._words[_TURNS] = (self._words[_TURNS] + 1) % 2**64


def create_page_file() -> int:
    """Return the descriptor of a new page; the file has no name.

    Raises:
        OSError: The system is out of descriptors or memory.
    """
    # Sealed: if the engine shrank the page, reading it would be a bus error.
    descriptor = memfd.create(SIZE).descriptor
    assert descriptor is not None
    return descriptor


class Heartbeat(Protocol):
    """Receives a beat at each turn of an engine loop."""

    def beat(self, *, idle: bool) -> None:
        """Record a turn of the loop, or the begin of its sleep."""


# Never unmapped: the C library follows a list of the locks that a thread holds, and the
# thread may lock others after its engine has ended.
_locked: list[HeartbeatPage] = []


class PageHeartbeat:
    """Writes the page, if there is one, from the engine loop, and holds its lock."""

    def __init__(self, page: HeartbeatPage | None) -> None:
        self._page = page
        if page is not None:
            _locked.append(page)
            acquire_death_lock(page)
            page.enter(Phase.WORKING)

    def beat(self, *, idle: bool) -> None:
        """Record a turn of the loop, or the begin of its sleep."""
        if self._page is not None:
            self._page.enter(Phase.WAITING if idle else Phase.WORKING)

    def stop(self) -> None:
        """Record that the loop has ended: no message is answered any more."""
        if self._page is not None:
            self._page.enter(Phase.EXITED)


def loop_hooks(backend: str, heartbeat: Heartbeat) -> dict[str, Any]:
    """Return options for `anyio.run` that record the turns of its event loop.

    An event loop sleeps in one call only, which waits for descriptors. All between two
    such calls is work: a task that blocks the loop counts like a long step. A
    heartbeat task was rejected: it wakes an idle engine, and does not show where the
    loop is.
    """
    if backend == "trio":
        return {"instruments": [_Instrument(heartbeat)]}
    return {"loop_factory": lambda: asyncio.SelectorEventLoop(_Selector(heartbeat))}


class _Selector(selectors.DefaultSelector):
    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self._heartbeat = heartbeat

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._heartbeat.beat(idle=True)
        try:
            return super().select(timeout)
        finally:
            self._heartbeat.beat(idle=False)


class _Instrument:
    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._heartbeat.beat(idle=True)

    def after_io_wait(self, timeout: float) -> None:
        del timeout
        self._heartbeat.beat(idle=False)


# Samples further apart do not show what was between: this event loop was blocked, or
# the machine slept. A longer gap counts as this one.
_LONGEST_GAP = 0.5
# Samples closer than this count as one.
_MIN_STOPPED_SECONDS = 0.02
# A loop that has ended is followed by the exit of the process, or it is a fault.
_LEAVING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds of each kind of silence; see `ZmqEngine`."""

    busy: float
    stalled: float
    stopped: float


class StallDetector:
    """Classifies an engine as healthy, busy, stopped or stalled. Does no I/O.

    The kernel reports a *stopped* process. A *busy* one is inside one turn of its
    loop, such as a long prefill or C code that holds the interpreter lock, and is given
    time. One that exceeds it is *stalled*, as in a driver call that never returns.

    A heartbeat from a second thread was rejected: it fails while C code holds the
    interpreter lock, continues while the loop hangs, and wakes an idle engine.
    """

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._at: float | None = None
        self._beats = 0
        self._stopped_now = False
        self._stopped = 0.0
        self._silent = 0.0
        self._leaving = 0.0

    def sample(
        self, now: float, process: ProcessState, phase: Phase, beats: int
    ) -> str | None:
        """Add a sample; return why to mark the engine as failed, in one word, if so."""
        gap = 0.0 if self._at is None else min(now - self._at, _LONGEST_GAP)
        silent = beats == self._beats
        self._stopped = self._stopped + gap if process.stopped else 0.0
        self._silent = self._silent + gap if silent and phase is Phase.WORKING else 0.0
        self._leaving = self._leaving + gap if phase is Phase.EXITED else 0.0
        self._at, self._beats, self._stopped_now = now, beats, process.stopped
        return self._verdict()

    @property
    def stopped_now(self) -> bool:
        """Whether it was stopped at the last sample."""
        return self._stopped_now

    @property
    def stopped(self) -> bool:
        """Whether it was stopped at the last sample, and at one before."""
        return self._stopped >= _MIN_STOPPED_SECONDS

    @property
    def suspicious(self) -> bool:
        """Whether it was silent in any way at the last sample."""
        return self._stopped_now or max(self._silent, self._leaving) > 0.0

    @property
    def busy(self) -> bool:
        """Whether one turn has taken long, though not too long."""
        return self._silent >= self._limits.busy

    def _verdict(self) -> str | None:
        if self._stopped >= self._limits.stopped:
            return "stopped"
        if self._silent >= self._limits.stalled:
            return "stalled"
        return "disconnected" if self._leaving >= _LEAVING_SECONDS else None
