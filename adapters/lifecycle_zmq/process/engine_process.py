"""One engine process: spawned, drained, watched, reaped."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from lifecycle_zmq.process.parent import kill_at_hang_up
from lifecycle_zmq.process.proc import ProcessState, look_at

_RING = 64 * 2**10
# Reads in a row: what writes without end must not hold the event loop up.
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
    """A child in a session of its own, with nothing inherited but what is listed.

    It is spawned on the calling thread, which must live as long as the engine: the
    kernel's notice of a parent's death is bound to the thread. The thread of the event
    loop does; a worker thread of a pool does not.

    Args:
        argv: The program and its arguments.
        env: Its environment; ``None`` inherits ours.
        pass_fds: Descriptors that it inherits beside the three standard ones.

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
        self._ring = bytearray()
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
            kill_at_hang_up(stdin, self._popen.pid)
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
        _make_expendable(self.pid)

    @property
    def reaped(self) -> bool:
        """Whether it is gone, with all that it had mapped."""
        return self._popen.returncode is not None

    @property
    def output(self) -> str:
        """The end of what it wrote to standard output and error, at most 64 KiB."""
        return self._ring.decode(errors="replace")

    async def drain(self) -> None:
        """Read its output for ever, so that it never blocks on a full pipe.

        Cancellation: the ordinary way to stop; nothing read is lost.
        """
        while self.read_output():
            await anyio.wait_readable(self._output_fd)
        await anyio.sleep_forever()

    def read_output(self) -> bool:
        """Take what it has written so far, or much of it; False at its end."""
        for _ in range(_BURST):
            try:
                data = os.read(self._output_fd, 2**16)
            except BlockingIOError:
                break
            if not data:
                return False
            self._ring += data
            del self._ring[:-_RING]
        return True

    async def wait(self) -> None:
        """Wait until the process has ended; it is not reaped yet.

        Cancellation: nothing changes; where the system has no process descriptors, a
        worker thread waits on until the end.
        """
        if self._exited:
            return
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        elif not hasattr(os, "waitid"):  # macOS, before Python 3.13
            while self._popen.poll() is None:  # noqa: ASYNC110 - nothing tells
                await anyio.sleep(_POLL_SECONDS)
            self._kill_session()  # at once: soon its number may be another's
        else:
            wait = functools.partial(
                os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT
            )
            await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)
        self._exited = True

    def kill(self) -> None:
        """Send SIGKILL to it and to all of its session that is left."""
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
        """Reap a process that has ended and return why it did, in one word."""
        self.kill()
        return self._reason(self._popen.wait())

    @property
    def code(self) -> int | None:
        """Its exit code or minus its signal, once it was reaped."""
        return self._popen.returncode

    def look(self) -> ProcessState:
        """Return what the kernel says of it now."""
        # Until it is reaped its number cannot name another process.
        return look_at(self.pid) if self.code is None else ProcessState(exiting=True)

    def reason_of(self, code: int) -> tuple[str, str]:
        """Return why a process with this exit code ended, in one word and in more."""
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return self._reason(code), how

    def _reason(self, code: int) -> str:
        if code >= 0:
            return "exit"
        if -code != signal.SIGKILL:
            return _SIGNALS.get(-code, "signal")
        return "oom" if _count_oom_kills() > self._oom_kills else "killed"


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process ended; None if impossible."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _make_expendable(pid: int) -> None:
    # No core file, which would hold prompts; and when memory runs out, the kernel
    # takes the half that can be restarted.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/oom_score_adj").write_text("500")


def _count_oom_kills() -> int:
    """Return how often the kernel ran out of memory for our cgroup; 0 if unknown."""
    try:
        groups = Path("/proc/self/cgroup").read_text()
        counts = _memory_file(groups).read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)", counts, re.MULTILINE)
    return int(found[1]) if found else 0


def _memory_file(groups: str) -> Path:
    # Where the first version of cgroups has the controller, the second one has not.
    first = re.search(r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(\S*)", groups, re.MULTILINE)
    if first is not None:
        return Path("/sys/fs/cgroup", "memory", first[1], "memory.oom_control")
    second = re.search(r"^0::/(\S*)", groups, re.MULTILINE)
    return Path("/sys/fs/cgroup", second[1] if second else "", "memory.events")
