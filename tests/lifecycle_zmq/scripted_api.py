"""An API process that runs an engine and waits to be killed; run as a script.

Prints the engine's process id once the engine serves and streams; with ``--early``
as the first argument, as soon as there is one.
"""

from __future__ import annotations

import sys

import anyio

from lifecycle_zmq import ZmqEngine


async def main() -> None:
    """Hold one engine with one endless stream."""
    early = sys.argv[1] == "--early"
    async with ZmqEngine(sys.argv[2 if early else 1 :]) as engine:
        while early and engine.pid is None:
            await anyio.sleep(0.001)
        if early:
            print(engine.pid, flush=True)
            await anyio.sleep_forever()
        await engine.wait_ready()
        stream = await engine.start("a#1", {"forever": True})
        await anext(stream)
        print(engine.pid, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
