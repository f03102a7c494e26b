"""A client process that starts streams, reads none, and waits to be killed.

Arguments: the engine's endpoint, how many streams, and the request as JSON.
"""

from __future__ import annotations

import json
import sys

import anyio

from lifecycle_zmq import EngineClient


async def main() -> None:
    """Start the streams, say so, and stay."""
    endpoint, count, request = sys.argv[1:]
    async with EngineClient(endpoint, incarnation=1) as client:
        await client.wait_ready()
        streams = [
            await client.start(f"gone#{number}", json.loads(request))
            for number in range(int(count))
        ]
        print(len(streams), flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
