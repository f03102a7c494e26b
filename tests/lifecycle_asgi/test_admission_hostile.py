"""Admission behind a real server, and clients that are slow, odd or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgi_kit import serving

from lifecycle import Gate
from lifecycle_asgi import Admission

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.parametrize("http", ["h11", "httptools"]),
]
MIB = 2**20
NONE = {"small": 0, "bodies": 0, "requests": 0}


async def count_bytes(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the length of its body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def admission_of(**options: Any) -> Admission:
    """Admission with few bytes."""
    return Admission(count_bytes, environment={}, **{"bytes": 64 * MIB, **options})


def head(*lines: bytes) -> bytes:
    """The head of a request with these lines."""
    return b"\r\n".join([b"POST /v1/x HTTP/1.1", b"host: here", *lines, b"", b""])


class Client:
    """A connection from an address of its own.

    Args:
        reader: Of the connection.
        writer: Of the connection.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, bytes]:
        """The status and the content of the next response."""
        start = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(start.partition(b"content-length:")[2].split()[0])
        return int(start.split()[1]), await self.reader.readexactly(length)


@contextlib.asynccontextmanager
async def clients(
    port: int, count: int, first: int = 1, addresses: int = 200
) -> AsyncIterator[list[Client]]:
    """Connections from addresses 127.0.0.*first* on, closed without a wait."""
    opened: list[Client] = []
    try:
        for number in range(count):
            local = (f"127.0.0.{first + number % addresses}", 0)
            pair = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
            opened.append(Client(*pair))
        yield opened
    finally:
        for each in opened:
            each.writer.transport.abort()
        await asyncio.sleep(0)


def in_use(admission: Admission) -> dict[str, int]:
    """Bytes held in each lane."""
    return {name: now.bytes_in_use for name, now in admission.statistics().items()}


async def released(admission: Admission) -> None:
    """Wait until nothing is held."""
    while in_use(admission) != NONE:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("size", [2_000_000, 2_700])
async def test_serves_small_text_beside_slow_clients(http: str, size: int) -> None:
    """Slow bodies of 24 clients, large or small, keep out no honest text request."""
    admission = admission_of(slow_after=0.2, max_wait=60.0, max_body=4 * MIB)
    count = 24 if size > 10_000 else 24 * 24  # small ones until the lane is full
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, count, 10, 24) as slow, clients(port, 1) as honest:
            for each in slow:
                each.writer.write(head(b"content-length: %d" % size) + b"x")
            lane = "small" if count > 24 else "bodies"
            while admission.statistics()[lane].received < count:
                await asyncio.sleep(0.001)
            honest[0].writer.write(head(b"content-length: 2") + b"{}")
            assert await honest[0].answer() == (200, b"2")
        await released(admission)


async def test_reads_chunked_bodies_of_any_chunks(http: str) -> None:
    """Chunks of one byte are a body like any other."""
    admission = admission_of()
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, 1) as [client]:
            client.writer.write(head(b"transfer-encoding: chunked"))
            client.writer.write(b"1\r\nx\r\n" * 5_000 + b"0\r\n\r\n")
            assert await client.answer() == (200, b"5000")
    assert in_use(admission) == NONE


async def test_answers_pipelined_requests_in_order(http: str) -> None:
    """What follows a body on its connection is the next request."""
    admission = admission_of()
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, 1) as [client]:
            for size in range(1, 9):
                body = head(b"content-length: %d" % size) + b"x" * size
                client.writer.write(body)
            answers = [await client.answer() for _ in range(8)]
    assert answers == [(200, b"%d" % size) for size in range(1, 9)]


async def test_releases_what_clients_leave(http: str) -> None:
    """Bodies that are declared and never sent, or left in the middle, hold nothing."""
    admission = admission_of()
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, 20) as leaving:
            for number, each in enumerate(leaving):
                each.writer.write(head(b"content-length: 300000") + b"x" * number**4)
            while not in_use(admission)["bodies"]:
                await asyncio.sleep(0.001)
        await released(admission)


@pytest.mark.parametrize(
    "lines",
    [
        [b"content-length: 5", b"content-length: 500000"],
        [b"content-length: -5"],
        [b"content-length: 1_0"],
        [b"content-length: 99999999999999999999999"],
        [b"content-length: 5", b"transfer-encoding: chunked"],
    ],
)
async def test_holds_nothing_for_lengths_that_lie(
    http: str, lines: list[bytes]
) -> None:
    """The server refuses the request, or one of its lengths counts."""
    admission = admission_of(body_timeout=1.0)
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, 1) as [client]:
            client.writer.write(head(*lines) + b"5\r\nabcde\r\n0\r\n\r\n")
            status = int((await client.reader.read(12))[9:12])
            assert status in (200, 400, 413)
        await released(admission)


FORM = b"content-type: multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\nhi\r\n'
ODD = {
    "parts": ([FORM], PART * 10_000 + b"--x--\r\n"),
    "heads": ([FORM], b"--x\r\nContent-Disposition: " * 10_000),
    "compressed": ([b"content-encoding: gzip"], gzip.compress(bytes(MIB))),
    "nested": ([], b"[" * 100_000),
}


@pytest.mark.parametrize("name", ODD)
async def test_serves_odd_bodies(http: str, name: str) -> None:
    """They are priced as if there were images in them, and reach the application."""
    admission = admission_of(bytes=1024 * MIB)
    lines, body = ODD[name]
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, 1) as [client]:
            client.writer.write(head(*lines, b"content-length: %d" % len(body)) + body)
            assert await client.answer() == (200, b"%d" % len(body))
    assert in_use(admission) == NONE


async def test_clients_that_leave_free_the_line(http: str) -> None:
    """Bodies of 4 MiB that wait unread: the next client is not refused for them."""
    size = 4 * MIB  # charged threefold, that is all that bodies have
    bodies = Gate(bytes=3 * size, order="fair", max_waiting=8)
    options = {"bytes": 1024 * MIB, "slow_after": 600.0, "max_wait": 600.0}
    admission = admission_of(gates={"bodies": bodies}, **options)
    now = admission.statistics
    async with asyncio.timeout(120), serving(admission, http=http) as port:
        async with clients(port, 1) as [slow], clients(port, 1, 2) as [honest]:
            slow.writer.write(head(b"content-length: %d" % size) + b"x")
            while not now()["bodies"].slots_in_use:
                await asyncio.sleep(0.001)
            async with clients(port, 8, 10) as leavers:
                for each in leavers:
                    line = head(b"content-length: %d" % size)
                    each.writer.write(line + b"{" * size)
                while now()["bodies"].waiting < 8:
                    await asyncio.sleep(0.001)
            while now()["bodies"].waiting:
                await asyncio.sleep(0.001)
            honest.writer.write(head(b"content-length: %d" % size) + b"{" * size)
            while not now()["bodies"].waiting:
                await asyncio.sleep(0.001)
            slow.writer.transport.abort()
            assert await honest.answer() == (200, b"%d" % size)
        await released(admission)
    assert (now()["bodies"].refused, now()["bodies"].admitted) == (0, 2)
