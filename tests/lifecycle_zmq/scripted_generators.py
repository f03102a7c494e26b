"""The scripted engine as one async generator per request; run as a script.

Request fields are those of scripted_engine.py, as far as they make sense here, and:
``close_seconds`` is how long its clean-up takes, ``wait_at`` waits there for ever,
``start_seconds`` and ``end_seconds`` block the loop, ``wait_before`` waits before it
refuses, ``mark`` is a file that its clean-up makes, ``lost_at`` awaits there what another has cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import scripted_engine

from lifecycle_zmq import EngineFailed, GeneratorBackend, RequestRejected


class Script:
    """Records the calls of the generators, for `status`."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._live: dict[str, int] = {}
        self._calls: list[str] = []
        self._made: dict[str, int] = {}
        self._tensors = scripted_engine.Tensors()

    async def serve(
        self, key: str, request: dict[str, Any], tensors: dict[str, memoryview]
    ) -> AsyncIterator[Any]:
        """Do what the request says."""
        self._tensors.read_process_state(tensors)
        del tensors
        time.sleep(request.get("start_seconds", 0))  # noqa: ASYNC251
        if "wait_before" in request:
            await anyio.sleep(request["wait_before"])
        if "reject" in request:
            refusal = RequestRejected(request["reject"], "as asked")
            raise refusal
        if "raise_in_start" in request:
            raise RuntimeError(request["raise_in_start"])
        self._live[key] = self._made[key] = 0
        began_in = anyio.get_current_task().id
        try:
            async for item in self._items(key, request):
                yield item
        except (anyio.get_cancelled_exc_class(), GeneratorExit):
            self._calls.append(f"cancel {key}")
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(request.get("close_seconds", 0))
            time.sleep(request.get("end_seconds", 0))  # noqa: ASYNC251
            del self._live[key]
            self._calls.append(f"end {key}")
            if "mark" in request and anyio.get_current_task().id == began_in:
                Path(request["mark"]).touch()

    async def _items(self, key: str, it: dict[str, Any]) -> AsyncIterator[Any]:
        at = 0
        while at != it.get("count"):
            if "hold" in it or at == it.get("wait_at"):
                await anyio.sleep_forever()
            if self._step_seconds:
                await anyio.sleep(self._step_seconds)
            else:
                await anyio.lowlevel.checkpoint()
            if at == it.get("lost_at"):
                lost = asyncio.get_running_loop().create_future()
                lost.cancel()
                await lost
            self._go_wrong(at, it)
            self._made[key] = at + 1
            for item in scripted_engine.items_at(at, it):
                yield [self._tensors.alive()] if "watch" in it else item
            at += 1

    def _go_wrong(self, at: int, it: dict[str, Any]) -> None:
        if at == it.get("raise_at"):
            raise RuntimeError("as asked")
        if at == it.get("leave_at"):
            raise SystemExit(3)
        if at == it.get("fail_at"):
            raise EngineFailed("asked", "as asked")
        scripted_engine.block_at(at, it)

    def status(self) -> dict[str, Any]:
        """Return the books."""
        return {
            "live": sorted(self._live),
            "calls": self._calls[-200:],
            "made": dict(list(self._made.items())[-200:]),
            **self._tensors.status(),
            "pid": os.getpid(),
        }


def make(step: float, on: Literal["asyncio", "trio"] = "asyncio") -> GeneratorBackend:
    """Return a backend of such generators."""
    script = Script(step)
    return GeneratorBackend(
        script.serve,
        merge=lambda request: request.get("merge"),
        backend=on,
        status=script.status,
    )


if __name__ == "__main__":
    on: Any = os.environ.get("GENERATORS", "asyncio")
    scripted_engine.main(functools.partial(make, on=on))
