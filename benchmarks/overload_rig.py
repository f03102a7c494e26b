"""The server of one case of the overload experiment, and its simulated engine."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

WAYS = ("gate", "none", "semaphore")

# Requests that run at a time in the engine, tokens of each, and seconds of a step:
# some twenty requests a second, whatever machine this is.
BATCH = 10
TOKENS = 12
STEP = 0.04
# Seconds that a client waits for the end of its answer.
DEADLINE = 2.0
# A few more than the engine runs, so that it never waits for the next one.
SLOTS = 12
LINE = 4


class SemaphoreMiddleware:
    """What is often written instead of a gate: all may wait, for as long as it takes.

    Args:
        app: The application to wrap.
        places: How many requests it sees at a time.
    """

    def __init__(self, app: Any, *, places: int) -> None:
        self._app = app
        self._semaphore = asyncio.Semaphore(places)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        async with self._semaphore:
            await self._app(scope, receive, send)


def argv(way: str) -> list[str]:
    """The command line of a server."""
    return [sys.executable, __file__, way]


def serve(way: str) -> None:
    """Be the API process."""
    from lifecycle import Gate
    from lifecycle_engine import AppSettings, SimProcessor, create_app
    from lifecycle_engine.server.run import run
    from lifecycle_zmq import ZmqEngine

    work = [sys.executable, "-m", "lifecycle_engine.worker", "--runner", "sim"]
    work += ["--max-batch", str(BATCH), "--sim-decode-step", str(STEP)]
    work += ["--sim-prefill-token", "0", "--sim-decode-lane", "0"]
    gate = Gate(slots=SLOTS, max_waiting=LINE, name="in_flight")
    app = create_app(
        ZmqEngine(work),
        SimProcessor(),
        gate=Gate(slots=None, name="payloads"),
        in_flight=gate if way == "gate" else None,
        settings=AppSettings(model="sim"),
    )
    if way == "semaphore":
        app.add_middleware(SemaphoreMiddleware, places=SLOTS)
    say = partial(print, sep="\n", flush=True)
    run(
        app,
        host="127.0.0.1",
        port=0,
        announce=say,
        operator=("127.0.0.1", 0),
    )


if __name__ == "__main__":
    serve(sys.argv[1])
