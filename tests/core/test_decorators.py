"""managed, admits, track: the promises as decorators."""

import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import (
    CostTooLarge,
    Gate,
    Lease,
    Payload,
    Session,
    SessionEnded,
    SessionExists,
    SessionRegistry,
    StreamTimeout,
    managed,
    scrub,
)
from lifecycle.testing import Attempt, assert_quiescent, cancel_everywhere


class Tensor:
    """Something heavy that a weak reference can watch."""


class Engine:
    """A gate, a registry and functions that stream, decorated with both."""

    def __init__(self, sessions: SessionRegistry, **limits: int) -> None:
        self.gate = gate = Gate(**limits)
        self.sessions = sessions
        self.log: list[str] = []
        together = managed(
            gate=gate,
            cost=lambda image, **_: getattr(image, "nbytes", 5),
            sessions=sessions,
            key=lambda _image, *, name="a": name,
            scrub="image",
        )
        self.generate = together(self._generate)
        self.two_phase = together(self._two_phase)

    async def _generate(
        self, image: Payload[Tensor], *, name: str = "a"
    ) -> AsyncGenerator[int, None]:
        self.log.append("begun")
        try:
            await checkpoint()
            image.take()
            for i in range(3):
                yield i
                await checkpoint()
        finally:
            self.log.append("closed")

    async def _two_phase(
        self, image: Payload[Tensor], *, name: str = "a"
    ) -> AsyncIterator[int]:
        tensor = image.take()
        await checkpoint()
        assert tensor
        return self._items()

    async def _items(self) -> AsyncGenerator[int, None]:
        self.log.append("begun")
        try:
            for i in range(3):
                await checkpoint()
                yield i
        finally:
            self.log.append("closed")

    def in_use(self) -> tuple[int, int]:
        return self.gate.statistics().bytes_in_use, self.sessions.statistics().live


FORMS = pytest.mark.parametrize("form", ["generate", "two_phase"])


@pytest.mark.anyio
class TestManaged:
    @FORMS
    async def test_streams_under_a_lease_and_a_session(
        self, form: str, no_collector: None
    ) -> None:
        """Hand-off ends the lease and the payload, the last item the session."""
        async with SessionRegistry() as sessions:
            engine = Engine(sessions, bytes=10)
            tensor = Tensor()
            ref = weakref.ref(tensor)
            stream = getattr(engine, form)(tensor)
            del tensor
            assert engine.in_use() == (0, 0)
            assert engine.gate.statistics().received == 0
            async with stream:
                assert await anext(stream) == 0
                assert ref() is None
                assert engine.in_use() == (0, 1)
                assert [item async for item in stream] == [1, 2]
                assert engine.in_use() == (0, 0)
            assert sessions.statistics().outcomes["completed"] == 1
            assert_quiescent(engine.gate, sessions)

    async def test_hands_off_when_a_two_phase_function_returns(self) -> None:
        """The second phase runs without the lease of the first."""
        async with SessionRegistry() as sessions:
            engine = Engine(sessions, bytes=10)
            held: list[int] = []

            @managed(gate=engine.gate, cost=5)
            async def answer() -> AsyncIterator[int]:
                held.append(engine.in_use()[0])
                return items()

            async def items() -> AsyncGenerator[int, None]:
                held.append(engine.in_use()[0])
                yield 1

            assert [item async for item in answer()] == [1]
            assert held == [5, 0]
            assert_quiescent(engine.gate, sessions)

    async def test_costs_what_its_arguments_say(self) -> None:
        """The cost may be a number, or a function of the call's arguments."""
        gate = Gate(bytes=10, slots=4)
        held: list[tuple[int, int]] = []

        async def stream(size: int) -> AsyncGenerator[int, None]:
            now = gate.statistics()
            held.append((now.bytes_in_use, now.slots_in_use))
            yield size

        for cost in (7, lambda size: size):
            decorated = managed(gate=gate, cost=cost, slots=2)(stream)
            [item] = [i async for i in decorated(4)]
            assert item == 4
        assert held == [(7, 2), (4, 2)]
        with pytest.raises(CostTooLarge):
            await anext(managed(gate=gate, cost=lambda size: size)(stream)(11))
        assert_quiescent(gate)

    async def test_gives_lease_and_session_to_parameters_of_these_names(self) -> None:
        """Parameters named lease and session are filled in."""
        gate = Gate(bytes=10)
        async with SessionRegistry() as sessions:

            @managed(gate=gate, cost=5, sessions=sessions, key=lambda: "a")
            async def stream(
                *, lease: Lease, session: Session
            ) -> AsyncGenerator[object, None]:
                assert session is sessions.get("a")
                assert gate.statistics().bytes_in_use == 5
                lease.release()
                assert gate.statistics().bytes_in_use == 0
                yield session.id

            async with stream() as items:
                assert [item async for item in items] == ["a"]
            assert_quiescent(gate, sessions)

    async def test_hides_what_it_gives_from_callers(self) -> None:
        """What a framework reads off the signature is what a caller has to give."""
        gate = Gate(bytes=10)
        async with SessionRegistry() as sessions:

            @managed(gate=gate, sessions=sessions, key=str, scrub="image")
            async def stream(
                session: Session, name: str, lease: Lease, *rest: int, image: Any
            ) -> AsyncGenerator[object, None]:
                yield lease.held, session.id, name, rest, image.take()

            assert list(inspect.signature(stream).parameters) == [
                "name",
                "rest",
                "image",
            ]
            call: Any = stream
            with pytest.raises(TypeError, match="unexpected .*'lease'"):
                call("a", image=1, lease=None)
            with pytest.raises(TypeError, match="'image'"):
                call("a")

        @managed(gate=gate, cost=5)
        async def plain(session: str) -> AsyncGenerator[str, None]:
            yield session

        assert [item async for item in plain("theirs")] == ["theirs"]
        assert_quiescent(gate, sessions)

    async def test_gives_lease_and_session_wherever_they_stand(self) -> None:
        """The place of a parameter among the others does not matter."""
        gate = Gate(bytes=10)
        async with SessionRegistry() as sessions:

            @managed(gate=gate, cost=1, sessions=sessions, key=lambda name, *_: name)
            async def stream(
                session: Session, name: str, lease: Lease, *rest: int
            ) -> AsyncGenerator[object, None]:
                yield session.id, name, lease.held, rest

            call: Any = stream
            async with call("a", 1, 2) as items:
                assert await anext(items) == ("a", "a", True, (1, 2))
        assert_quiescent(gate, sessions)

    @pytest.mark.parametrize("two_phase", [False, True])
    async def test_detects_a_stream_that_waits_for_itself(
        self, two_phase: bool
    ) -> None:
        """A second stream of a full gate before the first item of one never hangs."""
        gate = Gate(slots=1)

        @managed(gate=gate)
        async def inner() -> AsyncGenerator[int, None]:
            yield 1

        @managed(gate=gate)
        async def generator() -> AsyncGenerator[int, None]:
            async for item in inner():
                yield item

        @managed(gate=gate)
        async def coroutine() -> AsyncIterator[int]:
            first = await anext(inner())
            return generator() if first else inner()

        outer = coroutine if two_phase else generator
        with anyio.fail_after(2), pytest.raises(RuntimeError, match="deadlock at gate"):
            async with outer() as stream:
                await anext(stream)
        assert [item async for item in inner()] == [1]
        assert_quiescent(gate)

    async def test_gives_up_the_rest_where_one_callback_raises(self) -> None:
        """A box whose on_release raises keeps neither another box nor the lease."""
        gate = Gate(slots=1)

        def fail(how: str) -> None:
            raise OSError(how)

        @managed(gate=gate, scrub=("first", "second"))
        async def stream(first: Any, second: Any) -> AsyncGenerator[int, None]:
            yield 1

        boxes = [Payload(i, on_release=fail) for i in range(2)]
        with pytest.raises(OSError, match="cleared"):
            async with stream(*boxes) as items:
                await anext(items)
        assert all(box.taken for box in boxes)
        assert_quiescent(gate)

    @FORMS
    async def test_owes_nothing_before_it_is_iterated(
        self, form: str, no_collector: None
    ) -> None:
        """A stream that is dropped or closed unused takes nothing and says nothing."""
        async with SessionRegistry() as sessions:
            engine = Engine(sessions, bytes=10)
            for close in (False, True):
                tensor = Tensor()
                ref = weakref.ref(tensor)
                stream = getattr(engine, form)(tensor)
                del tensor
                if close:
                    await stream.aclose()
                    await stream.aclose()
                    assert [item async for item in stream] == []
                else:
                    del stream
                assert ref() is None
            assert sessions.statistics().opened == 0
            assert engine.gate.statistics().received == 0
            assert engine.log == []

    @FORMS
    async def test_ends_what_was_broken_off(self, form: str) -> None:
        """Breaking off inside of the block ends the session, and closes the source."""
        async with SessionRegistry() as sessions:
            engine = Engine(sessions, bytes=10)
            async with getattr(engine, form)(Tensor()) as stream:
                async for _item in stream:
                    break
            assert engine.log == ["begun", "closed"]
            assert sessions.statistics().outcomes["cancelled"] == 1
            assert_quiescent(engine.gate, sessions)

    @FORMS
    @pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")  # trio
    @pytest.mark.parametrize("where", ["here", "in another thread"])
    async def test_ends_what_was_dropped(self, form: str, where: str) -> None:
        """A stream dropped in the middle ends its session in the registry's loop."""
        threads: list[int] = []
        async with SessionRegistry(
            observer=lambda _event: threads.append(threading.get_ident())
        ) as sessions:
            engine = Engine(sessions, bytes=10)
            box = [getattr(engine, form)(Tensor())]
            assert await anext(box[0]) == 0

            def drop() -> None:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    box.clear()
                    gc.collect()
                assert "dropped after 1 items" in str(caught[0].message)

            waiting = sessions.statistics().live
            assert waiting == 1
            if where == "here":
                drop()
            else:
                await anyio.to_thread.run_sync(drop)
            with anyio.fail_after(2):
                free = await sessions.open_when_free("a")
            free.close()
            assert set(threads) == {threading.get_ident()}
            assert sessions.statistics().outcomes["cancelled"] == 1
            assert_quiescent(engine.gate, sessions)

    async def test_says_how_it_ended(self) -> None:
        """Errors and refusals are outcomes of the session, and reach the caller."""
        gate = Gate(bytes=10)
        async with SessionRegistry() as sessions:

            @managed(gate=gate, cost=lambda n: n, sessions=sessions, key=str)
            async def stream(n: int) -> AsyncGenerator[int, None]:
                if n:
                    raise OSError("bad image")
                yield 1

            with pytest.raises(OSError, match="bad image"):
                await anext(stream(1))
            with pytest.raises(CostTooLarge):
                await anext(stream(11))
            other = sessions.open("2")
            with pytest.raises(SessionExists):
                await anext(stream(2))
            other.close()
            outcomes = sessions.statistics().outcomes
            assert (outcomes["failed"], outcomes["refused"]) == (1, 1)
            assert_quiescent(gate, sessions)

    async def test_is_stopped_by_id(self) -> None:
        """Cancelling the session ends the stream, with SessionEnded, not a group."""
        async with SessionRegistry() as sessions:

            @managed(sessions=sessions, key=lambda: "a")
            async def stream() -> AsyncGenerator[int, None]:
                yield 1
                await anyio.sleep_forever()

            async def consume() -> None:
                with pytest.raises(SessionEnded) as caught:
                    async with stream() as items:
                        async for _item in items:
                            pass
                assert caught.value.outcome == "cancelled"

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consume)
                await anyio.wait_all_tasks_blocked()
                await sessions.cancel("a")
            assert_quiescent(sessions)

    async def test_keeps_deadlines_of_the_stream_that_a_function_returns(self) -> None:
        """A late source ends the caller's block, and the session counts a deadline."""
        async with SessionRegistry() as sessions:

            async def words() -> AsyncGenerator[int, None]:
                yield 1
                await anyio.sleep_forever()

            @managed(sessions=sessions, key=lambda: "a")
            async def stream(session: Session) -> AsyncIterator[int]:
                return session.stream(words(), idle=0.01)

            with anyio.fail_after(5), pytest.raises(StreamTimeout, match="after 1"):
                async with stream() as items:
                    assert [item async for item in items]
            assert sessions.statistics().outcomes["deadline"] == 1
            assert_quiescent(sessions)

    async def test_ends_at_the_next_item_when_stopped_without_a_block(self) -> None:
        """Outside of async with, a stopped stream says so when it is asked again."""
        async with SessionRegistry() as sessions:

            @managed(sessions=sessions, key=lambda: "a")
            async def stream() -> AsyncGenerator[int, None]:
                yield 1
                yield 2

            items = stream()
            assert await anext(items) == 1
            sessions.get("a").stop()
            with pytest.raises(SessionEnded):
                await anext(items)
            assert_quiescent(sessions)

    async def test_begins_nothing_that_was_stopped_in_line(self) -> None:
        """A request that waited when all were closed starts nothing, with a block or not."""
        gate, begun = Gate(slots=1), []
        async with SessionRegistry() as sessions:

            @managed(gate=gate, sessions=sessions, key=lambda: "a")
            async def stream() -> AsyncGenerator[int, None]:
                begun.append(1)
                yield 1

            async def consume() -> None:
                with pytest.raises(SessionEnded):
                    async for _item in stream():
                        pass

            async with anyio.create_task_group() as tasks:
                with gate.try_admit():
                    tasks.start_soon(consume)
                    await anyio.wait_all_tasks_blocked()
                    assert sessions.close_all() == 1
            assert not begun
            assert_quiescent(gate, sessions)

    async def test_wraps_iterators_without_aclose(self) -> None:
        """A two-phase function may return any asynchronous iterable."""

        class Items:
            async def __anext__(self) -> int:
                await checkpoint()
                return 1

            def __aiter__(self) -> "Items":
                return self

        @managed(gate=Gate(slots=1))
        async def stream() -> Any:
            return Items()

        async with stream() as items:
            assert await anext(items) == 1
        assert items.closed


@FORMS
def test_leaks_nothing_when_cancelled_anywhere(form: str) -> None:
    """Cancelled at any point: no lease, session or payload is left (B3, B4)."""

    async def scenario(attempt: Attempt) -> None:
        gc.disable()
        try:
            async with SessionRegistry() as sessions:
                engine = Engine(sessions, bytes=10)
                holder = engine.gate.try_admit(bytes=10)
                box = Payload(Tensor(), nbytes=5)

                async def consume() -> None:
                    async with getattr(engine, form)(box) as stream:
                        async for _item in stream:
                            await checkpoint()

                async def let_go() -> None:
                    holder.release()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(let_go)
                    outcome = await attempt(consume())
                now = sessions.statistics()
                assert now.opened == now.outcomes[outcome]
                assert engine.log in ([], ["begun", "closed"])
                assert_quiescent(engine.gate, sessions)
                if now.opened:
                    assert box.taken
        finally:
            gc.enable()

    points = cancel_everywhere(scenario, double=True)
    assert min(points.values()) >= 8


@pytest.mark.parametrize("odd", ["cost", "key", "argument", "argument of scrub"])
def test_keeps_no_payload_for_an_error_of_the_call(
    no_collector: None, odd: str
) -> None:
    """An error of `cost`, of `key` or of a wrong call may be kept for long."""
    known: list[weakref.ref[Tensor]] = []

    def watched() -> Tensor:
        tensor = Tensor()
        known.append(weakref.ref(tensor))
        return tensor

    def fail(image: object) -> Any:
        raise LookupError

    async def look(image: Any) -> AsyncGenerator[object, None]:
        yield image

    describe: Any = managed(
        gate=Gate(slots=1),
        cost=fail if odd == "cost" else 1,
        sessions=SessionRegistry(),
        key=fail if odd == "key" else repr,
        scrub="image",
    )(look)
    if odd == "argument of scrub":
        describe = scrub("image")(look)
    more = {"more": 1} if odd.startswith("argument") else {}
    with pytest.raises((LookupError, TypeError)) as kept:
        describe(watched(), **more)
    assert known[0]() is None
    assert kept.value.__traceback__ is not None


@pytest.mark.anyio
async def test_keeps_no_argument_that_its_function_lets_go(no_collector: None) -> None:
    """Of what is in no box, either, there is no second holder."""
    gone: list[bool] = []

    @managed(gate=Gate(slots=1))
    async def look(tensor: Tensor) -> AsyncGenerator[int, None]:
        known = weakref.ref(tensor)
        del tensor
        gone.append(known() is None)
        yield 1

    async with look(Tensor()) as stream:
        assert [item async for item in stream] == [1]
    assert gone == [True]


def test_is_what_it_was() -> None:
    """Name, documentation and signature are those of the function."""

    @managed(scrub=("image",))
    async def describe(image: bytes, *, words: int = 3) -> AsyncGenerator[str, None]:
        """Say what is in the image."""
        yield "x"

    assert describe.__name__ == "describe"
    assert describe.__doc__ == "Say what is in the image."
    assert str(inspect.signature(describe)).startswith("(image: bytes, *, words")


def test_refuses_what_it_cannot_decorate() -> None:
    """Mistakes raise where the function is defined."""

    def plain() -> None: ...

    async def stream() -> AsyncGenerator[int, None]:
        yield 1

    with pytest.raises(TypeError, match="neither a generator"):
        managed(gate=Gate(slots=1))(plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no parameter 'image'"):
        managed(scrub="image")(stream)
    with pytest.raises(TypeError, match="sessions and key go together"):
        managed(sessions=SessionRegistry())
    with pytest.raises(TypeError, match="sessions and key go together"):
        managed(key=lambda: "a")
