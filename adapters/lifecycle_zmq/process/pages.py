"""One page of memory in which an engine shows that it is getting on.

The API process makes it before it spawns, the engine inherits its descriptor. The
engine's loop writes two numbers into it and sends nothing: a look costs it nothing,
and works while it is in C code for seconds. Only plain numbers are ever read from it,
so that an engine gone wrong can lie about itself and nothing else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from enum import IntEnum
from typing import Self

SIZE = 4096
# The second half of the first 256 bytes is for the lock whose owner's death is told.
LOCK_AT = 128
LOCK_SIZE = 128

# Words of eight bytes.
_PHASE, _TURNS, _LOCK_WORD = 0, 1, 2


class Phase(IntEnum):
    """What the loop of the engine's server is at."""

    UNKNOWN = 0
    """It has not begun; or the engine does not write the page."""
    WAITING = 1
    """It sleeps until a message comes."""
    WORKING = 2
    """It handles messages or runs a step."""
    LEFT = 3
    """It is over: nothing will be answered any more."""


class Page:
    """The page, mapped.

    Args:
        descriptor: Of the file that it is in; stays the caller's.
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
        """Unmap it; nothing else may be done with it afterwards."""
        self._words.release()
        self.memory.close()

    @property
    def phase(self) -> Phase:
        """What the engine's loop is at."""
        word = self._words[_PHASE]
        return Phase(word) if word <= Phase.LEFT else Phase.UNKNOWN

    @property
    def turns(self) -> int:
        """Counts on with every turn of the engine's loop."""
        return self._words[_TURNS]

    @property
    def lock_word(self) -> int | None:
        """Where in the page the lock's word is, if the engine holds the lock."""
        at = self._words[_LOCK_WORD]
        return at if LOCK_AT <= at < LOCK_AT + LOCK_SIZE and at % 4 == 0 else None

    def tell_lock_word(self, at: int) -> None:
        """Announce that the lock is held."""
        self._words[_LOCK_WORD] = at

    def enter(self, phase: Phase) -> None:
        """Begin a phase; each is a turn of its own."""
        self._words[_PHASE] = phase
        self._words[_TURNS] = (self._words[_TURNS] + 1) % 2**64


def make_file() -> int:
    """Return the descriptor of a fresh page that has no name anywhere.

    Raises:
        OSError: The system is out of descriptors or memory.
    """
    try:
        return _make_sealed()
    except (AttributeError, OSError):  # no such files here, or a sandbox forbids them
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            return os.dup(file.fileno())


def _make_sealed() -> int:
    descriptor = os.memfd_create(
        "lifecycle-liveness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    )
    try:
        os.ftruncate(descriptor, SIZE)
        # Shrunk by the other side, the page would be a bus error in this process.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
