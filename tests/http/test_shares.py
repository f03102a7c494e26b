"""No client keeps another one out, by the server's defaults or by small gates."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_kit import encoded, make_engine, running, user

from lifecycle import Gate
from lifecycle_engine import AppSettings, SimProcessor, create_app, load_config

pytestmark = pytest.mark.asyncio
ATTACKER, HONEST = "127.0.0.3", "127.0.0.2"
PATH = "/v1/chat/completions"


def ask(*content: str | bytes, **more: Any) -> bytes:
    """The body of a request."""
    named = {"model": "sim", "messages": user(*content), "max_tokens": 2}
    return json.dumps(named | more).encode()


@contextlib.asynccontextmanager
async def sent(
    port: int, body: bytes, address: str, *headers: str, declared: int | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request, or the beginning of a longer one, from an address."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, local_addr=(address, 0)
    )
    lines = [f"POST {PATH} HTTP/1.1", "host: here", "connection: close", *headers]
    lines.append(f"content-length: {declared or len(body)}")
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def status(port: int, body: bytes, address: str, *headers: str) -> int:
    """Send one request; returns its status."""
    async with sent(port, body, address, *headers) as reader:
        return int((await reader.readline()).split()[1])


async def test_admits_texts_and_pictures_beside_slow_bodies() -> None:
    """Bodies that declare all bytes and send none keep out neither."""
    bodies = Gate(bytes=2**26, max_waiting=64, order="fair", name="bodies")
    async with (
        asyncio.timeout(120),
        running(bodies=bodies) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(24):
            slow = sent(server.port, b" " * 8192, ATTACKER, declared=2**26)
            await stack.enter_async_context(slow)
        await server.until(lambda: bodies.statistics().waiting)
        # Neither returns before the bytes of slow bodies are given back: by default
        # that is when they are refused, after 30 s.
        assert await status(server.port, ask("hi"), HONEST) == 200
        picture = ask("what?", encoded(), user="x" * 200).ljust(100_000)
        async with asyncio.timeout(15):
            assert await status(server.port, picture, HONEST) == 200


async def test_admits_a_client_beside_a_queue_of_another() -> None:
    """One client has half of the queue, and gets every other slot."""
    in_flight = Gate(slots=1, max_waiting=8, order="fair", name="in_flight")
    async with asyncio.timeout(120), running(in_flight=in_flight) as server:
        held = in_flight.try_admit(key="none")
        crowd = [
            asyncio.create_task(status(server.port, ask("hi"), ATTACKER))
            for _ in range(20)
        ]
        await server.until(lambda: in_flight.statistics().waiting == 4)
        honest = asyncio.create_task(status(server.port, ask("hi"), HONEST))
        await server.until(lambda: in_flight.statistics().waiting == 5)
        await server.until(lambda: sum(task.done() for task in crowd) == 16)
        held.release()
        assert await honest == 200
        done = [task.result() for task in crowd if task.done()]
        assert done.count(200) < 4  # the others of the crowd come later
        found = await asyncio.gather(*crowd)
        assert sorted(set(found)) == [200, 429]


async def test_refuses_what_does_not_fit_once_it_is_slow() -> None:
    """Beyond what it gave back, a slow body gets bytes only if there are some."""
    bodies = Gate(bytes=300_000, max_waiting=8, order="fair", name="bodies")
    async with asyncio.timeout(120), running(bodies=bodies) as server:
        async with sent(server.port, b" " * 8192, ATTACKER, declared=200_000) as slow:
            await server.until(lambda: bodies.statistics().bytes_in_use == 200_000)
            async with sent(server.port, b" ", HONEST, declared=290_000):
                await server.until(lambda: not bodies.statistics().waiting)
                # Not waiting any more: the first one was charged with what it sent.
                assert bodies.statistics().bytes_in_use < 320_000
            del slow


async def test_counts_and_refuses_none_in_shadow() -> None:
    """`--shadow` shows what the gates would do, and admits all."""
    config = load_config(
        {"model_runner": "sim", "admission_shadow": "true", "admission_slots": "1"}
    )
    assert config.admission.shadow
    gate = Gate(slots=1, enforce=False, order="fair", name="in_flight")
    settings = AppSettings(model="sim", shadow=True, per_client=1)
    async with (
        asyncio.timeout(120),
        running(in_flight=gate, settings=settings) as server,
    ):
        held = gate.try_admit()
        found = [status(server.port, ask("hi"), HONEST) for _ in range(5)]
        assert await asyncio.gather(*found) == [200] * 5
        assert gate.statistics().over_limit >= 5
        held.release()


async def test_goes_by_priority_in_order_of_arrival() -> None:
    """By the field or the header, of each API; a wrong header is refused."""
    in_flight = Gate(slots=1, max_waiting=64, name="in_flight")
    ended: list[str] = []
    async with asyncio.timeout(120), running(in_flight=in_flight) as server:
        held = in_flight.try_admit()

        async def one(name: str, body: bytes, *headers: str) -> None:
            assert await status(server.port, body, HONEST, *headers) == 200
            ended.append(name)

        asks = {
            "plain": (ask("hi"),),
            "field": (ask("hi", priority=5),),
            "header": (ask("hi"), "x-priority: 9"),
            "both": (ask("hi", priority=-1), "x-priority: 9"),
        }
        async with asyncio.TaskGroup() as tasks:
            for count, (name, request) in enumerate(asks.items(), 1):
                tasks.create_task(one(name, *request))
                await server.until(
                    lambda count=count: in_flight.statistics().waiting == count
                )
            held.release()
        assert ended == ["header", "field", "plain", "both"]
        for wrong in ("x-priority: 101", "x-priority: high"):
            assert await status(server.port, ask("hi"), HONEST, wrong) == 400
        assert await status(server.port, ask("hi", priority=101), HONEST) == 400


async def test_preprocesses_as_many_pictures_as_configured() -> None:
    """Preprocessing has slots beside its bytes, which clients share."""
    app = create_app(
        make_engine(),
        SimProcessor(),
        gate=Gate(bytes=10**9, name="payloads"),
        settings=AppSettings(model="sim", threads=4, preprocessing=1),
    )
    assert app.state.service.preprocessing.statistics().slots == 1
