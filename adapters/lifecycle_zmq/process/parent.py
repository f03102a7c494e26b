"""An engine never outlives the process that spawned it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
import threading
from types import FrameType

_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 70
_WATCHER = "parent-watch"


def exit_with_parent() -> None:
    """End this process when its parent does, however the parent ends.

    Standard input must be a pipe whose other end the parent holds and nobody else:
    its end of file ends this process at once, without clean-up. On Linux the kernel is
    also asked to kill it, which works while C code holds the interpreter lock. Call
    this first in an engine that takes long to load; `EngineServer.run` does too,
    and a second call changes nothing.
    """
    if sys.platform == "linux":
        # Counts for the death of the parent's *thread* that spawned: see EngineProcess.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if any(it.name == _WATCHER for it in threading.enumerate()):
        return
    # A parent that died before the prctl is seen here: its end of the pipe is closed,
    # unless it had forked; then `exit_with_process` sees it.
    threading.Thread(target=_leave_at_eof, name=_WATCHER, daemon=True).start()


def _leave_at_eof() -> None:
    try:
        while os.read(0, 4096):
            pass
    finally:
        os._exit(_EXIT_ORPHANED)


def exit_with_process(descriptor: int | None) -> None:
    """End this process when that of a process descriptor has ended, or had before.

    A process that the parent forked, as a pool of workers does, keeps the pipe open
    after the parent is gone. The kernel kills only whoever had asked for it by then.

    Args:
        descriptor: Of the parent; ``None`` where the system has no such descriptors.
    """
    if descriptor is not None:
        threading.Thread(
            target=_leave_after, args=(descriptor,), name=_WATCHER, daemon=True
        ).start()


def _leave_after(descriptor: int) -> None:
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
    finally:
        os._exit(_EXIT_ORPHANED)


def kill_at_hang_up(descriptor: int, pid: int) -> None:
    """Let the kernel kill a process when nobody holds the other end of a pipe any more.

    What a process asks for itself, as above, it may be stopped before it asks for: it
    would stay for as long as nobody continues it. Only a parent that had forked, too,
    keeps the pipe open; then it ends when it is continued.

    Args:
        descriptor: The end that is read from, into which nothing is ever written.
        pid: Of a child that is not reaped.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid)
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)


def leave_signals_to_parent() -> None:
    """Let SIGINT and SIGTERM pass: the parent says when this process leaves.

    Whoever stops a service may signal every process of it at once, and an engine that
    went at once would cut the streams that its parent is draining.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # Not SIG_IGN: programs that this process starts would inherit it.
            signal.signal(number, _pass)


def _pass(_number: int, _frame: FrameType | None) -> None:
    pass
