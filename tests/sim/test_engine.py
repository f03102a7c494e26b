"""The scripted engine plays its script, and counts calls."""

from __future__ import annotations

import math
from functools import partial

import anyio
import pytest

from lifecycle import EngineLost, SessionRegistry, StreamTimeout
from lifecycle.testing import Script, ScriptedEngine, simulate, simulate_trio

BOTH = pytest.mark.parametrize("run", [simulate, simulate_trio])


async def read(stream):
    """Return every item."""
    return [item async for item in stream]


@BOTH
def test_plays_its_script_through_a_session(run):
    """Start delay, items and END, each counted once."""
    engine = ScriptedEngine(
        lambda key: Script(items=(key, "b"), start_delay=1, item_delay=1, end_delay=1)
    )

    async def main():
        async with SessionRegistry() as sessions:
            with sessions.open("a") as session:
                source = await session.start(
                    partial(engine.start, session.key, b"pixels"),
                    end=lambda _: engine.end(session.key),
                )
                assert engine.live == {session.key}
                async with session.stream(source) as items:
                    assert await read(items) == ["a#1", "b"]
        return anyio.current_time()

    # Delay of the start, of two items and of the end of the items, and of END.
    assert run(main, **({"early_timers": 0} if run is simulate else {})).value == 5
    assert (engine.starts, engine.ends) == (1, 1)
    assert not (engine.live or engine.early_ends or engine.double_ends)


@BOTH
def test_counts_ends_that_should_not_be(run):
    """END before START was sent or answered, and END twice."""
    engine = ScriptedEngine(Script(start_delay=1))

    async def main():
        await engine.end("unknown")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.start, "a")
            await anyio.sleep(0.5)
            await engine.end("a")
            await anyio.sleep(1)
            await engine.end("a")
            await engine.end("a")

    run(main)
    assert (engine.ends, engine.early_ends, engine.double_ends) == (4, 2, 2)


@BOTH
def test_refuses_fails_and_hangs_on_cue(run):
    """A refusal holds nothing; a failure and a hang come at their item."""
    scripts = {
        "refuse": Script(refuse=KeyError("no")),
        "fail": Script(fail_at=1, error=LookupError("bad")),
        "plain": Script(fail_at=0),
        "hang": Script(hang_at=2),
    }
    engine = ScriptedEngine(scripts.__getitem__)

    async def main():
        with pytest.raises(KeyError, match="no"):
            await engine.start("refuse")
        assert not engine.live
        stream = await engine.start("fail")
        assert await anext(stream) == 0
        with pytest.raises(LookupError, match="bad"):
            await anext(stream)
        with pytest.raises(RuntimeError, match="the script fails here"):
            await anext(await engine.start("plain"))
        stream = await engine.start("hang")
        with anyio.move_on_after(100) as scope:
            await read(stream)
        assert scope.cancelled_caught
        assert stream.given == 2

    run(main)


@BOTH
def test_dies_and_comes_back(run):
    """Waiting tasks get an error; what the dead engine had stays lost (fault-22)."""
    engine = ScriptedEngine(
        lambda key: Script(
            start_delay=math.inf if key == "mute" else 0,
            hang_at=0 if key == "hang" else None,
            end_delay=math.inf if key == "deaf" else 0,
            die_at=1 if key == "deadly" else None,
        )
    )
    reasons = []

    async def expect(waiting):
        with pytest.raises(EngineLost) as lost:
            await waiting
        reasons.append(lost.value.reason)

    async def main():
        stream = await engine.start("hang")
        await engine.start("deaf")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect, engine.start("mute"))
            tasks.start_soon(expect, anext(stream))
            tasks.start_soon(engine.end, "deaf")
            await anyio.sleep(1)
            engine.die("oom")
            engine.die("twice")
        await expect(engine.start("late"))
        assert reasons == ["oom"] * 3
        assert (engine.alive, engine.live) == (False, set())
        await engine.end("hang")
        engine.restart()
        engine.restart()
        assert (engine.alive, engine.incarnation) == (True, 2)
        await expect(anext(stream))
        deadly = await engine.start("deadly")
        assert await anext(deadly) == 0
        await expect(anext(deadly))
        assert not engine.alive
        assert not (engine.early_ends or engine.double_ends)

    run(main)


@BOTH
def test_stops_a_stream_that_is_closed_or_ended(run):
    """Nothing comes out of a stream after aclose, or after END."""
    engine = ScriptedEngine(Script(end_error=ValueError("END")))

    async def main():
        stream = await engine.start("closed")
        await stream.aclose()
        assert stream.closed
        assert await read(stream) == []
        stream = await engine.start("ended")
        with pytest.raises(ValueError, match="END"):
            await engine.end("ended")
        assert await read(stream) == []

    run(main)


@BOTH
def test_keeps_a_start_that_was_cancelled(run):
    """As if the answer were lost: the session is there until it is ended."""
    engine = ScriptedEngine(Script(start_delay=1))

    async def main():
        with anyio.move_on_after(0.5):
            await engine.start("a")
        assert engine.live == {"a"}
        await engine.end("a")
        assert not (engine.live or engine.early_ends)

    run(main)


@BOTH
def test_breaks_an_idle_deadline(run):
    """A stream that goes silent is ended by the session's own deadline (fault-37)."""
    engine = ScriptedEngine(Script(hang_at=1))

    async def main():
        async with SessionRegistry() as sessions:
            with pytest.raises(StreamTimeout), sessions.open("a") as session:
                source = await session.start(
                    partial(engine.start, session.key),
                    end=lambda _: engine.end(session.key),
                )
                async with session.stream(source, idle=3) as items:
                    await read(items)
            assert session.outcome == "deadline"

    run(main)
