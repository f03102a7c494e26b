"""An API process that runs an engine and waits to be killed; run as a script.

Prints the engine's process id once the engine serves and streams; with ``--early``
first, as soon as there is one. With ``--forked`` first, or second, it forks before
that: the copy holds all that this process holds, until the end of file on the standard
input of both.
"""

from __future__ import annotations

import os
import sys

import anyio

from lifecycle_zmq import ZmqEngine


async def main() -> None:
    """Hold one engine with one endless stream."""
    flags = [it for it in sys.argv[1:3] if it in {"--early", "--forked"}]
    async with ZmqEngine(sys.argv[1 + len(flags) :]) as engine:
        while engine.pid is None:
            await anyio.sleep(0.001)
        if "--forked" in flags and not os.fork():
            os.read(0, 1)
            os._exit(0)
        if "--early" in flags:
            print(engine.pid, flush=True)
            await anyio.sleep_forever()
        await engine.wait_ready()
        stream = await engine.start("a#1", {"forever": True})
        await anext(stream)
        print(engine.pid, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
