"""An API process in a cgroup whose engine eats all of its memory; run as a script.

Arguments: the file that takes a process into the group, and the engine's command
line. Prints as JSON which errors the waiters got, and how often by which process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio

from lifecycle import EngineLost
from lifecycle_zmq import ZmqEngine


async def main() -> None:
    """Hold eight streams and one request too many; then serve again."""
    Path(sys.argv[1]).write_text(str(os.getpid()))
    reported: list[str] = []

    async def read(key: str) -> None:
        try:
            async for _ in await engine.start(key, {"forever": True}):
                pass
        except EngineLost as lost:
            reported.append(lost.reason)

    async with ZmqEngine(sys.argv[2:], backoff=0.01) as engine:
        await engine.wait_ready()
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(read, f"s{number}")
            while (await engine.status())["live"] < 8:
                await anyio.sleep(0.005)
            try:
                await engine.start("hungry", {"eat": 2**32})
            except EngineLost as lost:
                reported.append(lost.reason)
        await engine.wait_ready()
        assert await anext(await engine.start("next", {"count": 1})) == [0]
        print(json.dumps([reported, engine.incarnation]), flush=True)


if __name__ == "__main__":
    anyio.run(main)
