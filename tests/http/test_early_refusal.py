"""Who is going to be refused is refused before the body is read."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_kit import answer_to, png, running, user

from lifecycle import Gate

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
    async with asyncio.timeout(5):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("path", "status"), [(b"/v1/chat/completions", 503), (b"/v1/messages", 529)]
)
async def test_refuses_without_the_body_when_the_line_is_full(
    path: bytes, status: int
) -> None:
    """Nobody has to send a megabyte to hear that there is no room."""
    in_flight = Gate(slots=1, max_waiting=0, name="in_flight")
    async with running(in_flight=in_flight) as server:
        with in_flight.try_admit():
            assert await status_without_body(server.port, path) == status
        assert in_flight.statistics().refused == 1
        await server.quiet()


async def test_reads_the_body_of_who_may_wait() -> None:
    """With a place in the line nobody is refused early, and all are served."""
    in_flight = Gate(slots=1, max_waiting=1, name="in_flight")
    async with running(in_flight=in_flight) as server:
        with in_flight.try_admit():
            asking = asyncio.create_task(answer_to(server.port, BODY))
            await server.until(lambda: in_flight.statistics().waiting)
            assert await status_without_body(server.port) == 503
        assert (await asking)[0] == 200
        await server.quiet()


@pytest.mark.parametrize("limits", [{}, {"slots": 1}, {"slots": 1, "max_waiting": 0}])
async def test_reads_the_body_where_there_is_room(limits: dict[str, int]) -> None:
    """A gate with room, however narrow, refuses nobody."""
    in_flight = Gate(name="in_flight", **limits)
    async with running(in_flight=in_flight) as server:
        for _ in range(3):
            assert (await answer_to(server.port, BODY))[0] == 200
        assert in_flight.statistics().refused == 0
        await server.quiet()
