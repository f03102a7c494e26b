"""Whether one client can keep another one out of the bundled server.

An honest client asks for a short text again and again, first alone and then beside
another client that attacks by its defaults: slow bodies, large uploads, or many
requests. Prints the latency of both, and their ratio, from one run of one server:

    python benchmarks/shut_out.py --seconds 20

The server runs the simulated model. Clients are processes of their own, by address:
127.0.0.2 is honest, 127.0.0.3 attacks.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/kit")]
HONEST, ATTACKER = "127.0.0.2", "127.0.0.3"
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
    "content-type: application/json\r\ncontent-length: {}\r\n\r\n"
)
ATTACKS = {"slow": 24, "uploads": 300, "requests": 1400}


def text(tokens: int) -> bytes:
    """A request of a short text."""
    messages = [{"role": "user", "content": "x"}]
    ask = {"model": "sim", "max_tokens": tokens, "messages": messages}
    return json.dumps(ask).encode()


def upload(size: int) -> bytes:
    """A request with one picture, of about *size* bytes."""
    from http_kit import png_chunk

    side = int((size * 3 / 4 / 3) ** 0.5)
    row = b"\0" + os.urandom(3 * side)
    pixels = zlib.compress(row * side, 0)
    head = side.to_bytes(4) + side.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    image = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head)
    image += png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": parts}]
    return json.dumps({"model": "sim", "max_tokens": 2, "messages": messages}).encode()


async def ask(port: int, body: bytes, address: str) -> str:
    """Send one request; return its status."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(address, 0)
    )
    try:
        writer.write(HEAD.format(len(body)).encode())
        for at in range(0, len(body), 2**20):
            writer.write(body[at : at + 2**20])
            await writer.drain()
        answer = await reader.read()
        return answer[9:12].decode() or "closed"
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def drip(port: int) -> str:
    """Declare 64 MiB and send 8 KiB a second, until the server answers."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(ATTACKER, 0)
    )
    writer.write(HEAD.format(2**26).encode())
    answer = asyncio.create_task(reader.read(300))
    while not answer.done():
        writer.write(b" " * 8192)
        await asyncio.wait([answer], timeout=1)
    writer.close()
    return (await answer)[9:12].decode()


async def attack(kind: str, port: int, seconds: float) -> None:
    """Attack, with as many requests at once as the kind has."""
    body = upload(49 * 2**20) if kind == "uploads" else text(16)
    seen: collections.Counter[str] = collections.Counter()
    print("attacks", flush=True)

    async def again() -> None:
        while True:
            try:
                done = drip(port) if kind == "slow" else ask(port, body, ATTACKER)
                status = await done
                seen[status] += 1
                if status in ("429", "503"):
                    await asyncio.sleep(1)  # as it is asked to by Retry-After
            except OSError as error:
                seen[type(error).__name__] += 1
                await asyncio.sleep(0.2)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for _ in range(ATTACKS[kind]):
                tasks.create_task(again())
    print(json.dumps(seen), flush=True)


async def honest(port: int, seconds: float) -> None:
    """Ask every tenth of a second; print the latencies."""
    statuses: collections.Counter[str] = collections.Counter()
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        statuses[await ask(port, text(2), HONEST)] += 1
        times.append(time.monotonic() - began)
        await asyncio.sleep(0.1)
    print(json.dumps([sorted(times), statuses]))


def client(*arguments: object) -> subprocess.Popen[str]:
    """Run one client as a process."""
    argv = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def measured(port: int, seconds: float) -> tuple[list[float], dict[str, int]]:
    """The latencies and statuses of the honest client."""
    out, _ = client("honest", port, seconds).communicate()
    times, statuses = json.loads(out)
    return times, statuses


def at(times: Sequence[float], part: float) -> float:
    """A percentile, in milliseconds."""
    return 1000 * times[min(int(part * len(times)), len(times) - 1)]


@contextlib.contextmanager
def server(*options: str) -> Iterator[int]:
    """Run `serve` with the simulated model; yields its port."""
    from http_kit import ENV

    argv = [sys.executable, "-m", "lifecycle_engine.cli", "serve", "--runner", "sim"]
    argv += ["--port", "0", *options]
    with subprocess.Popen(
        argv, text=True, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield int(line.rpartition(":")[2])
        finally:
            process.terminate()


def report(kinds: Sequence[str], seconds: float, options: Sequence[str]) -> None:
    """Print a line for each attack."""
    print(f"{'attack':10} {'requests':>8} {'p50 ms':>8} {'p99 ms':>8} {'ratio':>6}")
    for kind in kinds:
        with server(*options) as port:
            measured(port, 2)
            quiet, _ = measured(port, seconds)
            attacker = client("attack", kind, port, seconds + 8)
            assert attacker.stdout is not None
            attacker.stdout.readline()
            time.sleep(2)
            beside, statuses = measured(port, seconds)
            seen, _ = attacker.communicate()
        for name, times in ((f"- {kind}", quiet), (kind, beside)):
            ratio = at(times, 0.99) / at(quiet, 0.99)
            latency = f"{at(times, 0.5):8.1f} {at(times, 0.99):8.1f} {ratio:6.2f}"
            print(f"{name:10} {len(times):8} {latency}", flush=True)
        print(f"{'':10} answers {statuses}, of the attacker {seen.strip()}", flush=True)


def main() -> None:
    """Run the command line."""
    match sys.argv[1:]:
        case ["attack", kind, port, seconds]:
            asyncio.run(attack(kind, int(port), float(seconds)))
        case ["honest", port, seconds]:
            asyncio.run(honest(int(port), float(seconds)))
        case _:
            parser = argparse.ArgumentParser(description=__doc__)
            parser.add_argument("--seconds", type=float, default=20)
            parser.add_argument("--attack", choices=ATTACKS, action="append")
            parser.add_argument("options", nargs="*", help="of the server, after --")
            found = parser.parse_args()
            report(found.attack or list(ATTACKS), found.seconds, found.options)


if __name__ == "__main__":
    main()
