"""Control groups for servers that may have little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a cgroup of *limit* bytes, in the version that this machine has."""
    folder, file = GROUPS / "memory", "memory.limit_in_bytes"
    if not folder.exists():
        folder, file = GROUPS, "memory.max"
    made = folder / f"lifecycle-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / file).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield made
    finally:
        made.rmdir()
