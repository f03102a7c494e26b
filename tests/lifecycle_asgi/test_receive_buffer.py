"""What an application is given by `receive`, and what is cancelled instead."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from lifecycle_asgi.middleware import DISCONNECT, ReceiveBuffer

pytestmark = pytest.mark.anyio

LAST: Any = {"type": "http.request", "body": b"z", "more_body": False}
FIRST: Any = {"type": "http.request", "body": b"a", "more_body": True}


async def test_takes_no_message_along_where_it_is_cancelled() -> None:
    """A call that had to wait and is cancelled leaves the message to the next one."""
    buffer = ReceiveBuffer(10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(buffer.get)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        buffer.put(LAST)
    assert await buffer.get() is LAST


async def test_lets_several_tasks_wait_at_rest() -> None:
    """They do not wake each other, and each gets a message."""
    buffer, got = ReceiveBuffer(10), []

    async def get() -> None:
        got.append(await buffer.get())

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get)
            tasks.start_soon(get)
            await anyio.wait_all_tasks_blocked()
            buffer.put(FIRST)
            await anyio.wait_all_tasks_blocked()
            assert got == [FIRST]
            assert buffer.has_space
            buffer.put(LAST)
    assert got == [FIRST, LAST]


@pytest.mark.parametrize("read", [[LAST], [FIRST, LAST], [FIRST], []])
async def test_sends_disconnect_in_a_cancelled_scope(read: list[Any]) -> None:
    """That is how Starlette looks for a disconnect; it waits for nothing."""
    buffer, seen = ReceiveBuffer(10), []
    for message in read:
        buffer.put(message)
        assert await buffer.get() is message
    for closed in (False, True):
        with anyio.CancelScope() as scope:
            scope.cancel()
            seen.append(await buffer.get())
        assert scope.cancelled_caught is not closed
        buffer.close()
    assert seen == [{"type": DISCONNECT}]
    assert buffer.listens


async def test_cancels_an_application_that_asks_for_ever() -> None:
    """After a hundred disconnects, `get` is a checkpoint."""
    buffer, asked = ReceiveBuffer(10), 0
    buffer.close()
    with anyio.CancelScope() as scope:
        scope.cancel()
        while True:
            await buffer.get()
            asked += 1
    assert asked == 100


async def test_reads_on_by_request_where_the_server_repeats_itself() -> None:
    """A second end of the body is read no more often than the application asks."""
    buffer = ReceiveBuffer(10)
    buffer.put(LAST)
    await buffer.wait_space()
    buffer.put(LAST)
    with anyio.move_on_after(0) as waiting:
        await buffer.wait_space()
    assert waiting.cancelled_caught
    for _ in range(2):
        assert await buffer.get() is LAST


async def test_yields_at_every_disconnect_message() -> None:
    """An application that asks again and again does not hold up the loop."""
    buffer, ran = ReceiveBuffer(10), anyio.Event()
    buffer.put(LAST)
    await buffer.get()
    buffer.close()
    async with anyio.create_task_group() as tasks:

        async def other() -> None:
            ran.set()

        tasks.start_soon(other)
        for _ in range(10):
            assert await buffer.get() == {"type": DISCONNECT}
        assert ran.is_set()


async def test_reads_no_further_ahead_than_its_bound() -> None:
    """The reader waits for room, which is there as soon as less than that waits."""
    buffer, steps = ReceiveBuffer(2), []
    buffer.put(FIRST)
    await buffer.wait_space()
    buffer.put(FIRST)
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            await buffer.wait_space()
            steps.append("room")

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert steps == []
        await buffer.get()
    assert steps == ["room"]


async def test_raises_what_the_server_raised_behind_what_it_delivered() -> None:
    """The first error is raised again at each call."""
    buffer = ReceiveBuffer(10)
    buffer.put(FIRST)
    buffer.close(OSError("first"))
    buffer.close(OSError("second"))
    assert await buffer.get() is FIRST
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            await buffer.get()
