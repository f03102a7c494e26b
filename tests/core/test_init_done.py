"""The barrier in front of END, and removal that never hits a newer session."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Session, SessionEnded, SessionNotFound, SessionRegistry
from lifecycle.testing import Attempt, assert_quiescent, cancel_everywhere

virtual = pytest.mark.parametrize("anyio_backend", ["virtual"], indirect=True)


class Engine:
    """Answers a start when it is let go; END checks that the start was answered."""

    def __init__(self, fails: bool = False) -> None:
        self.go_on = anyio.Event()
        self.fails = fails
        self.begun = False
        self.ended: list[object] = []
        self.session: Session | None = None

    async def open(self) -> str:
        self.begun = True
        await self.go_on.wait()
        if self.fails:
            raise OSError("the engine says no")
        return "stream"

    async def end(self, stream: object) -> None:
        assert self.session is not None
        assert self.session.init_done.is_set()
        self.ended.append(stream)


async def start(session: Session, engine: Engine, **options: Any) -> None:
    """Start a session whose END checks the barrier."""
    engine.session = session
    try:
        with session:
            await session.start(engine.open, end=engine.end, **options)
            await anyio.sleep_forever()
    except (SessionEnded, OSError, TimeoutError):
        pass


async def note(session: Session, noted: list[str]) -> None:
    await session.init_done
    noted.append("set")


async def begin(tasks: Any, engine: Engine, session: Session, **options: Any) -> None:
    """Begin a start in the background, and wait until the engine has it."""
    tasks.start_soon(partial(start, session, engine, **options))
    while not engine.begun:
        await checkpoint()


@pytest.mark.anyio
class TestInitDone:
    """It is set once, whatever happens to the start."""

    @pytest.mark.parametrize("fails", [False, True])
    async def test_is_set_when_the_engine_has_answered(self, fails: bool) -> None:
        """Not before: neither by the start's beginning nor by waiting for it."""
        engine, noted = Engine(fails), list[str]()
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            session = sessions.open("a")
            assert not session.init_done
            for _ in range(2):  # any number of tasks may wait
                tasks.start_soon(note, session, noted)
            await begin(tasks, engine, session)
            assert (session.init_done.is_set(), noted) == (False, [])
            assert "not set" in repr(session.init_done)
            engine.go_on.set()
            with anyio.fail_after(2):
                await session.init_done
                await session.init_done.wait()
                while len(noted) < 2:
                    await checkpoint()
            assert session.init_done
            assert "not" not in repr(session.init_done)
            session.stop()
            await session.quiet()
        assert engine.ended == ([] if fails else ["stream"])

    async def test_is_waited_for_by_cancel_and_end(self) -> None:
        """A cancellation by id returns, and END is sent, only when it is set."""
        engine, returned = Engine(), anyio.Event()

        async def cancel() -> None:
            await sessions.cancel("a")
            assert session.init_done.is_set()
            returned.set()

        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            session = sessions.open("a")
            await begin(tasks, engine, session)
            tasks.start_soon(cancel)
            for _ in range(10):
                await checkpoint()
            assert session.outcome == "cancelled"
            assert not session.init_done.is_set()
            assert not (returned.is_set() or engine.ended)
            engine.go_on.set()
            with anyio.fail_after(2):
                await returned.wait()
        assert engine.ended == ["stream"]

    @virtual
    async def test_is_set_where_the_engine_never_answers(self) -> None:
        """A start that is given up sets it before END is sent by key."""
        engine = Engine()
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            session = sessions.open("a")
            await begin(tasks, engine, session, timeout=1.0)
            await session.init_done
            await session.quiet()
        assert engine.ended == [None]

    async def test_is_set_for_a_session_that_started_nothing(self) -> None:
        """Closing it is enough; also a start that was refused changes nothing."""
        noted = list[str]()
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            session = sessions.open("a")
            tasks.start_soon(note, session, noted)
            with sessions.open("b") as other:
                await checkpoint()
                with pytest.raises(ValueError, match="NaN"):
                    await other.start(Engine().open, timeout=float("nan"))
                assert await other.start_all([]) == []
                assert not other.init_done
            assert other.init_done
            session.close()
            with anyio.fail_after(2):
                while not noted:
                    await checkpoint()

    async def test_is_set_with_the_last_of_several_starts(self) -> None:
        """One that failed ends the others; the barrier waits for each of them."""
        first, last, noted = Engine(fails=True), Engine(), list[str]()
        async with SessionRegistry() as sessions:
            session = first.session = last.session = sessions.open("a")

            async def open_all() -> None:
                with pytest.raises(OSError, match="says no"), session:
                    await session.start_all([(first.open, None), (last.open, last.end)])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(open_all)
                tasks.start_soon(note, session, noted)
                while not last.begun:
                    await checkpoint()
                first.go_on.set()
                while session.outcome is None:
                    await checkpoint()
                for _ in range(10):
                    await checkpoint()
                assert not session.init_done
                assert noted == []
                last.go_on.set()
                with anyio.fail_after(2):
                    await session.init_done
            await session.quiet()
        assert last.ended == ["stream"]

    async def test_is_set_where_the_registry_is_left(self) -> None:
        """A start that never began is withheld, and one that goes on is cut."""
        noted = list[str]()
        async with SessionRegistry() as sessions:
            session, engine = sessions.open("a"), Engine()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(note, session, noted)
                tasks.start_soon(start, session, engine)
                while session.phase != "starting":
                    await checkpoint()
                sessions.close_all("shutdown")
        assert noted == ["set"]
        assert session.init_done.is_set()
        await session.init_done  # at once, also of a registry that was left

    async def test_waits_for_a_start_where_all_sessions_are_ended(self) -> None:
        """Short of a shutdown, what an engine is about to open is ended, and not cut."""
        async with SessionRegistry() as sessions:
            session, engine = sessions.open("a"), Engine()
            async with anyio.create_task_group() as tasks:
                await begin(tasks, engine, session)
                session.close()
                assert sessions.close_all() == 0
                for _ in range(10):
                    await checkpoint()
                engine.go_on.set()
                await session.quiet()
        assert engine.ended == ["stream"]

    async def test_belongs_to_one_loop(self) -> None:
        """Another thread may ask, and not wait."""
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:

                async def wait() -> None:
                    await session.init_done

                def ask() -> bool:
                    with pytest.raises(RuntimeError, match="loop it was entered"):
                        asyncio.run(wait())
                    return session.init_done.is_set()

                assert not await anyio.to_thread.run_sync(ask)


def test_is_set_when_its_caller_is_cancelled_anywhere() -> None:
    """Cancelled at any await, natively or not: the barrier is set, END after it."""

    async def scenario(attempt: Attempt) -> None:
        engine, noted = Engine(), list[str]()
        engine.go_on.set()
        async with SessionRegistry() as sessions:
            session = engine.session = sessions.open("a")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(note, session, noted)
                await attempt(request(session, engine))
                session.close()
                with anyio.fail_after(2):
                    await session.quiet()
                    while not noted:
                        await checkpoint()
            assert session.init_done.is_set()
            assert len(engine.ended) == engine.begun
            assert_quiescent(sessions)

    async def request(session: Session, engine: Engine) -> None:
        with session:
            await session.start(engine.open, end=engine.end)
            await checkpoint()

    assert min(cancel_everywhere(scenario, double=True).values()) >= 2


@pytest.mark.anyio
class TestRemove:
    """It ends one certain session, once, and no newer one."""

    @pytest.mark.parametrize(
        "how",
        [
            lambda sessions, s: sessions.remove(s),
            lambda sessions, s: sessions.remove(s, generation=s.generation),
            lambda sessions, s: sessions.remove(s.id, generation=s.generation),
        ],
    )
    async def test_removes_once_and_never_a_newer_session(
        self, how: Callable[[SessionRegistry, Session], bool]
    ) -> None:
        """The first call says true; later ones change nothing and say false."""
        async with SessionRegistry() as sessions:
            old = sessions.open("a")
            assert how(sessions, old) is True
            assert how(sessions, old) is False
            new = sessions.open("a")
            assert how(sessions, old) is False
            assert sessions.get("a") is new
            assert how(sessions, new) is True
            with pytest.raises(SessionNotFound):
                sessions.get("a")
            assert sessions.statistics().outcomes["completed"] == 2
        assert how(sessions, new) is False  # late, when the server has gone

    async def test_removes_by_id_whichever_is_live(self) -> None:
        """Without a generation, an id stands for the session that has it now."""
        async with SessionRegistry() as sessions:
            assert sessions.remove("a") is False
            first, second = sessions.open("a"), None
            assert sessions.remove("a", outcome="client_gone") is True
            second = sessions.open("a")
            assert sessions.remove("a", generation=first.generation) is False
            assert sessions.remove("a") is True
            assert (first.outcome, second.outcome) == ("client_gone", "completed")

    async def test_removes_no_session_of_another_registry(self) -> None:
        """Equal ids and generations do not make it the same session."""
        async with SessionRegistry() as sessions, SessionRegistry() as others:
            mine, other = sessions.open("a"), others.open("a")
            assert mine.generation == other.generation
            assert sessions.remove(other) is False
            assert (mine.outcome, other.outcome) == (None, None)
            assert mine.close() and other.close()

    async def test_leaves_end_to_the_registry(self) -> None:
        """It never waits: END follows the start, in the background."""
        engine = Engine()
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:
            session = sessions.open("a")
            await begin(tasks, engine, session)
            assert sessions.remove(session) is True
            assert sessions.remove(session) is False
            assert engine.ended == []
            engine.go_on.set()
            with anyio.fail_after(2):
                await session.quiet()
            tasks.cancel_scope.cancel()
        assert engine.ended == ["stream"]

    async def test_refuses_what_is_no_session(self) -> None:
        """A mistake is an error, whether or not there would be anything to remove."""
        async with SessionRegistry() as sessions:
            with pytest.raises(TypeError, match="a session or an id, not int"):
                sessions.remove(3)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="no outcome of a session"):
                sessions.remove("a", outcome="gone")  # type: ignore[arg-type]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_is_set_where_a_start_gets_no_task() -> None:
    """A loop that makes no more tasks fails the start whole: none of it begins."""
    begun: list[str] = []

    def refuse(*_: Any, **__: Any) -> Any:
        made.append(1)
        if len(made) == 2:
            raise OSError("no more tasks")
        return asyncio.Task(*_, loop=loop, **__)

    async def open_() -> str:
        begun.append("opened")
        return "stream"

    async def withhold(sessions: SessionRegistry) -> Session:
        with sessions.open("a") as session:
            supervisor = session._state.supervisor
            spawn = partial(supervisor._spawn_in_loop, refuse)
            supervisor.spawn = spawn
            with pytest.raises(OSError, match="no more tasks"):
                await session.start_all([(open_, None)] * 3)
            for _ in range(5):
                await asyncio.sleep(0)
            assert session.init_done
            return session

    made: list[int] = []
    loop = asyncio.get_running_loop()
    async with SessionRegistry() as sessions:
        session = await withhold(sessions)
        await session.quiet()
        assert_quiescent(sessions)
    assert begun == []
