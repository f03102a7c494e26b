"""What a server's process keeps of what it has freed, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Payloads of all sizes in several threads, each with a small thing that stays.
BURST = """
import os, sys, threading
from lifecycle_engine.http.heap import give_large_back

if "before" not in sys.argv:
    assert give_large_back()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

kept, start = [], resident()

def burst():
    # The first to be freed tells glibc that such blocks belong on the heap.
    del (first := [bytearray(30 << 20)])[:]
    large = []
    for _ in range(5):
        large.append(bytearray(b"1") * (12 << 20))
        kept.append(bytearray(b"1") * 1000)

threads = [threading.Thread(target=burst) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((resident() - start) >> 20)
"""


def left(*argv: str) -> int:
    """MiB that are left after a burst of 240 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", BURST, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_gives_large_blocks_back() -> None:
    """After a burst next to nothing is left, where it would be most of it."""
    assert left() < 24
