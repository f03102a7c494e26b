"""A lock that an engine holds while it lives, and whose loss tells of its death.

The kernel marks the lock of a thread that ends as its owner's death and wakes who
waits for it, *before* it takes the process's memory back. Every notice of the exit
itself (a process descriptor, the end of a pipe, `waitpid`) comes after that, which
takes tens of milliseconds for each gigabyte.

The engine uses the C library's robust mutex, which its thread's list of such locks
belongs to. The API process only reads one word of it and sleeps on it in the kernel:
an engine gone wrong can wake it too early, and do nothing worse.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
import threading

from lifecycle_zmq.process.pages import LOCK_AT, LOCK_SIZE, SIZE, Page

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
# The kernel wakes once. An engine that writes the word for ever must not keep this
# thread busy for ever: then the end of the process has to tell.
_MAX_WAKES = 1000


def hold(page: Page) -> bool:
    """Take the lock for as long as the calling thread lives; False where impossible."""
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


def _announce(page: Page) -> bool:
    # Where in a mutex the word is that holds its owner, only the C library knows.
    owner = threading.get_native_id()
    for at in range(LOCK_AT, LOCK_AT + LOCK_SIZE, 4):
        (word,) = struct.unpack_from("=I", page.memory, at)
        if word == owner:
            # Nobody contends for the lock, so the kernel must be told of a waiter.
            struct.pack_into("=I", page.memory, at, word | _WAITERS)
            page.tell_lock_word(at)
            return True
    return False


def watch(page: Page, descriptor: int) -> DeathNotice | None:
    """Watch the engine of a page; ``None`` where it, or the system, cannot."""
    at = page.lock_word
    if at is None or _FUTEX is None:
        return None
    try:
        return DeathNotice(descriptor, at)
    except (OSError, RuntimeError):  # out of descriptors, or of threads
        return None


class DeathNotice:
    """A thread that sleeps until an engine dies, and what it then makes readable.

    Args:
        descriptor: Of the page of an engine that holds its lock.
        at: The lock's word in the page.

    Attributes:
        notice: Becomes readable when the engine dies, or at `close`.
    """

    def __init__(self, descriptor: int, at: int) -> None:
        self._libc = ctypes.CDLL(None)
        # Mapped once more, for as long as the thread needs it.
        memory = mmap.mmap(descriptor, SIZE)
        self._word: _Word | None = ctypes.c_uint32.from_buffer(memory, at)
        self._closed = False
        self.notice, write = os.pipe()
        # A daemon: an engine that cannot be killed must not hold our own exit up.
        thread = threading.Thread(
            target=self._sleep, args=(write,), name="engine-death", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            os.close(self.notice)
            os.close(write)
            raise

    def close(self) -> None:
        """Let the thread go; it ends by itself."""
        self._closed = True
        os.close(self.notice)
        word = self._word
        if word is not None:
            self._call(word, _WAKE, 1)

    def _sleep(self, write: int) -> None:
        word = self._word
        try:
            for _ in range(_MAX_WAKES):
                if word is None or self._closed:
                    return
                seen = word.value
                if seen & _OWNER_DIED or not seen & _OWNER:
                    return
                self._call(word, _WAIT, seen)
        finally:
            # With it goes the mapping, whoever may still hold this object.
            self._word = None
            os.close(write)

    def _call(self, word: _Word, operation: int, value: int) -> None:
        # Returns at once if the word has changed; the caller looks again.
        self._libc.syscall(_FUTEX, ctypes.byref(word), operation, value, None, None, 0)
