"""Many requests through one proxy, a part of them left; then what is left in it.

``python tests/lifecycle_tools/long_run.py --requests 100000`` prints one line. The
tests run a short form.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))

from proxy_kit import Peer, ProxyProcess, raw_upstream, running_proxy

POST = b"POST /%b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ndata\r\n"
END = b"4\r\nmore\r\n0\r\n\r\n"
# Of ten requests, five are served, and two each are left before the head and in the
# middle of the response, and one while its body is read.
KINDS = ("whole",) * 5 + ("silent",) * 2 + ("stream",) * 2 + ("body",)

# Of an allocator that has not found its size yet; a leak grows with the requests.
MOST_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What more than after the first requests there is after all of them."""

    requests: int
    seconds: float
    descriptors: int
    resident: int
    upstream: int


async def upstream_of_all(peer: Peer) -> None:
    """Serve each kind by its path until the proxy closes."""
    while True:
        head = await peer.read_head()
        await peer.read_body()
        if b"/silent" in head:
            await peer.closed()
            return
        await peer.send(HEAD)
        if b"/stream" in head:
            await peer.closed()
            return
        await peer.send(END)


async def one_client(proxy: ProxyProcess, kinds: Iterator[str]) -> None:
    """Send requests one by one, each over a new connection where the last was left."""
    pair = None
    for kind in kinds:
        pair = pair or await proxy.connect()
        reader, writer = pair
        writer.write(POST % (kind.encode(), 4000) + b"x" * 2000)
        if kind != "body":
            writer.write(b"x" * 2000)
        if kind == "whole":
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"\r\n0\r\n\r\n")
            continue
        if kind == "stream":
            await reader.readuntil(b"data\r\n")
        else:
            await asyncio.sleep(0.002)
        writer.transport.abort()
        pair = None
    if pair:
        pair[1].close()


async def load(proxy: ProxyProcess, requests: int, clients: int) -> None:
    """Send *requests* by *clients* at a time."""
    kinds = itertools.islice(itertools.cycle(KINDS), requests)
    await asyncio.gather(*(one_client(proxy, kinds) for _ in range(clients)))


async def run(requests: int, folder: Path, *, clients: int = 16) -> Remains:
    """Return what is left after *requests*."""
    async with (
        raw_upstream(upstream_of_all) as (upstream, url),
        running_proxy(url, folder, "--upstream-keep-alive", "1") as proxy,
    ):
        empty = proxy.descriptors()
        await load(proxy, 1000, clients)
        assert await proxy.settled(empty) <= empty
        resident = proxy.resident()
        began = time.monotonic()
        await load(proxy, requests, clients)
        seconds = time.monotonic() - began
        return Remains(
            requests=requests,
            seconds=seconds,
            descriptors=await proxy.settled(empty) - empty,
            resident=proxy.resident() - resident,
            # It sees the end of a connection after the proxy has closed it.
            upstream=await upstream.settled(),
        )


def main() -> None:
    """Run as many as asked for; exit with 1 if anything is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        remains = asyncio.run(run(arguments.requests, Path(folder)))
    print(remains)
    if remains.descriptors > 0 or remains.upstream or remains.resident > MOST_BYTES:
        sys.exit(1)


if __name__ == "__main__":
    main()
