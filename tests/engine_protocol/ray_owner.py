"""A driver with one endless stream, for tests to stop and to kill; run as a script."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from lifecycle import EngineLost
from lifecycle_ray import Placement, RayEngine
from lifecycle_zmq import Output


class Noting:
    """Streams that never end, and a file that says what became of them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._live: list[str] = []

    def start(self, key: str, request: dict[str, Any], tensors: dict[str, Any]) -> None:
        self._live.append(key)
        self._note()

    def cancel(self, key: str) -> None:
        pass

    def end(self, key: str) -> None:
        self._live.remove(key)
        self._note()

    def step(self) -> list[Output]:
        return []

    @property
    def busy(self) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        return {}

    def _note(self) -> None:
        self._file.write_text(f"live {len(self._live)}")


async def main() -> None:
    """Start a stream, say so and wait for its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    async with RayEngine(
        partial(Noting, options.file),
        address=options.address,
        placement=Placement(num_cpus=0.25),
        owner_timeout=1.5,
    ) as engine:
        await engine.wait_ready()
        stream = await engine.start("a", {})
        print("started", engine.places[0]["pid"], flush=True)
        try:
            async for _ in stream:
                pass
        except EngineLost as error:
            print("lost", error.reason, flush=True)


if __name__ == "__main__":
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    anyio.run(main)
