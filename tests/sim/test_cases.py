"""Mistakes of other servers, each as a small story that must end well here."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from lifecycle import (
    Gate,
    GateFull,
    SessionExists,
    SessionRegistry,
    Stream,
    managed,
)
from lifecycle.testing import (
    Script,
    ScriptedEngine,
    assert_quiescent,
    simulate,
    simulate_trio,
)

# Without early timers: these stories count on the order of requests.
BOTH = pytest.mark.parametrize(
    "run", [partial(simulate, early_timers=0.0), simulate_trio], ids=["asyncio", "trio"]
)


def started(session, engine):
    """Start *session* on *engine*, the ordinary way."""
    return session.start(
        partial(engine.start, session.key), end=lambda _: engine.end(session.key)
    )


@BOTH
def test_renders_no_request_that_it_will_refuse(run):
    """Capacity is reserved before the work begins, not counted after it (peers-1)."""
    gate = Gate(slots=4, max_waiting=0)
    rendered = refused = 0

    async def request():
        nonlocal rendered, refused
        try:
            with await gate.admit():
                rendered += 1
                await anyio.sleep(5)
        except GateFull:
            refused += 1

    async def main():
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(request)

    run(main)
    assert (rendered, refused) == (4, 46)


@BOTH
def test_holds_a_burst_of_images_below_its_bytes(run):
    """Two hundred heavy requests wait; memory stays bounded (peers-2, peers-3)."""
    gate = Gate(bytes=100)
    in_memory = 0

    async def request(nbytes):
        nonlocal in_memory
        with await gate.admit(bytes=nbytes):
            in_memory += nbytes
            assert in_memory <= 100
            await anyio.sleep(0.01)
            in_memory -= nbytes

    async def main():
        async with anyio.create_task_group() as tasks:
            for i in range(200):
                tasks.start_soon(request, 1 + i * 7 % 60)
        assert_quiescent(gate)

    run(main)


@BOTH
def test_charges_in_the_step_that_checks(run):
    """Eight at once, each of which would fit alone: only one gets in (peers-4, B11)."""
    gate = Gate(bytes=10, max_waiting=0)
    inside = []

    async def request():
        with suppress(GateFull), await gate.admit(bytes=8):
            inside.append(gate.statistics().bytes_in_use)
            await anyio.sleep(1)

    async def main():
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(request)

    run(main)
    assert inside == [8]


@BOTH
def test_admits_a_fan_out_whole_or_not_at_all(run):
    """Four children are one admission; a cancelled one returns all (peers-5, B5)."""
    gate = Gate(slots=5)

    async def main():
        first = gate.try_admit(slots=2)
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def fan_out():
                with scope, await gate.admit(slots=4):
                    raise AssertionError("half of it would not fit")

            tasks.start_soon(fan_out)
            await anyio.sleep(1)
            assert gate.statistics().slots_in_use == 2
            scope.cancel()
        with gate.try_admit(slots=3):
            pass
        first.release()
        assert_quiescent(gate)

    run(main)


@BOTH
def test_keeps_its_capacity_for_the_whole_stream(run):
    """A lease around a stream outlasts the first item and ends with it (peers-9)."""
    gate = Gate(slots=1)
    engine = ScriptedEngine(Script(item_delay=1.0))

    async def main():
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session, await gate.admit():
                async with session.stream(await started(session, engine)) as items:
                    async for _ in items:
                        assert gate.statistics().slots_in_use == 1
            assert_quiescent(gate)

    run(main)


@BOTH
def test_admits_before_the_payload_is_made(run):
    """A managed function does not begin before it is admitted (peers-15)."""
    gate = Gate(slots=1)
    made = []

    @managed(gate=gate)
    async def infer(name: str) -> AsyncIterator[str]:
        made.append(name)
        await anyio.sleep(1)
        yield name

    async def main():
        async with anyio.create_task_group() as tasks:

            async def request(name):
                async with infer(name) as stream:
                    assert [item async for item in stream] == [name]

            tasks.start_soon(request, "a")
            tasks.start_soon(request, "b")
            await anyio.sleep(0.5)
            assert len(made) == 1
        assert len(made) == 2

    run(main)


@BOTH
def test_frees_an_id_that_was_cancelled_in_line(run):
    """A turn that is ended while it waits does not block the next (peers-23)."""
    gate = Gate(slots=1)
    engine = ScriptedEngine()

    async def main():
        lease = gate.try_admit()
        async with SessionRegistry() as sessions, anyio.create_task_group() as tasks:

            async def turn(scope):
                with scope, sessions.open("chat") as session:
                    with await gate.admit():
                        await started(session, engine)

            scope = anyio.CancelScope()
            tasks.start_soon(turn, scope)
            await anyio.sleep(1)
            with pytest.raises(SessionExists):
                sessions.open("chat")
            scope.cancel()
            await anyio.sleep(1)
            lease.release()
            await turn(anyio.CancelScope())
        assert (engine.starts, engine.ends) == (1, 1)
        assert_quiescent(gate, sessions)

    run(main)


@BOTH
def test_cancels_by_the_exact_id(run):
    """Ending ``batch_1`` leaves ``batch_10`` alone (peers-25)."""
    engine = ScriptedEngine()

    async def main():
        async with SessionRegistry() as sessions:
            with sessions.open("batch_10") as ten:
                await started(ten, engine)
                one = sessions.open("batch_1")
                await started(one, engine)
                await sessions.cancel("batch_1")
                assert engine.live == {ten.key}
                assert ten.outcome is None
            assert ten.outcome == "completed"

    run(main)


@BOTH
def test_ends_an_old_session_without_touching_its_successor(run):
    """A slow END for an id that is in use again hits the old one only (peers-26)."""
    engine = ScriptedEngine(
        lambda key: Script(end_delay=1.0 if key.endswith("#1") else 0.0)
    )

    async def main():
        async with SessionRegistry() as sessions:
            with sessions.open("a") as old:
                await started(old, engine)
            with sessions.open("a") as new:
                stream = await started(new, engine)
                await anyio.sleep(2)
                assert engine.live == {new.key}
                assert [item async for item in stream] == [0, 1, 2]
        assert (engine.starts, engine.ends, engine.double_ends) == (2, 2, 0)

    run(main)


@BOTH
def test_forgets_no_session_when_one_end_fails(run):
    """Ending all goes on after an END that raises or never answers (peers-37)."""
    scripts = [Script(end_error=OSError()), Script(end_delay=math.inf), Script()]
    engine = ScriptedEngine(lambda key: scripts[int(key[0])])

    async def main():
        async with SessionRegistry(end_timeout=1.0) as sessions:
            for name in "012":
                await started(sessions.open(name), engine)
            assert sessions.close_all() == 3
            await anyio.sleep(2)
            assert not engine.live
            now = sessions.statistics()
            assert (now.ends_failed, now.closing, now.outcomes["cancelled"]) == (
                2,
                0,
                3,
            )

    run(main)


def test_refuses_a_registry_that_is_not_entered():
    """A request before the registry is entered fails, and does not wait (peers-36)."""
    with pytest.raises(RuntimeError, match="async with"):
        SessionRegistry().open("a")


@BOTH
def test_survives_a_source_that_yields_while_it_is_closed(run):
    """A source that refuses to end is an error; all is released (peers-44)."""
    closed = []

    async def stubborn():
        try:
            yield 1
        finally:
            yield 2

    async def main():
        with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
            async with Stream(
                stubborn(), on_close=[partial(closed.append, 1)]
            ) as items:
                assert await anext(items) == 1

    run(main)
    assert closed == [1]


@BOTH
def test_never_takes_a_lease_back_for_its_age(run):
    """A request may be slow for as long as it likes and still be counted (B9)."""
    gate = Gate(slots=1)

    async def main():
        with await gate.admit() as lease:
            await anyio.sleep(80_000)
            assert lease.held
            assert gate.statistics().slots_in_use == 1

    run(main)


@BOTH
def test_serves_no_request_that_was_cancelled(run):
    """After a storm of impatient clients, only the living are served (peers-46, B8)."""
    gate = Gate(slots=1)
    served = []

    async def client(number, patience):
        with anyio.move_on_after(patience):
            with await gate.admit():
                served.append(number)
                await anyio.sleep(1)

    async def main():
        lease = gate.try_admit()
        with lease:
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(client, number, 5 if number < 99 else 1000)
                await anyio.sleep(10)
                assert gate.statistics().waiting == 1
                lease.release()
        assert served == [99]
        assert_quiescent(gate)

    run(main)
