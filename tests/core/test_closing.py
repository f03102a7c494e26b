"""What a source does when it is closed is what it does when left alone.

However it waits meanwhile, and whatever cancels its task: the notes that a source takes
are compared with those of the same source that is left alone.
"""

import asyncio
import contextlib
import contextvars
import importlib.util
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from lifecycle import Stream
from lifecycle._closing import sources

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

Notes = list[object]
Closing = Callable[[Notes], Awaitable[None]]

# Of a source's own deadlines: a source is cancelled before them, within some turns.
SOON = 0.005


async def for_ever() -> None:
    await asyncio.Event().wait()


def running_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# --- how a source closes ---


async def sleeps(_notes: Notes) -> None:
    await asyncio.sleep(SOON)


async def yields_often(notes: Notes) -> None:
    before = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < before + SOON:
        await asyncio.sleep(0)
    notes.append("yielded")


async def own_timeout(notes: Notes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SOON):
            await for_ever()
    notes.append("timed out")


async def own_timeout_while_it_yields(notes: Notes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SOON):
            while True:
                await asyncio.sleep(0)
    notes.append("timed out")


async def own_timeout_set_anew(notes: Notes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await asyncio.sleep(0)
            limit.reschedule(asyncio.get_running_loop().time() + SOON)
            await for_ever()
    notes.append("timed out")


async def timeout_in_a_timeout(notes: Notes) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60) as outer:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SOON):
                    await for_ever()
            notes.append("inner")
            outer.reschedule(asyncio.get_running_loop().time() + SOON)
            await for_ever()
    notes.append("outer")


async def timeout_in_an_exit_stack(notes: Notes) -> None:
    with contextlib.suppress(TimeoutError):
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(SOON))
            await for_ever()
    notes.append("timed out")


async def own_wait_for(notes: Notes) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(for_ever(), SOON)
    notes.append("timed out")


async def own_scope(notes: Notes) -> None:
    with anyio.move_on_after(SOON) as scope:
        await anyio.sleep_forever()
    notes.append(scope.cancelled_caught)


async def own_scope_while_it_yields(notes: Notes) -> None:
    with anyio.move_on_after(SOON) as scope:
        while True:
            await asyncio.sleep(0)
    notes.append(scope.cancelled_caught)


async def own_shield(notes: Notes) -> None:
    with anyio.move_on_after(SOON, shield=True) as scope:
        await anyio.sleep_forever()
    notes.append(scope.cancelled_caught)


async def own_task_group(notes: Notes) -> None:
    async def fail() -> None:
        await asyncio.sleep(SOON)
        raise OSError

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await for_ever()
    notes.append("failed")


async def own_task_group_of_anyio(notes: Notes) -> None:
    async def fail() -> None:
        await asyncio.sleep(SOON)
        raise OSError

    with contextlib.suppress(ExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            await for_ever()
    notes.append("failed")


async def own_timer_that_cancels(notes: Notes) -> None:
    task = running_task()
    asyncio.get_running_loop().call_later(SOON, task.cancel)
    try:
        await for_ever()
    except asyncio.CancelledError:
        notes.append(task.uncancel())


async def cancels_itself(notes: Notes) -> None:
    task = running_task()
    await asyncio.sleep(SOON)
    task.cancel()
    try:
        await for_ever()
    except asyncio.CancelledError:
        notes.append(task.uncancel())


async def cancels_what_it_waits_for(notes: Notes) -> None:
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(SOON, future.cancel)
    try:
        await future
    except asyncio.CancelledError:
        notes.append("cancelled")


async def waits_for_a_task(notes: Notes) -> None:
    notes.append(await asyncio.create_task(asyncio.sleep(SOON, "result")))


async def waits_for_a_thread(notes: Notes) -> None:
    # Its own, so that no test waits for the threads of another.
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    thread = threading.Timer(SOON, loop.call_soon_threadsafe, (done.set,))
    thread.start()
    await done.wait()
    thread.join(5)
    notes.append("joined")


async def waits_at_a_queue(notes: Notes) -> None:
    queue = asyncio.Queue[str]()
    asyncio.get_running_loop().call_later(SOON, queue.put_nowait, "item")
    notes.append(await queue.get())


async def gives_a_condition_up(notes: Notes) -> None:
    condition = asyncio.Condition()
    async with condition:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SOON):
                await condition.wait()
        notes.append(condition.locked())


async def closes_another_stream(notes: Notes) -> None:
    async with Stream(source_of(own_timeout, notes, asyncio.Event())) as inner:
        await anext(inner)


async def reads_another_stream(notes: Notes) -> None:
    async def inner() -> AsyncIterator[int]:
        async with asyncio.timeout(SOON):
            while True:
                yield 1
                await asyncio.sleep(0)

    with contextlib.suppress(TimeoutError):
        async with Stream(inner()) as stream:
            async for _ in stream:
                pass
    notes.append("timed out")


async def leaves_nested_generators(notes: Notes) -> None:
    async def inner() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await own_timeout(notes)

    async def outer() -> AsyncIterator[int]:
        async with contextlib.aclosing(inner()) as items:  # type: ignore[type-var]
            async for item in items:
                yield item

    async with contextlib.aclosing(outer()) as items:  # type: ignore[type-var]
        await anext(items)


CLOSINGS: list[Closing] = [
    *(sleeps, yields_often, own_timeout, own_timeout_while_it_yields),
    *(own_timeout_set_anew, timeout_in_a_timeout, timeout_in_an_exit_stack),
    *(own_wait_for, own_scope, own_scope_while_it_yields, own_shield, own_task_group),
    *(own_task_group_of_anyio, own_timer_that_cancels, cancels_itself),
    *(cancels_what_it_waits_for, waits_for_a_task, waits_for_a_thread),
    *(waits_at_a_queue, gives_a_condition_up, closes_another_stream),
    *(reads_another_stream, leaves_nested_generators),
]


async def source_of(
    closing: Closing, notes: Notes, begun: asyncio.Event
) -> AsyncIterator[int]:
    try:
        yield 1
        yield 2
    finally:
        begun.set()
        try:
            await closing(notes)
            notes.append(("closed", running_task().cancelling()))
        finally:
            await asyncio.sleep(0)
            notes.append("end")


def deadline_around(
    notes: Notes, begun: asyncio.Event, at_item: int
) -> AsyncIterator[int]:
    """A source with a deadline around its items, entered at one of them."""

    async def items() -> AsyncIterator[int]:
        for item in range(at_item):
            yield item
        try:
            async with asyncio.timeout(SOON):
                try:
                    yield at_item
                finally:
                    begun.set()
                    await for_ever()
        finally:
            notes.append(("cut", running_task().cancelling()))
            await asyncio.sleep(SOON)
            notes.append("end")

    return items()


# --- who cancels ---


class Reader:
    """Reads a source, leaves it after some items, and is cancelled meanwhile.

    Attributes:
        notes: What the source has noted.
        counted: `Task.cancelling` after the stream was closed.
        asked: How often `cancel` was called before that.
    """

    def __init__(self, make: Callable[[Notes, asyncio.Event], Any], last: int) -> None:
        self.notes: Notes = []
        self.counted: int | None = None
        self.asked = 0
        self.closing = asyncio.Event()
        self.limit = asyncio.timeout(None)
        self.scope = anyio.CancelScope()
        self._source, self._last = make(self.notes, self.closing), last
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with self.scope:
            async with self.limit:
                try:
                    async with Stream(self._source, grace=60) as stream:
                        async for item in stream:
                            if item == self._last:
                                break
                finally:
                    self.counted = running_task().cancelling()

    def cancel(self) -> None:
        """Cancel its task. On a busy machine, the stream may be closed already."""
        self.asked += self.counted is None
        self.task.cancel("enough")

    async def end(self) -> BaseException | None:
        """Wait for the end; return how it was."""
        await asyncio.wait((self.task,), timeout=30)
        assert self.task.done()
        cancelled = self.task.cancelled()
        return asyncio.CancelledError() if cancelled else self.task.exception()


async def cancel_once(reader: Reader) -> None:
    reader.cancel()


async def cancel_thrice(reader: Reader) -> None:
    for _ in range(3):
        reader.cancel()
        await some_turns()


async def cancel_by_a_timer(reader: Reader) -> None:
    asyncio.get_running_loop().call_soon(reader.cancel)
    await some_turns()


async def time_out(reader: Reader) -> None:
    reader.limit.reschedule(asyncio.get_running_loop().time())


async def cancel_the_scope(reader: Reader) -> None:
    reader.scope.cancel()


# How it cancels, how the reader ends, and what is counted beside what it was asked.
CANCELLERS: list[tuple[Callable[[Reader], Awaitable[None]], type | None, int]] = [
    (cancel_once, asyncio.CancelledError, 0),
    (cancel_thrice, asyncio.CancelledError, 0),
    (cancel_by_a_timer, asyncio.CancelledError, 0),
    (time_out, TimeoutError, 1),
    (cancel_the_scope, type(None), 0),
]


async def left_alone(make: Callable[..., Any], last: int = 1) -> Notes:
    """What the source notes where its task is not cancelled."""
    alone = Reader(make, last)
    await alone.end()
    assert alone.counted == 0
    return alone.notes


async def cancelled_while_it_closes(
    make: Callable[..., Any], cancel: Callable[[Reader], Awaitable[None]]
) -> tuple[BaseException | None, Reader]:
    """How the reader ended, and itself.

    A deadline is noticed a turn later, when a busy machine may have closed the stream
    already: then another one is cancelled.
    """
    async with asyncio.timeout(60):
        while True:
            reader = Reader(make, 1)
            await reader.closing.wait()
            await cancel(reader)
            ended = await reader.end()
            if cancel is not time_out or reader.limit.expired():
                return ended, reader


@pytest.mark.parametrize(
    ("cancel", "ends", "counted"), CANCELLERS, ids=lambda a: getattr(a, "__name__", a)
)
@pytest.mark.parametrize("closing", CLOSINGS)
async def test_closes_as_if_left_alone(
    closing: Closing, cancel: Any, ends: type, counted: int
) -> None:
    """Its clean-up neither sees a cancellation by others nor is cut by it."""

    def make(notes: Notes, begun: asyncio.Event) -> AsyncIterator[int]:
        return source_of(closing, notes, begun)

    expected = await left_alone(make)
    ended, reader = await cancelled_while_it_closes(make, cancel)
    assert type(ended) is ends, reader.limit
    assert reader.notes == expected
    assert expected[-1] == "end"
    assert reader.counted == reader.asked + counted


@pytest.mark.parametrize("at_item", [0, 1])
@pytest.mark.parametrize("cancel", [cancel_once, cancel_thrice, time_out])
async def test_keeps_a_deadline_around_the_items(cancel: Any, at_item: int) -> None:
    """A deadline is the source's own, at whichever item it has entered it."""

    def make(notes: Notes, begun: asyncio.Event) -> AsyncIterator[int]:
        return deadline_around(notes, begun, at_item)

    expected = await left_alone(make, at_item)
    assert expected == [("cut", 0), "end"]
    reader = Reader(make, at_item)
    async with asyncio.timeout(30):
        await reader.closing.wait()
        await cancel(reader)
    await reader.end()
    assert reader.notes == expected


async def test_holds_what_a_timer_of_the_loop_body_cancels() -> None:
    """Between two items the source does not run: what is set there is its reader's."""
    notes: Notes = []

    async def read() -> None:
        begun = asyncio.Event()
        async with Stream(source_of(own_timeout, notes, begun)) as stream:
            async for _ in stream:
                loop = asyncio.get_running_loop()
                loop.call_later(SOON / 10, running_task().cancel)
                break

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(read())
    assert notes == ["timed out", ("closed", 0), "end"]


async def test_holds_a_timer_that_is_set_after_an_error_of_the_source() -> None:
    """An error ends the source's part as its items do."""
    notes: Notes = []

    async def fail() -> AsyncIterator[int]:
        yield 1
        raise OSError("its own")

    async def read() -> None:
        begun = asyncio.Event()
        failing = Stream(fail())
        async with Stream(source_of(own_timeout, notes, begun)) as stream:
            await anext(stream)
            await anext(failing)
            with pytest.raises(OSError, match="its own"):
                await anext(failing)
            assert not sources.get()
            loop = asyncio.get_running_loop()
            loop.call_later(SOON / 10, running_task().cancel)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(read())
    assert notes == ["timed out", ("closed", 0), "end"]


@pytest.mark.parametrize(
    ("closing", "noted"), [(own_timeout, "timed out"), (cancels_itself, 0)]
)
async def test_holds_a_cancellation_that_came_before(
    closing: Closing, noted: object
) -> None:
    """The task is cancelled in the step that begins to close; that one alone waits."""
    notes: Notes = []

    async def read() -> None:
        stream = Stream(source_of(closing, notes, asyncio.Event()))
        await anext(stream)
        running_task().cancel("enough")
        await stream.aclose()

    with pytest.raises(asyncio.CancelledError, match="enough"):
        await asyncio.create_task(read())
    assert notes == [noted, ("closed", 0), "end"]


@pytest.mark.parametrize("nested", [False, True])
async def test_loses_nothing_that_arrives_as_its_scope_is_cancelled(
    nested: bool,
) -> None:
    """As in any scope of anyio: what the task waited for is there, and is received."""

    async def receive(notes: Notes) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with anyio.CancelScope() as scope:
            loop.call_soon(future.set_result, "item")
            loop.call_soon(scope.cancel)
            notes.append(await future)
            await for_ever()

    async def receive_in_another(notes: Notes) -> None:
        async with Stream(source_of(receive, notes, asyncio.Event())) as inner:
            await anext(inner)

    closing = receive_in_another if nested else receive
    notes = await left_alone(lambda *args: source_of(closing, *args))
    assert notes[0] == "item"
    assert notes[-1] == "end"


async def test_does_not_hide_a_future_of_another_loop() -> None:
    """The error says what is wrong, as it does elsewhere."""
    other = asyncio.new_event_loop()

    async def wait(notes: Notes) -> None:
        try:
            await other.create_future()
        except RuntimeError as error:
            notes.append(str(error).rpartition("attached")[2])

    try:
        notes = await left_alone(lambda *args: source_of(wait, *args))
    finally:
        other.close()
    assert notes == [" to a different loop", ("closed", 0), "end"]


async def test_does_not_hide_a_task_that_waits_for_itself() -> None:
    """The error says what is wrong, as it does elsewhere."""

    async def wait(notes: Notes) -> None:
        try:
            await running_task()
        except RuntimeError as error:
            notes.append(str(error).partition("await on itself")[1])

    notes = await left_alone(lambda *args: source_of(wait, *args))
    assert notes == ["await on itself", ("closed", 0), "end"]


async def test_can_be_given_up() -> None:
    """A coroutine that is closed while its stream closes leaves no source suspended."""
    ended: Notes = []

    class Endless:
        async def __anext__(self) -> int:
            return 1

        async def aclose(self) -> None:
            try:
                await for_ever()
            finally:
                ended.append(sys.exc_info()[0])

    closing = Stream[int](Endless()).aclose()  # type: ignore[arg-type]
    closing.send(None)
    closing.close()
    assert ended == [GeneratorExit]


@pytest.mark.parametrize("at_once", [False, True])
async def test_gives_up_in_another_context(at_once: bool) -> None:
    """A wait for an item may be closed where the collector runs, and changes nothing."""

    class Silent:
        def __init__(self) -> None:
            if at_once:
                self.close_nowait = object()
            self.items = 0

        async def __anext__(self) -> int:
            self.items += 1
            if self.items > 1:
                await for_ever()
            return self.items

    stream = Stream[int](Silent())  # type: ignore[arg-type]
    assert await anext(stream) == 1
    waiting = anext(stream).__await__()
    context = contextvars.copy_context()
    context.run(waiting.send, None)
    waiting.close()
    assert stream.closed


async def test_marks_nothing_for_good_where_tasks_share_a_context() -> None:
    """Each stream takes its own mark away, whatever others have set meanwhile."""
    shared, loop = contextvars.copy_context(), asyncio.get_running_loop()
    marks: list[int] = []

    async def items(go_on: asyncio.Event) -> AsyncIterator[int]:
        await go_on.wait()
        yield 1

    async def read(go_on: asyncio.Event) -> None:
        async with Stream(items(go_on)) as stream:
            await anext(stream)
            marks.append(len(sources.get()))

    events = asyncio.Event(), asyncio.Event()
    tasks = [loop.create_task(read(each), context=shared) for each in events]
    await some_turns()
    for event, task in zip(events, tasks, strict=True):
        event.set()
        await asyncio.wait((task,), timeout=30)
    # While the first is between its items, the second waits for its own.
    assert marks == [1, 0]
    assert not shared.get(sources)


async def test_waits_for_what_has_no_get_loop() -> None:
    """A task waits for any class that looks like a future, by its `_loop`."""

    class Plain:
        _asyncio_future_blocking = False

        def __init__(self) -> None:
            self._loop = asyncio.get_running_loop()
            self._future = self._loop.create_future()
            self._loop.call_soon(self._future.set_result, "result")

        def add_done_callback(self, call: Any, *, context: Any = None) -> None:
            self._future.add_done_callback(lambda _: call(self), context=context)

        def result(self) -> object:
            return self._future.result()

        def __await__(self) -> Any:
            self._asyncio_future_blocking = True
            yield self
            return self.result()

    async def wait(notes: Notes) -> None:
        notes.append(await Plain())

    notes = await left_alone(lambda *args: source_of(wait, *args))
    assert notes == ["result", ("closed", 0), "end"]


async def test_keeps_its_own_deadline_after_taking_a_cancellation_back() -> None:
    """From CPython 3.13, what is taken back before it was raised never comes."""
    notes: Notes = []

    async def take_back(notes: Notes) -> None:
        running_task().uncancel()
        await own_timeout(notes)

    async def read() -> None:
        stream = Stream(source_of(take_back, notes, asyncio.Event()))
        await anext(stream)
        running_task().cancel()
        await stream.aclose()

    reader = asyncio.create_task(read())
    await asyncio.wait((reader,), timeout=30)
    assert reader.cancelled() == (sys.version_info < (3, 13))
    assert notes == ["timed out", ("closed", 0), "end"]
