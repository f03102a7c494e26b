"""The kernel's memory killer takes the engine, and everybody is told that it did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle_zmq.process import engine_process

SCRIPT = Path(__file__).with_name("scripted_oom.py")
LIMIT = 256 * 2**20
ROOT = Path("/sys/fs/cgroup")


def _places() -> Iterator[tuple[Path, str]]:
    """Where a group may be made, and what its limit is called."""
    groups = Path("/proc/self/cgroup").read_text()
    for pattern, root, limit in (
        (r"^\d+:memory:/(\S*)", ROOT / "memory", "memory.limit_in_bytes"),
        (r"^0::/(\S*)", ROOT, "memory.max"),
    ):
        found = re.search(pattern, groups, re.MULTILINE)
        if found is not None:
            yield root / found[1], limit
        yield root, limit


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of 256 MiB, where we may make one."""
    for place, limit in _places():
        group = place / f"lifecycle-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT))
        except OSError:
            group.rmdir()
            continue
        yield group
        _remove(group)
        return
    pytest.skip("no right to make a cgroup with a limit of memory")


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 20
    while True:  # the last process may not be gone yet
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def test_engine_that_eats_all_memory_is_told_as_oom(
    small_group: Path, engine_argv: list[str], environment: dict[str, str]
) -> None:
    """The kernel takes the engine, not the server; the next one serves (`fault-25`, `S6`)."""
    argv = [sys.executable, str(SCRIPT), str(small_group / "cgroup.procs")]
    done = subprocess.run(
        [*argv, *engine_argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["oom"] * 9, 2]


@pytest.mark.parametrize(
    ("groups", "file", "kills"),
    [
        ("0::/unit\n", "unit/memory.events", 2),
        ("0::/\n", "memory.events", 2),
        ("3:cpu,cpuacct:/x\n2:memory:/old\n0::/\n", "memory/old/memory.oom_control", 2),
        ("1:cpu:/unit\n", "unit/memory.events", 0),
        ("0::/gone\n", "unit/memory.events", 0),
    ],
)
def test_oom_kills_are_read_from_the_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, file: str, kills: int
) -> None:
    """The counter of our own cgroup, of either version; without one it is 0 (`fault-25`)."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("oom 3\noom_kill_disable 0\noom_kill 2\n")
    (tmp_path / "groups").write_text(groups)
    places = {"/proc/self/cgroup": tmp_path / "groups", "/sys/fs/cgroup": tmp_path}

    def place(first: str, *rest: str) -> Path:
        return Path(places[first], *rest)

    monkeypatch.setattr(engine_process, "Path", place)
    assert engine_process._count_oom_kills() == kills
