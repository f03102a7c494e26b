"""A pack of hostile clients beside good ones: memory, and how long the good ones take.

python tests/http/hostile.py [--idle 10000] [--each 200] [--seconds 20] [--strict] [KIND...]

A real server in a process of its own. First good clients alone, then beside each kind
of hostile ones: connections that say nothing, heads and bodies that never end, readers
that never read, bombs, deep documents, bad ids. Memory is the server's, its engine apart.

The hostile ones are a process that gives way to all others, as in the world they would
have processors of their own; and they have an address of their own. The good ones are
as the SDKs are: they keep their connections, and stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

from hostile_clients import KINDS
from http_kit import ENV
from rough_clients import PATHS, body_of

KIT = Path(__file__).parents[1] / "kit"
_PATH = PATHS[0]
_GOOD = 4
_TOKENS = 16
# Where the good ones are; the others are at 127.0.0.1.
_HOME = "127.0.0.2"
# What it may cost: times as long, and MiB.
_SLOWER = 2.0
_MIB = 100.0


@dataclass
class Times:
    """What was seen for a while, in seconds.

    Attributes:
        whole: How long good requests took.
        gaps: Between two reads of their answers.
        lag: How late the server's loop was, and how much of that it ran itself.
        own: How late the loop of the good clients was: theirs, not the server's.
        mib: The most that the server held.
    """

    whole: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    lag: list[tuple[float, float]] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    mib: float = 0.0


class Good:
    """A good client: one connection, one request after the other."""

    def __init__(self, port: int, seen: Times, seed: int) -> None:
        self._port = port
        self._seen = seen
        self._draw = random.Random(seed)

    async def run(self, until: float) -> None:
        """Ask until then."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, local_addr=(_HOME, 0)
        )
        while time.monotonic() < until:
            body = body_of(self._draw, _PATH, _TOKENS, stream=True)
            began = time.monotonic()
            head = f"POST {_PATH} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}"
            writer.write(f"{head}\r\n\r\n".encode() + body)
            await self._read(reader)
            self._seen.whole.append(time.monotonic() - began)
        writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        last = None
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
            now = time.monotonic()
            if last is not None:
                self._seen.gaps.append(now - last)
            last = now
        await reader.readexactly(2)


class Pack:
    """A server with its clients.

    Attributes:
        api: The process of the server.
    """

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.api = psutil.Process(pid)
        self.seen = Times()

    async def listen(self, lines: asyncio.StreamReader) -> None:
        """Take in what the server's probe says."""
        async for line in lines:
            for pair in line.decode().split()[1:]:
                late, _, ran = pair.partition(":")
                self.seen.lag.append((float(late), float(ran)))

    async def good(self, seconds: float) -> Times:
        """What good clients see for so long."""
        self.seen = seen = Times()
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(_late(seen.own))]
            beside.append(tasks.create_task(self._watch(seen)))
            async with asyncio.TaskGroup() as clients:
                for seed in range(_GOOD):
                    clients.create_task(Good(self.port, seen, seed).run(until))
            for task in beside:
                task.cancel()
        return seen

    async def _watch(self, seen: Times) -> None:
        while True:
            seen.mib = max(seen.mib, self.api.memory_info().rss / 2**20)
            await asyncio.sleep(0.05)


async def _late(seen: list[float]) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.002)
        seen.append(time.monotonic() - began - 0.002)


class Attack:
    """Hostile clients in a process of their own.

    Attributes:
        done: How often one of them was done, and began again.
    """

    def __init__(self, kind: str, count: int, nice: int) -> None:
        self._options = str(count), str(nice), kind
        self.done = 0

    @contextlib.asynccontextmanager
    async def running(self, port: int) -> AsyncIterator[None]:
        """They are there meanwhile, from the beginning of the block."""
        argv = [sys.executable, str(KIT / "hostile_clients.py"), str(port)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, *self._options, stdin=pipe, stdout=pipe, env=ENV
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"ready\n"
            process.stdin.write(b"\n")
            async with asyncio.TaskGroup() as tasks:
                counting = tasks.create_task(self._count(process.stdout))
                yield
                counting.cancel()
            assert process.returncode is None, "the hostile clients failed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _count(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self.done = int(line)


@contextlib.asynccontextmanager
async def serving_pack(*options: str) -> AsyncIterator[Pack]:
    """A server and its pack."""
    argv = [sys.executable, str(KIT / "probed_server.py"), "--runner", "sim"]
    # The others have one address. Without a share for each they are what any two
    # hundred clients are who want long answers: a line.
    argv += ["--per-client", "5", "--max-batch", "16", "--port", "0", *options]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, env=ENV, limit=2**20
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        while b"ready" not in line:
            line = await process.stdout.readline()
        pack = Pack(int(line.decode().split(":")[-1]), process.pid)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(pack.listen(process.stdout))
            yield pack
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 20) == 0
            listening.cancel()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def p99(taken: list[float]) -> float:
    """Milliseconds that 99 of 100 stay below."""
    return 1000 * statistics.quantiles(taken, n=100, method="inclusive")[98]


_HEAD = """
kind                      | done/s |    MiB       | token gap p99, ms  | request p99, ms    | server's loop, ms | clients'
                          |        | alone beside | alone beside ratio | alone beside ratio | p99 late  longest | p99 late
""".strip()


def row(kind: str, done: float, alone: Times, beside: Times) -> str:
    """A line of the table."""
    cells = [f"{kind:25}", f"{done:6.0f}", f"{alone.mib:5.0f} {beside.mib:6.0f}"]
    for one, other in ((alone.gaps, beside.gaps), (alone.whole, beside.whole)):
        cells.append(f"{p99(one):5.1f} {p99(other):6.1f} {p99(other) / p99(one):5.2f}")
    step = 1000 * max(ran for _, ran in beside.lag)
    cells.append(f"{p99([late for late, _ in beside.lag]):8.1f} {step:8.1f}")
    return " | ".join([*cells, f"{p99(beside.own):8.1f}"])


def misses(kind: str, alone: Times, beside: Times) -> list[str]:
    """Which goals were missed."""
    missed = []
    if beside.mib - alone.mib >= _MIB:
        missed.append(f"{kind}: {beside.mib - alone.mib:.0f} MiB more")
    if p99(beside.gaps) >= _SLOWER * p99(alone.gaps):
        missed.append(f"{kind}: token gaps {_SLOWER:g} times as long, or more")
    if p99(beside.whole) >= _SLOWER * p99(alone.whole):
        missed.append(f"{kind}: requests {_SLOWER:g} times as long, or more")
    return missed


async def run(options: argparse.Namespace) -> list[str]:
    """Print a table; return which goals were missed."""
    missed = []
    print(_HEAD, flush=True)
    async with serving_pack(*options.serve.split()) as pack:
        await pack.good(max(2, options.seconds / 4))  # warm
        for kind in options.kinds or KINDS:
            # Before each, since others use the machine, too.
            alone = await pack.good(options.seconds / 2)
            count = options.idle if kind.startswith("idle") else options.each
            attack = Attack(kind, count, options.nice)
            async with attack.running(pack.port):
                beside = await pack.good(options.seconds)
            await asyncio.sleep(1)  # for the server to hear that they are gone
            done = attack.done / options.seconds
            print(row(f"{count} {kind}", done, alone, beside), flush=True)
            missed += misses(kind, alone, beside)
    return missed


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--nice", type=int, default=19, help="of the hostile ones")
    parser.add_argument("--serve", default="", help="further options of the server")
    parser.add_argument("--strict", action="store_true", help="exit 1 on a miss")
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    options = parser.parse_args()
    missed = asyncio.run(run(options))
    print("\n".join(missed) or "all goals are met")
    sys.exit(1 if missed and options.strict else 0)


if __name__ == "__main__":
    main()
