"""in_thread: blocking generators as asynchronous ones, closed where they run."""

import asyncio
import contextvars
import gc
import inspect
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lifecycle import (
    Gate,
    Payload,
    SessionRegistry,
    Stream,
    consumer_gone,
    in_thread,
    managed,
    scrub,
)
from lifecycle.testing import assert_quiescent

PATIENCE = 120


class Picture:
    """Something heavy that a weak reference can watch."""


class Blocking:
    """Blocking generators that say where they ran, and a door that holds one up."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.door = threading.Event()
        self.closed = threading.Event()
        self.threads: list[int] = []
        self.gone: list[bool] = []

    def numbers(self, picture: Any = None, *, stop: int = 3) -> Iterator[int]:
        """Yield numbers, and note each thread."""
        try:
            for number in range(stop):
                self.threads.append(threading.get_ident())
                yield number
        finally:
            self.threads.append(threading.get_ident())
            self.closed.set()

    def held_up(self, picture: Any = None) -> Iterator[int]:
        """Wait for the door within the first item."""
        try:
            self.began.set()
            self.gone.append(consumer_gone())
            assert self.door.wait(PATIENCE)
            self.gone.append(consumer_gone())
            yield 0
        finally:
            self.closed.set()


async def until(ready: Callable[[], bool]) -> None:
    """Let the loop run until *ready*."""
    with anyio.fail_after(PATIENCE):
        while not ready():
            await anyio.sleep(0.001)


def threads() -> list[str]:
    """Names of the threads of iterators that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("lifecycle ")]


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    """Generators whose door is open at the end, and that leave no thread."""
    made = Blocking()
    yield made
    made.door.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lifecycle "):
            thread.join(PATIENCE)
    assert threads() == []


@pytest.mark.anyio
class TestInThread:
    async def test_runs_in_one_thread_that_is_not_the_loop(
        self, blocking: Blocking
    ) -> None:
        """All items and the end come from one thread, and it ends with them."""
        items = [item async for item in in_thread(blocking.numbers)()]
        assert items == [0, 1, 2]
        assert len(set(blocking.threads)) == 1
        assert threading.get_ident() not in blocking.threads
        assert len(blocking.threads) == 4

    async def test_closes_in_the_thread(self, blocking: Blocking) -> None:
        """Closed early, the generator's clean-up has run there when `aclose` returns."""
        source = in_thread(blocking.numbers)()
        assert await anext(source) == 0
        await source.aclose()
        assert blocking.closed.is_set()
        assert len(set(blocking.threads)) == 1
        assert threading.get_ident() not in blocking.threads
        await source.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(source)
        assert "closed" in repr(source)

    async def test_closes_in_the_thread_what_is_dropped(
        self, blocking: Blocking
    ) -> None:
        """A consumer that forgets to close leaves no generator behind."""
        source = in_thread(blocking.numbers)()
        await anext(source)
        assert "open" in repr(source)
        del source
        await until(blocking.closed.is_set)
        assert threading.get_ident() not in blocking.threads

    @pytest.mark.usefixtures("no_collector")
    async def test_closes_what_its_task_left_in_a_cycle(
        self, blocking: Blocking, anyio_backend_name: str
    ) -> None:
        """Cancelled outside of an item, on asyncio a task leaves no generator behind."""
        kept: list[Any] = []

        async def respond() -> None:
            kept.append(in_thread(blocking.numbers)())
            await anext(kept[0])
            kept.append(kept)
            await anyio.sleep_forever()  # the send that a disconnect cuts

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(respond)
            await until(lambda: len(kept) == 2)
            tasks.cancel_scope.cancel()
        if anyio_backend_name == "trio":  # where such a cycle is cut by trio itself
            await kept[0].aclose()
        await until(blocking.closed.is_set)
        kept.clear()

    async def test_begins_nothing_that_is_never_iterated(
        self, blocking: Blocking
    ) -> None:
        """Closed or dropped before its first item, the arguments are gone."""
        for close in (True, False):
            picture = Picture()
            ref = weakref.ref(picture)
            source = in_thread(blocking.numbers)(picture)
            del picture
            if close:
                await source.aclose()
            del source
            assert ref() is None
        assert blocking.threads == []

    async def test_waits_for_no_thread_when_cancelled(self, blocking: Blocking) -> None:
        """A thread that works goes on, closes its generator, and gives its token back."""
        limiter = anyio.CapacityLimiter(1)
        source = in_thread(blocking.held_up, limiter=limiter)()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def leave() -> None:
                    await until(blocking.began.is_set)
                    scope.cancel()

                tasks.start_soon(leave)
                await anext(source)
        assert scope.cancelled_caught
        assert limiter.borrowed_tokens == 1
        assert not blocking.closed.is_set()
        with pytest.raises(StopAsyncIteration):
            await anext(source)
        blocking.door.set()
        await source.aclose()
        assert blocking.closed.is_set()
        await until(lambda: limiter.borrowed_tokens == 0)
        assert blocking.gone == [False, True]

    async def test_lets_closing_be_cancelled(self, blocking: Blocking) -> None:
        """`aclose` of a thread that works waits no longer than its caller does."""
        source = in_thread(blocking.held_up)()

        async def ask() -> None:
            with pytest.raises(StopAsyncIteration):  # and no item that never was
                await anext(source)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(blocking.began.is_set)
            with pytest.raises(RuntimeError, match="another task is waiting"):
                await anext(source)
            with anyio.move_on_after(0.001) as scope:
                await source.aclose()
            assert scope.cancelled_caught
            calls: list[bool] = []
            source.when_closed(lambda: calls.append(blocking.closed.is_set()))
            blocking.door.set()
        await until(lambda: calls == [True])
        source.when_closed(calls.clear)
        assert calls == []

    async def test_ends_where_it_is_closed_while_it_waits_for_a_token(
        self, blocking: Blocking
    ) -> None:
        """The function is not called any more, and the token goes back."""
        limiter = anyio.CapacityLimiter(1)
        source = in_thread(limiter=limiter)(blocking.numbers)()

        async def ask() -> None:
            with pytest.raises(StopAsyncIteration):
                await anext(source)

        async with limiter, anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await source.aclose()
            limiter.release()
            await anyio.wait_all_tasks_blocked()
            await limiter.acquire()
        assert blocking.threads == []

    async def test_goes_on_in_another_task_when_the_first_is_cancelled(
        self, blocking: Blocking
    ) -> None:
        """An iterator that was passed on belongs to the task that asked last."""
        source = in_thread(blocking.numbers)()
        passed_on = anyio.Event()

        async def first() -> None:
            assert await anext(source) == 0
            passed_on.set()
            await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await passed_on.wait()
            assert await anext(source) == 1
            tasks.cancel_scope.cancel()
        assert [item async for item in source] == [2]

    async def test_logs_an_error_that_comes_after_its_consumer_has_gone(
        self, blocking: Blocking, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What fails on the way to the next item is not lost."""

        def broken() -> Iterator[int]:
            blocking.began.set()
            assert blocking.door.wait(PATIENCE)
            raise RuntimeError("CUDA error")
            yield 0

        source = in_thread(broken)()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, source)
                await until(blocking.began.is_set)
                scope.cancel()
        blocking.door.set()
        await until(lambda: bool(caplog.records))
        assert "after its consumer had gone: RuntimeError" in caplog.text

    async def test_waits_for_a_token(self, blocking: Blocking) -> None:
        """A limiter bounds how many threads work, not how many wait for consumers."""
        limiter = anyio.CapacityLimiter(1)
        numbers = in_thread(limiter=limiter)(blocking.numbers)
        first, second = numbers(), numbers()
        for expected in range(3):
            assert await anext(first) == expected
            assert await anext(second) == expected
            assert limiter.borrowed_tokens == 0
        await first.aclose()
        await second.aclose()
        with anyio.CancelScope() as scope:
            async with limiter:
                third = numbers()
                scope.cancel()
                await anext(third)
        assert limiter.borrowed_tokens == 0
        late = numbers()
        async with anyio.create_task_group() as tasks:
            async with limiter:
                tasks.start_soon(anext, late)
                await anyio.sleep(0.001)
                assert limiter.statistics().tasks_waiting == 1
        await late.aclose()
        assert limiter.borrowed_tokens == 0

    async def test_gives_its_token_back_where_no_thread_can_start(
        self, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process without threads to spare loses no token."""

        def start(_thread: object) -> None:
            raise RuntimeError("can't start new thread")

        limiter = anyio.CapacityLimiter(1)
        source = in_thread(blocking.numbers, limiter=limiter)()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                await anext(source)
        assert limiter.borrowed_tokens == 0
        await source.aclose()

    async def test_calls_a_plain_function_in_the_thread(self) -> None:
        """A function that returns an iterator may block before it does."""
        called: list[int] = []

        class Lines:
            closed = 0

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> str:
                return "line"

            def close(self) -> None:
                self.closed = threading.get_ident()

        lines = Lines()

        def read() -> Lines:
            called.append(threading.get_ident())
            return lines

        source = in_thread(read)()
        assert called == []
        assert await anext(source) == "line"
        await source.aclose()
        assert called == [lines.closed] != [threading.get_ident()]
        assert [item async for item in in_thread(range)(2)] == [0, 1]
        assert [item async for item in in_thread(iter)([5])] == [5]

    async def test_raises_what_the_generator_raises(self, no_collector: None) -> None:
        """The error is the generator's own, and its frames have lost the picture."""
        seen: list[weakref.ref[Picture]] = []

        def fails(picture: Picture) -> Iterator[int]:
            seen.append(weakref.ref(picture))
            yield 1
            raise OSError("no more")

        source = in_thread(fails)(Picture())
        assert await anext(source) == 1
        with pytest.raises(OSError, match="no more") as caught:
            await anext(source)
        await source.aclose()
        assert seen[0]() is None
        assert caught.value.__traceback__ is not None
        with pytest.raises(StopAsyncIteration):
            await anext(source)

    async def test_raises_what_closing_raises(
        self, blocking: Blocking, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An error of the clean-up goes to `aclose`, or into the log by its type."""

        def stubborn(fail: bool = True) -> Iterator[int]:
            try:
                yield 1
            finally:
                assert blocking.door.wait(PATIENCE)
                if fail:
                    raise OSError("a prompt")

        source = in_thread(stubborn)()
        await anext(source)
        with anyio.move_on_after(0.001):
            await source.aclose()  # which then waits no more
        blocking.door.set()
        await until(lambda: "OSError at" in caplog.text)
        caplog.clear()
        source = in_thread(stubborn)()
        await anext(source)
        with pytest.raises(OSError, match="a prompt"):
            await source.aclose()
        source = in_thread(stubborn)()
        await anext(source)
        with caplog.at_level(logging.WARNING, "lifecycle"):
            del source
            await until(lambda: "OSError at" in caplog.text)
        assert "a prompt" not in caplog.text

        class Once:
            def __init__(self, last: type[Exception]) -> None:
                self.last = last

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Any:
                raise self.last

            def close(self) -> None:
                raise OSError("closing")

        with pytest.raises(OSError, match="closing"):
            await anext(in_thread(lambda: Once(StopIteration))())
        with pytest.raises(ValueError, match="^$"):
            await anext(in_thread(lambda: Once(ValueError))())

    async def test_sends_and_throws(self) -> None:
        """A generator's other methods work from the loop as well."""

        def echo() -> Iterator[object]:
            said: Any = None
            while True:
                try:
                    said = yield said
                except KeyError as error:
                    said = type(error)

        source = in_thread(echo)()
        assert await source.asend(None) is None
        assert await source.asend(3) == 3
        assert await source.athrow(KeyError("a")) is KeyError
        await source.aclose()

    async def test_runs_in_a_copy_of_the_callers_context(self) -> None:
        """Context variables are seen, kept between items, and not written back."""
        variable = contextvars.ContextVar("variable", default=0)
        variable.set(1)

        def count() -> Iterator[int]:
            for _ in range(2):
                variable.set(variable.get() + 1)
                yield variable.get()

        assert [item async for item in in_thread(count)()] == [2, 3]
        assert variable.get() == 1

    async def test_lets_code_of_the_thread_run_a_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A blocking library may use an event loop of its own inside."""

        async def answer() -> int:
            await anyio.lowlevel.checkpoint()
            return 3

        def ask() -> Iterator[int]:
            yield anyio.run(answer)

        assert [item async for item in in_thread(ask)()] == [3]
        monkeypatch.delitem(sys.modules, "sniffio", raising=False)
        assert [item async for item in in_thread(range)(1)] == [0]

    async def test_keeps_its_promises_in_a_stream(self, blocking: Blocking) -> None:
        """A stream closes it before its block is left, in its thread."""
        async with Stream(in_thread(blocking.numbers)()) as stream:
            async for _item in stream:
                break
        assert blocking.closed.is_set()
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                with pytest.raises(TimeoutError):
                    async with session.stream(
                        in_thread(blocking.held_up)(), first_item=0.01, grace=0.01
                    ) as stream:
                        await anext(stream)


@pytest.mark.anyio
@pytest.mark.usefixtures("no_collector")
class TestDecorated:
    async def test_stands_for_an_async_generator(self) -> None:
        """What frameworks find when they unwrap a function is one, and does nothing."""
        assert [item async for item in inspect.unwrap(in_thread(range))()] == [None]

    async def test_scrubs_a_blocking_generator(self, blocking: Blocking) -> None:
        """The picture is gone with the first item, and dies in the thread."""
        died: list[int] = []

        @scrub("picture")
        def look(picture: Payload[Picture], take: bool) -> Iterator[int]:
            if take:
                picture.take()
            yield from blocking.numbers()

        for take in (True, False):
            picture = Picture()
            weakref.finalize(picture, lambda: died.append(threading.get_ident()))
            stream = look(picture, take)
            del picture
            assert await anext(stream) == 0
            assert len(died) == 1
            assert died.pop() != threading.get_ident()
            assert [item async for item in stream] == [1, 2]

        stream = look(Picture(), True)
        await anext(stream)
        await stream.aclose()
        assert blocking.closed.is_set()

    async def test_manages_a_blocking_generator(self, blocking: Blocking) -> None:
        """Lease, payload and session end as those of an async generator."""
        gate = Gate(bytes=10)
        given: list[Any] = []

        async with SessionRegistry() as sessions:

            @managed(
                gate=gate,
                cost=7,
                sessions=sessions,
                key=lambda _picture: "a",
                scrub="picture",
            )
            def look(lease: Any, session: Any, picture: Any) -> Iterator[int]:
                given.append((lease.bytes, session.id, gate.statistics().bytes_in_use))
                yield from blocking.numbers(picture.take())

            picture = Picture()
            ref = weakref.ref(picture)
            async with look(picture) as stream:
                del picture
                assert await anext(stream) == 0
                assert gate.statistics().bytes_in_use == 0
                assert sessions.statistics().live == 1
            assert blocking.closed.is_set()
            assert ref() is None
            assert given == [(7, "a", 7)]
            assert sessions.statistics().outcomes["cancelled"] == 1
            assert_quiescent(gate, sessions)

    async def test_holds_the_lease_until_the_thread_has_settled(
        self, blocking: Blocking
    ) -> None:
        """A consumer that leaves does not free memory that a thread still uses."""
        gate = Gate(bytes=10)
        look = managed(gate=gate, cost=7, scrub="picture")(blocking.held_up)
        picture = Picture()
        ref = weakref.ref(picture)
        stream = look(picture)
        del picture
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def leave() -> None:
                    await until(blocking.began.is_set)
                    scope.cancel()

                tasks.start_soon(leave)
                await anext(stream)
        assert gate.statistics().bytes_in_use == 7
        assert ref() is not None
        # What the thread holds is no block of this task: it may wait for the gate.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0)
            blocking.door.set()
            with anyio.fail_after(PATIENCE), await gate.admit(bytes=7):
                pass
        await until(lambda: ref() is None)
        assert_quiescent(gate)

    async def test_tracks_what_a_thread_makes(self, blocking: Blocking) -> None:
        """A session without a lease: its thread has nothing to give back."""
        async with SessionRegistry() as sessions:
            decorate = managed(sessions=sessions, key=lambda: "a")
            look = decorate(blocking.numbers)
            assert [item async for item in look()] == [0, 1, 2]
            assert sessions.statistics().outcomes["completed"] == 1

    async def test_manages_what_in_thread_made(self, blocking: Blocking) -> None:
        """With a limiter of its own, a function is decorated twice."""
        limiter = anyio.CapacityLimiter(1)
        decorate = managed(gate=Gate(slots=1))
        look = decorate(in_thread(blocking.numbers, limiter=limiter))
        assert [item async for item in look()] == [0, 1, 2]
        with pytest.raises(TypeError, match="neither a generator function"):
            decorate(look)

    async def test_raises_where_giving_up_fails(self) -> None:
        """An error of a box's `on_release` ends the stream, and is raised."""

        def fail(_how: str) -> None:
            raise OSError("on_release")

        @scrub("picture")
        def look(picture: Any) -> Iterator[int]:
            yield 1

        stream = look(Payload(b"", on_release=fail))
        with pytest.raises(OSError, match="on_release"):
            await anext(stream)


def test_is_what_it_was() -> None:
    """Name, documentation and signature stay; frameworks see an async generator."""

    def words(count: int) -> Iterator[str]:
        """Say words."""
        yield "word"

    made = in_thread(words)
    assert (made.__name__, made.__doc__) == ("words", "Say words.")
    assert list(inspect.signature(made).parameters) == ["count"]
    assert inspect.isasyncgenfunction(inspect.unwrap(made))
    with pytest.raises(TypeError, match="missing 1 required"):
        made()  # type: ignore[call-arg]

    class Odd:
        @in_thread
        def words(self) -> Iterator[str]:
            yield "word"

    assert "words" in repr(Odd().words())


def test_refuses_what_it_cannot_run() -> None:
    """Asynchronous functions and wrong limiters are found where they are written."""

    async def coroutine() -> None: ...

    async def generator() -> Any:
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="is asynchronous already"):
            in_thread(function)
    with pytest.raises(TypeError, match="takes a function"):
        in_thread(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="limiter must be an anyio.CapacityLimiter"):
        in_thread(range, limiter=3)  # type: ignore[call-overload]
    assert consumer_gone() is False


def test_closes_what_outlives_its_loop(blocking: Blocking) -> None:
    """A thread that returns after the end of the loop closes its generator."""

    async def main() -> None:
        source = in_thread(blocking.held_up)()
        task = asyncio.ensure_future(anext(source))
        await until(blocking.began.is_set)
        task.cancel()

    asyncio.run(main())
    blocking.door.set()
    assert blocking.closed.wait(PATIENCE)


def test_does_not_keep_the_process_alive() -> None:
    """A thread that never returns does not keep the interpreter from ending."""
    code = """
import anyio, threading
from lifecycle import in_thread

def stuck():
    threading.Event().wait()
    yield

async def main():
    with anyio.move_on_after(0.05):
        await anext(in_thread(stuck)())

for backend in ("asyncio", "trio"):
    anyio.run(main, backend=backend)
print("left")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("left\n", "", 0)


def test_leaves_no_generator_to_the_collector(blocking: Blocking) -> None:
    """Neither a closed iterator nor its thread is part of a cycle."""

    async def main() -> None:
        gc.collect()
        gc.disable()
        try:
            source = in_thread(blocking.numbers)()
            await anext(source)
            ref = weakref.ref(source)
            await source.aclose()
            del source
            assert ref() is None
        finally:
            gc.enable()

    anyio.run(main)
