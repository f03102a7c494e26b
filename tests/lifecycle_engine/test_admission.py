"""Admission control of the bundled server: requests begin in turns."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from asgi_kit import http_scope

from lifecycle_engine.server.admission import PROBES, FairAcceptMiddleware


async def begun_by(*hosts: str) -> list[str]:
    """The order of requests that arrive at the same time."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["client"][0])

    turns: Any = FairAcceptMiddleware(app)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for host in hosts:
                scope = http_scope(client=(host, 1))
                tasks.start_soon(turns, scope, None, None)
    return begun


@pytest.mark.anyio
async def test_addresses_take_turns() -> None:
    """A hundred of one address are before another's by one or two, not by all (N12)."""
    crowd, others = ["10.0.0.1"] * 100, [f"10.0.1.{each}" for each in range(8)]
    begun = await begun_by(*crowd, *others)
    assert sorted(begun) == sorted([*crowd, *others])
    ahead = [begun[: begun.index(each)].count("10.0.0.1") for each in others]
    # One or two may be in line with the crowd; that is drawn anew in each process.
    assert sorted(ahead)[4] < 30


@pytest.mark.anyio
async def test_starts_other_requests_when_one_leaves_its_queue() -> None:
    """A request that is cancelled in line is none, and its turn is another's."""
    begun: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["number"])

    turns: Any = FairAcceptMiddleware(app, clock=lambda: 1.0)
    with anyio.fail_after(120):
        await turns(http_scope(number=9), None, None)  # who comes alone needs no line
        async with anyio.create_task_group() as tasks:
            scopes = [anyio.CancelScope() for _ in range(9)]

            async def one(number: int) -> None:
                with scopes[number]:
                    await turns(http_scope(number=number), None, None)

            for number in range(9):
                tasks.start_soon(one, number)
            for number in range(2, 9, 2):
                scopes[number].cancel()
    assert set(begun) >= {1, 3, 5, 7}
    assert not set(begun) & {2, 4, 6, 8}


@pytest.mark.anyio
async def test_shows_no_trailer_that_arrives_in_its_queue() -> None:
    """Some servers append trailers to the list that they put into the scope."""
    servers_own: list[Any] = [(b"host", b"a")]
    seen: list[Any] = []

    def clock() -> float:
        servers_own.append((b"authorization", b"Bearer k"))
        return 1.0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])

    turns: Any = FairAcceptMiddleware(app, clock=clock)
    with anyio.fail_after(120):
        await turns(http_scope(headers=servers_own), None, None)
    assert seen == [(b"host", b"a")]


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["waits", "raises", "cancelled"])
async def test_starts_other_requests_after_one_has_begun(end: str) -> None:
    """A slow body, an error and a client that left are no reason to wait for others."""
    begun: list[int] = []
    first = anyio.CancelScope()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["number"])
        if scope["number"] or end == "cancelled":
            return
        if end == "raises":
            raise ValueError
        await anyio.sleep_forever()

    turns: Any = FairAcceptMiddleware(app, clock=lambda: 1.0)
    with contextlib.suppress(ValueError):
        with anyio.CancelScope() as alone:  # who comes alone has no turn to hold
            alone.cancel()
            await turns(http_scope(number=0), None, None)
    begun.clear()

    async def one(number: int) -> None:
        with contextlib.suppress(ValueError):
            await turns(http_scope(number=number), None, None)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            with first:
                if end == "cancelled":  # with its turn, before it begins
                    first.cancel()
                    await one(0)
            if end != "cancelled":
                tasks.start_soon(one, 0)
            for number in range(1, 5):
                tasks.start_soon(one, number)
            # In whatever order: trio draws lots.
            wanted = {1, 2, 3, 4} | ({0} if end != "cancelled" else set())
            while not wanted <= set(begun):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert (0 in begun) == (end != "cancelled")


@pytest.mark.anyio
async def test_begins_a_single_request_at_once() -> None:
    """The first request does not yield to the event loop; concurrent ones do."""
    begun: list[str] = []
    now = 1.0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    turns: Any = FairAcceptMiddleware(app, clock=lambda: now)

    async def at_once(path: str) -> None:
        with anyio.CancelScope() as never:
            never.cancel()  # so that any wait is the end
            await turns(http_scope(path), None, None)

    await at_once("/a")
    await at_once("/b")
    assert begun == ["/a"]
    now = 1.5
    await at_once("/c")
    assert begun == ["/a", "/c"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", sorted(PROBES))
async def test_probes_stand_behind_no_request(path: str) -> None:
    """What a proxy asks for itself does not wait for its clients' requests to begin."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    turns: Any = FairAcceptMiddleware(app, clock=lambda: 1.0)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for asked in [*["/generate"] * 100, path]:
                tasks.start_soon(turns, http_scope(asked), None, None)
    assert begun.index(path) < 10


@pytest.mark.anyio
async def test_lets_other_scopes_pass() -> None:
    """A lifespan is no request."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    turns: Any = FairAcceptMiddleware(app)
    await turns({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]
