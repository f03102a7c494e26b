"""A few ends at random moments; `shutdowns.py` tries as many as one likes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shutdowns import shut_down_often

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(3600)]


async def test_ends_in_time_whatever_clients_do() -> None:
    """It exits in time, with nothing left or logged and each request answered (fault-61)."""
    runs = await shut_down_often(12, 10, 1)
    # On a slow machine fewer requests are under way when a server ends.
    while sum(run.answered for run in runs) <= 10 and len(runs) < 120:
        runs += await shut_down_often(12, 10 + len(runs), 1)
    assert [(run.name, run.wrong) for run in runs if run.wrong] == []
    assert sum(run.answered for run in runs) > 10
    assert len({run.name for run in runs}) > 2
