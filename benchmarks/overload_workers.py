"""Overload of one budget that 1, 2 and 4 workers of uvicorn share.

    python benchmarks/overload_workers.py [--repeat 3] [--seconds 20] [--load 10]

Four clients, whose requests cost 1, 2, 4 and 8 MiB, each ask for a quarter of the load.
Each request holds its bytes for a second, so that the budget alone limits the server.
Goodput is what was served of it. Jain's index of the byte-seconds of the clients is 1
where each of them got the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from _figures import goal, machine, spread

from lifecycle_asgi import Admission, MemoryEstimate

WORKERS = (1, 2, 4)
CLIENTS = {"a": 1, "b": 2, "c": 4, "d": 8}
MIB = 2**20
# Bytes that requests hold at a time, and seconds: that each holds its own, that it
# waits for them, and that its client waits for the answer.
BUDGET, HOLD, MAX_WAIT, PATIENCE = 64 * MIB, 1.0, 2.0, 4.0
# Seconds until the budget is full; earlier requests are not counted.
WARM = 3.0


async def answer(_scope: Any, receive: Any, send: Any) -> None:
    """Hold what the request was admitted with, for as long as a model would."""
    await receive()
    await asyncio.sleep(HOLD)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def make_app() -> Admission:
    """Be one worker; the folder that all share is in the environment."""
    logging.getLogger("lifecycle").setLevel(logging.ERROR)  # a line for each refusal
    return Admission(
        answer,
        price=lambda _, body: MemoryEstimate(int(body), 0),
        client=lambda scope: dict(scope["headers"])[b"x-client"],
        bytes=BUDGET * 4 // 3,  # three quarters are for what media need
        release="end",
        max_waiting=32,
        max_wait=MAX_WAIT,
    )


class Clients:
    """Open-loop clients: they come at times that do not depend on the answers.

    Attributes:
        served: Byte-seconds of each client that were served.
        refused: Milliseconds until each refusal of those that found the queue full.
        waited: Requests that were refused after their wait in it.
        late: Requests that were not answered in time.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.served = dict.fromkeys(CLIENTS, 0.0)
        self.refused: list[float] = []
        self.waited = self.late = 0

    async def run(self, load: float, seconds: float, seed: int) -> None:
        """Ask for *load* times the budget, each client for the same part of it."""
        async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as tasks:
            for name, cost in CLIENTS.items():
                rate = load * BUDGET / HOLD / len(CLIENTS) / (cost * MIB)
                chance = random.Random(f"{seed}{name}")
                tasks.create_task(self._client(name, rate, seconds, chance))

    async def _client(
        self, name: str, rate: float, seconds: float, chance: random.Random
    ) -> None:
        request = asking(name, CLIENTS[name] * MIB)
        began = due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while (due := due + chance.expovariate(rate)) < began + seconds:
                await asyncio.sleep(due - time.monotonic())
                counts = due >= began + WARM
                tasks.create_task(self.ask(name, request, counts=counts))

    async def ask(self, name: str, request: bytes, *, counts: bool) -> None:
        """Send a request and note how it is answered, if it *counts*."""
        began, found = time.monotonic(), b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    writer.write(request)
                    found = await reader.read()
                finally:
                    writer.transport.abort()
        if not counts:
            return
        took = time.monotonic() - began
        if b" 503 " in found[:20] and took >= MAX_WAIT:
            self.waited += 1
        elif b" 503 " in found[:20]:
            self.refused.append(1e3 * took)
        elif b"served" in found:
            self.served[name] += CLIENTS[name] * MIB * HOLD
        else:
            self.late += 1


def asking(client: str, nbytes: int) -> bytes:
    """Return the bytes of a request that costs *nbytes*."""
    head = f"POST / HTTP/1.1\r\nhost: a\r\nx-client: {client}\r\nconnection: close"
    body = b"%d" % nbytes
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def until_it_serves(port: int, workers: int) -> None:
    """Wait until the server answers, also those of its workers that come last."""
    clients = Clients(port)
    async with asyncio.timeout(60):
        while not clients.served["a"]:
            await asyncio.sleep(0.1)
            await clients.ask("a", asking("a", MIB), counts=True)
    await asyncio.sleep(workers)


def measure(workers: int, load: float, seconds: float, seed: int) -> dict[str, float]:
    """Start a server, overload it, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        port = 8100 + os.getpid() % 500
        command = [sys.executable, "-m", "uvicorn", "--log-level", "error"]
        command += ["--port", str(port), "--workers", str(workers)]
        server = subprocess.Popen(
            [*command, "--factory", "overload_workers:make_app"],
            env={**os.environ, "LIFECYCLE_SHARED": f"{folder}/budget"},
            cwd=Path(__file__).parent,
        )
        clients = Clients(port)
        try:
            asyncio.run(until_it_serves(port, workers))
            asyncio.run(clients.run(load, seconds, seed))
        finally:
            server.terminate()
            server.wait(30)
    return report(clients, seconds)


def report(clients: Clients, seconds: float) -> dict[str, float]:
    """Return what the clients saw, in shares of the budget and in milliseconds."""
    parts = list(clients.served.values())
    squares = len(parts) * sum(it**2 for it in parts)
    refused = statistics.quantiles(clients.refused or [0.0, 0.0], n=100)
    return {
        "goodput": sum(parts) / (BUDGET * (seconds - WARM)),
        "jain": sum(parts) ** 2 / squares if squares else 0.0,
        "refusal_p99": refused[-1],
        "refusals": len(clients.refused),
        "waited": clients.waited,
        "late": clients.late,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=10.0)
    options = parser.parse_args()
    print(json.dumps(machine()))
    for workers in WORKERS:
        runs = [
            measure(workers, options.load, options.seconds, turn)
            for turn in range(options.repeat)
        ]
        found = {name: [run[name] for run in runs] for name in runs[0]}
        shown = (f"{name} {spread(it, 3)}" for name, it in found.items())
        print(f"{workers} workers: {', '.join(shown)}")
        middle = {name: statistics.median(it) for name, it in found.items()}
        print(goal("  goodput", middle["goodput"], least=0.95))
        print(goal("  Jain's index of byte-seconds", middle["jain"], least=0.95))
        print(goal("  refusals, p99 in ms", middle["refusal_p99"], most=5))


if __name__ == "__main__":
    main()
