"""How long a busy machine has made this process wait, for tests that judge by a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STEP = 0.01


@contextmanager
def noted_pauses() -> Iterator[Callable[[], float]]:
    """Measure in a thread by how many seconds it is woken too late.

    Yields:
        A function that returns the sum of the delays since the block was entered.
    """
    begin, steps, done = time.monotonic(), 0, threading.Event()

    def measure() -> None:
        nonlocal steps
        while not done.wait(_STEP):
            steps += 1

    def pauses() -> float:
        return max(0.0, time.monotonic() - begin - _STEP * (steps + 1))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield pauses
    finally:
        done.set()
        thread.join()
