"""One engine process: spawned, watched, reaped, and killed with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import cast

import anyio
import anyio.to_thread

from lifecycle.lowlevel import check_int, check_type

_PF_EXITING = 0x4
# Counted from the field after the name, which may contain blanks.
_STATE, _FLAGS, _STATUS = 0, 6, 49


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process as it was at one moment.

    Attributes:
        stopped: Whether a signal has stopped it.
        exiting: Whether it is on its way out; its memory may still be there.
        code: As of `subprocess`: the exit code, minus its signal; ``None`` while it
            runs, and if it is unknown.
    """

    stopped: bool = False
    exiting: bool = False
    code: int | None = None


def read_process_state(pid: int) -> ProcessState:
    """Return the state of a child; counts as running where the system cannot tell."""
    try:
        text = _read(f"/proc/{pid}/stat")
    except OSError:  # no /proc here, or out of descriptors
        return ProcessState(stopped=_is_stopped(pid))
    fields = text.rpartition(b")")[2].split()
    exiting = bool(int(fields[_FLAGS]) & _PF_EXITING)
    # The kernel also shows 0 to processes without permission.
    status = int(fields[_STATUS]) & 0xFF7F if exiting else 0
    return ProcessState(
        stopped=fields[_STATE] == b"T",
        exiting=exiting,
        code=os.waitstatus_to_exitcode(status) if status else None,
    )


def _is_stopped(pid: int) -> bool:
    # Only a fallback: it knows neither `exiting` nor `code`.
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


_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 70
_WATCHER = "parent-watch"


def exit_with_parent() -> None:
    """End this process when its parent does, however the parent ends.

    Standard input must be a pipe whose other end only the parent holds: its end of
    file ends this process at once, without clean-up. On Linux the kernel is also
    asked to kill it, which works while C code holds the interpreter lock. Call this
    first in an engine that takes long to load; `EngineServer.run` does too, and a
    second call changes nothing.
    """
    if sys.platform == "linux":
        # For the death of the parent's *thread* that spawned: see EngineProcess.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if any(it.name == _WATCHER for it in threading.enumerate()):
        return
    # A parent that died before the prctl has closed its end of the pipe, unless it
    # had forked; then `exit_with_process` notices.
    threading.Thread(target=_exit_at_eof, name=_WATCHER, daemon=True).start()


def _exit_at_eof() -> None:
    try:
        while os.read(0, 4096):
            pass
    finally:
        os._exit(_EXIT_ORPHANED)


def exit_with_process(descriptor: int | None) -> None:
    """End this process when the process of a pidfd has ended, or had before.

    A process that the parent forked, such as a pool of workers, keeps the pipe open
    after the parent is gone, and the kernel only kills children that had asked for it
    by then.
    """
    if descriptor is not None:
        threading.Thread(
            target=_exit_after, args=(descriptor,), name=_WATCHER, daemon=True
        ).start()


def _exit_after(descriptor: int) -> None:
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
    finally:
        os._exit(_EXIT_ORPHANED)


def kill_on_hang_up(descriptor: int, pid: int) -> None:
    """Let the kernel kill a child when the other end of a pipe is closed.

    A child that is stopped before it can ask for that itself would stay until it is
    continued. Only if the parent had forked, too, does the pipe stay open; then the
    child ends when it is continued.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid)
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM: the parent decides when this process exits.

    A service manager may signal every process of a service at once, and an engine
    that exits at once would cut the streams that its parent is draining.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # Not SIG_IGN: programs that this process starts would inherit it.
            signal.signal(number, _pass)


def _pass(_number: int, _frame: FrameType | None) -> None:
    pass


_OUTPUT_BYTES = 64 * 2**10
# Reads in a row: a process that writes without end must not block the event loop.
_BURST = 64
_REAP_SECONDS = 10.0
_POLL_SECONDS = 0.02
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "killed",
    signal.SIGTERM: "terminated",
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "segfault",
    signal.SIGABRT: "aborted",
}


class EngineProcess:
    """A child in a session of its own that inherits only what is listed.

    It is spawned on the calling thread, which must live as long as the engine: the
    kernel's notice of a parent's death is bound to the thread. The thread of the event
    loop does; a worker thread of a pool does not.

    Raises:
        OSError: The program cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._oom_kills = _count_oom_kills()
        self._output = bytearray()
        self._exited = False
        self._stdin: int | None
        stdin, self._stdin = os.pipe()
        try:
            self._popen = subprocess.Popen(
                argv,
                bufsize=0,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                close_fds=True,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            kill_on_hang_up(stdin, self._popen.pid)
        except BaseException:
            os.close(self._stdin)
            raise
        finally:
            os.close(stdin)
        self.pid = self._popen.pid
        self._pidfd = open_pidfd(self.pid)
        assert self._popen.stdout is not None
        self._output_fd = self._popen.stdout.fileno()
        os.set_blocking(self._output_fd, False)
        _prefer_for_oom_kill(self.pid)

    @property
    def reaped(self) -> bool:
        """Whether it is gone, with all its mappings."""
        return self._popen.returncode is not None

    @property
    def output(self) -> str:
        """The end of what it wrote to standard output and error, at most 64 KiB."""
        return self._output.decode(errors="replace")

    async def drain(self) -> None:
        """Read its output forever, so that it never blocks on a full pipe.

        Cancellation: the ordinary way to stop; nothing read is lost.
        """
        while self.read_output():
            await anyio.wait_readable(self._output_fd)
        await anyio.sleep_forever()

    def read_output(self) -> bool:
        """Read what it has written so far, up to a bound; False at its end."""
        for _ in range(_BURST):
            try:
                data = os.read(self._output_fd, 2**16)
            except BlockingIOError:
                break
            if not data:
                return False
            self._output += data
            del self._output[:-_OUTPUT_BYTES]
        return True

    async def wait(self) -> None:
        """Wait until the process has ended; it is not reaped yet.

        Cancellation: nothing changes; where the system has no pidfds, a worker thread
        waits on until the end.
        """
        if self._exited:
            return
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        elif not hasattr(os, "waitid"):  # macOS, before Python 3.13
            while self._popen.poll() is None:  # noqa: ASYNC110 - no event
                await anyio.sleep(_POLL_SECONDS)
            self._kill_session()  # at once: its number may be reused soon
        else:
            wait = functools.partial(
                os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT
            )
            await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)
        self._exited = True

    def kill(self) -> None:
        """Send SIGKILL to it and to what is left of its session."""
        # Until it is reaped its number cannot name another process or group.
        if self._popen.returncode is None:
            self._kill_session()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> str:
        """Kill what is left, reap it, close every descriptor; return why it ended.

        Cancellation: shielded, bounded by ten seconds.
        """
        self.kill()
        try:
            with anyio.move_on_after(_REAP_SECONDS, shield=True):
                await self.wait()
        finally:  # a native cancellation gets through the shield
            self.read_output()
            code = self._popen.poll()
            self._close_descriptors()
        return "unkillable" if code is None else self._reason(code)

    def _close_descriptors(self) -> None:
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        for descriptor in (self._stdin, self._pidfd):
            if descriptor is not None:
                os.close(descriptor)
        self._stdin = self._pidfd = None

    def reap(self) -> str:
        """Reap a process that has ended; return why it did, in one word."""
        self.kill()
        return self._reason(self._popen.wait())

    @property
    def code(self) -> int | None:
        """Its exit code or minus its signal, once it was reaped."""
        return self._popen.returncode

    def state(self) -> ProcessState:
        """Return its current state according to the kernel."""
        # Until it is reaped its number cannot name another process.
        return (
            read_process_state(self.pid)
            if self.code is None
            else ProcessState(exiting=True)
        )

    def exit_reason(self, code: int) -> tuple[str, str]:
        """Return why a process with this exit code ended: one word, and a detail."""
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return self._reason(code), how

    def _reason(self, code: int) -> str:
        if code >= 0:
            return "exit"
        if -code != signal.SIGKILL:
            return _SIGNALS.get(-code, "signal")
        return "oom" if _count_oom_kills() > self._oom_kills else "killed"


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, readable once a process has ended; None if unsupported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _prefer_for_oom_kill(pid: int) -> None:
    # No core file, which would hold prompts; and when memory runs out, the kernel
    # kills the process that can be restarted.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text("500")


def _count_oom_kills() -> int:
    """Return how often the kernel ran out of memory for our cgroup; 0 if unknown."""
    try:
        groups = Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape")
        counts = _memory_file(groups).read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)", counts, re.MULTILINE)
    return int(found[1]) if found else 0


def _memory_file(groups: str) -> Path:
    # If cgroup v1 has the memory controller, v2 has not.
    first = re.search(r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(\S*)", groups, re.MULTILINE)
    if first is not None:
        return Path("/sys/fs/cgroup", "memory", first[1], "memory.oom_control")
    second = re.search(r"^0::/(\S*)", groups, re.MULTILINE)
    return Path("/sys/fs/cgroup", second[1] if second else "", "memory.events")


_TEXT = (str, bytes, os.PathLike)


def check_command(argv: object) -> tuple[str, ...]:
    """Return *argv* as a tuple; raise unless it is a list of at least one text."""
    if not isinstance(argv, Iterable) or isinstance(argv, str | bytes):
        kind = type(argv).__name__  # each letter of a text would be an argument
        raise TypeError(f"argv must be a list, not {kind}; shlex.split() makes one")
    arguments = tuple(argv)
    if not arguments:
        raise ValueError("argv is empty; name a program")
    for argument in arguments:
        check_type(_TEXT, "arguments in argv must be text", argument)
    return arguments


def check_environment(env: object) -> None:
    """Raise `TypeError` unless *env* maps text to text, or is ``None``."""
    if env is not None:
        check_type(Mapping, "env must be a map, or None", env)
        for it in chain.from_iterable(cast("Mapping[object, object]", env).items()):
            check_type(_TEXT, "what env maps must be text", it)


def check_descriptors(pass_fds: object) -> tuple[int, ...]:
    """Return *pass_fds* as a tuple; raise unless it lists descriptors."""
    if not isinstance(pass_fds, Iterable):
        kind = type(pass_fds).__name__
        raise TypeError(f"pass_fds must be a list of descriptors, not {kind}")
    numbers = tuple(pass_fds)
    for number in numbers:
        check_int(**{"what pass_fds lists": number})
    return numbers
