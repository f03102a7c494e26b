"""What this process has open, on Linux."""

import gc
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> set[str]:
    """Each open descriptor, as its number and what it is of."""
    found = set()
    for each in list(Path("/proc/self/fd").iterdir()):
        # The descriptor of the listing itself is closed by now.
        with suppress(FileNotFoundError):
            found.add(f"{each.name} {each.readlink()}")
    return found


def descriptors_before() -> set[str]:
    """Those that are open before a test does its work.

    What earlier tests left to the collector is closed first: a collection in the middle
    of the test would close it, and be taken for the test's own work.
    """
    gc.collect()
    return open_descriptors()
