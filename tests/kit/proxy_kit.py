"""`lifecycle proxy` in a process of its own, between raw sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from ports import free_port

HEAD_END = b"\r\n\r\n"
HEALTH = b"GET /-/health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
PATIENCE = 120.0
CUTS = (ConnectionError, asyncio.IncompleteReadError)
Handler = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection that the upstream was given."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""

    async def read_head(self) -> bytes:
        """Return the head of the next request."""
        self.head = await self.reader.readuntil(HEAD_END)
        return self.head

    async def read_body(self) -> bytes:
        """Return a body with a declared length."""
        return await self.reader.readexactly(length_of(self.head))

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> float:
        """Wait until the other side has closed; return when."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        return time.monotonic()


class RawUpstream:
    """A server of bytes: what its handler does, and what it was sent."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections = 0
        self.open = 0
        self.closed_at: asyncio.Queue[float] = asyncio.Queue()
        self.reached = asyncio.Event()
        self.heads: list[bytes] = []
        self.errors: list[BaseException] = []

    async def serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection."""
        self.connections += 1
        self.open += 1
        peer = Peer(reader, writer)
        try:
            await self.handler(peer)
        except CUTS:
            pass
        except Exception as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)
        finally:
            self.open -= 1
            self.heads.append(peer.head)
            writer.close()

    async def settled(self) -> int:
        """Wait until no connection is open; return how many are."""
        until = time.monotonic() + PATIENCE
        while self.open and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return self.open


@contextlib.asynccontextmanager
async def raw_upstream(
    handler: Handler, path: Path | None = None
) -> AsyncIterator[tuple[RawUpstream, str]]:
    """Serve connections by *handler*; yield the server and its URL."""
    upstream = RawUpstream(handler)
    if path is None:
        server = await asyncio.start_server(upstream.serve_one, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(upstream.serve_one, str(path))
        url = f"unix:{path}"
    try:
        yield upstream, url
    finally:
        server.close()
        assert upstream.errors == []


class ProxyProcess:
    """The command, and what can be seen of its process."""

    def __init__(self, process: Any, port: int, log: Path) -> None:
        self.process, self.port = process, port
        self._log = log
        self._seen = psutil.Process(process.pid)

    def log(self) -> str:
        """Return what it has written."""
        return self._log.read_text()

    def resident(self) -> int:
        """Return its resident memory in bytes."""
        return int(self._seen.memory_info().rss)

    def descriptors(self) -> int:
        """Return how many descriptors it has open."""
        return int(self._seen.num_fds())

    async def settled(self, descriptors: int) -> int:
        """Wait until it has at most *descriptors* open; return how many."""
        until = time.monotonic() + PATIENCE
        while (found := self.descriptors()) > descriptors and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return found

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a raw connection to it."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Send bytes, and return head and body of the response."""
        reader, writer = await self.connect()
        try:
            writer.write(request)
            return await asyncio.wait_for(read_response(reader), PATIENCE)
        finally:
            writer.close()


def length_of(head: bytes) -> int:
    """Return the declared length; 0 without one."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def read_response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body, of a declared length or in chunks as they came."""
    head = await reader.readuntil(HEAD_END)
    if b"transfer-encoding: chunked" in head.lower():
        return head, await reader.readuntil(b"0" + HEAD_END)
    return head, await reader.readexactly(length_of(head))


@contextlib.asynccontextmanager
async def running_proxy(
    upstream: str, folder: Path, *options: str, **environment: str
) -> AsyncIterator[ProxyProcess]:
    """Run the command in front of *upstream*, until the block ends."""
    port, log = free_port(), folder / f"proxy-{time.monotonic_ns()}.log"
    command = "from lifecycle_tools import main; main()"
    arguments = ["proxy", "--upstream", upstream, "--port", str(port), *options]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", command, *arguments),
            *("--health-path", "/-/health"),
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
        )
    proxy = ProxyProcess(process, port, log)
    try:
        await _until_healthy(proxy)
        yield proxy
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            raise


async def _until_healthy(proxy: ProxyProcess) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            reader, writer = await proxy.connect()
            writer.write(HEALTH)
            # Until the proxy has closed its end: who counts its descriptors next must
            # not count that one.
            head = await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()
        except OSError:
            assert proxy.process.returncode is None, proxy.log()
            assert time.monotonic() < until, proxy.log()
            await asyncio.sleep(0.05)
        else:
            assert b" 200 " in head, head
            assert "Uvicorn running on" in proxy.log(), "another server answers"
            return
