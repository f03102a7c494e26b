"""What a server's process keeps of what it has freed, in a process of its own."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from lifecycle_engine.http.heap import loaded_set_apart

# Payloads of all sizes in several threads, each with a small thing that stays.
BURST = """
import os, sys, threading
from lifecycle_engine.http.heap import give_back_what_is_freed

if "before" not in sys.argv:
    assert give_back_what_is_freed()

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


# As many pieces as a picture is decoded in, in four threads, one after the other.
PIECES = """
import os, sys, threading
from lifecycle_engine.http.heap import give_back_what_is_freed

if "before" not in sys.argv:
    assert give_back_what_is_freed()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

start, turn, done = resident(), threading.Lock(), threading.Barrier(5)

def decode():
    with turn:
        for _ in range(2):
            pieces = [b"1" * 65536 for _ in range(200)]
            del pieces
    done.wait(20)  # a thread that ends leaves its heap to the next one

for _ in range(4):
    threading.Thread(target=decode).start()
done.wait(20)
print((resident() - start) >> 20)
"""


# Pictures of 12 MiB one after another in each of two threads, at the same time.
DECODES = """
import io, sys, threading
from PIL import Image
from lifecycle_engine.http.heap import give_back_what_is_freed, keep_pages_of_pictures

give_back_what_is_freed()
if "before" not in sys.argv:
    keep_pages_of_pictures(2)

file = io.BytesIO()
Image.new("RGB", (2048, 1536)).save(file, "PNG")
both = threading.Barrier(2)

def decode():
    for _ in range(5):
        picture = Image.open(io.BytesIO(file.getvalue()))
        picture.load()
        both.wait(20)  # there are two of them now
        del picture
        both.wait(20)

threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(Image.core.get_stats()["allocated_blocks"])
"""


def left(script: str, *argv: str) -> int:
    """What a script prints when it is through: MiB that are left, for one."""
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_gives_large_blocks_back() -> None:
    """After a burst next to nothing is left, where it would be most of it."""
    assert left(BURST) < 24


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is glibc's")
def test_keeps_one_heap_for_all_threads() -> None:
    """What threads have freed is not kept once for each of them."""
    assert left(PIECES) < 20


def test_decodes_pictures_in_the_pages_of_those_before() -> None:
    """However many there are one after another, as many are made as threads decode."""
    assert left(DECODES) == 2


def test_collector_looks_at_no_module_while_a_server_runs() -> None:
    """What is loaded is set apart meanwhile, and back with the rest afterwards."""
    before = gc.get_freeze_count()
    with loaded_set_apart():
        assert gc.get_freeze_count() > 10_000
        assert not any(each is gc.__dict__ for each in gc.get_objects())
    assert gc.get_freeze_count() <= before
