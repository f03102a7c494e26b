"""A pack of hostile clients beside good ones: memory, and how long the good ones take.

python tests/http/hostile.py [--idle 10000] [--each 200] [--seconds 20]

A real server in a process of its own. First good clients alone, then beside each kind
of hostile ones: connections that say nothing, heads and bodies that never end, readers
that never read, bombs, deep documents, bad ids. Memory is the server's, its engine apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

from http_kit import ENV, png, user
from rough_clients import (
    PATHS,
    Answer,
    ask,
    ask_and_never_read,
    begin_and_stop,
    body_of,
    connected,
    request_of,
)

_PATH = PATHS[0]
_GOOD = 4
_DEEP = b'{"model":"sim","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
Hostile = Callable[[int], Awaitable[object]]


async def _slow_head(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n")
        while not reader.at_eof():
            writer.write(b"x-a: b\r\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(100), 1)


async def _idle(port: int) -> None:
    async with connected(port) as (reader, _):
        await reader.read()


async def _stalled_body(port: int) -> None:
    whole = request_of(_PATH, b"x" * 2**20)
    await begin_and_stop(port, whole[:2000], Answer())


async def _never_reads(port: int) -> None:
    await ask_and_never_read(
        port, _PATH, body_of(random.Random(1), _PATH, 4000, stream=True)
    )


def _sends(whole: bytes) -> Hostile:
    async def send(port: int) -> None:
        answer = Answer()
        await begin_and_stop(port, whole, answer)
        assert answer.status in {0, 400, 404, 408, 413, 422, 429, 431, 503}, answer

    return send


def _bomb(width: int, height: int) -> bytes:
    document = {"model": "sim", "messages": user(png(width, height))}
    return request_of(_PATH, json.dumps(document).encode())


def kinds() -> dict[str, Hostile]:
    """Every kind, by name."""
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    ask = request_of(_PATH, b'{"model":"sim","messages":[]}')
    return {
        "slow heads": _slow_head,
        "stalled bodies": _stalled_body,
        "readers that never read": _never_reads,
        "image bombs": _sends(_bomb(12_000, 12_000)),
        "deep documents": _sends(request_of(_PATH, _DEEP)),
        "bodies too large": _sends(request_of(_PATH, b"")[:-5] + b"999999999\r\n\r\n"),
        "heads too long": _sends(get + b"x-a: " + b"y" * 10**6 + b"\r\n\r\n"),
        "odd ids": _sends(ask.replace(b"host: here", b"x-request-id: a\r\tb\x0bc")),
        "no HTTP": _sends(b"\x16\x03\x01" * 100),
    }


class Pack:
    """A server with its clients.

    Attributes:
        api: The process of the server.
    """

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self.api = psutil.Process(pid)

    def memory(self) -> float:
        """MiB that the server holds."""
        return self.api.memory_info().rss / 2**20

    async def good(self, seconds: float) -> list[float]:
        """Seconds that good requests take, four at a time."""
        taken: list[float] = []
        until = time.monotonic() + seconds
        draw = random.Random(2)

        async def one() -> None:
            while time.monotonic() < until:
                answer, began = Answer(), time.monotonic()
                body = body_of(draw, "", 4, stream=True)
                await ask(self._port, _PATH, body, answer, key="good")
                assert answer.status == 200, answer
                taken.append(time.monotonic() - began)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_GOOD):
                tasks.create_task(one())
        return taken

    async def beside(
        self, hostile: Hostile, count: int, seconds: float
    ) -> tuple[float, list[float]]:
        """Most MiB, and the times of good clients, beside *count* hostile ones."""
        most = self.memory()

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await hostile(self._port)
                await asyncio.sleep(0.1)

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, self.memory())
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as tasks:
            bad = [tasks.create_task(watch())]
            for number in range(count):
                bad.append(tasks.create_task(one()))
                if number % 100 == 99:
                    await asyncio.sleep(0.01)
            taken = await self.good(seconds)
            for task in bad:
                task.cancel()
        return most, taken


@contextlib.asynccontextmanager
async def serving_pack():
    """A server and its pack."""
    argv = [sys.executable, "-m", "lifecycle_engine.cli", "serve", "--runner", "sim"]
    # The others have no key, and one address. Without a share for each they are what
    # any two hundred clients are who want long answers: a line.
    argv += ["--per-client", "5", "--max-batch", "16"]
    process = await asyncio.create_subprocess_exec(
        *argv, "--port", "0", stdout=asyncio.subprocess.PIPE, env=ENV
    )
    try:
        line = (await process.stdout.readline()).decode()
        yield Pack(int(line.split(":")[-1]), process.pid)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def p99(taken: list[float]) -> float:
    """Milliseconds that 99 of 100 requests stay below."""
    return 1000 * statistics.quantiles(taken, n=100, method="inclusive")[98]


async def run(
    idle: int, each: int, seconds: float, names: list[str]
) -> dict[str, tuple[float, float, float, float]]:
    """MiB before and at most, and p99 before and beside, by kind."""
    found = {}
    chosen: dict[str, tuple[Hostile, int]] = {"idle connections": (_idle, idle)}
    chosen |= {name: (kind, each) for name, kind in kinds().items()}
    async with serving_pack() as pack:
        await pack.good(2)  # warm
        for name in names or chosen:
            # Before each, since others use the machine, too.
            before, quiet = pack.memory(), await pack.good(seconds / 2)
            most, beside = await pack.beside(*chosen[name], seconds)
            found[name] = (before, most, p99(quiet), p99(beside))
            print(
                f"{chosen[name][1]} {name}: {before:.0f} MiB, at most {most:.0f}; "
                f"p99 {p99(quiet):.0f} ms alone, {p99(beside):.0f} ms beside them",
                flush=True,
            )
    return found


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(run(options.idle, options.each, options.seconds, options.names))


if __name__ == "__main__":
    main()
