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

# What is on its way out, such as a worker thread, gets so many seconds.
_PATIENCE: Final = 1.0

# Trio keeps idle worker threads for a while, for whoever comes next.
_POOL: Final = "Trio thread "

_HERE: Final = Path("/proc/self")

# A leftover: its kind, an identity that is never used twice, and words for it.
_Found = dict[tuple[str, Hashable], str]


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "leaves(*kinds): the test may leave a lease, session, payload, task, "
        "descriptor, thread or child behind",
    )


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    # Set up first and torn down last among the fixtures of a test.
    before = _look()
    yield
    marker = request.node.get_closest_marker("leaves")
    if marker is not None and not marker.args:
        return
    excused = () if marker is None else marker.args
    left = _left_since(before, excused)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _left_since(before: _Found, excused: tuple[str, ...]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    while True:
        left = [
            f"{kind} {words}"
            for (kind, identity), words in _look().items()
            if (kind, identity) not in before and kind not in excused
        ]
        if not left or time.monotonic() > deadline:
            return left
        gc.collect()  # what only a cycle kept is lost, not left
        time.sleep(0.01)


def _look() -> _Found:
    return {**_objects(), **_threads(), **_descriptors(), **_children()}


def _objects() -> _Found:
    found: _Found = {}
    judges: dict[type, Callable[[Any], str | None] | None] = {}
    for item in gc.get_objects():
        kind = type(item)
        if kind not in judges:
            judges[kind] = next(
                (judge for base, judge in _JUDGES.items() if issubclass(kind, base)),
                None,
            )
        judge = judges[kind]
        if judge is not None and (name := judge(item)) is not None:
            found[name, ref(item)] = repr(item)
    return found


def _lease(lease: Lease) -> str | None:
    return "lease" if lease.held else None


def _session(session: Session) -> str | None:
    return None if session.phase == "quiet" else "session"


def _payload(payload: Payload[Any]) -> str | None:
    return None if payload.taken else "payload"


def _task(task: asyncio.Task[Any]) -> str | None:
    return None if task.done() else "task"


_JUDGES: Final[dict[type, Callable[[Any], str | None]]] = {
    Lease: _lease,
    Session: _session,
    Payload: _payload,
    asyncio.Task: _task,
}


def _threads() -> _Found:
    return {
        ("thread", ref(thread)): repr(thread)
        for thread in threading.enumerate()
        if not thread.name.startswith(_POOL)
    }


def _descriptors() -> _Found:
    found: _Found = {}
    for name in _names(_HERE / "fd"):
        try:
            target = (_HERE / "fd" / name).readlink()
        except OSError:  # the one that the listing itself had open
            continue
        found["descriptor", (name, target)] = f"{name} -> {target}"
    return found


def _children() -> _Found:
    found: _Found = {}
    for thread in _names(_HERE / "task"):
        try:
            pids = (_HERE / "task" / thread / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes()
            except OSError:
                continue
            words = command.replace(b"\0", b" ").decode(errors="replace").strip()
            # Python's own helper, which serves until the end.
            if "multiprocessing.resource_tracker" not in words:
                found["child", pid] = f"{pid} {words or '(ended, not waited for)'}"
    return found


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:  # not on this system
        return []
