"""A stream closes its source whole, also where the task is cancelled natively."""

import __future__

import asyncio
import contextlib
import contextvars
import importlib.util
import logging
import pkgutil
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from lifecycle import Gate, SessionRegistry, Stream, scrub
from lifecycle.events import LeaseGranted
from lifecycle.testing import RecordingObserver

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        "anyio_backend",
        [
            "asyncio",
            *(["uvloop"] if importlib.util.find_spec("uvloop") else []),
            *(["eager"] if sys.version_info >= (3, 12) else []),
        ],
        indirect=True,
    ),
]

Closing = Callable[["Source"], Awaitable[None]]


class Source:
    """A source that closes as it is asked to, and notes how far it came."""

    def __init__(self, closing: Closing) -> None:
        self.closing = asyncio.Event()
        self.go_on = asyncio.Event()
        self.noted: list[str] = []
        self.task: asyncio.Task[Any] | None = None
        self._closing = closing

    async def items(self) -> AsyncIterator[int]:
        self.task = asyncio.current_task()
        try:
            yield 1
        finally:
            self.closing.set()
            await self._closing(self)
            self.noted.append("closed")

    async def read(self, grace: float = 60.0) -> None:
        """Read one item and leave."""
        async with Stream(self.items(), grace=grace) as stream:
            async for _ in stream:
                break
        self.noted.append("went on")


async def wait(source: Source) -> None:
    await source.go_on.wait()


async def yield_often(source: Source) -> None:
    while not source.go_on.is_set():
        await asyncio.sleep(0)


async def wait_for_a_task(source: Source) -> None:
    await asyncio.create_task(source.go_on.wait())


async def close_another_stream(source: Source) -> None:
    other = Source(wait)
    other.go_on = source.go_on
    async with Stream(other.items()) as stream:
        await anext(stream)
    source.noted += other.noted


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "closing", [wait, yield_often, wait_for_a_task, close_another_stream]
)
@pytest.mark.parametrize("cancels", [1, 3])
async def test_closes_whole_when_its_task_is_cancelled(
    closing: Closing, cancels: int
) -> None:
    """``Task.cancel()`` is raised once the source has closed, however often it came."""
    source = Source(closing)
    reader = asyncio.create_task(source.read())
    async with asyncio.timeout(5):
        await source.closing.wait()
        for _ in range(cancels):
            await some_turns()
            reader.cancel("enough")
        await some_turns()
        assert not reader.done()
        source.go_on.set()
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await reader
    assert source.noted in (["closed"], ["closed", "closed"])
    assert source.task is reader


async def test_closes_whole_under_a_timeout() -> None:
    """``asyncio.timeout`` goes off, and raises once the source has closed."""
    source = Source(wait)

    async def let_go_on() -> None:
        await source.closing.wait()
        while not limit.expired():
            await asyncio.sleep(0)
        await some_turns()
        source.go_on.set()

    helper = asyncio.create_task(let_go_on())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            async with Stream(source.items()) as stream:
                await anext(stream)
                limit.reschedule(asyncio.get_running_loop().time())
    await helper
    assert source.noted == ["closed"]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def limit() -> AsyncIterator[None]:
    """A deadline that is not a local of the generator which has it."""
    async with asyncio.timeout(0.01):
        yield


@contextlib.asynccontextmanager
async def stacked() -> AsyncIterator[None]:
    """A deadline in an exit stack."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(0.01))
        yield


@pytest.mark.parametrize("block", [limit, stacked])
async def test_lets_a_deadline_of_the_source_cut_its_closing(block: Any) -> None:
    """A timeout within the clean-up raises there, and cancels no other code."""
    raised: list[BaseException] = []

    async def closing(source: Source) -> None:
        try:
            async with block():
                await source.go_on.wait()
        except TimeoutError as error:
            raised.append(error)

    source = Source(closing)
    async with asyncio.timeout(60):
        await source.read()
    assert source.noted == ["closed", "went on"]
    assert len(raised) == 1
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_closes_whole_when_a_scrubbed_generator_is_cancelled() -> None:
    """The boxes of a scrubbed generator do not stand in between."""
    source = Source(wait)

    @scrub("picture")
    async def answer(picture: Any) -> AsyncIterator[int]:
        async for item in source.items():
            yield item

    generator = answer(b"x")

    async def read() -> None:
        async with Stream(generator) as stream:
            await anext(stream)
            await source.read()

    reader = asyncio.create_task(read())
    async with asyncio.timeout(5):
        await source.closing.wait()
        reader.cancel()
        await some_turns()
        assert source.noted == []
        source.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
    assert source.noted[0] == "closed"


@pytest.mark.parametrize("native", [False, True])
async def test_ends_with_its_grace(native: bool) -> None:
    """A source that takes longer is cut, and a native cancellation raised then."""
    source = Source(wait)
    async with asyncio.timeout(5):
        if native:
            reader = asyncio.create_task(source.read(grace=0.02))
            await source.closing.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert source.noted == []
        else:
            await source.read(grace=0.0)
            assert source.noted == ["went on"]


async def timeout_of_asyncio(_source: Source) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


async def timeout_of_asyncio_at_a_task(_source: Source) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.001)


async def timeout_that_cancels_a_task(_source: Source) -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await task
    assert task.cancelled()


async def timeout_of_anyio(_source: Source) -> None:
    with anyio.move_on_after(0.001) as scope:
        await asyncio.Event().wait()
    assert scope.cancelled_caught


async def child_that_fails(_source: Source) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.Event().wait()


async def child_of_anyio_that_fails(_source: Source) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError

    with pytest.raises(ExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            await asyncio.Event().wait()


async def timeout_while_it_yields(_source: Source) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            while True:
                await asyncio.sleep(0)


async def timeout_within_a_generator(source: Source) -> None:
    async def inner() -> AsyncIterator[int]:
        myself = generator
        async with asyncio.timeout(0):
            assert myself
            await asyncio.Event().wait()
        yield 1

    with pytest.raises(TimeoutError):
        generator = inner()
        await anext(generator)


@pytest.mark.parametrize(
    "closing",
    [
        timeout_of_asyncio,
        timeout_of_asyncio_at_a_task,
        timeout_that_cancels_a_task,
        timeout_of_anyio,
        child_that_fails,
        child_of_anyio_that_fails,
        timeout_while_it_yields,
        timeout_within_a_generator,
    ],
)
async def test_keeps_what_the_source_itself_cancels(closing: Closing) -> None:
    """Timeouts and groups in the source's own clean-up work as they always do."""
    source = Source(closing)
    async with asyncio.timeout(5):
        await source.read()
    assert source.noted == ["closed", "went on"]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_closes_in_its_own_task_and_context() -> None:
    """What a source has entered it can leave: a timeout, and a context variable."""
    var = contextvars.ContextVar("var", default=0)

    async def items() -> AsyncIterator[int]:
        token = var.set(1)
        async with asyncio.timeout(60):
            try:
                yield 1
            finally:
                await asyncio.sleep(0)
                var.reset(token)

    async with Stream(items()) as stream:
        await anext(stream)
        assert var.get() == 1
    assert var.get() == 0


async def test_is_cancelled_although_closing_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No error replaces a native cancellation; its type is logged."""

    async def fail(source: Source) -> None:
        await source.go_on.wait()
        raise OSError("a secret")

    source = Source(fail)
    reader = asyncio.create_task(source.read())
    async with asyncio.timeout(5):
        await source.closing.wait()
        reader.cancel()
        await some_turns()
        source.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["closing a cancelled stream failed: OSError"]
    assert caplog.records[0].levelno == logging.WARNING


async def test_raises_what_closing_raises() -> None:
    """Without a cancellation, an error of the source is its caller's."""

    async def fail(_source: Source) -> None:
        await asyncio.sleep(0)
        raise OSError("its own")

    with pytest.raises(OSError, match="its own"):
        await Source(fail).read()


async def test_keeps_nothing_of_the_source(no_collector: None) -> None:
    """The cancellation that was raised late, and is kept, refers to nothing of it."""
    go_on, dead = asyncio.Event(), list[bool]()

    class Value:
        def __del__(self) -> None:
            dead.append(True)

    async def produce() -> Value:
        await go_on.wait()
        return Value()

    class Endless:
        async def __anext__(self) -> int:
            return 1

        async def aclose(self) -> None:
            value = Value()
            await asyncio.create_task(produce())
            assert value

    async def close() -> None:
        await Stream[int](Endless()).aclose()  # type: ignore[arg-type]

    reader = asyncio.create_task(close())
    await some_turns()
    reader.cancel()
    await some_turns()
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as kept:
        await reader
    assert dead == [True, True]
    assert kept.value.__traceback__ is not None


class Part:
    """What a task has in hand, and what a source receives while it closes."""


async def receives(parts: list[weakref.ref[Part]]) -> None:
    part = await asyncio.create_task(part_of(parts))
    del part


async def part_of(parts: list[weakref.ref[Part]]) -> Part:
    part = Part()
    parts.append(weakref.ref(part))
    await asyncio.sleep(0.005)
    return part


async def receives_and_fails(parts: list[weakref.ref[Part]]) -> None:
    await receives(parts)
    raise OSError("its own")


async def waits_for_a_task_that_fails(parts: list[weakref.ref[Part]]) -> None:
    await asyncio.create_task(receives_and_fails(parts))


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize(
    "closing", [receives, receives_and_fails, waits_for_a_task_that_fails]
)
async def test_is_freed_with_its_task(
    closing: Callable[[list[weakref.ref[Part]]], Awaitable[None]],
    cancelled: bool,
    no_collector: None,
) -> None:
    """Neither an error nor a late cancellation keeps the task that keeps it."""
    parts: list[weakref.ref[Part]] = []
    begun = asyncio.Event()

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            begun.set()
            await closing(parts)

    async def read() -> None:
        part = Part()
        parts.append(weakref.ref(part))
        async with Stream(items()) as stream:
            await anext(stream)

    reader = asyncio.create_task(read())
    await begun.wait()
    if cancelled:
        reader.cancel()
    await asyncio.wait((reader,), timeout=30)
    assert cancelled or closing is receives or type(reader.exception()) is OSError
    assert reader.cancelled() == cancelled
    del reader
    await some_turns()
    assert [part() for part in parts] == [None, None]


async def test_closes_what_returns_any_awaitable() -> None:
    """A source may close by a future, too."""
    closed = asyncio.get_running_loop().create_future()

    class Endless:
        async def __anext__(self) -> int:
            return 1

        def aclose(self) -> asyncio.Future[None]:
            asyncio.get_running_loop().call_soon(closed.set_result, None)
            return closed

    await Stream[int](Endless()).aclose()  # type: ignore[arg-type]
    assert closed.done()


async def test_passes_on_a_cancellation_of_the_source() -> None:
    """What the source awaits may be cancelled: that is its error, and raised."""

    async def wait_for_a_cancelled_task(_source: Source) -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    source = Source(wait_for_a_cancelled_task)
    with pytest.raises(asyncio.CancelledError):
        await source.read()
    assert source.noted == []


async def test_closes_a_source_of_a_session_whole() -> None:
    """The same holds for a session's stream, and END follows."""
    source, ended = Source(wait), list[object]()

    async def open_() -> AsyncIterator[int]:
        return source.items()

    async def answer() -> None:
        with sessions.open("a") as session:
            opened = await session.start(open_, end=ended.append)
            async with session.stream(opened) as stream:
                await anext(stream)

    async with SessionRegistry() as sessions, asyncio.timeout(5):
        request = asyncio.create_task(answer())
        await source.closing.wait()
        request.cancel()
        await some_turns()
        assert (source.noted, ended) == ([], [])
        source.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await request
        while sessions.statistics().closing:
            await asyncio.sleep(0)
        assert sessions.statistics().outcomes["cancelled"] == 1
    assert source.noted == ["closed"]
    assert len(ended) == 1


async def test_tells_how_long_one_waited_that_is_cancelled_as_it_is_granted() -> None:
    """From its own beginning, like any other; and what it got goes to the next one."""
    now, seen = [0.0], RecordingObserver()
    gate = Gate(slots=1, observer=seen, clock=lambda: now[0])
    first = gate.try_admit()
    now[0] = 3.0
    asking = asyncio.create_task(gate.admit())
    await anyio.wait_all_tasks_blocked()
    now[0] = 10.0
    first.release()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    waited = [it.waited_s for it in seen.events if isinstance(it, LeaseGranted)]
    assert waited == [0.0, 7.0]
    assert gate.statistics().slots_in_use == 0


async def test_tells_coroutines_of_any_module_from_async_generators() -> None:
    """Their code has other flags where annotations are not evaluated, for example."""
    text = """
async def coroutine():
    return block()
async def generator():
    yield block()
"""
    code = compile(text, "module", "exec", __future__.annotations.compiler_flag)
    found = pkgutil.resolve_name("lifecycle._eventloop:in_async_generator")

    def block() -> bool:
        return bool(found())

    names: dict[str, Any] = {"block": block}
    exec(code, names)
    for begun, expected in (
        (names["coroutine"](), False),
        (names["generator"]().asend(None), True),
    ):
        with pytest.raises(StopIteration) as ended:
            begun.send(None)
        assert ended.value.value is expected
