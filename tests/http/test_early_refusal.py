"""A request that will be refused is refused before its body is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_kit import answer_to, png, running, user

from lifecycle import Gate
from lifecycle.events import Event
from lifecycle_asgi import RequestEnded, RequestStarted
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio


BODY = json.dumps(
    {"model": "sim", "messages": user("see", png(64, 64)), "max_tokens": 2}
).encode()


HEAD = (
    b"POST %s HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
    b"content-length: 1000000\r\n\r\n"
)


async def status_without_body(port: int, path: bytes = b"/v1/chat/completions") -> int:
    """Send the head of a request and nothing of its body; return the answer's status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % path)
    async with asyncio.timeout(120):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("path", "status"), [(b"/v1/chat/completions", 503), (b"/v1/messages", 529)]
)
async def test_refuses_without_the_body_when_the_line_is_full(
    path: bytes, status: int
) -> None:
    """A client need not send a megabyte to learn that the server is full."""
    in_flight = Gate(slots=1, max_waiting=0, name="in_flight")
    async with running(in_flight=in_flight) as server:
        with in_flight.try_admit():
            assert await status_without_body(server.port, path) == status
        assert in_flight.statistics().refused == 1
        await server.quiet()


async def refused(in_flight: Gate, head: bytes, log: list[Event]) -> tuple[int, bytes]:
    """Ask a full server by a head alone; returns the status and the whole answer."""
    settings = AppSettings(model="sim", body_bytes=2_000_000)
    async with running(
        in_flight=in_flight, log=log.append, settings=settings
    ) as server:
        with in_flight.try_admit():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head)
            async with asyncio.timeout(120):
                answer = await reader.readuntil(b"}}")
            writer.close()
        await server.quiet()
    return int(answer.split()[1]), answer


async def test_reports_an_early_refusal_like_every_other() -> None:
    """The id comes back, both words on retries are there, and it counts once (S10)."""
    in_flight = Gate(slots=1, max_waiting=0, name="in_flight")
    log: list[Event] = []
    head = HEAD.replace(b"host: here", b"x-request-id: abc") % b"/v1/chat/completions"
    status, answer = await refused(in_flight, head, log)
    assert status == 503
    for said in (b"x-request-id: abc", b"retry-after: ", b"retry-after-ms: "):
        assert said in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == (
        "server_overloaded"
    )
    told = [each for each in log if isinstance(each, (RequestStarted, RequestEnded))]
    started, ended = told
    assert isinstance(ended, RequestEnded)
    assert (started.operation, ended.outcome, ended.status) == ("chat", "refused", 503)
    assert started.request == ended.request
    assert in_flight.statistics().refused == 1


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (b"host: here", b"x-request-id: a b", 400),
        (b"host: here", b"content-encoding: gzip", 400),
        (b"1000000", b"9000000", 413),
    ],
)
async def test_says_first_what_no_retry_would_mend(
    old: bytes, new: bytes, status: int
) -> None:
    """A request that an idle server would refuse gets no ``Retry-After``."""
    in_flight = Gate(slots=1, max_waiting=0, name="in_flight")
    head = HEAD.replace(old, new) % b"/v1/chat/completions"
    assert (await refused(in_flight, head, []))[0] == status
    assert in_flight.statistics().refused == 0


async def test_reads_the_body_while_the_queue_has_space() -> None:
    """While the queue has space no request is refused early, and all are served."""
    in_flight = Gate(slots=1, max_waiting=1, name="in_flight")
    async with running(in_flight=in_flight) as server:
        with in_flight.try_admit():
            asking = asyncio.create_task(answer_to(server.port, BODY))
            await server.until(lambda: in_flight.statistics().waiting)
            assert await status_without_body(server.port) == 503
        assert (await asking)[0] == 200
        await server.quiet()


@pytest.mark.parametrize(
    "limits", [{"slots": None}, {"slots": 1}, {"slots": 1, "max_waiting": 0}]
)
async def test_reads_the_body_where_there_is_room(limits: dict[str, Any]) -> None:
    """A gate with any capacity left refuses no request early."""
    in_flight = Gate(name="in_flight", **limits)
    async with running(in_flight=in_flight) as server:
        for _ in range(3):
            assert (await answer_to(server.port, BODY))[0] == 200
        assert in_flight.statistics().refused == 0
        await server.quiet()
