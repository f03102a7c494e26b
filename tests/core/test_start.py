"""Supervised start: begun once, settled always, ended once and only afterwards."""

import asyncio
import contextlib
import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import (
    Gate,
    Session,
    SessionEnded,
    SessionRegistry,
    StartTimeout,
    Stream,
    StreamTimeout,
    managed,
)
from lifecycle.events import EndFailed, SessionClosed, StartSettled
from lifecycle.testing import (
    Attempt,
    RecordingObserver,
    assert_quiescent,
    cancel_everywhere,
)

virtual = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


async def one_item() -> AsyncIterator[int]:
    yield 1


class Engine:
    """An engine that records calls, and checks their order."""

    def __init__(self, steps: int = 2) -> None:
        self.steps = steps
        self.begun = self.opened = self.ended = 0
        self.ended_with: list[object] = []
        self.settled = anyio.Event()

    async def open(self) -> str:
        self.begun += 1
        for _ in range(self.steps):
            await checkpoint()
        self.opened += 1
        return "stream"

    async def end(self, stream: object) -> None:
        self.ended_with.append(stream)
        assert self.begun == 1, "ended before it was begun"
        await checkpoint()
        self.ended += 1

    def assert_quiet(self) -> None:
        """Whatever was begun was ended exactly once, and nothing else."""
        assert self.begun <= 1
        assert len(self.ended_with) == self.begun
        assert self.ended_with in ([], [None], ["stream"])


def test_leaks_nothing_when_the_caller_is_cancelled_anywhere() -> None:
    """Cancelled anywhere, in any way: the lease is back, END sent once (fault-3)."""

    async def scenario(attempt: Attempt) -> None:
        seen = RecordingObserver()
        gate = Gate(slots=1)
        engine = Engine()
        async with SessionRegistry(observer=seen) as sessions:

            async def request() -> None:
                with sessions.open("a") as session:
                    box = session.box(b"x", nbytes=1)
                    lease = await gate.admit()
                    await session.start(
                        lambda: open_(box), end=engine.end, lease=lease, timeout=5
                    )
                    assert not lease.held
                    await checkpoint()

            async def open_(box: Any) -> str:
                box.clear()
                return await engine.open()

            outcome = await attempt(request())
            with anyio.fail_after(2):
                while sessions.statistics().closing:
                    await checkpoint()
            engine.assert_quiet()
            assert engine.opened == engine.begun
            assert_quiescent(gate, sessions)
            assert [e.outcome for e in seen.of(SessionClosed)] == [outcome]

    points = cancel_everywhere(scenario, double=True)
    assert min(points.values()) >= 2


def test_survives_a_native_cancel_of_its_own_task() -> None:
    """A native cancel of the registry's task at any point: END is tried once."""

    async def main(at: int) -> bool:
        engine = Engine(steps=3)
        async with SessionRegistry() as sessions:
            before = asyncio.all_tasks()
            got: list[object] = []

            async def request() -> None:
                try:
                    with sessions.open("a") as session:
                        got.append(await session.start(engine.open, end=engine.end))
                        await checkpoint()
                except SessionEnded as ended:
                    got.append(ended.outcome)

            request_task = asyncio.create_task(request())
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the task has begun: else no code of ours would run
            for _ in range(at):
                await asyncio.sleep(0)
            mine = asyncio.all_tasks() - before - {request_task}
            for task in mine:
                task.cancel()
            async with asyncio.timeout(2):
                await request_task
            while sessions.statistics().closing:
                await asyncio.sleep(0)
            # The registry and its other sessions go on.
            with sessions.open("b") as session:
                assert await session.start(Engine().open) == "stream"
            await session.quiet()
            assert_quiescent(sessions)
        assert got
        assert len(engine.ended_with) <= 1
        if engine.opened:
            assert engine.ended_with
        return bool(mine)

    for at in range(40):
        if not asyncio.run(main(at)):
            break
    assert at > 4


def test_stops_the_block_where_its_own_task_is_cancelled_natively() -> None:
    """The owner, which waits for its stream, is woken: its stream is being ended."""

    async def main() -> None:
        engine = Engine()
        async with SessionRegistry() as sessions:
            before = asyncio.all_tasks()
            with pytest.raises(SessionEnded) as caught:
                with sessions.open("a") as session:
                    await session.start(engine.open, end=engine.end)
                    for task in asyncio.all_tasks() - before:
                        task.cancel()
                    async with asyncio.timeout(60):
                        await anyio.sleep_forever()
            assert caught.value.outcome == "cancelled"
            await session.quiet()
        assert len(engine.ended_with) == 1

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_tells_the_caller_where_the_task_never_ran() -> None:
    """Cancelled natively before its first step, a start settles with the registry."""

    async def main() -> None:
        gate = Gate(slots=1)
        outcomes: list[object] = []

        async def serve() -> None:
            async with SessionRegistry() as registry:
                sessions.append(registry)
                await anyio.sleep_forever()

        async def request() -> None:
            lease = await gate.admit()
            with pytest.raises(SessionEnded) as ended, sessions[0].open("a") as session:
                await session.start(Engine().open, lease=lease)
            outcomes.append(ended.value.outcome)

        sessions: list[SessionRegistry] = []
        serving = asyncio.create_task(serve())
        await asyncio.sleep(0.001)
        before = asyncio.all_tasks()
        requesting = asyncio.create_task(request())
        before.add(requesting)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        async with asyncio.timeout(2):
            await requesting
            await asyncio.wait([serving])
        assert outcomes == ["shutdown"]
        assert_quiescent(gate, sessions[0])

    asyncio.run(main())
    gc.collect()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_settles_each_of_several_where_one_task_never_ran() -> None:
    """Its sibling is opened and ended as ever, and both settle once."""

    async def main() -> None:
        gate, seen, engine = Gate(slots=1), RecordingObserver(), Engine()
        ended: list[str] = []

        async def serve(sessions: SessionRegistry) -> None:
            async with sessions:
                entered.set()
                await anyio.sleep_forever()

        async def request() -> None:
            lease = await gate.admit()
            pairs = [(engine.open, engine.end), (Engine().open, Engine().end)]
            with pytest.raises(SessionEnded) as ended_by, sessions.open("a") as session:
                await session.start_all(pairs, lease=lease)
            ended.append(ended_by.value.outcome)

        sessions, entered = SessionRegistry(observer=seen), asyncio.Event()
        serving = asyncio.create_task(serve(sessions))
        await entered.wait()
        requesting = asyncio.create_task(request())
        await asyncio.sleep(0)
        starts = [t for t in asyncio.all_tasks() if "StartTask.run" in t.get_name()]
        assert len(starts) == 2
        starts[0].cancel()
        async with asyncio.timeout(2):
            await requesting
            await asyncio.wait([serving])
        assert ended == ["shutdown"]
        assert len(seen.of(StartSettled)) == 2
        engine.assert_quiet()
        assert_quiescent(gate, sessions)

    asyncio.run(main())
    gc.collect()


def test_watches_on_where_every_task_is_cancelled_natively() -> None:
    """An END that hangs has its deadline also while a server is torn down."""

    async def hang(_stream: object) -> None:
        await anyio.sleep(1000)

    async def main() -> None:
        async with SessionRegistry(end_timeout=0.01) as sessions:
            await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
            with sessions.open("a") as session:
                assert await session.start(Engine().open, end=hang) == "stream"
            async with asyncio.timeout(5):
                await session.quiet()
            assert sessions.statistics().ends_failed == 1

    asyncio.run(main())


def test_goes_with_a_loop_where_it_was_not_left() -> None:
    """As a fixture that is never finalised: the loop ends all the same."""
    kept: list[SessionRegistry] = []

    async def main() -> None:
        kept.append(await SessionRegistry().__aenter__())

    looping = threading.Thread(target=asyncio.run, args=[main()], daemon=True)
    looping.start()
    looping.join(5)
    assert not looping.is_alive()


@virtual
async def test_late_start_has_its_moment_though_many_are_watched(
    anyio_backend: object,
) -> None:
    """What it says to its cancellation is heard, also where the watchdog tidies up."""

    async def open_() -> str:
        try:
            await anyio.sleep(1000)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                raise LookupError("mine")
        return "never"

    async def tidy(sessions: SessionRegistry, watched: list[object]) -> None:
        await anyio.sleep(0.03)

        async def items() -> AsyncIterator[int]:
            yield 1

        with sessions.open("other") as session:
            watched += [session.stream(items(), idle=1000) for _ in range(300)]

    async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
        watched: list[object] = []
        tasks.start_soon(tidy, sessions, watched)
        with sessions.open("a") as session, pytest.raises(StartTimeout) as caught:
            await session.start(open_, timeout=0.01)
        assert isinstance(caught.value.__cause__, LookupError)
        assert len(watched) == 300


def test_asks_no_eager_factory_for_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that began within its caller could not be withheld."""
    asked: list[str] = []

    def eager(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        asked.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(eager)
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                assert await session.start(Engine().open) == "stream"

    asyncio.run(main())
    assert "StartTask.run" in asked
    asked.clear()
    monkeypatch.setattr(asyncio, "eager_task_factory", eager, raising=False)
    asyncio.run(main())
    assert asked
    assert "StartTask.run" not in asked


@pytest.mark.anyio
async def test_shows_how_far_a_start_has_come() -> None:
    """A start says what it is, and whether it was closed."""

    async def end(_stream: object) -> None: ...

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            await session.start(Engine().open, end=end)
            (start,) = session._starts
            assert repr(start) == "<StartTask started>"
        assert repr(start) == "<StartTask started, closed>"


class Abort(BaseException):
    """Neither an error nor a cancellation, like KeyboardInterrupt."""


@pytest.mark.anyio
async def test_raises_several_aborts_as_a_group() -> None:
    """Only where there really are several, the registry raises a group."""
    together = anyio.Event()

    async def open_() -> str:
        await together.wait()
        raise Abort

    with pytest.raises(BaseExceptionGroup) as caught:
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            for name in "ab":
                tasks.start_soon(sessions.open(name).start, open_)
            await anyio.wait_all_tasks_blocked()
            together.set()
            await anyio.sleep_forever()
    assert caught.group_contains(Abort, depth=1)
    assert_quiescent(sessions)


@pytest.mark.anyio
async def test_raises_an_abort_though_it_is_cancelled_itself() -> None:
    """What stops the program is not lost where the server is cancelled as well."""
    opening, go_on = anyio.Event(), anyio.Event()

    async def open_() -> str:
        opening.set()
        with anyio.CancelScope(shield=True):
            await go_on.wait()
        raise Abort

    async def serve() -> None:
        with anyio.CancelScope() as scope:
            async with SessionRegistry() as sessions:
                tasks.start_soon(request, sessions)
                await opening.wait()
                tasks.start_soon(cancel, scope)

    async def request(sessions: SessionRegistry) -> None:
        with pytest.raises(SessionEnded), sessions.open("a") as session:
            await session.start(open_)

    async def cancel(scope: anyio.CancelScope) -> None:
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        go_on.set()

    with pytest.raises(BaseExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
    assert caught.group_contains(Abort)


@pytest.mark.anyio
async def test_lets_a_block_go_on_whose_start_was_aborted() -> None:
    """Its session is ended, but the owner may still clean up."""
    noted: list[object] = []

    async def open_() -> str:
        raise Abort

    async def serve() -> None:
        with pytest.raises(Abort):
            async with SessionRegistry() as sessions:
                tasks.start_soon(request, sessions)
                await anyio.sleep_forever()

    async def request(sessions: SessionRegistry) -> None:
        with sessions.open("a") as session:
            with pytest.raises(SessionEnded):
                await session.start(open_)
            for _ in range(10):
                await checkpoint()
            noted.append(session.outcome)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
    assert noted == ["shutdown"]


@pytest.mark.anyio
async def test_ends_what_was_aborted() -> None:
    """An exception that stops the program stops the registry, after one END."""
    engine = Engine()

    async def open_() -> str:
        await engine.open()
        raise Abort

    with pytest.raises(Abort):
        async with SessionRegistry() as sessions:
            with pytest.raises(StartTimeout), sessions.open("a") as session:
                await session.start(open_, end=engine.end)
            await anyio.sleep_forever()
    assert engine.ended_with == [None]
    assert_quiescent(sessions)


@pytest.mark.anyio
class TestStart:
    async def test_returns_what_was_opened(self) -> None:
        """The caller gets the stream, and END the same one, once, when all is over."""
        engine = Engine()
        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                lease = await gate.admit()
                assert session.phase == "open"
                stream = await session.start(engine.open, end=engine.end, lease=lease)
                assert (stream, session.phase, lease.held) == (
                    "stream",
                    "started",
                    False,
                )
                assert engine.ended == 0
            assert session.phase == "closing"
            await session.quiet()
            assert session.phase == "quiet"
            assert engine.ended_with == ["stream"]
            assert_quiescent(gate, sessions)

    async def test_raises_what_open_raised(self) -> None:
        """An error is raised as it was; nothing is ended; the outcome is failed."""
        engine = Engine()
        gate = Gate(slots=1)
        error = OSError("bad image")

        async def open_() -> str:
            await checkpoint()
            raise error

        async with SessionRegistry() as sessions:
            with pytest.raises(OSError, match="bad image") as caught:
                with sessions.open("a") as session:
                    lease = await gate.admit()
                    await session.start(open_, end=engine.end, lease=lease)
            assert caught.value is error
            await session.quiet()
            assert session.outcome == "failed"
            assert engine.ended_with == []
            assert_quiescent(gate, sessions)

    async def test_is_withheld_from_a_session_that_closed_first(self) -> None:
        """Closed before its task ran, a start never begins and nothing is ended."""
        engine = Engine()
        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            session = sessions.open("a")

            async def owner() -> None:
                with pytest.raises(SessionEnded), session:
                    lease = await gate.admit()
                    await session.start(engine.open, end=engine.end, lease=lease)

            async def close() -> None:
                session.stop("client_gone")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(owner)
                tasks.start_soon(close)
            await session.quiet()
            assert session.outcome == "client_gone"
            assert engine.begun == 0
            assert_quiescent(gate, sessions)

    async def test_refuses_to_start_what_is_over(self) -> None:
        """A closed session cannot start, and gives the lease back."""
        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                session.close("client_gone")
                lease = await gate.admit()
                with pytest.raises(SessionEnded) as ended:
                    await session.start(Engine().open, lease=lease)
                assert ended.value.outcome == "client_gone"
            assert_quiescent(gate, sessions)

    async def test_starts_once(self) -> None:
        """A second start is a mistake; its lease is given back, the first goes on."""
        engine = Engine()
        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                await session.start(engine.open, end=engine.end)
                lease = await gate.admit()
                with pytest.raises(RuntimeError, match="was started before"):
                    await session.start(engine.open, end=engine.end, lease=lease)
                assert not lease.held
            await session.quiet()
            engine.assert_quiet()
            assert_quiescent(gate, sessions)

    async def test_needs_a_registry_that_runs(self) -> None:
        """After its registry is gone a session cannot start anything."""
        gate = Gate(slots=1)
        async with SessionRegistry() as sessions:
            session = sessions.open("a")
        assert session.outcome == "shutdown"
        lease = await gate.admit()
        with pytest.raises(SessionEnded):
            await session.start(Engine().open, lease=lease)
        assert_quiescent(gate, sessions)

    async def test_goes_on_without_its_caller(self) -> None:
        """The caller's cancellation is raised at once; the start goes on, then END."""
        go_on = anyio.Event()
        engine = Engine()
        scope = anyio.CancelScope()

        async def open_() -> str:
            scope.cancel()
            await go_on.wait()
            return await engine.open()

        async with SessionRegistry() as sessions:
            with scope, sessions.open("a") as session:
                await session.start(open_, end=engine.end)
            assert scope.cancelled_caught
            assert session.outcome == "cancelled"
            assert engine.opened == 0
            go_on.set()
            await session.quiet()
            assert (engine.opened, engine.ended_with) == (1, ["stream"])

    async def test_ends_only_after_it_settled(self) -> None:
        """A session cancelled by id while it starts ends after that (fault-4)."""
        go_on, opening = anyio.Event(), anyio.Event()
        order: list[str] = []

        async def open_() -> str:
            opening.set()
            await go_on.wait()
            order.append("opened")
            return "stream"

        async def end(stream: object) -> None:
            assert stream == "stream"
            order.append("ended")

        async def owner() -> None:
            with pytest.raises(SessionEnded) as ended, sessions.open("a") as session:
                await session.start(open_, end=end)
            assert ended.value.outcome == "cancelled"
            order.append("raised")

        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            tasks.start_soon(owner)
            await opening.wait()
            tasks.start_soon(sessions.cancel, "a")
            await anyio.wait_all_tasks_blocked()
            assert order == ["raised"]
            go_on.set()
        assert order == ["raised", "opened", "ended"]

    async def test_counts_an_end_that_fails(self) -> None:
        """An END that raises breaks nothing, is counted and reported (fault-10)."""
        seen = RecordingObserver()

        async def end(_stream: object) -> None:
            raise OSError("socket")

        async with SessionRegistry(observer=seen) as sessions:
            with sessions.open("a") as session:
                await session.start(Engine().open, end=end)
            await session.quiet()
            await checkpoint()
            assert sessions.statistics().ends_failed == 1
            assert [event.error for event in seen.of(EndFailed)] == ["OSError"]
            assert_quiescent(sessions)

    @pytest.mark.parametrize("where", ["open", "end"])
    async def test_outlives_a_cancellation_that_leaks_from_user_code(
        self, where: str, anyio_backend_name: str
    ) -> None:
        """A CancelledError of some other task, raised by open_ or end, stays there."""
        if anyio_backend_name != "asyncio":
            pytest.skip("trio has no cancellation without a scope")

        async def leak(_stream: object = None) -> str:
            other = asyncio.create_task(asyncio.sleep(10))
            other.cancel()
            await other
            raise AssertionError("never")

        engine = Engine()

        async def open_() -> str:
            await engine.open()
            return await leak() if where == "open" else "stream"

        async with SessionRegistry() as sessions:
            with anyio.fail_after(2):
                try:
                    with sessions.open("a") as session:
                        await session.start(
                            open_,
                            end=leak if where == "end" else engine.end,
                        )
                except (SessionEnded, StartTimeout):
                    assert where == "open"
                await session.quiet()
            # All others go on undisturbed.
            await checkpoint()
            with sessions.open("b") as session:
                assert await session.start(Engine().open) == "stream"
            await session.quiet()
            assert sessions.statistics().ends_failed == (where == "end")
            assert engine.ended_with == ([None] if where == "open" else [])
            assert_quiescent(sessions)

    async def test_keeps_nothing_of_its_caller(self, no_collector: None) -> None:
        """What open_ closes over is gone once it has returned."""

        class Payload: ...

        payload = Payload()
        ref = weakref.ref(payload)

        def opener(payload: object) -> Callable[[], Awaitable[str]]:
            async def open_() -> str:
                await checkpoint()
                assert payload
                return "stream"

            return open_

        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                await session.start(opener(payload))
                del payload
                assert ref() is None

    @pytest.mark.parametrize("way", ["success", "error", "cancelled"])
    async def test_is_freed_without_a_collector(
        self, no_collector: None, way: str
    ) -> None:
        """A session that is quiet and forgotten leaves no cycle to be collected."""
        refs: list[weakref.ref[Session]] = []

        async def open_() -> str:
            await checkpoint()
            if way == "error":
                raise OSError
            return "stream"

        async def request(sessions: SessionRegistry) -> None:
            with sessions.open("a") as session:
                refs.append(weakref.ref(session))
                session.box(b"x")
                if way == "cancelled":
                    sessions.get("a").stop()
                await session.start(open_, end=Engine().end)

        async with SessionRegistry() as sessions:
            with contextlib.suppress(OSError, SessionEnded):
                await request(sessions)
            with anyio.fail_after(2):
                while sessions.statistics().closing:
                    await checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert refs[0]() is None, gc.get_referrers(refs[0]())

    @pytest.mark.parametrize("left_early", [False, True])
    async def test_is_freed_with_a_stream_that_has_no_end(
        self, no_collector: None, left_early: bool
    ) -> None:
        """A stream refers to its session, which keeps it for an END alone."""
        refs: list[weakref.ref[Session]] = []
        scope = anyio.CancelScope()

        async def request(sessions: SessionRegistry) -> None:
            with scope, sessions.open("a") as session:

                async def open_() -> Stream[int]:
                    if left_early:
                        scope.cancel()
                        for _ in range(5):
                            await checkpoint()
                    return session.stream(one_item())

                refs.append(weakref.ref(session))
                async with await session.start(open_) as stream:
                    assert [item async for item in stream] == [1]

        async with SessionRegistry() as sessions:
            await request(sessions)
            with anyio.fail_after(2):
                while sessions.statistics().closing:
                    await checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert refs[0]() is None, gc.get_referrers(refs[0]())

    async def test_frees_an_error_that_came_too_late(self, no_collector: None) -> None:
        """An error of a start after its timeout is not kept."""

        class Failure(Exception): ...

        refs: list[weakref.ref[Failure]] = []
        timed_out = anyio.Event()

        async def open_() -> str:
            with anyio.CancelScope(shield=True):
                await timed_out.wait()
            error = Failure()
            refs.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

        async with SessionRegistry() as sessions:
            session = sessions.open("a")
            with session, pytest.raises(StartTimeout):
                await session.start(open_, timeout=0.0)
            timed_out.set()
            with anyio.fail_after(2):
                await session.quiet()
            assert len(refs) == 1
            assert refs[0]() is None

    async def test_frees_the_error_of_a_caller_that_left(
        self, no_collector: None
    ) -> None:
        """What a start raised whose caller had left is in no cycle with the start."""

        class Failure(Exception): ...

        refs: list[weakref.ref[Failure]] = []
        left = anyio.Event()

        async def open_() -> str:
            scope.cancel()
            await left.wait()
            error = Failure()
            refs.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

        async def request(sessions: SessionRegistry) -> None:
            with scope, sessions.open("a") as session:
                await session.start(open_)

        scope = anyio.CancelScope()
        async with SessionRegistry() as sessions:
            await request(sessions)
            left.set()
            with anyio.fail_after(2):
                while sessions.statistics().closing:
                    await checkpoint()
            assert len(refs) == 1
            assert refs[0]() is None


@virtual
@pytest.mark.anyio
class TestDeadlines:
    async def test_gives_up_in_time_and_ends_by_key(self) -> None:
        """A start that takes too long is a deadline, and is ended with None."""
        engine = Engine()
        gate = Gate(slots=1)
        seen = RecordingObserver()

        async def open_() -> str:
            engine.begun += 1
            await anyio.sleep(100)
            return "stream"

        async with SessionRegistry(observer=seen) as sessions:
            began = anyio.current_time()
            with pytest.raises(StartTimeout, match="within 7 s"):
                with sessions.open("a") as session:
                    lease = await gate.admit()
                    await session.start(open_, end=engine.end, lease=lease, timeout=7)
            assert anyio.current_time() - began == pytest.approx(7)
            assert session.outcome == "deadline"
            await session.quiet()
            assert engine.ended_with == [None]
            assert [event.how for event in seen.of(StartSettled)] == ["unknown"]
            assert_quiescent(gate, sessions)

    @pytest.mark.parametrize("timeout", [math.nan, None])
    async def test_refuses_a_timeout_that_is_no_number(self, timeout: Any) -> None:
        """It is the mistake of one caller, and the registry goes on for all others."""
        gate, engine = Gate(slots=1), Engine()
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                lease = gate.try_admit()
                with pytest.raises((ValueError, TypeError), match="number"):
                    await session.start(engine.open, lease=lease, timeout=timeout)
                assert not lease.held
            with sessions.open("b") as session:
                assert await session.start(engine.open, end=engine.end) == "stream"
            await session.quiet()
            engine.assert_quiet()
            assert_quiescent(gate, sessions)

    async def test_ends_a_start_with_a_deadline_reported_as_another_error(self) -> None:
        """A client may turn a cancellation into its own error: outcome unknown."""
        engine = Engine()

        async def open_() -> str:
            engine.begun += 1
            try:
                await anyio.sleep(100)
            except BaseException:  # noqa: BLE001 - as such clients do
                raise OSError("connection lost while cancelling") from None
            return "stream"

        async with SessionRegistry() as sessions:
            with pytest.raises(StartTimeout) as caught:
                with sessions.open("a") as session:
                    await session.start(open_, end=engine.end, timeout=7)
            assert isinstance(caught.value.__cause__, OSError)
            await session.quiet()
            assert session.outcome == "deadline"
            assert engine.ended_with == [None]

    async def test_takes_a_result_that_arrives_at_the_last_moment(self) -> None:
        """What was opened in spite of the deadline, at once, belongs to the caller."""
        engine = Engine()

        async def open_() -> str:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(7.05)
            return await engine.open()

        engine.steps = 0
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                assert await session.start(open_, end=engine.end, timeout=7) == "stream"
            await session.quiet()
            engine.assert_quiet()

    @pytest.mark.parametrize("how", ["opens", "fails"])
    async def test_tells_the_caller_in_time_of_what_cannot_be_cancelled(
        self, how: str
    ) -> None:
        """A thread goes on; its caller does not wait, and END and lease wait for it."""
        engine, gate, seen = Engine(), Gate(slots=1), RecordingObserver()

        async def open_() -> str:
            engine.begun += 1
            with anyio.CancelScope(shield=True):
                await anyio.sleep(100)
            if how == "fails":
                raise OSError("reset")
            return "stream"

        async with SessionRegistry(observer=seen) as sessions:
            began = anyio.current_time()
            with pytest.raises(StartTimeout, match="within 7 s"):
                with sessions.open("a") as session:
                    lease = await gate.admit()
                    await session.start(open_, end=engine.end, lease=lease, timeout=7)
            assert anyio.current_time() - began <= 7.2
            assert session.outcome == "deadline"
            with anyio.move_on_after(90):
                await session.quiet()
            assert (lease.held, session.phase, engine.ended_with) == (
                True,
                "closing",
                [],
            )
            await session.quiet()
            assert anyio.current_time() - began == pytest.approx(100)
            known = {"opens": ("started", "stream"), "fails": ("unknown", None)}[how]
            assert [event.how for event in seen.of(StartSettled)] == [known[0]]
            assert engine.ended_with == [known[1]]
            assert_quiescent(gate, sessions)

    async def test_tells_the_caller_at_once_that_others_closed_the_session(
        self,
    ) -> None:
        """Also one that is in no with block; END comes after the start has settled."""
        engine = Engine(steps=0)

        async def open_() -> str:
            await anyio.sleep(5)
            return await engine.open()

        async with SessionRegistry() as sessions:
            session = sessions.open("a")

            async def stop() -> None:
                await anyio.sleep(1)
                session.stop("client_gone")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop)
                began = anyio.current_time()
                with pytest.raises(SessionEnded) as ended:
                    await session.start(open_, end=engine.end)
            assert ended.value.outcome == "client_gone"
            assert anyio.current_time() - began == pytest.approx(1)
            await session.quiet()
            assert anyio.current_time() - began == pytest.approx(5)
            engine.assert_quiet()

    async def test_ends_what_timed_out_while_its_session_stays_open(self) -> None:
        """The caller may go on with the session; END is sent at once."""
        engine = Engine()

        async def open_() -> str:
            engine.begun += 1
            await anyio.sleep(100)
            return "stream"

        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                with pytest.raises(StartTimeout):
                    await session.start(open_, end=engine.end, timeout=7)
                await anyio.sleep(1)
                assert (session.outcome, engine.ended_with) == (None, [None])

    async def test_takes_its_time_without_a_limit(self) -> None:
        """An infinite timeout is none."""

        async def open_() -> str:
            await anyio.sleep(10_000)
            return "stream"

        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                assert await session.start(open_, timeout=math.inf) == "stream"

    async def test_gives_an_end_its_time_and_no_more(self) -> None:
        """An END that hangs is cut, counted, and delays no other session (fault-10)."""
        seen = RecordingObserver()

        async def end(_stream: object) -> None:
            await anyio.sleep(1000)

        async with SessionRegistry(observer=seen, end_timeout=3) as sessions:
            with sessions.open("a") as session:
                await session.start(Engine().open, end=end)
            began = anyio.current_time()
            await session.quiet()
            assert anyio.current_time() - began == pytest.approx(3)
            await checkpoint()
            assert sessions.statistics().ends_failed == 1
            assert [event.error for event in seen.of(EndFailed)] == ["StartTimeout"]

    async def test_cuts_a_start_at_shutdown(self) -> None:
        """Leaving the registry does not wait for a start that hangs (fault-60)."""
        engine = Engine()

        async def open_() -> str:
            engine.begun += 1
            await anyio.sleep(1000)
            return "stream"

        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            async with SessionRegistry() as sessions:

                async def owner() -> None:
                    with pytest.raises(SessionEnded), sessions.open("a") as session:
                        await session.start(open_, end=engine.end, timeout=500)

                tasks.start_soon(owner)
                await anyio.wait_all_tasks_blocked()
            assert anyio.current_time() - began < 1
        assert engine.ended_with == [None]

    async def test_cuts_a_start_that_is_shut_down_alone(self) -> None:
        """A single session that is stopped as shutdown does not wait either."""
        engine = Engine()

        async def open_() -> str:
            engine.begun += 1
            await anyio.sleep(1000)
            return "stream"

        async with SessionRegistry() as sessions:

            async def stop() -> None:
                await anyio.sleep(1)
                sessions.get("a").stop("shutdown")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop)
                with pytest.raises(SessionEnded), sessions.open("a") as session:
                    await session.start(open_, end=engine.end, timeout=500)
            began = anyio.current_time()
            await session.quiet()
            assert anyio.current_time() - began < 1
        assert engine.ended_with == [None]

    @pytest.mark.parametrize("how", ["leave", "drain"])
    async def test_cuts_a_start_that_its_caller_has_left(self, how: str) -> None:
        """Shutdown cuts starts of sessions that are closed already (fault-60)."""
        engine = Engine()

        async def open_() -> str:
            engine.begun += 1
            await anyio.sleep(1000)
            return "stream"

        async with SessionRegistry() as sessions:
            with anyio.move_on_after(1), sessions.open("a") as session:
                await session.start(open_, end=engine.end, timeout=500)
            assert sessions.statistics().closing == 1
            began = anyio.current_time()
            if how == "drain":
                await sessions.drain(5)
                assert anyio.current_time() - began <= 6
        assert anyio.current_time() - began <= 6
        assert engine.ended_with == [None]

    async def test_tells_a_stream_timeout_from_a_start_timeout(self) -> None:
        """Both are deadlines, and both are TimeoutErrors."""
        assert issubclass(StartTimeout, TimeoutError)
        assert issubclass(StreamTimeout, TimeoutError)


@pytest.mark.anyio
async def test_gives_the_lease_back_where_the_starts_cannot_be_listed() -> None:
    """An iterable that raises leaves no lease, and a session that can start."""
    gate = Gate(slots=1)
    payload = weakref.WeakSet[Engine]()

    def starts() -> Any:
        engine = Engine()
        payload.add(engine)
        yield engine.open, engine.end
        raise LookupError("no such tensor")

    async with SessionRegistry() as sessions:
        with sessions.open("a") as session:
            lease = await gate.admit()
            with pytest.raises(LookupError, match="no such tensor"):
                await session.start_all(starts(), lease=lease)
            assert not lease.held
            assert not payload, "the traceback keeps what was to be opened"
            assert await session.start(Engine().open) == "stream"
        assert_quiescent(gate, sessions)


@pytest.mark.anyio
async def test_keeps_its_lease_from_a_second_start() -> None:
    """The lease of a start that is refused is given back, not that of the first."""
    gate = Gate(slots=2)
    began, go_on = anyio.Event(), anyio.Event()

    async def open_() -> str:
        began.set()
        await go_on.wait()
        return "stream"

    async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
        with sessions.open("a") as session:
            first, second = await gate.admit(), await gate.admit()
            tasks.start_soon(lambda: session.start(open_, lease=first))
            await began.wait()
            with pytest.raises(RuntimeError, match="was started before"):
                await session.start(open_, lease=second)
            with pytest.raises(RuntimeError, match="was started before"):
                await session.start(open_)
            assert (first.held, second.held) == (True, False)
            go_on.set()
            await anyio.wait_all_tasks_blocked()
            assert not first.held


@pytest.mark.anyio
async def test_keeps_lease_of_a_block_that_is_left_during_the_start() -> None:
    """Leaving ``with lease:`` releases nothing while a start goes on with it."""
    gate = Gate(slots=1)
    began, go_on = anyio.Event(), anyio.Event()

    async def open_() -> None:
        began.set()
        await go_on.wait()

    async def work(sessions: SessionRegistry) -> None:
        with sessions.open("a") as session:
            with await gate.admit() as lease:
                await session.start(open_, lease=lease)

    async with SessionRegistry() as sessions:
        async with anyio.create_task_group() as group:
            group.start_soon(work, sessions)
            await began.wait()
            group.cancel_scope.cancel()
        assert sessions.statistics().live == 0
        assert gate.statistics().slots_in_use == 1
        go_on.set()
        await sessions.drain(deadline=1.0)
        assert gate.statistics().slots_in_use == 0


@pytest.mark.anyio
async def test_keeps_lease_of_a_managed_stream_that_is_left_during_the_start() -> None:
    """A managed function that passes its lease on does not lose it to its caller."""
    gate = Gate(slots=1)
    began, go_on = anyio.Event(), anyio.Event()

    async def open_() -> Any:
        began.set()
        await go_on.wait()

    async with SessionRegistry() as sessions:

        @managed(gate=gate, sessions=sessions, key=lambda: "a")
        async def answer(session: Any, lease: Any) -> Any:
            return await session.start_all([(open_, None)], lease=lease)

        async with anyio.create_task_group() as group:
            group.start_soon(anext, answer())
            await began.wait()
            group.cancel_scope.cancel()
        assert gate.statistics().slots_in_use == 1
        go_on.set()
        await sessions.drain(deadline=1.0)
        assert gate.statistics().slots_in_use == 0
