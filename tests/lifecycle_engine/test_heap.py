"""The heap is given back when nothing large is left, and not before."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest
import trio.testing

from lifecycle import Gate
from lifecycle_engine.server import heap


def test_trims_once_after_each_time_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while bytes are in use, nor right after, nor again and again."""
    trimmed: list[float] = []

    async def run_sync(function: object, *_: object, **__: object) -> None:
        trimmed.append(anyio.current_time() - begun)

    monkeypatch.setattr(heap, "malloc_trim", lambda: len)
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
    gate = Gate(bytes=10)

    async def work() -> None:
        nonlocal begun
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            statistics = lambda: [gate.statistics()]  # noqa: E731
            tasks.start_soon(lambda: heap.give_back_heap(statistics, seconds=1.0))
            for _ in range(2):
                await anyio.sleep(3.25)
                with await gate.admit(bytes=1):
                    await anyio.sleep(3.0)
            await anyio.sleep(10.25)
            tasks.cancel_scope.cancel()

    begun = 0.0
    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(work, backend="trio", backend_options={"clock": clock})
    assert trimmed == [8.0, 14.0]


def test_leaves_other_systems_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library that cannot trim is no error."""
    monkeypatch.setattr(heap, "malloc_trim", lambda: None)
    anyio.run(heap.give_back_heap, lambda: [Gate(bytes=1).statistics()])


KEPT = """
import subprocess
import sys

import anyio
from pathlib import Path
from lifecycle import Gate
from lifecycle_engine.server.heap import give_back_heap

def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6

async def main():
    gate, kept = Gate(bytes=1), []
    async with anyio.create_task_group() as tasks:
        statistics = lambda: [gate.statistics()]
        tasks.start_soon(lambda: give_back_heap(statistics, seconds=0.01))
        await anyio.wait_all_tasks_blocked()
        gate.try_admit(bytes=1).release()
        # As of requests: many parts are freed, and one that came late is not.
        parts = [b"x" * 60_000 for _ in range(2_000)]
        del parts[:-1]
        print(megabytes() - before > 100)
        with anyio.fail_after(30):
            while megabytes() - before > 10:
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()

before = megabytes()
anyio.run(main)
"""


@pytest.mark.skipif(not heap.malloc_trim(), reason="another C library")
def test_gives_back_what_the_allocator_keeps() -> None:
    """A real heap, in a process of its own."""
    argv = [sys.executable, "-c", KEPT]
    done = subprocess.run(
        argv, check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
