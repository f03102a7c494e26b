"""A few ends at random moments; `shutdowns.py` tries as many as one likes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shutdowns import shut_down_often

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]


async def test_ends_in_time_whoever_is_there() -> None:
    """In time, with nothing left or logged, and with everybody told (fault-61)."""
    runs = await shut_down_often(12, 10, 1)
    assert [(run.name, run.wrong) for run in runs if run.wrong] == []
    assert sum(run.told for run in runs) > 10
    assert len({run.name for run in runs}) > 2
