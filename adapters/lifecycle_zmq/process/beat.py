"""Showing, from inside an event loop, that it gets on.

The loop sleeps in one place only, in the call that waits for descriptors. What it does
between two such calls is work, whoever's it is: a task that blocks the loop is seen
like a step that takes long. A task for a heartbeat was rejected: it wakes an engine
that has nothing to do, and says nothing of where the loop is.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from lifecycle_zmq.process.pulse import Turns


def options(backend: str, pulse: Turns) -> dict[str, Any]:
    """Return the options with which `anyio.run` shows its turns."""
    if backend == "trio":
        return {"instruments": [_Instrument(pulse)]}
    return {"loop_factory": lambda: asyncio.SelectorEventLoop(_Selector(pulse))}


class _Selector(selectors.DefaultSelector):
    def __init__(self, pulse: Turns) -> None:
        super().__init__()
        self._pulse = pulse

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._pulse.turn(idle=True)
        try:
            return super().select(timeout)
        finally:
            self._pulse.turn(idle=False)


class _Instrument:
    def __init__(self, pulse: Turns) -> None:
        self._pulse = pulse

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._pulse.turn(idle=True)

    def after_io_wait(self, timeout: float) -> None:
        del timeout
        self._pulse.turn(idle=False)
