"""Whether a client will still be there when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import anyio

from lifecycle import Gate

# Of the SDKs of OpenAI and Anthropic: seconds until a client gives up.
_HEADERS: Final = (b"x-stainless-read-timeout", b"x-stainless-timeout")
# A shorter time says little about how fast a gate drains.
_WINDOW: Final = 1.0


def patience(scope: Any) -> float:
    """Seconds that the client of an ASGI scope waits; infinite if it does not say."""
    said = [math.inf]
    for name, value in scope["headers"]:
        if name in _HEADERS:
            with suppress(ValueError):
                said.append(float(value))
    return min(each for each in said if each > 0)


class Forecast:
    """How long a newcomer will wait at a gate, by how fast it has drained lately.

    Args:
        gate: Which one.
        clock: Monotonic seconds.
    """

    def __init__(
        self, gate: Gate, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._gate = gate
        self._clock = clock
        self._since: float | None = None
        self._released = 0
        self._interval = 0.0

    def wait(self) -> float:
        """Seconds; 0 where nobody is in line, and where nothing is known yet."""
        now, gate = self._clock(), self._gate.statistics()
        if self._since is None or not gate.waiting:
            # An idle time says nothing about how fast it is when there is a line.
            self._since, self._released = now, gate.released
            return 0.0
        window, departures = now - self._since, gate.released - self._released
        if departures and window >= _WINDOW:
            self._interval = window / departures
            self._since, self._released = now, gate.released
        elif window > self._interval and not departures:
            self._interval = window  # it is stuck, for so long already
        return self._interval * (gate.waiting + 1)
