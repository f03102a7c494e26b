"""Some seconds of clients that hang up; `hang_ups.py` goes on for as long as one likes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hang_ups
from hang_ups import MAY_RISE, Soak, drifts, soak
from http_kit import ENV
from leavers import MOMENTS, WAYS


@pytest.mark.asyncio
async def test_keeps_nothing_of_clients_that_disconnect() -> None:
    """At each moment and in each way: counted once, and nothing is left (fault-6)."""
    run, left = await soak(6, 32, 1, 1)
    assert not run.wrong
    assert not left
    names = [name.split(", ") for name in run.fates if ", " in name]
    assert {moment for moment, _ in names} == set(MOMENTS)
    assert {way for _, way in names} == set(WAYS)
    assert run.samples[-1]["api descriptors"] <= run.samples[0]["api descriptors"]


@pytest.mark.asyncio
async def test_passes_no_run_that_was_interrupted() -> None:
    """The exit status shows a failure."""
    script = Path(__file__).with_name("hang_ups.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stderr=asyncio.subprocess.PIPE, env=ENV
    )
    children: list[psutil.Process] = []
    try:
        async with asyncio.timeout(600):
            while not psutil.Process(process.pid).children(recursive=True)[1:]:
                await asyncio.sleep(0.05)  # until there is an engine
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            _, told = await process.communicate()
    finally:
        if process.returncode is None:
            for each in (process, *children):  # they keep its stderr open
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    each.kill()
            await process.wait()
    assert process.returncode == 1
    assert told.endswith(b"interrupted: no verdict\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("manner", ["leaves", "reads", "looks", "lies"])
async def test_takes_no_answer_for_a_fault(
    manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that did not leave is answered: not cut off, and not kept waiting."""
    monkeypatch.setattr(hang_ups, "_MANNERS", {manner: 1})
    pipe = asyncio.subprocess.PIPE
    engine = await asyncio.create_subprocess_exec("cat", stdin=pipe)
    try:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            port, pid = nobody.getsockname()[1], os.getpid()
            run = Soak(port, pid, 1)
            await run.client(time.monotonic() + 0.1)
            cut = set() if manner == "leaves" else {f"cut off by the server: {manner}"}
            assert set(run.wrong) == cut
            nobody.listen()  # and never accepts
            run = Soak(port, pid, 1, patience=0.1)
            await run.client(time.monotonic() + 0.1)
            late = {name for name in run.wrong if name.startswith("not answered")}
    finally:
        engine.kill()
        await engine.wait()
    if manner != "leaves":
        assert late == {f"not answered: {manner}"}


def test_tells_a_drift_from_noise() -> None:
    """A rising line is reported; fluctuations, and what is given back, are not."""

    def run(
        per_sample: float, noise: float, *, more: int = 0
    ) -> list[dict[str, float]]:
        samples = [
            {
                "s": at,
                "own MiB": 50 + per_sample * at + noise * (at % 2),
                "descriptors": 9,
            }
            for at in range(40)
        ]
        samples[0]["own MiB"] = 0
        samples[-1]["descriptors"] += more
        return samples

    assert drifts(run(MAY_RISE / 15, 1)) == {"own MiB": pytest.approx(10, abs=2)}
    assert drifts(run(0, 5)) == {}
    given_back = run(MAY_RISE / 15, 1)
    given_back[-1]["own MiB"] = MAY_RISE - 1
    assert drifts(given_back) == {}
    assert drifts(run(0, 0, more=1)) == {"descriptors": 1}


def test_tells_shared_memory_beyond_what_is_admitted() -> None:
    """Pages of the arena may all be used once; nothing else is shared."""

    def run(pages: float) -> list[dict[str, float]]:
        return [
            {"s": at, "api own MiB": 50, "api RSS MiB": 60 + pages * at / 39}
            for at in range(40)
        ]

    assert drifts(run(128)) == {}
    assert drifts(run(150)) == {"api shared MiB": pytest.approx(22)}
