"""A pytest plugin that fails a test which leaves anything behind, and says what.

One line in ``conftest.py`` switches it on::

    pytest_plugins = ["lifecycle.testing.pytest_plugin"]

After each test and its fixtures it looks for leases that are held, sessions
whose engine is not quiet, payloads still in their boxes, tasks that are not
done, file descriptors, threads and child processes that were not there before.
What wider fixtures hold was there before. ``@pytest.mark.leaves("thread", ...)``
excuses a test from what it names, and ``@pytest.mark.leaves`` from everything.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Final
from weakref import ref

import pytest

from lifecycle import Lease, Payload, Session

# Seconds for what is on its way out, such as a worker thread.
_PATIENCE: Final = 1.0
# Helpers that outlive their work on purpose: trio's idle threads, the one that gives
# back memory for `Admission`, and the process that multiprocessing starts once.
_POOLS: Final = ("Trio thread ", "lifecycle heap")
_TRACKER: Final = "multiprocessing.resource_tracker"
# By kind and by an identity that is never used twice, in words.
_Found = dict[tuple[str, Hashable], str]
# What one of these is called while it has something left to do.
_JUDGES: Final[dict[type, Callable[[Any], str]]] = {
    Lease: lambda lease: "lease" if lease.held else "",
    Session: lambda session: "" if session.phase == "quiet" else "session",
    Payload: lambda payload: "" if payload.taken else "payload",
    asyncio.Task: lambda task: "" if task.done() else "task",
}


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    kinds = "a lease, session, payload, task, descriptor, thread or child"
    config.addinivalue_line("markers", f"leaves(*kinds): may leave {kinds} behind")


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    # Set up first and torn down last among the fixtures of a test.
    before = _look()
    yield
    marker = request.node.get_closest_marker("leaves")
    excused = () if marker is None else marker.args
    left = [] if marker is not None and not excused else _left(before, excused)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _left(before: _Found, excused: tuple[str, ...]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    while True:
        left = [
            f"{kind} {words}"
            for (kind, found), words in _look().items()
            if (kind, found) not in before and kind not in excused
        ]
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()  # what only a cycle kept is lost, not left
        time.sleep(0.01)


def _look() -> _Found:
    found: _Found = {
        ("thread", ref(thread)): repr(thread)
        for thread in threading.enumerate()
        if not thread.name.startswith(_POOLS)
    }
    for item in _objects():
        base = next(base for base in _JUDGES if isinstance(item, base))
        if kind := _JUDGES[base](item):
            found[kind, ref(item)] = repr(item)
    for path in _paths("fd"):
        try:
            target = str(path.readlink())
        except OSError:  # the one that the listing itself had open
            continue
        found["descriptor", (path.name, target)] = f"{path.name} -> {target}"
    for path in _paths("task"):
        found |= {
            ("child", pid): f"{pid} {words or '(ended, not waited for)'}"
            for pid in _read(path / "children").split()
            if _TRACKER not in (words := _read(Path("/proc", pid, "cmdline")))
        }
    return found


def _objects() -> list[Any]:
    everything = gc.get_objects()
    # By type first: asking each object for its class could run code of its own.
    kinds = {k for k in set(map(type, everything)) if issubclass(k, tuple(_JUDGES))}
    return [item for item in everything if type(item) in kinds]


def _paths(name: str) -> list[Path]:
    try:
        return list(Path("/proc/self", name).iterdir())
    except OSError:  # not on this system
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
