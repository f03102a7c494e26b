"""Sessions and their registry: one outcome each, and nothing left of them."""

import gc
import math
import threading
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, get_args

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import (
    AdmissionTimeout,
    EngineLost,
    Gate,
    GateClosed,
    Session,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    SessionRegistry,
    StartTimeout,
    StreamTimeout,
)
from lifecycle.events import (
    DrainFinished,
    DrainStarted,
    Outcome,
    PayloadReleased,
    SessionClosed,
    SessionOpened,
    StartSettled,
    StreamEnded,
)
from lifecycle.testing import (
    Attempt,
    RecordingObserver,
    assert_quiescent,
    cancel_everywhere,
)

virtual = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


async def nothing() -> str:
    """Open a stream without any payload."""
    await checkpoint()
    return "stream"


class Ends:
    """An END that waits until it is let go, and notes that it ran."""

    def __init__(self) -> None:
        self.go_on = anyio.Event()
        self.done: list[object] = []

    async def __call__(self, stream: object) -> None:
        await self.go_on.wait()
        self.done.append(stream)


@pytest.mark.anyio
class TestOutcomes:
    @pytest.mark.parametrize(
        ("error", "outcome"),
        [
            (None, "completed"),
            (AdmissionTimeout("x"), "refused"),
            (GateClosed("x"), "refused"),
            (EngineLost("x", reason="killed"), "engine_lost"),
            (StreamTimeout("x", deadline="idle"), "deadline"),
            (StartTimeout("x"), "deadline"),
            (SessionEnded("x", outcome="client_gone"), "client_gone"),
            (OSError("x"), "failed"),
            (KeyboardInterrupt("x"), "failed"),
            (GeneratorExit(), "cancelled"),
            (ExceptionGroup("x", [GateClosed("x")]), "refused"),
            (ExceptionGroup("x", [GateClosed("x"), GateClosed("y")]), "refused"),
            (ExceptionGroup("x", [GateClosed("x"), OSError("y")]), "failed"),
            (BaseExceptionGroup("x", [GeneratorExit()]), "cancelled"),
        ],
        ids=repr,
    )
    async def test_follows_from_how_the_block_is_left(
        self, error: BaseException | None, outcome: Outcome
    ) -> None:
        """Each way out of the block has its outcome; the error goes on as it was."""
        seen = RecordingObserver()
        caught: BaseException | None = None
        async with SessionRegistry(observer=seen) as sessions:
            try:
                with sessions.open("a") as session:
                    if error is not None:
                        raise error
            except BaseException as raised:  # noqa: BLE001
                caught = raised
            assert caught is error
            assert session.outcome == outcome
            assert [event.outcome for event in seen.of(SessionClosed)] == [outcome]
            assert sessions.statistics().outcomes[outcome] == 1
            assert_quiescent(sessions)

    @pytest.mark.parametrize("means", ["cancelled", "client_gone"])
    async def test_counts_a_cancellation_as_what_it_means(self, means: Outcome) -> None:
        """Code that cancels the owner sets the outcome before."""
        async with SessionRegistry() as sessions:
            with anyio.CancelScope() as scope, sessions.open("a") as session:
                session.cancelled_as = means
                scope.cancel()
                await checkpoint()
            assert scope.cancelled_caught
            assert session.outcome == means

    async def test_counts_cancelled_children_as_a_cancellation(self) -> None:
        """A group of nothing but cancellations is one."""
        async with SessionRegistry() as sessions:
            with anyio.CancelScope() as scope:
                with sessions.open("a") as session:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(anyio.sleep_forever)
                        tasks.start_soon(anyio.sleep_forever)
                        await checkpoint()
                        scope.cancel()
            assert session.outcome == "cancelled"

    async def test_is_decided_by_the_first(self) -> None:
        """The first close decides; later ones say that they did not."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                assert session.close("client_gone")
                assert not session.close("failed")
                session.stop("shutdown")  # too late to stop anything
                await checkpoint()
            assert session.outcome == "client_gone"
            assert sessions.statistics().outcomes["client_gone"] == 1

    async def test_knows_every_outcome_from_the_start(self) -> None:
        """Statistics have a number for each outcome, also where it is none."""
        async with SessionRegistry() as sessions:
            now = sessions.statistics()
        assert now.outcomes == dict.fromkeys(get_args(Outcome), 0)


@pytest.mark.anyio
class TestIds:
    async def test_refuses_an_id_in_use(self) -> None:
        """Two live sessions never share an id."""
        async with SessionRegistry() as sessions:
            with sessions.open("a"):
                with pytest.raises(SessionExists):
                    sessions.open("a")
                with sessions.open("b"):
                    assert [session.id for session in sessions.live()] == ["a", "b"]
            assert_quiescent(sessions)
            assert sessions.statistics().opened == 2

    async def test_reuses_an_id_while_the_old_one_closes(self) -> None:
        """A late clean-up removes nothing of a newer session (fault-20)."""
        ends = Ends()
        async with SessionRegistry() as sessions:
            with sessions.open("a") as old:
                await old.start(nothing, end=ends)
            with sessions.open("a") as new:
                assert (old.generation, new.generation) == (1, 2)
                assert (old.key, new.key) == ("a#1", "a#2")
                assert not old.close("failed")
                ends.go_on.set()
                await old.quiet()
                assert sessions.get("a") is new
                assert new.outcome is None
                assert ends.done == ["stream"]
            assert_quiescent(sessions)

    async def test_finds_live_sessions_only(self) -> None:
        """Getting and cancelling know ids that are live, and no others."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                assert sessions.get("a") is session
            for ask in (sessions.get, sessions.get):
                with pytest.raises(SessionNotFound):
                    ask("a")
            with pytest.raises(SessionNotFound):
                await sessions.cancel("a")

    async def test_finds_a_session_by_what_the_engine_calls_it(self) -> None:
        """A key finds the session it belongs to, and no newer one with its id."""
        async with SessionRegistry() as sessions:
            sessions.open("a#1").close()
            with sessions.open("a#1") as session:
                assert session.key == "a#1#2"
                assert sessions.get(key="a#1#2") is session
                for key in ("a#1#1", "a#1", "a#2", "#", ""):
                    with pytest.raises(SessionNotFound):
                        sessions.get(key=key)

    async def test_waits_until_an_id_is_free(self) -> None:
        """open_when_free waits for the live session and for its END."""
        ends = Ends()
        got: list[Session] = []

        async def wait(sessions: SessionRegistry) -> None:
            with await sessions.open_when_free("a") as session:
                assert ends.done
                got.append(session)

        async with SessionRegistry() as sessions:
            async with anyio.create_task_group() as tasks:
                with sessions.open("a") as session:
                    await session.start(nothing, end=ends)
                    tasks.start_soon(wait, sessions)
                    await anyio.wait_all_tasks_blocked()
                await anyio.wait_all_tasks_blocked()
                assert got == []
                ends.go_on.set()
            assert [session.key for session in got] == ["a#2"]
            assert_quiescent(sessions)

    async def test_waits_for_the_end_of_no_other_id(self) -> None:
        """Another session may take its time to end, whatever its id."""
        ends = Ends()
        async with SessionRegistry() as sessions:
            with sessions.open("b") as session:
                await session.start(nothing, end=ends)
            for id_ in "ac":
                with anyio.fail_after(60), await sessions.open_when_free(id_):
                    assert not ends.done
            ends.go_on.set()
        assert ends.done

    def test_opens_nothing_when_it_waits_in_vain(self) -> None:
        """Cancelled while it waits for an id, it has opened nothing."""

        async def scenario(attempt: Attempt) -> None:
            async with SessionRegistry() as sessions:
                release = anyio.Event()

                async def hold() -> None:
                    with sessions.open("a"):
                        await release.wait()

                async def wait() -> None:
                    with await sessions.open_when_free("a"):
                        await checkpoint()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(hold)
                    await checkpoint()
                    await checkpoint()
                    tasks.start_soon(lambda: set_soon(release))
                    await attempt(wait())
                assert_quiescent(sessions)

        cancel_everywhere(scenario)


async def set_soon(event: anyio.Event) -> None:
    """Set *event* after a moment."""
    await checkpoint()
    event.set()


@pytest.mark.anyio
class TestBoxes:
    async def test_are_emptied_when_the_session_closes(self) -> None:
        """Payloads that were not taken are cleared, counted and reported."""
        seen = RecordingObserver()
        async with SessionRegistry(observer=seen) as sessions:
            with sessions.open("a") as session:
                first = session.box(b"1", nbytes=1)
                second = session.box(b"2", nbytes=2)
                assert sessions.statistics().payload_bytes == 3
                assert first.take() == b"1"
                now = sessions.statistics()
                assert (now.payloads, now.payload_bytes) == (1, 2)
            assert second.taken
            seen = [(event.bytes, event.how) for event in seen.of(PayloadReleased)]
            assert seen == [(1, "taken"), (2, "cleared")]
            late = session.box(b"3", nbytes=4)
            assert late.taken
            assert_quiescent(sessions)

    async def test_are_forgotten_once_emptied(self) -> None:
        """A session that boxes frame after frame does not keep the empty boxes."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                gc.collect()
                before = len(gc.get_objects())
                for _ in range(1000):
                    session.box(b"frame", nbytes=5).take()
                assert len(gc.get_objects()) - before < 100
            assert_quiescent(sessions)


@pytest.mark.anyio
class TestStopping:
    async def test_tells_the_owner_and_waits_for_the_engine(self) -> None:
        """The owner's block ends with SessionEnded; cancel returns when it is quiet."""
        ends = Ends()
        seen: list[str] = []
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:

            async def owner() -> None:
                with pytest.raises(SessionEnded) as caught:
                    with sessions.open("a") as session:
                        await session.start(nothing, end=ends)
                        await anyio.sleep_forever()
                seen.append(caught.value.outcome)

            async def cancel() -> None:
                await sessions.cancel("a")
                seen.append("quiet")

            tasks.start_soon(owner)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(cancel)
            tasks.start_soon(sessions.get("a").quiet)
            await anyio.wait_all_tasks_blocked()
            assert seen == ["cancelled"]
            assert sessions.statistics().closing == 1
            ends.go_on.set()
            await anyio.wait_all_tasks_blocked()
            assert seen == ["cancelled", "quiet"]
            assert_quiescent(sessions)

    async def test_tells_an_owner_that_was_about_to_leave(self) -> None:
        """Stopped before its block ended, a session says so, even without an await."""
        async with SessionRegistry() as sessions:
            with pytest.raises(SessionEnded), sessions.open("a") as session:
                session.stop("shutdown")
            assert session.outcome == "shutdown"

    async def test_stops_before_it_is_entered(self) -> None:
        """A session that was stopped between open and with ends at its first await."""
        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            session.stop()
            with pytest.raises(SessionEnded), session:
                await anyio.sleep_forever()

    @pytest.mark.parametrize("how", ["close", "stop"])
    async def test_says_that_it_was_over_before_it_was_entered(self, how: str) -> None:
        """A block of a closed session is left with an error, not with a cancellation."""
        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            getattr(session, how)("completed")
            with pytest.raises(SessionEnded):
                with session:
                    await checkpoint()

    async def test_keeps_the_owners_own_error(self) -> None:
        """An error of the owner's goes on as it is, though the session was stopped."""
        async with SessionRegistry() as sessions:
            with pytest.raises(OSError, match="mine"), sessions.open("a") as session:
                session.stop()
                raise OSError("mine")
            assert session.outcome == "cancelled"

    async def test_keeps_an_outer_cancellation(self) -> None:
        """Stopped and cancelled from outside, the owner sees the cancellation."""
        async with SessionRegistry() as sessions:
            with anyio.CancelScope() as scope:
                with sessions.open("a") as session:
                    scope.cancel()
                    session.stop()
                    await checkpoint()
            assert scope.cancelled_caught

    async def test_can_be_entered_once(self) -> None:
        """A session has one owner."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                with pytest.raises(RuntimeError, match="entered once"), session:
                    pass

    async def test_ends_all_that_are_open(self) -> None:
        """Every session that is open by then ends, the oldest first, and no later."""
        seen = RecordingObserver()
        outcomes: list[str] = []

        async def owner(sessions: SessionRegistry, name: str) -> None:
            try:
                with sessions.open(name):
                    await anyio.sleep_forever()
            except SessionEnded as ended:
                outcomes.append(ended.outcome)

        async with SessionRegistry(observer=seen) as sessions:
            async with anyio.create_task_group() as tasks:
                for name in "abc":
                    tasks.start_soon(owner, sessions, name)
                await anyio.wait_all_tasks_blocked()
                assert sessions.close_all("engine_lost") == 3
                assert sessions.close_all() == 0
                with sessions.open("d") as session:
                    await checkpoint()
                assert session.outcome == "completed"
            assert outcomes == ["engine_lost"] * 3
            closed = [event.generation for event in seen.of(SessionClosed)]
            assert closed == [1, 2, 3, 4]
            assert_quiescent(sessions)

    async def test_shows_its_phase_and_no_more(self) -> None:
        """Both repr and phase tell how far a session got."""
        ends = Ends()
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                assert repr(session) == "<Session 'a#1' open>"
                opening = anyio.Event()

                async def open_() -> None:
                    assert session.phase == "starting"
                    opening.set()

                await session.start(open_, end=ends)
                assert session.phase == "started"
            assert session.phase == "closing"
            ends.go_on.set()
            await session.quiet()
            assert session.phase == "quiet"
            assert repr(session) == "<Session 'a#1' completed>"

    async def test_streams_items_and_says_how_many(self) -> None:
        """The end of a stream of a session is reported."""
        seen = RecordingObserver()

        async def source() -> AsyncGenerator[int, None]:
            for i in range(3):
                await checkpoint()
                yield i

        async with SessionRegistry(observer=seen) as sessions:
            with sessions.open("a") as session:
                async with session.stream(source()) as stream:
                    assert [item async for item in stream] == [0, 1, 2]
        assert [event.items for event in seen.of(StreamEnded)] == [3]
        assert seen.names() == ["SessionOpened", "StreamEnded", "SessionClosed"]
        assert seen.of(SessionOpened)[0].generation == 1

    async def test_raises_no_groups(self) -> None:
        """Errors of owners reach their callers alone, also through the registry."""
        error = OSError("mine")
        with pytest.raises(OSError, match="mine") as caught:
            async with SessionRegistry() as sessions:
                with sessions.open("a") as session:
                    await session.start(nothing, end=fail)
                    raise error
        assert caught.value is error


async def fail(_stream: object) -> None:
    """An END that fails."""
    raise OSError("end")


@virtual
@pytest.mark.anyio
class TestDrain:
    async def test_lets_sessions_finish_and_ends_the_rest(self) -> None:
        """Sessions that finish in time are left alone; the rest is ended (fault-61)."""
        seen = RecordingObserver()
        ended_as: list[tuple[int, str]] = []

        async def owner(sessions: SessionRegistry, seconds: int) -> None:
            try:
                with sessions.open(str(seconds)) as session:
                    await session.start(nothing, end=slow_end)
                    await anyio.sleep(seconds)
                ended_as.append((seconds, "completed"))
            except SessionEnded as ended:
                ended_as.append((seconds, ended.outcome))

        async def slow_end(_stream: object) -> None:
            await anyio.sleep(1)

        async with SessionRegistry(observer=seen) as sessions:
            async with anyio.create_task_group() as tasks:
                for seconds in (2, 4, 50):
                    tasks.start_soon(owner, sessions, seconds)
                await anyio.wait_all_tasks_blocked()
                began = anyio.current_time()
                assert await sessions.drain(10) == 1
                assert anyio.current_time() - began == pytest.approx(11)
                assert sessions.draining
                with pytest.raises(GateClosed):
                    sessions.open("new")
                assert_quiescent(sessions)
            assert sorted(ended_as) == [
                (2, "completed"),
                (4, "completed"),
                (50, "shutdown"),
            ]
        assert [event.live for event in seen.of(DrainStarted)] == [3]
        [finished] = seen.of(DrainFinished)
        assert (finished.cut, finished.duration_s) == (1, pytest.approx(11))

    async def test_tells_how_long_a_session_was_open(self) -> None:
        """Until it is closed, from when it was opened; a registry drains no earlier."""
        seen = RecordingObserver()
        sessions = SessionRegistry(observer=seen)
        assert not sessions.draining
        async with sessions:
            await anyio.sleep(1)
            seconds = 2 * anyio.current_time() + 1
            with sessions.open("a"):
                await anyio.sleep(seconds)
        [closed] = seen.of(SessionClosed)
        assert closed.duration_s == pytest.approx(seconds)

    async def test_drains_an_empty_registry_at_once(self) -> None:
        """Without live sessions, a drain takes no time."""
        async with SessionRegistry() as sessions:
            began = anyio.current_time()
            assert await sessions.drain(10) == 0
            assert anyio.current_time() == began

    async def test_waits_for_every_end_on_leaving(self) -> None:
        """Leaving the registry ends all sessions, and waits for their ENDs, bounded."""
        ended: list[object] = []
        outcomes: list[str] = []

        async def end(stream: object) -> None:
            await anyio.sleep(2)
            ended.append(stream)

        async def owner(sessions: SessionRegistry) -> None:
            try:
                with sessions.open("a") as session:
                    await session.start(nothing, end=end)
                    await anyio.sleep_forever()
            except SessionEnded as error:
                outcomes.append(error.outcome)

        async with anyio.create_task_group() as tasks:
            async with SessionRegistry() as sessions:
                tasks.start_soon(owner, sessions)
                await anyio.sleep(1)
                began = anyio.current_time()
            assert anyio.current_time() - began == pytest.approx(2)
        assert (ended, outcomes) == (["stream"], ["shutdown"])
        assert_quiescent(sessions)

    async def test_drains_in_peace_where_the_server_is_cancelled(self) -> None:
        """Starts and deadlines go on while a cancelled server drains, shielded."""
        outcomes: dict[str, object] = {}
        registry: list[SessionRegistry] = []
        scope = anyio.CancelScope()

        async def serve() -> None:
            with scope:
                async with SessionRegistry() as sessions:
                    registry.append(sessions)
                    try:
                        await anyio.sleep_forever()
                    finally:
                        with anyio.CancelScope(shield=True):
                            await sessions.drain(30)

        async def open_() -> str:
            await anyio.sleep(5)
            return "stream"

        async def start(sessions: SessionRegistry) -> None:
            with sessions.open("start") as session:
                outcomes["start"] = await session.start(open_)

        async def late() -> AsyncGenerator[int, None]:
            await anyio.sleep(20)
            yield 1

        async def stream(sessions: SessionRegistry) -> None:
            with pytest.raises(StreamTimeout), sessions.open("stream") as session:
                async with session.stream(late(), first_item=3) as items:
                    await anext(items)
            outcomes["stream"] = anyio.current_time() - began

        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(serve)
            await anyio.sleep(1)
            tasks.start_soon(start, *registry)
            tasks.start_soon(stream, *registry)
            await anyio.sleep(1)
            scope.cancel()
        assert outcomes == {"start": "stream", "stream": pytest.approx(4)}
        assert_quiescent(*registry)

    async def test_gives_a_source_the_grace_of_its_session(self) -> None:
        """A session's stream has the grace that it was asked for, and not another."""

        async def stuck() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await anyio.sleep(1000)

        async with SessionRegistry() as sessions:
            with sessions.open("a") as session, anyio.CancelScope() as scope:
                async with session.stream(stuck(), grace=3) as stream:
                    await anext(stream)
                    began = anyio.current_time()
                    scope.cancel()
                    await checkpoint()
            assert anyio.current_time() - began == pytest.approx(3)
        assert_quiescent(sessions)

    async def test_goes_on_ending_when_it_is_cancelled(self) -> None:
        """A cancelled registry still ends what it holds before it goes."""
        ended: list[object] = []

        async def end(stream: object) -> None:
            await anyio.sleep(2)
            ended.append(stream)

        with anyio.CancelScope() as scope:
            async with SessionRegistry() as sessions:
                with sessions.open("a") as session:
                    await session.start(nothing, end=end)
                    scope.cancel()
                    await checkpoint()
        assert scope.cancelled_caught
        assert ended == ["stream"]
        assert session.outcome == "cancelled"
        assert_quiescent(sessions)


@pytest.mark.parametrize("backends", [("asyncio", "asyncio"), ("asyncio", "trio")])
def test_a_registry_serves_one_event_loop_after_another(
    backends: tuple[str, ...],
) -> None:
    """As one does that a module holds and that each test of an application enters."""
    sessions = SessionRegistry()
    outcomes: list[object] = []

    async def serve() -> None:
        async def open_() -> AsyncIterator[int]:
            return numbers()

        async def numbers() -> AsyncIterator[int]:
            yield 1
            await anyio.sleep_forever()

        async with sessions:
            session = sessions.open("a")
            with pytest.raises(SessionEnded), session:
                items = await session.start(open_)
                async with session.stream(items, idle=0.0) as stream:
                    async for _ in stream:
                        session.stop("client_gone")
            outcomes.append(session.outcome)
            await session.quiet()

    for backend in backends:
        anyio.run(serve, backend=backend)
    assert outcomes == ["client_gone", "client_gone"]
    assert_quiescent(sessions)


@pytest.mark.anyio
class TestRegistry:
    async def test_refuses_an_end_timeout_that_is_no_number(self) -> None:
        """Found out at the first END, it would take all other sessions down."""
        with pytest.raises(ValueError, match="end_timeout"):
            SessionRegistry(end_timeout=math.nan)

    async def test_serves_one_block_at_a_time(self) -> None:
        """And nothing outside of it."""
        sessions = SessionRegistry()
        with pytest.raises(RuntimeError, match="async with first"):
            sessions.open("a")
        async with sessions:
            with pytest.raises(RuntimeError, match="already entered; make another"):
                async with sessions:
                    pass
            sessions.open("a").close()
        with pytest.raises(RuntimeError, match="is closed, .*; enter it again"):
            sessions.open("a")

    async def test_can_be_entered_again_once_it_was_left(self) -> None:
        """One that a module holds serves each of its tests, and a server that reloads."""
        sessions = SessionRegistry()
        ended: list[object] = []

        async def open_() -> str:
            return "stream"

        async def end(stream: object) -> None:
            ended.append(stream)

        for _ in range(2):
            async with sessions:
                with sessions.open("a") as session:
                    await session.start(open_, end=end)
                assert await sessions.drain(1.0) == 0
                with pytest.raises(GateClosed):
                    sessions.open("b")
        assert ended == ["stream", "stream"]
        assert session.generation == 2
        assert_quiescent(sessions)

    async def test_opens_nothing_while_it_is_being_left(self) -> None:
        """Requests that still come then are refused."""
        refused: list[type[Exception]] = []
        sessions = SessionRegistry()
        ending = anyio.Event()

        async def end(_: object) -> None:
            ending.set()
            await checkpoint()

        async def try_later() -> None:
            await ending.wait()
            try:
                sessions.open("late")
            except GateClosed as error:
                refused.append(type(error))

        async def open_() -> str:
            return "stream"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(try_later)
            async with sessions:
                await sessions.open("a").start(open_, end=end)
        assert refused == [GateClosed]

    async def test_balances_at_every_moment(self) -> None:
        """Opened are the live + the sum of the outcomes, whenever one looks."""
        sessions: SessionRegistry

        def look(_event: object = None) -> None:
            now = sessions.statistics()
            assert now.opened == now.live + sum(now.outcomes.values())

        async def request(i: int) -> None:
            with anyio.CancelScope() as scope:
                try:
                    with sessions.open(str(i % 40)) as session:
                        look()
                        await session.start(nothing, end=checkpointing)
                        look()
                        if i % 3 == 0:
                            scope.cancel()
                        if i % 5 == 0:
                            session.stop("client_gone")
                        await checkpoint()
                except (SessionExists, SessionEnded):
                    look()

        async with SessionRegistry(observer=look) as sessions:
            async with anyio.create_task_group() as tasks:
                for i in range(100):
                    tasks.start_soon(request, i)
                    if i % 7 == 0:
                        await checkpoint()
                        look()
            with anyio.fail_after(5):
                while sessions.statistics().closing:
                    await checkpoint()
            assert_quiescent(sessions)

    async def test_can_be_read_by_another_thread(self) -> None:
        """A scrape from a thread is not broken off by sessions that come and go."""
        errors = list[Exception]()
        over = threading.Event()

        def scrape() -> None:
            while not over.is_set():
                try:
                    sessions.statistics()
                except RuntimeError as error:
                    errors.append(error)

        async with SessionRegistry() as sessions:
            kept = [sessions.open(f"kept {number}") for number in range(1000)]
            thread = threading.Thread(target=scrape)
            thread.start()
            try:
                for number in range(5000):
                    with sessions.open(f"short {number}") as session:
                        session.box(number)
            finally:
                over.set()
                thread.join()
            assert len(kept) == sessions.close_all()
        assert not errors

    @pytest.mark.thorough
    async def test_holds_ten_thousand_sessions(self) -> None:
        """10,000 sessions live at once; one that started takes < 8 KiB (fault-21)."""
        count, weighed = 10_000, 1000
        async with SessionRegistry() as sessions:

            async def start(ids: range) -> list[Session]:
                held = [sessions.open(str(i)) for i in ids]
                async with anyio.create_task_group() as tasks:
                    for session in held:
                        session.box(b"", nbytes=1)
                        tasks.start_soon(session.start, nothing)
                return held

            others = [sessions.open(str(i)) for i in range(weighed, count)]
            gc.collect()
            tracemalloc.start(1)
            try:
                before = tracemalloc.get_traced_memory()[0]
                held = await start(range(weighed))
                gc.collect()
                each = (tracemalloc.get_traced_memory()[0] - before) / weighed
            finally:
                tracemalloc.stop()
            assert {session.phase for session in held} == {"started"}
            assert each < 8 * 1024, f"{each:.0f} bytes"
            assert sessions.close_all() == count
            with anyio.fail_after(20):
                for session in held + others:
                    await session.quiet()
            assert_quiescent(sessions)


async def checkpointing(_stream: object) -> None:
    """An END that takes a moment."""
    await checkpoint()


@pytest.mark.anyio
class TestFanOut:
    """Several streams for one request: all of them or none."""

    async def test_opens_all_and_ends_each_once(self) -> None:
        """Every stream is opened, the lease goes when the last was, each is ended."""
        gate, ended = Gate(slots=1), list[int | None]()
        go = anyio.Event()

        def child(i: int) -> tuple[Any, Any]:
            async def open_() -> int:
                if i == 1:
                    await go.wait()
                return i

            async def end(value: int | None) -> None:
                ended.append(value)

            return open_, end

        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                lease = await gate.admit()
                async with anyio.create_task_group() as tasks:
                    opened: list[int] = []

                    async def start() -> None:
                        opened.extend(
                            await session.start_all(
                                [child(i) for i in range(3)], lease=lease
                            )
                        )

                    tasks.start_soon(start)
                    await anyio.wait_all_tasks_blocked()
                    assert lease.held
                    assert session.phase == "starting"
                    go.set()
                assert opened == [0, 1, 2]
                assert not lease.held
                assert ended == []
            await session.quiet()
            assert sorted(x for x in ended if x is not None) == [0, 1, 2]
            assert_quiescent(gate, sessions)

    async def test_ends_the_siblings_of_one_that_failed(self) -> None:
        """peers-33: One failing child ends its siblings, also those still opening."""
        ended = list[str]()

        async def opened() -> str:
            return "opened"

        async def failing() -> str:
            raise LookupError("no such model")

        async def end(value: str | None) -> None:
            ended.append(str(value))

        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                lease = await gate.admit()
                starts = [(opened, end), (failing, end), (opened, end)]
                with pytest.raises(LookupError, match="no such model"):
                    await session.start_all(starts, lease=lease)
                assert not lease.held
                await anyio.wait_all_tasks_blocked()
                assert ended == ["opened", "opened"]
                assert session.outcome is None
                # It has an owner, and is quiet no earlier than that has left.
                assert session.phase == "started"
                with anyio.move_on_after(0.01) as waited:
                    await session.quiet()
                assert waited.cancelled_caught
            await session.quiet()
            assert ended == ["opened", "opened"]
            assert_quiescent(gate, sessions)

    async def test_raises_a_cancellation_at_once_and_ends_all(self) -> None:
        """The caller leaves at once; what opens later is ended when it has opened."""
        ended, go = list[str](), anyio.Event()

        async def slow() -> str:
            await go.wait()
            return "slow"

        async def end(value: str | None) -> None:
            ended.append(str(value))

        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            lease = await gate.admit()

            async def owner() -> None:
                with session:
                    await session.start_all([(slow, end), (slow, end)], lease=lease)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(owner)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            assert session.outcome == "cancelled"
            assert ended == []
            go.set()
            await session.quiet()
            assert ended == ["slow", "slow"]
            assert not lease.held
            assert_quiescent(gate, sessions)

    @virtual
    async def test_waits_for_no_other_where_one_is_late(self) -> None:
        """The first to be cut at the timeout tells the caller, others may be deaf."""
        go = anyio.Event()

        async def deaf() -> str:
            with anyio.CancelScope(shield=True):
                await go.wait()
            return "late"

        async with SessionRegistry() as sessions:
            session, began = sessions.open("a"), anyio.current_time()
            pairs = [(anyio.sleep_forever, None), (deaf, None)]
            try:
                with anyio.fail_after(100), pytest.raises(StartTimeout):
                    await session.start_all(pairs, timeout=5)
                assert anyio.current_time() - began == pytest.approx(5)
            finally:
                session.close()
                go.set()

    async def test_opens_nothing_where_nothing_is_asked(self) -> None:
        """An empty list of starts opens nothing, and does not wait."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session, anyio.fail_after(1):
                assert await session.start_all([]) == []

    async def test_refuses_where_the_session_is_over(self) -> None:
        """Nothing is opened for a session that is closed, and the lease comes back."""
        gate = Gate(slots=1)

        async def open_() -> None:
            raise AssertionError("opened")

        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            session.close()
            lease = await gate.admit()
            with pytest.raises(SessionEnded):
                await session.start_all([(open_, None), (open_, None)], lease=lease)
            assert not lease.held
            assert_quiescent(gate, sessions)


@pytest.mark.anyio
class TestQuarantine:
    """Sessions whose END failed."""

    async def test_remembers_the_session_of_a_failed_end(self) -> None:
        """fault-10: The id of a session whose END failed is not given out unseen."""

        async def open_() -> str:
            return "stream"

        async def end(_: str | None) -> None:
            raise OSError("engine does not answer")

        async with SessionRegistry(max_quarantined=2) as sessions:
            for name in ("a", "b", "c"):
                with sessions.open(name) as session:
                    await session.start(open_, end=end)
                await session.quiet()
            assert sessions.quarantined() == ["b#2", "c#3"]
            with pytest.raises(SessionExists, match="END failed"):
                await sessions.open_when_free("c")
            # Keys never repeat: an engine that goes by them may take the id again.
            sessions.open("c").close()
            sessions.release("c#3")
            (await sessions.open_when_free("c")).close()
            sessions.release(*sessions.quarantined())
            assert sessions.quarantined() == []
            assert sessions.statistics().ends_failed == 3


@pytest.mark.anyio
class TestLost:
    """Sessions that were opened, and dropped before they were entered."""

    @pytest.mark.parametrize("where", ["here", "in another thread"])
    async def test_are_closed_and_reported(self, where: str) -> None:
        """The id is free again, the payload gone, and a warning issued."""
        seen = RecordingObserver()
        async with SessionRegistry(observer=seen) as sessions:
            held = [sessions.open("a")]
            lost = "session 'a#1' was dropped"
            if where == "here":
                with pytest.warns(ResourceWarning, match=lost):
                    held.clear()
            else:
                with pytest.warns(ResourceWarning, match=lost):
                    await anyio.to_thread.run_sync(held.clear)
            with anyio.fail_after(2):
                (await sessions.open_when_free("a")).close()
            outcomes = [event.outcome for event in seen.of(SessionClosed)]
            assert outcomes == ["cancelled", "completed"]

    async def test_are_counted_until_they_are_closed(self) -> None:
        """Found by the collector, with a payload, they balance at every moment."""
        async with SessionRegistry() as sessions:
            sessions.open("a").box(b"image", nbytes=5)  # a circle
            with pytest.warns(ResourceWarning, match="was dropped"):
                gc.collect()
            now = sessions.statistics()
            assert now.opened == now.live + sum(now.outcomes.values()) == 1
            assert sessions.live() == []
            with pytest.raises(SessionNotFound):
                sessions.get("a")
            await sessions.drain(1)
            assert sessions.statistics().outcomes["cancelled"] == 1
            assert_quiescent(sessions)

    async def test_are_not_those_that_are_at_work(self) -> None:
        """A session that was entered or started needs no other reference."""

        async def end(_stream: object) -> None:
            ended.append("a")

        ended: list[str] = []
        async with SessionRegistry() as sessions:
            await sessions.open("a").start(nothing, end=end)
            with sessions.open("b"):
                gc.collect()
                await checkpoint()
                assert [session.id for session in sessions.live()] == ["a", "b"]
            await sessions.cancel("a")
            assert ended == ["a"]


class Interrupt(BaseException):
    """As of Ctrl-C while an observer runs."""


@pytest.mark.anyio
class TestInterrupted:
    """An observer may raise what no library can catch; state is whole by then."""

    async def test_leaves_its_block_whole(self) -> None:
        """The session is closed, its boxes are empty, and the scopes are in order."""

        def look(event: object) -> None:
            if isinstance(event, SessionClosed | PayloadReleased):
                raise Interrupt

        async with SessionRegistry(observer=look) as sessions:
            with pytest.raises(Interrupt):
                with sessions.open("a") as session:
                    boxes = [session.box(b"x", nbytes=1) for _ in range(3)]
            assert all(box.taken for box in boxes)
            assert (session.outcome, session.phase) == ("completed", "quiet")
            with anyio.move_on_after(0) as scope:
                await anyio.sleep_forever()
            assert scope.cancelled_caught
            assert_quiescent(sessions)

    async def test_stops_its_owner(self) -> None:
        """All sessions are ended, and their owners leave."""

        def look(event: object) -> None:
            if isinstance(event, SessionClosed):
                raise Interrupt

        async with SessionRegistry(observer=look) as sessions:
            ended: list[str] = []

            async def owner(name: str) -> None:
                with pytest.raises(SessionEnded), sessions.open(name):
                    await anyio.sleep_forever()
                ended.append(name)

            async with anyio.create_task_group() as tasks:
                for name in "abc":
                    tasks.start_soon(owner, name)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(Interrupt):
                    sessions.close_all()
            assert sorted(ended) == ["a", "b", "c"]
            assert_quiescent(sessions)

    async def test_hands_off_and_ends(self) -> None:
        """A start has settled, its caller returns, and END is sent."""
        gate, ended = Gate(slots=1), list[object]()

        def look(event: object) -> None:
            if isinstance(event, StartSettled):
                raise Interrupt

        async def end(stream: object) -> None:
            ended.append(stream)

        with pytest.raises(Interrupt):
            async with SessionRegistry(observer=look) as sessions:
                with sessions.open("a") as session:
                    lease = await gate.admit()
                    await session.start(nothing, end=end, lease=lease)
                    await anyio.sleep_forever()
        assert ended == ["stream"]
        assert_quiescent(gate, sessions)

    async def test_closes_its_stream(self) -> None:
        """A stream that ends is closed, whatever is made of the news."""

        def look(event: object) -> None:
            if isinstance(event, StreamEnded):
                raise Interrupt

        async def source() -> AsyncGenerator[int, None]:
            yield 1

        async with SessionRegistry(observer=look) as sessions:
            with sessions.open("a") as session:
                stream = session.stream(source())
                await anext(stream)
                with pytest.raises(Interrupt):
                    await anext(stream)
                assert stream.closed

    async def test_leaves_the_registry_whole(self) -> None:
        """Leaving the registry waits for its tasks, and its scopes are in order."""

        def look(event: object) -> None:
            if isinstance(event, SessionClosed):
                raise Interrupt

        with pytest.raises(Interrupt):
            async with SessionRegistry(observer=look) as sessions:
                held = [sessions.open(name) for name in "ab"]
        assert {session.phase for session in held} == {"quiet"}
        with anyio.move_on_after(0) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert_quiescent(sessions)


@pytest.mark.anyio
async def test_refuses_an_outcome_that_does_not_exist() -> None:
    """A misspelt outcome is said so, and the session stays open to be closed."""
    async with SessionRegistry() as sessions:
        session = sessions.open("a")
        with pytest.raises(ValueError, match="use one of completed"):
            session.close("finished")  # type: ignore[arg-type]
        assert session.outcome is None
        assert session.close()
        assert_quiescent(sessions)


@pytest.mark.anyio
@pytest.mark.parametrize("leave", ["cancelled_as", "error"])
async def test_leaves_a_block_also_by_an_outcome_that_does_not_exist(
    leave: str,
) -> None:
    """An unusual way to leave is counted as failed, and the block is left."""
    async with SessionRegistry() as sessions:
        with anyio.CancelScope() as scope:
            if leave == "error":
                with pytest.raises(SessionEnded), sessions.open("s"):
                    raise SessionEnded("odd", outcome="odd")
            else:
                with sessions.open("s") as session:
                    session.cancelled_as = "odd"  # type: ignore[assignment]
                    scope.cancel()
                    await checkpoint()
        assert sessions.statistics().outcomes["failed"] == 1
        assert_quiescent(sessions)


@pytest.mark.anyio
@pytest.mark.parametrize("nbytes", ["1", None, 1.5, -1])
async def test_boxes_whole_sizes_only(nbytes: Any) -> None:
    """A size that cannot be added up is refused before it is counted."""
    async with SessionRegistry() as sessions:
        with sessions.open("s") as session:
            with pytest.raises(ValueError, match="nbytes"):
                session.box(b"", nbytes=nbytes)
            assert sessions.statistics().payloads == 0
