"""The heap is given back when large requests have ended, and not before."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import ClassVar

import pytest

from lifecycle.testing import pytest_plugin
from lifecycle_asgi import heap

MIB = 2**20


class Pauses:
    """Stands in for `time.sleep`: each pause ends when the test says so."""

    def __init__(self) -> None:
        self._begun: queue.Queue[float] = queue.Queue()
        self._ended: queue.Queue[None] = queue.Queue()

    def __call__(self, seconds: float) -> None:
        self._begun.put(seconds)
        self._ended.get(timeout=60)

    def begun(self) -> float:
        """Wait for the next pause; return its seconds."""
        return self._begun.get(timeout=60)

    def end(self) -> None:
        """End the pause."""
        assert self._begun.empty()
        self._ended.put(None)


def test_trims_once_after_each_time_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not right after a large request, nor again and again."""
    trimmed: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(heap, "malloc_trim", lambda: trimmed.put)
    pauses = Pauses()
    it = heap.Heap(sleep=pauses)
    for _ in range(2):
        it.freed(20 * MIB)
        it.freed(20 * MIB)
        assert pauses.begun() == 2.5
        it.freed(MIB)
        pauses.end()
        assert pauses.begun() == 2.5
        assert trimmed.empty()
        pauses.end()
        assert trimmed.get(timeout=60) == 0
        it.freed(8 * MIB)  # not worth a thread
    assert trimmed.empty()


class Late:
    """A lock that a large request finds taken, right before it is released."""

    def __init__(self, request: Callable[[], object]) -> None:
        self._request, self._lock = request, threading.Lock()
        self.acquire = self._lock.acquire

    def release(self) -> None:
        """Release it, behind the request the first time."""
        request, self._request = self._request, object
        request()
        self._lock.release()


def test_overlooks_no_request_that_ends_as_the_thread_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread waits for the memory of that one."""
    trimmed: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(heap, "malloc_trim", lambda: trimmed.put)
    pauses = Pauses()
    it = heap.Heap(sleep=pauses)
    monkeypatch.setattr(it, "_at_work", Late(lambda: it.freed(99 * MIB)))
    it.freed(99 * MIB)
    for _ in range(2):
        assert pauses.begun() == 2.5
        pauses.end()
        assert trimmed.get(timeout=60) == 0


REQUEST = ContextVar("request", default="")


class NoThread(threading.Thread):
    """A thread of a process that may have no more of them."""

    starts: ClassVar[list[str]] = []

    def start(self) -> None:
        """Note the context, and fail as the real one."""
        self.starts.append(REQUEST.get())
        raise RuntimeError("can't start new thread")


def test_serves_where_it_cannot_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another C library nor a process without threads is an error.

    A thread would keep what it finds in the context where it starts, on some builds.
    """
    monkeypatch.setattr(NoThread, "starts", [])
    token = REQUEST.set("of a client")
    monkeypatch.setattr(threading, "Thread", NoThread)
    monkeypatch.setattr(heap, "malloc_trim", lambda: len)
    it = heap.Heap()
    for _ in range(2):
        it.freed(99 * MIB)
    assert NoThread.starts == ["", ""]
    monkeypatch.undo()
    monkeypatch.setattr(heap, "malloc_trim", lambda: None)
    monkeypatch.setattr(threading, "Thread", None)
    heap.Heap().freed(99 * MIB)
    REQUEST.reset(token)


ENDING = """
import sys
from lifecycle_asgi.heap import Heap

async def serve():
    try:
        await Never()
    finally:
        heap.freed(2**30)
        sys.stderr.write("freed")

class Never:
    def __await__(self):
        yield

heap, request = Heap(), serve()
request.send(None)
"""


def test_lets_the_interpreter_end() -> None:
    """A request that is freed as late as that begins no thread, and waits for none."""
    argv = [sys.executable, "-c", ENDING]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "freed")


KEPT = """
from pathlib import Path
import anyio
from lifecycle_asgi import Admission
from lifecycle_asgi.testing import request

def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 10**6

async def app(scope, receive, send):
    await receive()
    # As of a request: many parts are freed, and one that came late is not.
    parts = [b"x" * 60_000 for _ in range(2_000)]
    kept.append(parts.pop())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def main():
    answer = await request(
        Admission(app, environment={}, bytes=2**30), "POST", "/", body=b"x" * 12 * 2**20
    )
    print(answer.status, megabytes() - before > 100)
    with anyio.fail_after(30):
        while megabytes() - before > 20:
            await anyio.sleep(0.1)

kept, before = [], megabytes()
anyio.run(main)
"""


@pytest.mark.skipif(not heap.malloc_trim(), reason="another C library")
@pytest.mark.thorough
def test_gives_back_what_the_allocator_keeps() -> None:
    """A real heap, in a process of its own."""
    argv = [sys.executable, "-c", KEPT]
    done = subprocess.run(
        argv, check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("200 True\n", "")


def test_is_no_leftover_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin blames no test of a guarded application for a thread of ours."""
    trimmed: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(heap, "malloc_trim", lambda: trimmed.put)
    pauses = Pauses()
    before = pytest_plugin._look()
    heap.Heap(sleep=pauses).freed(40 * MIB)
    pauses.begun()
    left = pytest_plugin._look().keys() - before.keys()
    pauses.end()
    trimmed.get(timeout=60)
    assert not left
