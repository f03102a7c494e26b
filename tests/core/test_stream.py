"""Stream: whatever becomes of the loop, the source is closed here, and once."""

import asyncio
import contextlib
import gc
import math
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import SessionRegistry, Stream, StreamTimeout
from lifecycle.testing import Attempt, cancel_everywhere

virtual = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


class Log(list[str]):
    """What happened, in order."""

    async def source(self, count: int = 3) -> AsyncGenerator[int, None]:
        self.append("begun")
        try:
            for i in range(count):
                await checkpoint()
                yield i
        finally:
            self.append("closing")
            with anyio.CancelScope(shield=True):
                await checkpoint()
            self.append("closed")

    def closed(self) -> None:
        self.append("on_close")


def test_closes_its_source_when_cancelled_anywhere() -> None:
    """Cancelled anywhere, the source is closed in the block, on_close runs once."""

    async def scenario(attempt: Attempt) -> None:
        log = Log()
        stream = Stream(log.source(), on_close=[log.closed])

        async def consume() -> None:
            async with stream:
                await checkpoint()
                async for _item in stream:
                    await checkpoint()

        outcome = await attempt(consume())
        assert stream.closed or outcome == "cancelled"
        if "begun" in log:
            # A native cancel may cut the source's own shield, and then nothing helps.
            assert "closing" in log
        if stream.closed:
            assert log.count("on_close") == 1

    points = cancel_everywhere(scenario, double=True)
    assert min(points.values()) >= 8


def test_lets_a_source_finish_closing_under_a_cancelled_scope() -> None:
    """A scope that keeps cancelling does not disturb the source's own clean-up."""

    async def scenario(attempt: Attempt) -> None:
        log = Log()
        stream = Stream(log.source(), on_close=[log.closed])

        async def consume() -> None:
            async with stream:
                async for _item in stream:
                    await checkpoint()

        await attempt(consume())
        assert log.count("begun") == log.count("closed")
        assert log.count("on_close") == 1

    cancel_everywhere(scenario, kinds=("scope",))


@pytest.mark.anyio
class TestStream:
    async def test_gives_what_its_source_gives(self) -> None:
        """All items in order, counted, and the end."""
        log = Log()
        stream = Stream(log.source(), on_close=[log.closed, log.closed])
        assert repr(stream) == "<Stream new, 0 items>"
        async with stream as entered:
            assert entered is stream
            assert [item async for item in stream] == [0, 1, 2]
        assert log == ["begun", "closing", "closed", "on_close", "on_close"]
        assert (stream.items, stream.closed) == (3, True)
        assert repr(stream) == "<Stream closed, 3 items>"

    async def test_closes_what_was_broken_off(self) -> None:
        """Breaking off the loop closes the source before the block is left."""
        log = Log()
        async with Stream(log.source(), on_close=[log.closed]) as stream:
            async for _item in stream:
                break
            assert "closing" not in log
        assert log == ["begun", "closing", "closed", "on_close"]

    async def test_closes_what_was_never_begun(self) -> None:
        """on_close runs although the generator's finally never will."""
        log = Log()
        async with Stream(log.source(), on_close=[log.closed]):
            pass
        assert log == ["on_close"]
        log.clear()
        stream = Stream(log.source(), on_close=[log.closed])
        await stream.aclose()
        await stream.aclose()
        assert log == ["on_close"]
        assert [item async for item in stream] == []

    async def test_passes_on_what_its_source_raises(self) -> None:
        """An error of the source ends the stream and is raised as it was."""
        log = Log()
        error = OSError("engine")

        async def source() -> AsyncGenerator[int, None]:
            yield 1
            raise error

        with pytest.raises(OSError, match="engine") as caught:
            async with Stream(source(), on_close=[log.closed]) as stream:
                async for _item in stream:
                    assert log == []
        assert caught.value is error
        assert log == ["on_close"]

    async def test_raises_what_the_source_raises_while_closing(self) -> None:
        """An error in the source's own clean-up is the user's to see."""
        log = Log()

        async def source() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                raise OSError("clean-up")

        with pytest.raises(OSError, match="clean-up"):
            async with Stream(source(), on_close=[log.closed]) as stream:
                await anext(stream)
        assert log == ["on_close"]

    @pytest.mark.parametrize("read", [False, True])
    async def test_closes_at_once_what_can_be_closed_without_waiting(
        self, read: bool
    ) -> None:
        """A source with close_nowait is closed by that alone, once, also if cancelled."""
        log = Log()

        class Source:
            async def __anext__(self) -> int:
                raise StopAsyncIteration

            def close_nowait(self) -> None:
                log.append("closed")

            async def aclose(self) -> None:
                raise AssertionError

        with anyio.CancelScope() as scope:
            async with Stream(Source(), on_close=[log.closed]) as stream:  # type: ignore[arg-type]
                assert not read or [item async for item in stream] == []
                scope.cancel()
            assert sorted(log) == ["closed", "on_close"]

    async def test_owns_iterators_that_cannot_be_closed(self) -> None:
        """A source without aclose is simply let go, with all it refers to."""

        class Source:
            def __aiter__(self) -> AsyncIterator[int]:
                return self

            async def __anext__(self) -> int:
                await checkpoint()
                return 1

        source = Source()
        ref = weakref.ref(source)
        async with Stream(source) as stream:
            assert await anext(stream) == 1
        del source
        gc.collect()
        assert stream.closed
        assert ref() is None

    async def test_runs_every_on_close(self) -> None:
        """A callback that raises does not keep the others from running (fault-10)."""
        log = Log()

        def fail() -> None:
            raise OSError("callback")

        with pytest.raises(OSError, match="callback"):
            async with Stream(log.source(1), on_close=[fail, log.closed]) as stream:
                await anext(stream)
        assert log[-1] == "on_close"
        assert stream.closed

    async def test_can_be_entered_once(self) -> None:
        """Entering twice is a mistake, and no second owner."""
        async with Stream(Log().source()) as stream:
            with pytest.raises(RuntimeError, match="entered once"):
                async with stream:
                    pass

    async def test_refuses_what_is_no_iterator(self) -> None:
        """A source that cannot be iterated is refused, and nothing else is said."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(TypeError, match="asynchronous iterator"):
                Stream(object())  # type: ignore[arg-type]
            gc.collect()

    async def test_refuses_a_second_reader(self) -> None:
        """Two tasks cannot wait for the same stream at a time."""
        async with Stream(hang()) as stream, anyio.create_task_group() as tasks:
            await anext(stream)
            tasks.start_soon(stream.__anext__)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="another task is waiting"):
                await anext(stream)
            tasks.cancel_scope.cancel()

    async def test_says_when_it_was_lost(self) -> None:
        """A stream that owes a call and is dropped makes it, and says so."""
        log = Log()
        with pytest.warns(ResourceWarning, match="dropped after 0 items"):
            Stream(log.source(), on_close=[log.closed])
        assert log == ["on_close"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Stream(log.source())  # owes nothing
            gc.collect()

    async def test_keeps_no_item(self, no_collector: None) -> None:
        """An item is the consumer's as soon as it was delivered."""

        class Item: ...

        async def source() -> AsyncGenerator[Item, None]:
            for _ in range(2):
                await checkpoint()
                yield Item()

        async with Stream(source()) as stream:
            ref = weakref.ref(await anext(stream))
            assert ref() is None
            await anext(stream)


async def hang(log: Log | None = None) -> AsyncGenerator[int, None]:
    """Give one item and then nothing any more."""
    yield 0
    try:
        await anyio.sleep_forever()
    finally:
        if log is not None:
            log.append(str(anyio.get_current_task().id))
            with anyio.CancelScope(shield=True):
                await checkpoint()
            log.append("closed")


@pytest.mark.anyio
class TestStop:
    async def test_stops_a_waiting_consumer_from_another_task(self) -> None:
        """The block is left at once, and the source closed by the task that read it."""
        log = Log()
        left: list[str] = []

        async def consume(stream: Stream[int]) -> None:
            async with stream:
                async for _item in stream:
                    pass
                left.append("loop")
            left.append(str(anyio.get_current_task().id))

        stream = Stream(hang(log), on_close=[log.closed])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, stream)
            await anyio.wait_all_tasks_blocked()
            assert repr(stream) == "<Stream running, 1 items>"
            stream.stop()
            stream.stop()
        assert log == [*left, "closed", "on_close"]

    async def test_raises_the_error_it_was_stopped_with(self) -> None:
        """The owner gets the error itself, not a cancellation and not a group."""
        error = OSError("engine lost")

        async def consume(stream: Stream[int]) -> None:
            with pytest.raises(OSError, match="engine lost") as caught:
                async with stream:
                    async for _item in stream:
                        pass
            assert caught.value is error

        stream = Stream(hang())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, stream)
            await anyio.wait_all_tasks_blocked()
            stream.stop(error)
        stream.stop(OSError("too late"))
        assert await anext(stream, None) is None

    async def test_raises_on_entry_what_it_was_stopped_with_before(self) -> None:
        """A stream stopped early says so where it is entered, and closes its source."""
        log = Log()
        stream = Stream(log.source(), on_close=[log.closed])
        stream.stop(OSError("early"))
        with pytest.raises(OSError, match="early"):
            async with stream:
                log.append("body")
        assert log == ["on_close"]

    @pytest.mark.parametrize("how", ["stopped", "closed", "exhausted", "left"])
    async def test_is_entered_although_it_is_over(self, how: str) -> None:
        """The body of a stream that is over runs to its end, and gets nothing."""
        log = Log()
        stream = Stream(log.source(), on_close=[log.closed])
        if how == "stopped":
            stream.stop()
        elif how == "closed":
            await stream.aclose()
        elif how == "exhausted":
            assert len([item async for item in stream]) == 3
        else:
            async with stream:
                pass
        async with stream:
            await checkpoint()
            assert await anext(stream, None) is None
            log.append("body")
        assert log[-2:] == ["on_close", "body"]

    async def test_stops_between_two_items(self) -> None:
        """Without a block, the next item is an error, and then the end."""
        log = Log()
        stream = Stream(log.source(), on_close=[log.closed])
        assert await anext(stream) == 0
        stream.stop(OSError("enough"))
        with pytest.raises(OSError, match="enough"):
            await anext(stream)
        assert log == ["begun", "closing", "closed", "on_close"]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def test_is_stopped_while_it_waits(self) -> None:
        """To close a running stream stops its reader instead of raising (fault-12)."""
        log = Log()
        stream = Stream(hang(log), on_close=[log.closed])

        async def consume() -> None:
            async with stream:
                async for _item in stream:
                    pass

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            await anyio.wait_all_tasks_blocked()
            await stream.aclose()
        assert log[1:] == ["closed", "on_close"]

    async def test_closes_once_for_two_calls(self) -> None:
        """While the source is being closed, it is not read or closed again."""
        go_on = anyio.Event()
        log = Log()

        async def source() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await go_on.wait()
                log.append("closed")

        stream = Stream(source(), on_close=[log.closed])
        await anext(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.aclose)
            await anyio.wait_all_tasks_blocked()
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert log == []
            go_on.set()
        assert log == ["closed", "on_close"]

    async def test_leaves_a_reader_behind_that_the_body_forgot(self) -> None:
        """A task that still reads when the block ends is stopped, and closes by itself."""
        log = Log()
        stream = Stream(Log().source(100), on_close=[log.closed])

        async def read() -> None:
            async for _item in stream:
                pass

        async with anyio.create_task_group() as tasks:
            async with stream:
                tasks.start_soon(read)
                await checkpoint()
                await checkpoint()
        assert log == ["on_close"]
        assert stream.closed

    async def test_keeps_the_callers_cancellation(self) -> None:
        """Stopped and cancelled from outside at once, the outer cancellation wins."""
        stream = Stream(hang())
        after = False
        with anyio.CancelScope() as scope:
            async with stream:
                scope.cancel()
                stream.stop(OSError("both"))
                await checkpoint()
            after = True
        assert scope.cancelled_caught
        assert not after
        assert stream.closed

    @pytest.mark.parametrize("where", ["source", "callback", "callback at an item"])
    async def test_is_cancelled_although_its_end_fails(
        self, where: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An error in closing never replaces a cancellation; it is logged by type."""

        async def source() -> AsyncGenerator[int, None]:
            try:
                yield 0
                await anyio.sleep_forever()
            finally:
                if where == "source":
                    raise OSError("words of an error")

        def callback() -> None:
            if where != "source":
                raise LookupError("words of an error")

        after = False
        with anyio.CancelScope() as scope:
            async with Stream(source(), on_close=[callback]) as stream:
                await anext(stream)
                scope.cancel()
                await (anext(stream) if "item" in where else anyio.sleep_forever())
            after = True
        assert scope.cancelled_caught
        assert not after
        assert ("OSError" if where == "source" else "LookupError") in caplog.text
        assert "words" not in caplog.text

    async def test_prefers_what_it_was_stopped_with(self) -> None:
        """Why a stream was stopped says more than what then failed in closing it."""

        async def source() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                raise OSError("clean-up")

        with pytest.raises(StreamTimeout, match="late"):
            async with Stream(source()) as stream:
                await anext(stream)
                stream.stop(StreamTimeout("late", deadline="idle"))
                await checkpoint()


@pytest.mark.anyio
async def test_tells_that_closing_failed_after_an_error_of_the_block(caplog) -> None:
    """An ordinary error is no reason to keep another one back."""

    async def source():
        try:
            yield 1
        finally:
            raise OSError("closing failed")

    with pytest.raises(OSError, match="closing failed") as failed:
        async with Stream(source()) as items:
            await anext(items)
            raise ValueError("of the block")
    assert isinstance(failed.value.__context__, ValueError | GeneratorExit)
    assert caplog.messages == []


@virtual
@pytest.mark.anyio
class TestDeadlines:
    async def open(
        self,
        sessions: SessionRegistry,
        source: Any,
        block: bool = True,
        **limits: float,
    ) -> int:
        count = 0
        with sessions.open("a") as session:
            stream = session.stream(source, **limits)
            async with stream if block else contextlib.nullcontext():
                async for _item in stream:
                    count += 1
        return count

    @staticmethod
    async def paced(*waits: float) -> AsyncGenerator[float, None]:
        for wait in waits:
            await anyio.sleep(wait)
            yield wait

    @pytest.mark.parametrize("block", [True, False], ids=["block", "plain"])
    @pytest.mark.parametrize(
        ("waits", "limits", "broken", "at"),
        [
            ((5, 1), {"first_item": 3}, "first_item", 3),
            ((1, 9), {"idle": 4}, "idle", 5),
            ((1, 1, 9), {"first_item": 2, "idle": 4}, "idle", 6),
            ((1, 9), {"first_item": 100, "idle": 4}, "idle", 5),
            ((2,) * 9, {"idle": 4, "total": 7}, "total", 7),
            ((2,) * 9, {"total": 0}, "total", 0),
            ((1, 99), {"first_item": 50, "idle": 4}, "idle", 5),
            ((9,), {"first_item": 0}, "first_item", 0),
            ((9,), {"first_item": 3, "total": 5}, "first_item", 3),
        ],
    )
    async def test_stops_a_stream_that_is_late(
        self,
        waits: tuple[float, ...],
        limits: dict[str, float],
        broken: str,
        at: float,
        block: bool,
    ) -> None:
        """The first deadline that is broken ends the stream at that very moment."""
        async with SessionRegistry() as sessions:
            began = anyio.current_time()
            with pytest.raises(StreamTimeout, match=f"its {broken} deadline") as caught:
                await self.open(sessions, self.paced(*waits), block, **limits)
            assert anyio.current_time() - began == pytest.approx(at)
            assert caught.value.deadline == broken
            assert sessions.statistics().outcomes["deadline"] == 1

    @pytest.mark.parametrize("block", [True, False], ids=["block", "plain"])
    async def test_leaves_a_stream_in_time_alone(self, block: bool) -> None:
        """A stream that keeps its deadlines is not disturbed, however long it takes."""
        async with SessionRegistry() as sessions:
            limits = {"first_item": 5.5, "idle": 2.5, "total": 100}
            source = self.paced(5, *[2] * 20)
            assert await self.open(sessions, source, block, **limits) == 21
            await anyio.sleep(200)
            assert sessions.statistics().outcomes["completed"] == 1

    async def test_counts_no_time_that_the_consumer_takes(self) -> None:
        """The idle deadline is about the source: a slow consumer breaks nothing."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                source = self.paced(1, 1, 1)
                async with session.stream(source, first_item=3, idle=3) as stream:
                    async for _item in stream:
                        await anyio.sleep(50)
                assert stream.items == 3

    async def test_stops_a_consumer_that_is_over_the_total(self) -> None:
        """The total is about everything: it ends a slow consumer as well."""
        async with SessionRegistry() as sessions:
            with pytest.raises(StreamTimeout), sessions.open("a") as session:
                async with session.stream(self.paced(1, 1), total=9) as stream:
                    async for _item in stream:
                        await anyio.sleep(50)
            assert session.outcome == "deadline"

    async def test_watches_thousands_of_streams(self) -> None:
        """One watchdog serves all: each stream is stopped at its own time."""
        stopped: dict[int, float] = {}

        async def late(session_id: int, sessions: SessionRegistry) -> None:
            with sessions.open(str(session_id)) as session:
                limit = 1 + session_id * 7 % 10
                try:
                    async with session.stream(self.paced(99), first_item=limit) as s:
                        await anext(s)
                except StreamTimeout:
                    stopped[session_id] = anyio.current_time() - began - limit

        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            began = anyio.current_time()
            for i in range(1000):
                tasks.start_soon(late, i, sessions)
        assert len(stopped) == 1000
        assert max(map(abs, stopped.values())) < 1e-6

    async def test_forgets_streams_that_ended(self) -> None:
        """Streams that ended long before their deadline do not pile up until then."""
        refs = []
        async with SessionRegistry() as sessions:
            for i in range(1000):
                with sessions.open(str(i)) as session:
                    async with session.stream(self.paced(), total=10_000) as stream:
                        async for _item in stream:
                            pass
                refs.append(weakref.ref(stream))
                del stream, session
            gc.collect()
            assert not any(ref() for ref in refs)
            # An entry of the watchdog keeps its deadlines, and nothing else.
            names = [type(each).__name__ for each in gc.get_objects()]
            assert 0 < names.count("StreamDeadlines") < 300

    async def test_gives_a_source_its_grace_and_no_more(self) -> None:
        """A source whose clean-up hangs is cut after the grace time."""

        async def stuck() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await anyio.sleep(1000)

        log = Log()
        began = anyio.current_time()
        with anyio.CancelScope() as scope:
            async with Stream(stuck(), on_close=[log.closed], grace=3) as stream:
                await anext(stream)
                scope.cancel()
                await checkpoint()
        assert anyio.current_time() - began == pytest.approx(3)
        assert log == ["on_close"]

    @pytest.mark.parametrize("takes_it_well", [False, True])
    async def test_raises_the_cancellation_after_the_grace(
        self, takes_it_well: bool
    ) -> None:
        """A source that is cut swallows nothing that came from without."""

        class Stuck:
            async def __anext__(self) -> int:
                return 1

            async def aclose(self) -> None:
                kinds = [anyio.get_cancelled_exc_class()] if takes_it_well else []
                with contextlib.suppress(*kinds):
                    await anyio.sleep(1000)

        reached = []
        began = anyio.current_time()
        with anyio.CancelScope() as scope:
            async with Stream(Stuck(), grace=3):  # type: ignore[arg-type]
                scope.cancel()
                await checkpoint()
            reached.append("after the block")
        assert anyio.current_time() - began == pytest.approx(3)
        assert (scope.cancelled_caught, reached) == (True, [])

    async def test_goes_on_after_a_grace_that_was_used_up(self) -> None:
        """Only the source is cut, not the task that closes it; an error is passed on."""

        class Stuck:
            async def __anext__(self) -> int:
                return 1

            async def aclose(self) -> None:
                await anyio.sleep(1000)

        async with Stream(Stuck(), grace=3):  # type: ignore[arg-type]
            pass
        await checkpoint()
        with pytest.raises(LookupError):
            async with Stream(Stuck(), grace=3):  # type: ignore[arg-type]
                raise LookupError

    @pytest.mark.parametrize("limit", [0.0, 1e-30])
    @pytest.mark.parametrize("name", ["first_item", "idle"])
    async def test_goes_on_beside_a_deadline_of_nothing(
        self, name: str, limit: float
    ) -> None:
        """A wait that may take no time breaks its deadline, and stops no other stream."""
        async with SessionRegistry() as sessions:
            with (
                pytest.raises(StreamTimeout, match=name),
                sessions.open("a") as session,
            ):
                source = self.paced(0, 1) if name == "idle" else self.paced(1)
                async with session.stream(source, **{name: limit}) as stream:
                    await anyio.sleep(5)  # no task waits for an item, so none is late
                    async for _item in stream:
                        pass
            assert session.outcome == "deadline"

    @pytest.mark.parametrize("name", ["first_item", "idle", "total"])
    @pytest.mark.parametrize("odd", [math.nan, -1, True])
    async def test_refuses_a_deadline_that_is_none(self, name: str, odd: float) -> None:
        """NaN would confuse the watchdog of all streams; -1 is no word for no limit."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                source = self.paced()
                with pytest.raises((TypeError, ValueError), match=f"^{name} must be "):
                    session.stream(source, **{name: odd})
                await source.aclose()


def test_refuses_a_grace_that_is_no_number() -> None:
    """Found out when the source is to be closed, it would be too late."""
    with pytest.raises(ValueError, match="grace"):
        Stream(Endless(), grace=math.nan)


class Endless:
    """A source that never gives anything; no generator, which would need its loop."""

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        await anyio.sleep_forever()
        raise AssertionError("never")


def test_makes_its_calls_when_its_consumer_is_thrown_away() -> None:
    """A consumer that is closed instead of cancelled still makes them (fault-11)."""
    log = Log()

    async def consume() -> None:
        async with Stream(Endless(), on_close=[log.closed]) as stream:
            await anext(stream)

    async def main() -> None:
        consuming = consume()
        consuming.send(None)
        consuming.close()
        assert log == ["on_close"]

    asyncio.run(main())


@pytest.mark.anyio
async def test_makes_its_calls_in_whatever_thread_it_dies() -> None:
    """A stream that another thread drops makes its calls there, at once."""
    called: list[int] = []
    box = [
        Stream(Log().source(), on_close=[lambda: called.append(threading.get_ident())])
    ]

    def drop() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            box.clear()
        return threading.get_ident()

    thread = await anyio.to_thread.run_sync(drop)
    assert called == [thread]
