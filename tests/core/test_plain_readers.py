"""A stream that is read without a block: its wait for an item ends by itself."""

import asyncio
import gc
import importlib.util
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Session, SessionEnded, SessionRegistry, Stream, managed
from lifecycle.testing import assert_quiescent

pytestmark = pytest.mark.anyio
ASYNCIO = [
    "asyncio",
    *(["uvloop"] if importlib.util.find_spec("uvloop") else []),
    *(["eager"] if sys.version_info >= (3, 12) else []),
]
asyncio_only = pytest.mark.parametrize("anyio_backend", ASYNCIO, indirect=True)
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
async def test_leaves_a_scope_what_is_its_own() -> None:
    """Stopped and then cancelled where asyncio makes one error of both."""

    async def source() -> AsyncIterator[int]:
        await asyncio.create_task(anyio.sleep_forever())
        yield 1

    async def reader() -> None:
        with scope:
            async for _item in stream:
                pass

    stream, scope = Stream(source()), anyio.CancelScope()
    task = asyncio.create_task(reader())
    await anyio.wait_all_tasks_blocked()
    stream.stop()
    scope.cancel()
    await task
    assert scope.cancelled_caught
    assert task.cancelling() == 0


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
async def test_ends_though_the_source_takes_back_more_than_its_own() -> None:
    """A source that uncancels its task leaves fewer requests than it began with."""

    async def source() -> AsyncIterator[int]:
        yield 0
        try:
            await anyio.sleep_forever()
        finally:
            task.uncancel()

    async def reader() -> None:
        this = asyncio.current_task()  # an eager one begins before it has a name
        assert this is not None
        this.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await read(stream, ended)

    stream, ended = Stream(source()), list[Any]()
    task = asyncio.create_task(reader())
    await anyio.wait_all_tasks_blocked()
    stream.stop()
    await task
    assert ended[0] == "end"


@asyncio_only
async def test_leaves_no_request_to_cancel_behind() -> None:
    """A later `asyncio.timeout` of the reader finds its count as it was."""

    async def deaf() -> AsyncIterator[int]:
        yield 0
        with suppress(asyncio.CancelledError):
            await anyio.sleep_forever()
        yield 1

    async def deaf_task() -> None:
        with suppress(asyncio.CancelledError):
            await anyio.sleep_forever()

    async def of_a_deaf_task() -> AsyncIterator[int]:
        yield 0
        await asyncio.create_task(deaf_task())
        yield 1

    async def reader(source: AsyncIterator[int], items: int) -> None:
        stream, task, read = Stream(source), asyncio.current_task(), 0
        assert task is not None
        call_soon = asyncio.get_running_loop().call_soon
        async for _item in stream:
            if not read:
                call_soon(call_soon, stream.stop)
            read += 1
            assert task.cancelling() == 0
        assert read == items
        assert task.cancelling() == 0

    await reader(silent(), 1)
    await reader(deaf(), 2)
    await reader(of_a_deaf_task(), 2)


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


@asyncio_only
@pytest.mark.parametrize("kind", ["scope", "timeout"])
async def test_ends_a_source_whose_own_timeout_came_first(kind: str) -> None:
    """In the same turn: the source goes on to wait, and is ended all the same."""
    expire: list[Callable[[], object]] = []

    async def source() -> AsyncIterator[int]:
        if kind == "scope":
            with anyio.CancelScope() as scope:
                expire.append(scope.cancel)
                await anyio.sleep_forever()
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as timeout:
                    expire.append(partial(timeout.reschedule, 0))
                    await anyio.sleep_forever()
        await anyio.sleep_forever()
        yield 1

    stream, ended = Stream(source()), list[Any]()
    loop = asyncio.get_running_loop()

    def act() -> None:
        expire.pop()()
        stop = partial(stream.stop, OSError("stopped"))
        loop.call_soon(stop) if kind == "timeout" else stop()

    await run_and(act, (read, stream, ended))
    assert repr(ended[0]) == "OSError('stopped')"


async def test_ends_the_wait_of_a_task_that_was_cancelled_before() -> None:
    """As in the clean-up of a request, behind a shield: that request is not this one."""
    ended, stream = list[Any](), Stream(silent())

    async def reader() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await read(stream, ended)

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                while stream.items == 0:
                    await checkpoint()
                stream.stop(OSError("stopped"))
    assert repr(ended[0]) == "OSError('stopped')"


@asyncio_only
async def test_keeps_a_cancellation_that_is_still_to_come() -> None:
    """A task that cancels itself and then waits is cancelled, whoever stops the rest."""

    async def source() -> AsyncIterator[int]:
        with suppress(asyncio.CancelledError):
            await asyncio.create_task(anyio.sleep_forever())
            yield 1
        raise asyncio.CancelledError

    async def reader() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        asyncio.get_running_loop().call_soon(stream.stop)
        async for _item in stream:
            pass

    stream = Stream(source())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(reader())


async def test_closes_a_source_that_goes_on_after_a_cancellation() -> None:
    """No generator, which is finished by one."""
    closed, ended = list[str](), list[Any]()

    class Source:
        async def __anext__(self) -> int:
            await anyio.sleep_forever()
            return 1

        async def aclose(self) -> None:
            await checkpoint()
            closed.append("closed")

    stream: Stream[int] = Stream(Source())  # type: ignore[arg-type]
    await run_and(lambda: stream.stop(OSError("stopped")), (read, stream, ended))
    assert repr(ended[0]) == "OSError('stopped')"
    assert closed == ["closed"]


async def test_does_not_let_what_was_cut_seem_whole() -> None:
    """A source may take a cancellation as its end, but that has an error."""

    async def source() -> AsyncIterator[int]:
        yield 0
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - on purpose
            return

    stream, ended = Stream(source()), list[Any]()
    await run_and(lambda: stream.stop(OSError("stopped")), (read, stream, ended))
    assert repr(ended[0]) == "OSError('stopped')"


@asyncio_only
async def test_waits_while_its_task_closes_a_source() -> None:
    """Or the request would come after the wait, and cancel the reader."""
    inner, closed = Stream(silent()), list[str]()

    async def source() -> AsyncIterator[int]:
        try:
            yield 0
        finally:
            with anyio.CancelScope() as scope:
                closing.append(scope)
                async for _item in inner:
                    pass
            closed.append("closed")

    async def reader() -> int:
        stream, task = Stream(source()), asyncio.current_task()
        await anext(stream)
        await stream.aclose()
        await checkpoint()
        assert task is not None
        return task.cancelling()

    closing: list[anyio.CancelScope] = []
    task = asyncio.create_task(reader())
    await anyio.wait_all_tasks_blocked()
    inner.stop()
    await anyio.wait_all_tasks_blocked()
    closing[0].cancel()
    assert await task == 0
    assert closed == ["closed"]


async def test_ends_all_streams_of_a_session_without_block() -> None:
    """One after another, and some at once, as `start_all` opens them."""
    ended = list[Any]()
    async with SessionRegistry() as sessions:
        session = sessions.open("a")
        for _ in range(3):
            first = session.stream(silent())
            await anext(first)
            await first.aclose()
        both = [session.stream(silent()) for _ in range(2)]
        await run_and(session.stop, *[(read, each, ended) for each in both])
    assert [type(each) for each in ended].count(SessionEnded) == 2


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
