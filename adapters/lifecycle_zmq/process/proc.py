"""What the kernel says of a child process, read from ``/proc/<pid>/stat``."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PF_EXITING = 0x4
# Counted from the field behind the name, which may hold blanks itself.
_STATE, _FLAGS, _STATUS = 0, 6, 49


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process as it was at one moment.

    Attributes:
        stopped: Whether a signal has stopped it.
        exiting: Whether it is on its way out; its memory may still be there.
        code: As of `subprocess`: the exit code, minus its signal; ``None`` while it
            lives, and where the kernel does not tell.
    """

    stopped: bool = False
    exiting: bool = False
    code: int | None = None


def look_at(pid: int) -> ProcessState:
    """Return the state of a child; of one that runs, where there is no telling."""
    try:
        text = _read(f"/proc/{pid}/stat")
    except OSError:  # no such directory here, or out of descriptors
        return ProcessState(stopped=_is_stopped(pid))
    fields = text.rpartition(b")")[2].split()
    exiting = bool(int(fields[_FLAGS]) & _PF_EXITING)
    # 0 is also what is shown to those who may not know.
    status = int(fields[_STATUS]) & 0xFF7F if exiting else 0
    return ProcessState(
        stopped=fields[_STATE] == b"T",
        exiting=exiting,
        code=os.waitstatus_to_exitcode(status) if status else None,
    )


def _is_stopped(pid: int) -> bool:
    # Not asked in the first place: it says nothing of the others.
    try:
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, pid, options) is not None
    except (AttributeError, OSError):
        return False


def _read(path: str) -> bytes:
    # A file object takes nine system calls, several times a second.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
