"""Which of our functions a process enters, in a phase that another process names.

`Phases` writes a ``sitecustomize.py`` into a folder. A Python process that has this
folder on its path imports it when it starts, and from then on appends each function
that it enters for the first time in a phase to a file of its own there.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
OURS = (f"{ROOT}/src/", f"{ROOT}/adapters/")
OFF = 0

Call = tuple[str, str]
"""A function and the file that it is in, by its path in this checkout."""


def noting(
    note: Callable[[str, str], object],
) -> Callable[[FrameType, str, object], None]:
    """Return a function for `sys.setprofile` that gives *note* each call of ours."""
    ours: dict[CodeType, tuple[str, str] | None] = {}

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in ours:
            name = code.co_filename
            file = name[len(str(ROOT)) + 1 :]
            function = f"{file}:{code.co_qualname}:{code.co_firstlineno}"
            ours[code] = (function, file) if name.startswith(OURS) else None
        if (found := ours[code]) is not None:
            note(*found)

    return profile


def install(folder: Path) -> None:
    """Trace this process; called by ``sitecustomize.py``."""
    with (folder / "phase").open("rb") as file:
        phase = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen: set[tuple[int, str]] = set()
    path = folder / f"{os.getpid()}.calls"

    def note(function: str, file: str) -> None:
        now = phase[0]
        if now == OFF or (now, function) in seen:
            return
        seen.add((now, function))
        line = f"{time.monotonic_ns()}\t{now}\t{function}\t{file}\n"
        with path.open("a") as calls:
            calls.write(line)

    profile = noting(note)
    threading.setprofile(profile)
    sys.setprofile(profile)


class Phases:
    """The phases of a trace, and what was called in each.

    Args:
        folder: For the files; to be put on the path of the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: list[str] = []
        self._write(OFF)
        here = str(Path(__file__).parent)
        (folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({here!r})\n"
            "import pathlib, file_tracer\n"
            f"file_tracer.install(pathlib.Path({str(folder)!r}))\n"
        )

    def begin(self, name: str) -> None:
        """Count what is called from now on for *name*."""
        self._names.append(name)
        self._write(len(self._names))

    def stop(self) -> None:
        """Count nothing from now on."""
        self._write(OFF)

    def settle(self, seconds: float) -> None:
        """Wait until nothing new has been called for *seconds*."""
        size, since = self._size(), time.monotonic()
        while time.monotonic() - since < seconds:
            time.sleep(0.05)
            if (now := self._size()) != size:
                size, since = now, time.monotonic()

    def calls(self, name: str) -> list[Call]:
        """Return what was called in a phase by all processes, in the order of time."""
        number = str(self._names.index(name) + 1)
        found = []
        for path in self._folder.glob("*.calls"):
            for line in path.read_text().splitlines():
                when, phase, function, file = line.split("\t")
                if phase == number:
                    found.append((int(when), function, file))
        return [(function, file) for _, function, file in sorted(found)]

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.calls"))

    def _write(self, phase: int) -> None:
        # In place: the processes have mapped it.
        with (self._folder / "phase").open("r+b" if self._names else "wb") as file:
            file.write(bytes([phase]))
