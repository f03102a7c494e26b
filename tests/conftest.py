"""What all tests share: a heap that is small to walk, whatever was imported."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kit"))
# Files that take more than half a minute, the longest first. One that is missing here
# costs time and nothing else.
LONGEST = {
    f"test_{name}.py": place
    for place, name in enumerate(
        (
            *("world", "mutants", "shared_schedules", "recipes", "protocol", "sdks"),
            *("arena_link", "ray", "serve", "servers", "shared_processes", "churn"),
            *("gpu_check", "slow_clients", "text_models", "odd_checkpoints"),
            *("generators", "engine", "liveness", "check", "schema"),
            *("admission", "faults", "supervisor", "families", "refusals", "run"),
        )
    )
}


def pytest_configure(config: pytest.Config) -> None:
    """Give Ray a folder of this process: in its own it would find another's cluster.

    A shell starts background jobs with SIGINT ignored, and children inherit that:
    the programs that tests interrupt must not.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tempfile.mkdtemp(
        prefix="ray-", dir="/tmp"
    )  # its sockets need a short path
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    (Path(folder) / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = folder


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first: no worker shall be alone with one at the end."""
    items.sort(key=lambda item: LONGEST.get(item.path.name, len(LONGEST)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide from the collector what imports and the collection itself have made.

    Hundreds of tests collect or walk the heap; of its objects most are pytest's own.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _root_logs_warnings() -> None:
    """Log what a new process would, whatever a program in this one has set up."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def whole_heap() -> Iterator[None]:
    """Show modules and classes to the collector again, for tests that look for them."""
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Collect after each test of the core: what it left is not blamed on another one."""
    yield
    if {"core", "sim", "others"} & set(item.path.parts):
        gc.collect()
