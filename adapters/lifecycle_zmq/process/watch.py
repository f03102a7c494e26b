"""Whether an engine that lives gets on: a verdict out of looks, without I/O.

Three things are told apart. A *stopped* process cannot do anything: the kernel says
so. One that is *busy* is inside of one turn of its loop, be that a long prefill or C
code that holds the interpreter lock: nobody can see into it, so it is given time. One
that has taken more than that is *stalled*, as in a call of a driver that never returns.

A heartbeat from a second thread was rejected: it fails while C code holds the
interpreter lock, goes on while the loop hangs, and wakes an idle engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from lifecycle_zmq.process.pages import Phase
from lifecycle_zmq.process.proc import ProcessState

# Looks further apart say nothing of what was between: our own loop was blocked, or
# the machine slept. Such a gap counts for this much and no more.
_LONGEST_GAP = 0.5
# Two looks that are as good as one prove nothing.
_SURE = 0.02
# A closed socket is followed by the end of the process, or it is a fault.
_LEAVING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of each kind of silence; see `ZmqEngine`."""

    busy: float
    stalled: float
    stopped: float


class Watch:
    """Adds up how long an engine has been silent, and in which way.

    Args:
        limits: How long is too long.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._at: float | None = None
        self._turns = 0
        self._stops = False
        self._stopped = 0.0
        self._silent = 0.0
        self._leaving = 0.0

    def look(
        self, now: float, process: ProcessState, phase: Phase, turns: int
    ) -> str | None:
        """Take one look into account.

        Returns:
            Why the engine is to be given up, in one word, or ``None``.
        """
        gap = 0.0 if self._at is None else min(now - self._at, _LONGEST_GAP)
        silent = turns == self._turns
        self._stopped = self._stopped + gap if process.stopped else 0.0
        self._silent = self._silent + gap if silent and phase is Phase.WORKING else 0.0
        self._leaving = self._leaving + gap if phase is Phase.LEFT else 0.0
        self._at, self._turns, self._stops = now, turns, process.stopped
        return self._verdict()

    @property
    def stops(self) -> bool:
        """Whether it was stopped at the last look."""
        return self._stops

    @property
    def stopped(self) -> bool:
        """Whether it was stopped at the last look, and at one before."""
        return self._stopped >= _SURE

    @property
    def suspicious(self) -> bool:
        """Whether it was silent at the last look, in whichever way."""
        return self._stops or max(self._silent, self._leaving) > 0.0

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
