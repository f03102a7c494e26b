"""Hostile clients, many at once, in a process of their own that gives way to others.

python tests/kit/hostile_clients.py PORT COUNT NICE KIND

Once a line has come in they begin, and print how often they were done, again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from http_kit import png, user
from rough_clients import (
    PATHS,
    Answer,
    ask_and_never_read,
    begin_and_stop,
    body_of,
    connected,
    request_of,
)

_PATH = PATHS[0]
_DEEP = b'{"model":"sim","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
_GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
Hostile = Callable[[int], Awaitable[object]]
# What a refusal may be; 0 is a connection that was closed without a word.
_REFUSED = {0, 400, 404, 408, 413, 422, 429, 431, 503}


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
        assert answer.status in _REFUSED, answer

    return send


def _bombs() -> Hostile:
    document = {"model": "sim", "messages": user(png(12_000, 12_000))}
    return _sends(request_of(_PATH, json.dumps(document).encode()))


def _odd_ids() -> Hostile:
    whole = request_of(_PATH, b'{"model":"sim","messages":[]}')
    return _sends(whole.replace(b"host: here", b"x-request-id: a\r\tb\x0bc"))


def _too_large() -> Hostile:
    return _sends(request_of(_PATH, b"")[:-5] + b"999999999\r\n\r\n")


# Made when asked for: a bomb takes seconds to make.
KINDS: dict[str, Callable[[], Hostile]] = {
    "idle connections": lambda: _idle,
    "slow heads": lambda: _slow_head,
    "stalled bodies": lambda: _stalled_body,
    "readers that never read": lambda: _never_reads,
    "image bombs": _bombs,
    "deep documents": lambda: _sends(request_of(_PATH, _DEEP)),
    "bodies too large": _too_large,
    "heads too long": lambda: _sends(_GET + b"x-a: " + b"y" * 10**6 + b"\r\n\r\n"),
    "odd ids": _odd_ids,
    "no HTTP": lambda: _sends(b"\x16\x03\x01" * 100),
}


async def attack(port: int, count: int, hostile: Hostile) -> None:
    """Be *count* clients, each again as soon as it was refused, until cancelled."""
    done = 0

    async def one() -> None:
        nonlocal done
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await hostile(port)
            done += 1
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(one())
        while True:
            await asyncio.sleep(0.2)
            print(done, flush=True)


def main(port: int, count: int, nice: int, kind: str) -> None:
    """Attack until killed."""
    hostile = KINDS[kind]()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # They would be elsewhere: here they must not take the processors of the others.
    os.nice(nice)
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(attack(port, count, hostile))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
