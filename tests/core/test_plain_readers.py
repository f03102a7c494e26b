"""A stream that is read without a block: its wait for an item ends by itself."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Session, SessionEnded, SessionRegistry, Stream, managed
from lifecycle.testing import assert_quiescent

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
PATIENCE = 120


async def silent(closed: list[str] | None = None) -> AsyncGenerator[int, None]:
    """Give one item and then nothing any more."""
    try:
        yield 0
        await anyio.sleep_forever()
    finally:
        if closed is not None:
            closed.append(str(anyio.get_current_task().id))


async def read(stream: AsyncIterator[Any], ended: list[Any]) -> None:
    """Read to the end, and note what ended it and whether the task can go on."""
    try:
        async for _item in stream:
            pass
    except (OSError, LookupError, SessionEnded) as error:
        ended.append(error)
    else:
        ended.append("end")
    await checkpoint()
    ended.append(str(anyio.get_current_task().id))


async def run_and(act: Callable[[], Any], *readers: Awaitable[None] | Any) -> None:
    """Run *readers* until all wait, and *act*; all must end by that."""
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for reader, *args in readers:
                tasks.start_soon(reader, *args)
            await anyio.wait_all_tasks_blocked()
            act()


@pytest.mark.parametrize("error", [OSError("lost"), None], ids=["error", "end"])
async def test_ends_a_wait_at_once(error: Exception | None) -> None:
    """With the error itself; the reader closes the source, and is not cancelled."""
    closed, ended, calls = list[str](), list[Any](), list[str]()
    stream = Stream(silent(closed), on_close=[lambda: calls.append("closed")])
    await run_and(lambda: stream.stop(error), (read, stream, ended))
    assert ended == [error or "end", *closed]
    assert calls == ["closed"]
    assert stream.closed
    assert await anext(stream, None) is None
    if error is not None:
        assert error.__context__ is None  # which would keep the source's frames


async def test_ends_the_wait_of_whoever_reads() -> None:
    """Each item may be asked for by another task; a scope of neither is disturbed."""
    stream, ended = Stream(silent()), list[Any]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, stream)
    with anyio.CancelScope() as scope:
        await run_and(stream.stop, (read, stream, ended))
    assert ended[0] == "end"
    assert not scope.cancel_called


async def test_ends_a_managed_stream_of_a_session_that_is_cancelled() -> None:
    """`sessions.cancel` reaches a response, and END is sent once."""
    ends, ended = list[object](), list[Any]()

    async def open_() -> str:
        return "stream"

    async with SessionRegistry() as sessions:

        @managed(sessions=sessions, key=lambda: "a")
        async def function(session: Session) -> Stream[int]:
            await session.start(open_, end=ends.append)
            return session.stream(silent(), idle=600.0)

        @managed(sessions=sessions, key=lambda: "b")
        async def generator(session: Session) -> AsyncIterator[int]:
            await session.start(open_, end=ends.append)
            async with session.stream(silent()) as items:
                async for item in items:
                    yield item

        def stop() -> None:
            for session in sessions.live():
                session.stop("shutdown")

        await run_and(stop, *[(read, each(), ended) for each in (function, generator)])
        assert [type(each) for each in ended].count(SessionEnded) == 2
        assert await sessions.drain(1.0) == 0
        assert_quiescent(sessions)
    assert ends == ["stream", "stream"]


async def test_ends_the_stream_of_a_session_without_block() -> None:
    """As an endpoint returns it: opened, not entered."""
    ended = list[Any]()
    async with SessionRegistry() as sessions:
        session = sessions.open("a")
        await run_and(session.stop, (read, session.stream(silent()), ended))
    assert isinstance(ended[0], SessionEnded)


async def test_ends_a_source_that_stops_its_own_stream() -> None:
    """It is the one that runs: its next wait ends."""

    async def source() -> AsyncIterator[int]:
        stream.stop(OSError("by itself"))
        await anyio.sleep_forever()
        yield 1

    stream: Stream[int] = Stream(source())
    with anyio.fail_after(PATIENCE), pytest.raises(OSError, match="by itself"):
        await anext(stream)
    await checkpoint()


async def test_ends_a_source_that_only_yields_to_the_loop() -> None:
    """It waits for nothing, and can be ended all the same."""

    async def source() -> AsyncIterator[int]:
        while True:
            await checkpoint()
        yield 1

    stream: Stream[int] = Stream(source())
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, stream, ended := list[Any]())
            for _ in range(3):
                await checkpoint()
            stream.stop()
    assert ended[0] == "end"


@pytest.mark.parametrize("first", ["stop", "cancel"])
async def test_keeps_a_cancellation_from_outside(first: str) -> None:
    """Stopped and cancelled in one turn of the loop, the reader is cancelled."""
    stream, scope, ended = Stream(silent()), anyio.CancelScope(), list[Any]()

    async def cancelled() -> None:
        with scope:
            async for _item in stream:
                pass
            await anyio.sleep_forever()
        ended.append(scope.cancelled_caught)

    def act() -> None:
        both = [lambda: stream.stop(OSError("late")), scope.cancel]
        for each in both if first == "stop" else reversed(both):
            each()

    if first == "stop":
        # A scope comes again, where a stream's error has come first.
        with suppress(ExceptionGroup):
            await run_and(act, (cancelled,))
    else:
        await run_and(act, (cancelled,))
        assert ended == [True]


@asyncio_only
@pytest.mark.parametrize("order", ["stop", "cancel", "cleanup"])
async def test_keeps_a_native_cancellation_from_outside(order: str) -> None:
    """`Task.cancel` is raised, also where it comes first, or while the source closes."""
    go_on, closed = asyncio.Event(), list[str]()

    async def source() -> AsyncIterator[int]:
        yield 0
        try:
            await anyio.sleep_forever()
        finally:
            await go_on.wait()
            closed.append("closed")

    stream = Stream(source())
    reader = asyncio.create_task(read(stream, ended := []))
    await anyio.wait_all_tasks_blocked()
    if order == "stop":
        stream.stop()
        reader.cancel()
        go_on.set()
    else:
        reader.cancel()
        if order == "cleanup":
            await anyio.wait_all_tasks_blocked()
        stream.stop()
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (ended, closed) == ([], ["closed"])


@asyncio_only
async def test_leaves_no_request_to_cancel_behind() -> None:
    """A later `asyncio.timeout` of the reader finds its count as it was."""

    async def deaf() -> AsyncIterator[int]:
        yield 0
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            pass
        yield 1

    async def reader(source: AsyncGenerator[int, None], items: int) -> None:
        stream, task = Stream(source), asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0, stream.stop)
        assert len([item async for item in stream]) == items
        assert task.cancelling() == 0

    await reader(silent(), 1)
    await reader(deaf(), 2)  # type: ignore[arg-type]


@asyncio_only
async def test_leaves_an_item_that_has_come_alone() -> None:
    """What arrived in the same turn is not cut; the stream ends after it."""
    arrives: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def source() -> AsyncIterator[int]:
        yield await arrives
        await anyio.sleep_forever()

    stream = Stream(source())
    reader = asyncio.create_task(anext(stream))
    await anyio.wait_all_tasks_blocked()
    arrives.set_result(5)
    stream.stop()
    assert await reader == 5
    assert await anext(stream, None) is None


async def test_keeps_errors_of_a_source_that_is_ended() -> None:
    """What the source raises in its cleanup is the source's."""

    async def source() -> AsyncIterator[int]:
        yield 0
        try:
            await anyio.sleep_forever()
        finally:
            raise LookupError("mine")

    stream, ended = Stream(source()), list[Any]()
    await run_and(stream.stop, (read, stream, ended))
    assert repr(ended[0]) == "LookupError('mine')"


async def test_leaves_nothing_of_a_reader_that_is_dropped(no_collector: None) -> None:
    """No timer keeps the stream, its source or its items until the deadline."""

    class Item:
        pass

    async def source(item: Item) -> AsyncIterator[Item]:
        yield item

    async with SessionRegistry() as sessions:
        session = sessions.open("a")
        stream = session.stream(source(Item()), idle=600.0, total=600.0)
        kept = [weakref.ref(await anext(stream)), weakref.ref(stream)]
        await stream.aclose()
        del stream
        assert [each() for each in kept] == [None, None]
        session.close()
    gc.collect()
