"""CPU time and memory of a server on the same host, with its child processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import anyio

try:
    import psutil
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'--pid needs {error.name}; pip install "anyio-lifecycle[tools]"',
        name=error.name,
    ) from None


class ServerProcess:
    """A process and its descendants, as the operating system counts them.

    Raises:
        ProcessLookupError: there is no process *pid*.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise ProcessLookupError(
                f"--pid {pid}: no such process; give the server's own"
            ) from None
        self.peak = 0
        self._seen: dict[int, float] = {}

    def _tree(self) -> Iterator[psutil.Process]:
        yield self._root
        yield from self._root.children(recursive=True)

    def cpu_seconds(self) -> float:
        """CPU seconds used so far; those of a process that ended are kept."""
        try:
            for process in self._tree():
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self._seen[process.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            pass
        return sum(self._seen.values())

    def memory(self) -> int:
        """Bytes of memory in use: PSS where the system has it, otherwise RSS."""
        total = 0
        try:
            for process in self._tree():
                with suppress(psutil.NoSuchProcess):
                    total += _memory_of(process)
        except psutil.NoSuchProcess:
            pass
        self.peak = max(self.peak, total)
        return total

    async def cpu_rate(self, seconds: float) -> float:
        """Return the CPU seconds used per second, over *seconds* from now."""
        before, started = self.cpu_seconds(), time.monotonic()
        await anyio.sleep(seconds)
        return (self.cpu_seconds() - before) / (time.monotonic() - started)

    async def watch_memory(self) -> None:
        """Keep `peak` up to date, until cancelled."""
        while True:
            self.memory()
            await anyio.sleep(0.02)


def _memory_of(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    return int(getattr(full, "pss", full.rss))
