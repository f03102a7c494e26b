"""A session's block in an async generator: left by another task, or never."""

import contextlib
import gc
import threading
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Session, SessionEnded, SessionRegistry, Stream
from lifecycle.testing import assert_quiescent

pytestmark = pytest.mark.anyio


async def endless(
    sessions: SessionRegistry, ended: list[str]
) -> AsyncGenerator[int, None]:
    """Yield numbers within the block of session "a"."""
    try:
        with sessions.open("a"):
            number = 0
            while True:
                yield number
                number += 1
    finally:
        ended.append("closed")


async def test_is_left_by_another_task() -> None:
    """Another task may close the generator; neither task's scopes are disturbed."""
    ended: list[str] = []
    async with SessionRegistry() as sessions:
        source = endless(sessions, ended)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, source)
        assert await anext(source) == 1
        with anyio.CancelScope():
            assert await anext(source) == 2
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source.aclose)
        assert ended == ["closed"]
        assert sessions.statistics().outcomes["cancelled"] == 1
        assert_quiescent(sessions)


@pytest.mark.parametrize("how", ["block", "stack", "manager"])
async def test_lets_another_task_read_the_rest_of_a_stream(how: str) -> None:
    """Nor is a scope of the stream's block left open in the task that began it."""
    async with SessionRegistry() as sessions:

        async def numbers() -> AsyncIterator[int]:
            for number in range(4):
                await checkpoint()
                yield number

        @contextlib.asynccontextmanager
        async def opened(session: Session) -> AsyncIterator[Stream[int]]:
            async with session.stream(numbers(), total=60.0) as items:
                yield items

        async def body() -> AsyncGenerator[int, None]:
            async with contextlib.AsyncExitStack() as stack:
                session = stack.enter_context(sessions.open("a"))
                items = session.stream(numbers(), total=60.0)
                if how == "manager":
                    items = await stack.enter_async_context(opened(session))
                elif how == "stack":
                    await stack.enter_async_context(items)
                else:
                    stack.push_async_exit(await items.__aenter__())
                async for item in items:
                    yield item

        source = body()
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, source)
        assert [item async for item in source] == [3]
        assert sessions.statistics().outcomes["completed"] == 1


async def test_raises_what_its_stream_raises_in_closing() -> None:
    """As in a task, where the block has a scope to leave first."""

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            raise LookupError("closing")

    async def body() -> AsyncGenerator[int, None]:
        async with Stream(numbers()) as items:
            yield await anext(items)

    source = body()
    await anext(source)
    with pytest.raises(LookupError, match="closing"):
        await anext(source)


async def test_is_closed_with_its_generator() -> None:
    """Cancelled in its wait, read to its end, failed: the outcome is as in a task."""
    async with SessionRegistry() as sessions:

        async def body(name: str) -> AsyncGenerator[int, None]:
            with sessions.open(name):
                yield 1
                if name == "fails":
                    raise OSError(name)
                if name == "waits":
                    await anyio.sleep_forever()

        assert [item async for item in body("ends")] == [1]
        with pytest.raises(OSError, match="fails"):
            _ = [item async for item in body("fails")]
        source = body("waits")
        await anext(source)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(source)
        outcomes = sessions.statistics().outcomes
        assert [outcomes[o] for o in ("completed", "failed", "cancelled")] == [1, 1, 1]


async def test_learns_of_a_stop_with_the_next_item() -> None:
    """`stop` closes the session at once and ends its streams; no wait is cancelled."""

    async def numbers() -> AsyncIterator[int]:
        for number in range(9):
            yield number

    async with SessionRegistry() as sessions:
        owned: list[Session] = []

        async def body(streams: bool) -> AsyncGenerator[int, None]:
            with sessions.open("a") as session:
                owned.append(session)
                source = session.stream(numbers()) if streams else numbers()
                async for number in source:
                    yield number

        for streams, items in ((True, 1), (False, 9)):
            source = body(streams)
            seen = [await anext(source)]
            await sessions.cancel("a")
            assert sessions.live() == []
            with pytest.raises(SessionEnded):
                async for item in source:
                    seen.append(item)  # noqa: PERF401 - what came before it raised
            assert len(seen) == items
        # One that was stopped before its block is not begun.
        session = sessions.open("b")
        session.stop()

        async def late() -> AsyncGenerator[int, None]:
            with session:
                yield 1

        with pytest.raises(SessionEnded):
            await anext(late())


async def test_keeps_a_scope_where_the_block_stays_in_its_task() -> None:
    """Context managers, and coroutines that a generator awaits, are still cancelled."""
    async with SessionRegistry() as sessions:

        @contextlib.asynccontextmanager
        async def opened() -> AsyncIterator[Session]:
            with sessions.open("a") as session:
                yield session

        @contextlib.contextmanager
        def opened_plainly() -> Iterator[Session]:
            with sessions.open("a") as session:
                yield session

        async def waits() -> None:
            with sessions.open("a") as session:
                session.stop()
                await anyio.sleep_forever()

        async def body() -> AsyncGenerator[int, None]:
            await waits()
            yield 1

        with pytest.raises(SessionEnded):
            async with opened() as session:
                session.stop()
                await anyio.sleep_forever()
        with pytest.raises(SessionEnded):
            with opened_plainly() as session:
                session.stop()
                await anyio.sleep_forever()
        with pytest.raises(SessionEnded):
            await anext(body())

        async def through_a_manager() -> AsyncGenerator[int, None]:
            with opened_plainly():
                yield 1

        source = through_a_manager()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, source)
        await source.aclose()
        assert sessions.live() == []


async def test_is_closed_where_its_task_was_cancelled_outside_of_it(
    anyio_backend_name: str,
) -> None:
    """A generator that a cycle keeps does not keep its session live, on asyncio."""
    ended: list[str] = []
    gc.collect()
    gc.disable()
    try:
        async with SessionRegistry() as sessions:

            async def respond() -> None:
                cycle: list[Any] = [endless(sessions, ended)]
                cycle.append(cycle)
                await anext(cycle[0])
                await anyio.sleep_forever()  # the send that a disconnect cuts

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(respond)
                while not sessions.live():
                    await checkpoint()
                tasks.cancel_scope.cancel()
            await checkpoint()
            await checkpoint()
            if anyio_backend_name == "asyncio":
                assert sessions.live() == []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # trio's
                gc.collect()
            with anyio.fail_after(120):
                while not ended:
                    await anyio.sleep(0.001)
            assert sessions.live() == []
    finally:
        gc.enable()


async def test_goes_on_where_its_first_task_was_cancelled(
    anyio_backend_name: str,
) -> None:
    """The generator goes on in another task; its session has closed, on asyncio."""
    ended: list[str] = []
    async with SessionRegistry() as sessions:
        source = endless(sessions, ended)

        async def peek() -> None:
            await anext(source)
            await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peek)
            while not sessions.live():
                await checkpoint()
            tasks.cancel_scope.cancel()
        for _ in range(5):
            await checkpoint()
        live = 0 if anyio_backend_name == "asyncio" else 1
        assert (len(sessions.live()), ended) == (live, [])
        assert await anext(source) == 1
        await source.aclose()
        assert (sessions.live(), ended) == ([], ["closed"])
        assert sessions.statistics().outcomes["cancelled"] == 1


def test_refuses_a_block_in_a_thread_without_event_loop() -> None:
    """Frames without a coroutine among them belong to no generator."""
    raised: list[type] = []

    def enter() -> None:
        try:
            with session:
                pass
        except RuntimeError as error:
            raised.append(type(error))

    async def main() -> None:
        nonlocal session
        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            await anyio.to_thread.run_sync(run_thread)
            session.close()

    def run_thread() -> None:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    session: Session
    anyio.run(main)
    assert raised == [RuntimeError]  # of `asyncio`: there is no current task


def test_finds_a_generator_that_is_driven_by_hand() -> None:
    """No frame but this one lies above the generator's."""

    async def main() -> None:
        async with SessionRegistry() as sessions:
            driven = endless(sessions, [])
            with pytest.raises(StopIteration):
                driven.asend(None).send(None)
            assert sessions.statistics().live == 1
            await driven.aclose()
            assert sessions.statistics().live == 0

    anyio.run(main)
