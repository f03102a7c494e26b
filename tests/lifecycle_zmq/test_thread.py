"""What only an engine in a thread of this very process has to see to."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from lifecycle import EngineLost, Payload
from lifecycle_zmq import Output, Restarts, ThreadEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


class Fatal:
    """A backend that takes one request, and then ends its process, as it believes."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    @property
    def busy(self) -> bool:
        """Whether it was given anything."""
        return bool(self.held)

    def start(self, key: str, request: Mapping[str, Any], tensors: Any) -> None:
        """Keep what it is given."""
        self.held[key] = dict(tensors)

    def cancel(self, key: str) -> None:
        """Too late."""

    def end(self, key: str) -> None:
        """Forget it."""
        self.held.pop(key, None)

    def step(self) -> Sequence[Output]:
        """End."""
        raise SystemExit

    def status(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dead has to be so without it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.usefixtures("no_collector")
async def test_payloads_die_with_the_backend_that_had_them(eventually: Any) -> None:
    """They are this process's own memory, which nothing else would free."""

    class Array(np.ndarray):
        """One that can be referred to weakly."""

    async with ThreadEngine(Fatal, restarts=Restarts(backoff=60)) as engine:
        with anyio.fail_after(45):
            await engine.wait_ready()
            array = np.zeros(2**20, np.uint8).view(Array)
            dead = weakref.ref(array)
            box = Payload({"x": array}, nbytes=2**20)
            del array
            with pytest.raises(EngineLost):
                async for _ in await engine.start("a", {}, box):
                    pass
            await engine.end("a")
        await eventually(lambda: dead() is None)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_system_without_threads_is_no_end_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a start that failed, like any other, and is tried again."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with anyio.fail_after(20):
        async with ThreadEngine(Fatal, restarts=Restarts(backoff=0.01)) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(EngineLost) as caught:
                    await engine.wait_ready()
            assert caught.value.reason == "spawn_failed"
            await engine.wait_ready()
