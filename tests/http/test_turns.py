"""Requests begin one by one, and addresses take turns."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from asgi_kit import http_scope

from lifecycle_engine.routes.turns import Turns

pytestmark = pytest.mark.anyio


async def begun_by(*hosts: str) -> list[str]:
    """Who begins after whom, where all come in at once."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["client"][0])

    turns: Any = Turns(app)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for host in hosts:
                scope = http_scope(client=(host, 1))
                tasks.start_soon(turns, scope, None, None)
    return begun


async def test_addresses_take_turns() -> None:
    """A hundred of one address are before another's by one or two, not by all (N12)."""
    crowd, others = ["10.0.0.1"] * 100, [f"10.0.1.{each}" for each in range(8)]
    begun = await begun_by(*crowd, *others)
    assert sorted(begun) == sorted([*crowd, *others])
    ahead = [begun[: begun.index(each)].count("10.0.0.1") for each in others]
    # One or two may be in line with the crowd; that is drawn anew in each process.
    assert sorted(ahead)[4] < 30


async def test_whoever_leaves_its_line_holds_up_nobody() -> None:
    """A request that is cancelled in line is none, and its turn is another's."""
    begun: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["number"])

    turns: Any = Turns(app)
    with anyio.fail_after(10):
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


@pytest.mark.parametrize("end", ["waits", "raises", "cancelled"])
async def test_whoever_has_begun_holds_up_nobody(end: str) -> None:
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

    turns: Any = Turns(app)

    async def one(number: int) -> None:
        with contextlib.suppress(ValueError):
            await turns(http_scope(number=number), None, None)

    with anyio.fail_after(10):
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


async def test_lets_other_scopes_pass() -> None:
    """A lifespan is no request."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    turns: Any = Turns(app)
    await turns({"type": "lifespan"}, None, None)
    assert seen == ["lifespan"]
