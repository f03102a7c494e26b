"""How fast engines that have no model generate."""

from __future__ import annotations

import time
from typing import Final

# Seconds between two tokens of a request, and of CPU time that each token takes.
PAUSE: Final = 0.01
WORK: Final = 0.001


def work() -> None:
    """Take the CPU time of a token."""
    until = time.thread_time() + WORK
    while time.thread_time() < until:
        pass
