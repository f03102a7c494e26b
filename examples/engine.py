"""An engine in another process: start, stream, cancel, kill and restart.

The same file is both processes: `ZmqEngine` runs it again with `--engine`.

Install: pip install "anyio-lifecycle[zmq]"
Run it:  python examples/engine.py
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import anyio

from lifecycle import EngineLost, SessionRegistry
from lifecycle_zmq import EngineServer, Finish, Output, ZmqEngine


class Counting:
    """A backend that counts the bytes of each request, one number per step."""

    def __init__(self) -> None:
        self.streams: dict[str, Iterator[int]] = {}

    def start(self, key: str, request: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Accept a request; no tensor is kept."""
        self.streams[key] = iter(range(len(tensors["data"])))

    def cancel(self, key: str) -> None:
        """Let the stream finish at the next step."""
        self.streams[key] = iter(())

    def end(self, key: str) -> None:
        """Forget a stream."""
        self.streams.pop(key, None)

    @property
    def busy(self) -> bool:
        """Whether there is work for `step`."""
        return bool(self.streams)

    def step(self) -> list[Output]:
        """Return the next number of each stream, or its end."""
        items = [(key, list(islice(some, 1))) for key, some in self.streams.items()]
        done = Finish("completed")
        return [Output(key, item, None if item else done) for key, item in items]

    def status(self) -> dict[str, Any]:
        """Return the number of streams."""
        return {"streams": len(self.streams)}


async def ask(sessions: SessionRegistry, engine: ZmqEngine, name: str, n: int) -> None:
    """Send *n* bytes to the engine and print how far it counted."""
    try:
        with sessions.open(name) as session:

            async def end(_stream: object) -> None:
                await engine.end(session.key)

            box = session.box({"data": bytes(n)}, nbytes=n)
            source = await session.start(
                lambda: engine.start(session.key, {}, box), end=end
            )
            async with session.stream(source, idle=5.0) as numbers:
                print(f"{name}: counted to {len([number async for number in numbers])}")
    except EngineLost as lost:
        print(f"{name}: engine lost ({lost.reason})")


async def main() -> None:
    """Use the engine, kill it during a request, and use its replacement."""
    command = [sys.executable, __file__, "--engine"]
    async with ZmqEngine(command) as engine, SessionRegistry() as sessions:
        await engine.wait_ready()
        await ask(sessions, engine, "small", 10)
        async with anyio.create_task_group() as group:
            group.start_soon(ask, sessions, engine, "large", 10**8)
            while (await engine.status())["backend"]["streams"] == 0:
                pass  # each iteration awaits a reply
            os.kill(engine.pid or 0, signal.SIGKILL)
        await engine.wait_ready()
        await ask(sessions, engine, f"incarnation {engine.incarnation}", 10)
        await sessions.drain(deadline=5.0)
        left = (await engine.status())["backend"]["streams"]
        print(f"engine sessions left: {left}")


if __name__ == "__main__":
    if "--engine" in sys.argv:
        _, _, _, endpoint, _, incarnation = sys.argv  # --endpoint E --incarnation N
        EngineServer(endpoint, Counting(), incarnation=int(incarnation)).run()
    else:
        anyio.run(main)
