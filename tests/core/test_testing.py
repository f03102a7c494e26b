"""The harness: it must find what it is there to find."""

import asyncio
import dataclasses

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Gate, SessionRegistry
from lifecycle.events import LeaseGranted, LeaseReleased
from lifecycle.testing import (
    Attempt,
    RecordingObserver,
    assert_quiescent,
    cancel_everywhere,
)


def test_tries_every_suspension_point() -> None:
    """Three suspensions are three points, early and late, on both event loops."""
    outcomes = []

    async def scenario(attempt: Attempt) -> None:
        async def victim() -> None:
            for _ in range(3):
                await checkpoint()

        outcomes.append(await attempt(victim()))

    points = cancel_everywhere(scenario)
    assert set(points) == {
        f"{how} {when}"
        for how in ("asyncio scope", "asyncio native", "trio scope")
        for when in ("early", "late")
    }
    assert points["asyncio native early"] == points["asyncio native late"] == 3
    assert min(points.values()) >= 3
    assert set(outcomes) == {"completed", "cancelled"}


def test_tries_one_backend_where_asked() -> None:
    """A single backend, and the kinds that it has."""

    async def scenario(attempt: Attempt) -> None:
        await attempt(checkpoint())

    points = cancel_everywhere(scenario, backends=("trio",))
    assert set(points) == {"trio scope early", "trio scope late"}


def test_cancels_twice_where_asked() -> None:
    """With double, a clean-up that awaits is cancelled as well."""
    cut = []

    async def scenario(attempt: Attempt) -> None:
        async def victim() -> None:
            try:
                await checkpoint()
            finally:
                finished = False
                try:
                    await checkpoint()
                    finished = True
                finally:
                    cut.append(not finished)

        await attempt(victim())

    cancel_everywhere(scenario, kinds=("native",), double=True)
    assert True in cut
    cut.clear()
    cancel_everywhere(scenario, kinds=("native",))
    assert True in cut  # struck once, but in the clean-up itself


def test_finds_a_lost_grant() -> None:
    """A limiter that loses a grant to a late cancellation is found (B1)."""

    async def scenario(attempt: Attempt) -> None:
        line: list[anyio.Event] = []
        free = 0

        async def acquire() -> None:
            nonlocal free
            turn = anyio.Event()
            line.append(turn)
            try:
                await turn.wait()
            except BaseException:
                if turn in line:
                    line.remove(turn)
                # And where it was granted in this very moment? Lost.
                raise
            free += 1

        async def release() -> None:
            nonlocal free
            if line:
                line.pop(0).set()
            else:
                free += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            await attempt(acquire())
        assert free == 1, "lost"

    with pytest.raises(AssertionError, match=r"native .* at 1: .*lost"):
        cancel_everywhere(scenario)


def test_finds_a_swallowed_cancellation() -> None:
    """A coroutine that eats a native cancellation fails."""

    async def scenario(attempt: Attempt) -> None:
        async def victim() -> None:
            try:
                await checkpoint()
            except BaseException:  # noqa: BLE001
                return

        await attempt(victim())

    with pytest.raises(AssertionError, match="swallowed"):
        cancel_everywhere(scenario, kinds=("native",))


def test_finds_a_hang() -> None:
    """A run that takes longer than its patience fails."""

    async def scenario(attempt: Attempt) -> None:
        await attempt(checkpoint())
        await anyio.Event().wait()

    with pytest.raises(AssertionError, match="TimeoutError"):
        cancel_everywhere(scenario, timeout=0.01)


def test_gives_up_on_endless_coroutines() -> None:
    """A coroutine with more suspensions than allowed is an error, not a hang."""

    async def scenario(attempt: Attempt) -> None:
        async def victim() -> None:
            for _ in range(30):
                await checkpoint()

        await attempt(victim())

    with pytest.raises(AssertionError, match="more than 5 suspension points"):
        cancel_everywhere(scenario, backends=("trio",), most=5)


def test_wants_exactly_one_attempt() -> None:
    """A scenario that makes no attempt, or two, is a mistake."""

    async def none(_attempt: Attempt) -> None: ...

    async def two(attempt: Attempt) -> None:
        await attempt(checkpoint())
        await attempt(checkpoint())

    with pytest.raises(AssertionError, match="never awaited"):
        cancel_everywhere(none)
    with pytest.raises(AssertionError, match="one attempt"):
        cancel_everywhere(two)


def test_lets_foreign_cancellations_through() -> None:
    """A CancelledError that the harness did not cause is an error of the run."""

    async def scenario(attempt: Attempt) -> None:
        async def victim() -> None:
            raise asyncio.CancelledError

        await attempt(victim())

    with pytest.raises(AssertionError, match="CancelledError"):
        cancel_everywhere(scenario, backends=("asyncio",), kinds=("native",))


def test_closes_the_coroutine_with_its_driver() -> None:
    """A coroutine that is suspended when its driver is closed is closed as well."""
    left = []

    async def scenario(attempt: Attempt) -> None:
        async def victim() -> None:
            try:
                await checkpoint()
            finally:
                left.append(True)

        driver = attempt(victim())
        driver.send(None)
        driver.close()

    with pytest.raises(AssertionError, match="CancelledError"):
        cancel_everywhere(scenario, backends=("asyncio",), kinds=("native",))
    assert left == [True]


@pytest.mark.anyio
async def test_names_what_is_left() -> None:
    """Each lease, waiter, session, start and payload left has its own line."""
    gate = Gate(slots=1, name="photos")
    async with SessionRegistry() as sessions:
        assert_quiescent(gate, sessions)
        lease = gate.try_admit(bytes=5)
        with pytest.raises(
            AssertionError, match="1 live leases of 1 slots and 5 bytes"
        ):
            assert_quiescent(gate)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gate.admit)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(AssertionError, match="'photos': 1 requests waiting"):
                assert_quiescent(gate)
            tasks.cancel_scope.cancel()
        lease.release()
        assert_quiescent(gate)

        with sessions.open("a") as session:
            session.box(b"x", nbytes=7)
            with pytest.raises(
                AssertionError, match=r"'a#1' \(open\)\n.*1 payloads of 7"
            ):
                assert_quiescent(gate, sessions)
        release = anyio.Event()
        with sessions.open("b") as session:

            async def end(_: object) -> None:
                await release.wait()

            async def open_() -> None: ...

            await session.start(open_, end=end)
        with pytest.raises(AssertionError, match="1 closed sessions with a start"):
            assert_quiescent(sessions)
        release.set()
        await session.quiet()
        assert_quiescent(gate, sessions)


@pytest.mark.anyio
async def test_finds_books_that_do_not_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that contradict each other are reported."""
    gate = Gate(slots=None, name="photos")
    wrong = dataclasses.replace(gate.statistics(), cancelled=-1)
    monkeypatch.setattr(Gate, "statistics", lambda _self: wrong)
    async with SessionRegistry() as sessions:
        odd = dataclasses.replace(sessions.statistics(), opened=1)
        monkeypatch.setattr(SessionRegistry, "statistics", lambda _self: odd)
        with pytest.raises(AssertionError) as caught:
            assert_quiescent(gate, sessions)
    lines = str(caught.value).splitlines()
    assert ["do not balance" in line for line in lines] == [False, True, True]


def test_records_events() -> None:
    """A recording observer keeps events in order and finds them by kind."""
    seen = RecordingObserver()
    with Gate(slots=None, observer=seen).try_admit():
        pass
    assert seen.names() == ["LeaseGranted", "LeaseReleased"]
    assert seen.of(LeaseReleased) == [seen.events[1]]
    assert isinstance(seen.events[0], LeaseGranted)
