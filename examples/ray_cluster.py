"""Two engines on Ray share requests; one is killed and replaced.

On a cluster pass `address="auto"` and `Placement(num_gpus=1)`; nothing else changes.

Run it: pip install "anyio-lifecycle[ray]"; python examples/ray_cluster.py
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np

from lifecycle import EngineLost, Payload, SessionRegistry
from lifecycle_ray import RayEngine
from lifecycle_zmq import Finish, Output


class Counting:
    """A backend that counts up to the sum of its input, one number per step."""

    def __init__(self) -> None:
        self.streams: dict[str, Iterator[int]] = {}

    def start(self, key: str, request: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Accept a request; no tensor is kept."""
        self.streams[key] = iter(range(int(np.sum(tensors["data"]))))

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
        """Return one number for each stream, at the speed of a model."""
        time.sleep(0.001)
        outputs = []
        for key, numbers in list(self.streams.items()):
            items = [[number] for number in [next(numbers, None)] if number is not None]
            outputs.append(Output(key, items, None if items else Finish("completed")))
            if not items:
                del self.streams[key]
        return outputs

    def status(self) -> dict[str, Any]:
        """Return the number of streams."""
        return {"sessions": len(self.streams)}


async def ask(engine: RayEngine, sessions: SessionRegistry, name: str, n: int) -> None:
    """Start one stream, read it, and end it in any case."""
    payload = Payload({"data": np.ones(n, np.uint8)})
    try:
        with sessions.open(name) as session:
            source = await session.start(
                lambda: engine.start(session.key, {}, payload),
                end=lambda _: engine.end(session.key),
            )
            async with session.stream(source) as items:
                print(f"{name}: {len([item async for item in items])} numbers")
    except EngineLost as error:
        print(
            f"{name}: engine lost, {error.reason}; retry in {error.retry_after:.0f} s"
        )


async def main() -> None:
    """Spread requests over two engines, kill one, and check what is left."""
    local = {"num_cpus": 2, "object_store_memory": 128 * 2**20}
    async with RayEngine(Counting, replicas=2, local=local) as engine:
        await engine.wait_ready(replicas=2)
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            for number, n in enumerate((50, 100, 1500, 1500)):
                tasks.start_soon(ask, engine, sessions, f"r{number}", n)
                await anyio.sleep(0.1)
            os.kill(int(engine.places[0]["pid"]), signal.SIGKILL)
        await engine.wait_ready(replicas=2)
        left = (await engine.status())["backend"]["sessions"]
        print(f"actors made: {engine.incarnation}; sessions left: {left}")


if __name__ == "__main__":
    anyio.run(main)
