"""Memory of processes over time: resident, proportional and total."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_EVERY = 0.02
# Of the proportional size the kernel makes a sum over all pages at each look.
_SELDOM = 0.2
_KIB = 1024


def _fields(path: str) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return {name: int(number) * _KIB for name, number in found}


def held(pids: Sequence[int]) -> int:
    """Return the total memory of processes; shared pages count once.

    What the kernel can drop at any time, the pages of programs, is not in it.
    """
    found = [_fields(f"/proc/{pid}/status") for pid in pids]
    return sum(it["RssAnon"] for it in found) + max(it["RssShmem"] for it in found)


def resident(pid: int) -> int:
    """Return the resident memory of a process, including shared pages."""
    return _fields(f"/proc/{pid}/status")["VmRSS"]


def proportional(pid: int) -> int:
    """Return the proportional set size: each of n sharers counts 1/n of a page."""
    return _fields(f"/proc/{pid}/smaps_rollup")["Pss"]


class Watch:
    """Samples processes from a thread while the context is open.

    Args:
        pids: Which.

    Attributes:
        before: What they `held` at first.
        peak: The most that they `held`.
        peaks: The most that each had `resident`.
        series: ``[seconds, resident of each …, proportional of each …]``.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.before = self.peak = held(pids)
        self.peaks = [0] * len(pids)
        self.series: list[list[float]] = []

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        looked = 0.0
        while not self._over.wait(_EVERY):
            try:
                now = time.monotonic() - self._began
                self.peak = max(self.peak, held(self._pids))
                sizes = [resident(pid) for pid in self._pids]
                self.peaks = [max(pair) for pair in zip(self.peaks, sizes, strict=True)]
                if not self.series or now - looked >= _SELDOM:
                    shares = [proportional(pid) for pid in self._pids]
                    self.series.append([round(now, 2), *sizes, *shares])
                    looked = now
            except (OSError, KeyError):  # a process that has ended holds nothing
                return
