"""Cost of an engine crash: time until it is detected, replaced, and memory is free."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_memory import seconds_until

Row = tuple[str, str]
STREAMS = 8
_BOUND = 120.0
# Device memory that the driver keeps.
_SLACK = 32 * 2**20
# A server of one stream, which prints the engine's process id and then waits.
_PARENT = """
import sys, anyio
from lifecycle_zmq import ZmqEngine
async def main():
    async with ZmqEngine(sys.argv[1:]) as engine:
        await engine.wait_ready()
        print(engine.pid, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def death(device: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the seconds from SIGKILL of the engine, or its parent, to each effect."""
    missing = [
        name
        for name in ("zmq", "msgpack", "anyio")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        return {"skipped": missing}, [
            ("death of the engine", f"left out: {', '.join(missing)} is not installed")
        ]
    import anyio

    from tiny_checkpoint import build

    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "lifecycle_engine.worker"),
            *("--checkpoint", str(build(folder)), "--device", device),
            *("--max-batch", str(STREAMS), "--max-length", "2048"),
        ]
        seconds = anyio.run(_killed, command) | _orphaned(command, device)
    return dict(seconds), [
        (f"SIGKILL, seconds until {what}", f"{value * 1e3:.1f} ms")
        for what, value in seconds.items()
    ]


async def _killed(command: list[str]) -> dict[str, float]:
    """Kill an engine with running streams; time their failure and the restart."""
    import anyio

    from lifecycle import EngineLost
    from lifecycle_zmq import ZmqEngine

    request = {"input_ids": [70, 71, 72], "max_tokens": 2000}
    failed: list[float] = []

    async def read(engine: ZmqEngine, key: str, begun: anyio.Event) -> None:
        stream = await engine.start(key, request)
        try:
            async for _ in stream:
                begun.set()
        except EngineLost:
            failed.append(time.perf_counter())

    with anyio.fail_after(_BOUND):
        async with ZmqEngine(command) as engine:
            await engine.wait_ready()
            async with anyio.create_task_group() as tasks:
                events = [anyio.Event() for _ in range(STREAMS)]
                for number, begun in enumerate(events):
                    tasks.start_soon(read, engine, f"k{number}", begun)
                for begun in events:
                    await begun.wait()
                assert engine.pid is not None
                killed = time.perf_counter()
                os.kill(engine.pid, signal.SIGKILL)
            await engine.wait_ready()
            stream = await engine.start("next", request | {"max_tokens": 1})
            async for _ in stream:
                pass
            served = time.perf_counter()
    assert len(failed) == STREAMS
    return {
        f"all {STREAMS} streams have failed": max(failed) - killed,
        "the next engine has served": served - killed,
    }


def _orphaned(command: list[str], device: str) -> dict[str, float]:
    """Kill the parent; time the exit of the engine and the release of its memory."""
    before = _free(device)
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
    finally:
        parent.kill()
    begin = time.perf_counter()
    parent.wait()
    seconds_until(lambda: _free(device) >= before - _SLACK, within=_BOUND)
    back = time.perf_counter() - begin
    seconds_until(lambda: gone(engine), within=_BOUND)
    return {
        "device memory is back after the parent": back,
        "gone after the parent": time.perf_counter() - begin,
    }


def gone(pid: int) -> bool:
    """Whether a process has ended, even as a zombie.

    Its parent was killed, and the init process of many containers reaps no children.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def _free(device: str) -> int:
    """Return the free bytes of the device; 0 on the CPU."""
    if device == "cpu":
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])
