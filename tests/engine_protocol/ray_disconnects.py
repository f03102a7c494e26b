"""Clients of an engine on Ray that leave at random moments; run as a script.

python tests/engine_protocol/ray_disconnects.py [--count 5000] [--seed 1] [--trio]
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from lifecycle import Payload, SessionRegistry
from lifecycle_ray import Placement, RayEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "lifecycle_zmq"))


class WithPayloads:
    """The engine, for clients of whom every third sends half a megabyte."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._asked = 0
        self.end = engine.end
        self.cancel = engine.cancel

    async def start(self, key: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        self._asked += 1
        box = None
        if self._asked % 3 == 0:
            box = Payload({"x": np.ones(2**19, np.uint8)})
        return await self._engine.start(key, request, box)


async def run(count: int, seed: int) -> None:
    """Run so many sessions, and look into every place where something may be left."""
    import disconnects
    import ray
    import scripted_engine
    from ray._private.internal_api import memory_summary
    from ray._private.worker import global_worker

    async with RayEngine(
        partial(scripted_engine.ScriptedBackend, 0.0),
        placement=Placement(num_cpus=1),
        local={"num_cpus": 2, "object_store_memory": 256 * 2**20},
    ) as engine:
        ray.cloudpickle.register_pickle_by_value(scripted_engine)
        await engine.wait_ready()
        begin = time.perf_counter()
        async with SessionRegistry() as sessions:
            fates = await disconnects.disconnect(
                WithPayloads(engine), sessions, count=count, seed=seed
            )
            seconds = time.perf_counter() - begin
        status = await disconnects.check_nothing_left(engine)
        assert status["backend"]["tensors_alive"] == 0
        assert engine.loads == [(0, 0)]
        # Without an address it asks whichever cluster began last on this machine.
        address = ray.get_runtime_context().gcs_address
        with anyio.fail_after(120):
            while "0 MiB, 0 objects" not in (
                text := memory_summary(address, stats_only=True)
            ):
                await anyio.sleep(0.1)
        (plasma,) = [it for it in text.splitlines() if it.startswith("Plasma memory")]
        references = len(global_worker.core_worker.get_all_reference_counts())
        assert references <= 2, references
    print(
        f"{count:,} sessions in {seconds:.1f} s, {status['starts']:,} of them started, "
        f"0 left: {dict(fates)}\n{plasma}; references here: {references}"
    )


if __name__ == "__main__":
    from disconnects import main

    main(run, count=5_000)
