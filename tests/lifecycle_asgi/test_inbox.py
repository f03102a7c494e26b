"""What an application is given by `receive`, and what is cancelled instead."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from lifecycle_asgi._inbox import DISCONNECT, Inbox

pytestmark = pytest.mark.anyio

LAST: Any = {"type": "http.request", "body": b"z", "more_body": False}
FIRST: Any = {"type": "http.request", "body": b"a", "more_body": True}


async def test_takes_no_message_along_where_it_is_cancelled() -> None:
    """Whoever asks next is given it."""
    inbox = Inbox(10)
    inbox.put(LAST)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await inbox.get()
    assert scope.cancelled_caught
    assert await inbox.get() is LAST


@pytest.mark.parametrize(
    ("read", "waits", "hears"),
    [
        ([LAST], True, True),
        ([LAST], False, False),
        ([FIRST, LAST], True, True),
        ([FIRST], True, False),
        ([], True, False),
    ],
)
async def test_tells_of_the_leaving_who_waits_for_nothing_else(
    read: list[Any], waits: bool, hears: bool
) -> None:
    """Behind the whole body it is heard; whoever waits for more of it is cancelled."""
    inbox, heard = Inbox(10), []

    def leave() -> None:
        inbox.close()
        scope.cancel()

    with anyio.fail_after(10), anyio.CancelScope() as scope:
        for message in read:
            inbox.put(message)
            assert await inbox.get() is message
        async with anyio.create_task_group() as tasks:
            if waits:

                async def last() -> None:
                    await anyio.wait_all_tasks_blocked()
                    leave()

                tasks.start_soon(last)
            else:
                leave()
            heard.append(await inbox.get())
    assert heard == ([{"type": DISCONNECT}] if hears else [])


async def test_lets_others_run_however_often_it_tells_of_the_leaving() -> None:
    """An application that asks again and again does not hold up the loop."""
    inbox, ran = Inbox(10), anyio.Event()
    inbox.put(LAST)
    await inbox.get()
    inbox.close()
    async with anyio.create_task_group() as tasks:

        async def other() -> None:
            ran.set()

        tasks.start_soon(other)
        for _ in range(10):
            assert await inbox.get() == {"type": DISCONNECT}
        assert ran.is_set()


async def test_reads_no_further_ahead_than_its_bound() -> None:
    """The reader waits for room, which is there as soon as less than that waits."""
    inbox, steps = Inbox(2), []
    inbox.put(FIRST)
    await inbox.room()
    inbox.put(FIRST)
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            await inbox.room()
            steps.append("room")

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert steps == []
        await inbox.get()
    assert steps == ["room"]


async def test_raises_what_the_server_raised_behind_what_it_delivered() -> None:
    """The first error is told, again and again."""
    inbox = Inbox(10)
    inbox.put(FIRST)
    inbox.close(OSError("first"))
    inbox.close(OSError("second"))
    assert await inbox.get() is FIRST
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            await inbox.get()
