"""Crash, stop and hang of real engines: which requests fail how, and how soon."""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import anyio
import psutil
import pytest
from pauses import noted_pauses

from lifecycle import EngineLost, Payload
from lifecycle_zmq import EngineFailed, ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]
MakeEngine = Callable[..., ZmqEngine]
MIB = 2**20


@pytest.fixture
def bare_start(engine_argv: list[str], environment: dict[str, str]) -> float:
    """How long an interpreter takes to import what an engine imports."""
    seconds = []
    argv = [*engine_argv, "--endpoint", "", "--incarnation", "0", "--fail", "as asked"]
    for _ in range(5):
        begin = time.monotonic()
        subprocess.run(argv, env=environment, capture_output=True, check=False)
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds)


async def _round_trip(engine: ZmqEngine) -> float:
    """How long one question takes: what this machine can do right now."""
    begin = time.monotonic()
    await engine.status()
    return time.monotonic() - begin


@pytest.mark.slow
async def test_kills_under_128_streams_are_reported_in_milliseconds(
    make_engine: MakeEngine, waiters_of: Any, bare_start: float
) -> None:
    """Each request fails once; the engine soon serves again; 25 times on each backend (`fault-22`, `N4`, `N5`, `peers-72`, `peers-75`)."""
    kills, streams = 25, 128
    options = {"backoff": 0.01, "max_backoff": 0.01, "max_crashes": None}
    reported, again, base = [], [], []
    async with make_engine("--step", "0.01", **options) as engine:
        await engine.wait_ready()
        waiters = waiters_of(engine)
        for number in range(kills):
            with anyio.fail_after(20):
                await waiters.start(streams, {"forever": True})
                base.append(await _round_trip(engine))
                pid = engine.pid
                assert (engine.incarnation, engine.health) == (number + 1, "serving")
                assert pid is not None
                begin = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                await waiters.all_failed(streams * (number + 1))
                reported.append(waiters.last - begin)
                await engine.wait_ready()
                again.append(time.monotonic() - begin)
    assert set(waiters.reported.values()) == {1}
    assert waiters.reasons == {"killed": kills * streams}
    # A machine that is slow to answer is slow to tell.
    assert statistics.median(reported) < 0.05 + 2 * statistics.median(base)
    assert statistics.median(again) < max(0.3, 3 * bare_start)


async def test_death_is_reported_before_the_memory_is_released(
    make_engine: MakeEngine, waiters_of: Any
) -> None:
    """With half a GiB in use, its waiters hear of it while it is still there to be freed."""
    async with make_engine("--ballast", str(512 * MIB)) as engine:
        with anyio.fail_after(60):
            await engine.wait_ready()
            waiters = waiters_of(engine)
            await waiters.start(8, {"forever": True})
            pid = engine.pid
            assert pid is not None
            descriptor = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            await waiters.all_failed(8)
            # The exit itself comes later by the time that takes.
            ended = _is_readable(descriptor)
            os.close(descriptor)
            assert (waiters.reasons, ended) == ({"killed": 8}, False)
            assert engine.health == "restarting"


@pytest.mark.parametrize(
    ("request_", "reason", "detail"),
    [
        ({"signal": 11}, "segfault", "signal 11"),
        ({"signal": 6}, "aborted", "signal 6"),
        ({"exit": 3}, "exit", "exit code 3"),
        ({"exit": 0}, "exit", "exit code 0"),
    ],
    ids=["segfault", "abort", "exit", "exit0"],
)
async def test_reason_has_a_detail(
    make_engine: MakeEngine, request_: dict[str, Any], reason: str, detail: str
) -> None:
    """One word to go by, and the code in the message (`fault-26`, `fault-36`)."""
    async with make_engine("--ballast", str(64 * MIB)) as engine:
        await engine.wait_ready()
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await engine.start("a#1", request_)
        assert caught.value.reason == reason
        assert detail in str(caught.value)


async def test_stopped_engine_takes_no_requests_and_is_replaced(
    make_engine: MakeEngine, waiters_of: Any, eventually: Any
) -> None:
    """SIGSTOP: not ready in 150 ms, lost and replaced within its limit (`fault-23`, `N6`)."""
    async with make_engine("--step", "0.01", stopped_after=0.5) as engine:
        await engine.wait_ready()
        waiters = waiters_of(engine)
        with anyio.fail_after(20):
            await waiters.start(8, {"forever": True})
            pid = engine.pid
            os.kill(pid or 0, signal.SIGSTOP)
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                pass
            begin = time.monotonic()
            # `health` is current; requests are refused a sample later.
            assert (engine.health, engine.ready) == ("stopped", False)
            with noted_pauses() as pauses:
                await eventually(lambda: not engine._supervisor.accepting)
                assert time.monotonic() - begin < 0.15 + 5 * pauses()
            with pytest.raises(EngineLost) as refused:
                await engine.start("late", {})
            assert refused.value.reason == "stopped"
            assert waiters.reported == {}
            await waiters.all_failed(8)
            assert 0.4 < time.monotonic() - begin < 5.0
            assert waiters.reasons == {"stopped": 8}
            await engine.wait_ready()
        assert engine.pid != pid
        assert not psutil.pid_exists(pid or 0)


async def test_engine_that_is_continued_in_time_loses_nothing(
    make_engine: MakeEngine, eventually: Any
) -> None:
    """SIGCONT before the bound: the streams go on, requests are taken (`fault-23`)."""
    async with make_engine(stopped_after=10.0) as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"count": 50})
        with anyio.fail_after(20):
            os.kill(engine.pid or 0, signal.SIGSTOP)
            await eventually(lambda: not engine._supervisor.accepting)
            os.kill(engine.pid or 0, signal.SIGCONT)
            assert [item async for item in stream] == [[n] for n in range(50)]
            await eventually(lambda: engine.ready and engine._supervisor.accepting)
            assert await engine.status()
    assert engine.incarnation == 1


@pytest.mark.parametrize(("how", "seconds"), [("hold_at", 5.0), ("sleep_at", 1.5)])
async def test_five_seconds_without_a_turn_are_no_verdict(
    make_engine: MakeEngine, eventually: Any, how: str, seconds: float
) -> None:
    """C code that holds the interpreter lock, or a long prefill, is busy (`fault-34`, `peers-77`, `N6`)."""
    async with make_engine(stopped_after=0.5) as engine:
        await engine.wait_ready()
        request = {"count": 2, how: 1, "seconds": seconds}
        stream = await engine.start("a#1", request)
        assert await anext(stream) == [0]
        with anyio.fail_after(30):
            await eventually(lambda: engine.health == "busy")
            assert engine.ready
            # Taken: it waits its turn.
            other = await engine.start("b#1", {"count": 1})
            assert [item async for item in other] == [[0]]
            assert [item async for item in stream] == [[1]]
            assert (engine.health, engine.incarnation) == ("serving", 1)


async def test_call_that_never_returns_is_stalled(
    make_engine: MakeEngine, waiters_of: Any, eventually: Any
) -> None:
    """At its limit each request fails, and the engine is replaced (`fault-37`, `peers-76`)."""
    async with make_engine(busy_after=0.1, stalled_after=0.5) as engine:
        await engine.wait_ready()
        waiters = waiters_of(engine)
        with anyio.fail_after(20):
            await waiters.start(4, {"forever": True})
            begin = time.monotonic()
            stuck = {"forever": True, "sleep_at": 0, "seconds": 600}
            stream = await engine.start("stuck", stuck)
            await eventually(lambda: engine.health == "busy")
            with pytest.raises(EngineLost) as caught:
                await anext(stream)
            assert caught.value.reason == "stalled"
            assert 0.4 < time.monotonic() - begin < 5.0
            await waiters.all_failed(4)
            assert waiters.reasons == {"stalled": 4}
            await engine.wait_ready()
    assert engine.incarnation == 2


@pytest.mark.parametrize("tensors", [False, True])
async def test_many_slow_starts_and_ends_at_once_are_not_stalled(
    make_engine: MakeEngine, *, tensors: bool
) -> None:
    """Each within its bound, all of them in one turn that is over it (`fault-37`)."""

    def box() -> Payload[dict[str, bytes]] | None:
        return Payload({"pixels": b"x"}) if tensors else None

    async with make_engine(stalled_after=0.7) as engine:
        await engine.wait_ready()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    request = {"hold": True, "start_seconds": 0.2}
                    request["end_seconds"] = 0.2
                    tasks.start_soon(engine.start, f"s{number}", request, box())
            async with anyio.create_task_group() as tasks:
                for number in range(6):
                    tasks.start_soon(engine.end, f"s{number}")
            assert (await engine.status())["ends"] == 6
        assert engine.incarnation == 1


async def test_engine_that_hangs_up_but_lives_is_replaced(
    make_engine: MakeEngine, becomes: Any
) -> None:
    """Its loop broke, a thread keeps the process: its streams fail (`fault-28`)."""
    async with make_engine("--linger") as engine:
        await engine.wait_ready()
        pid = engine.pid
        broken = {"forever": True, "raise_at": 0}
        with anyio.fail_after(20):
            for key in ("a", "b"):
                with pytest.raises(EngineFailed):
                    await anext(await engine.start(key, broken))
            # Before or after it was taken: last words may be lost.
            with pytest.raises(EngineLost) as caught:
                await anext(await engine.start("c", broken))
            assert caught.value.reason == "disconnected"
            await becomes(engine, lambda: engine.incarnation == 2)
            await engine.wait_ready()
    assert not psutil.pid_exists(pid or 0)


async def test_engine_of_another_incarnation_is_not_blamed(
    make_engine: MakeEngine, waiters_of: Any
) -> None:
    """A crash fails the streams of that process and no others (`fault-48`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        waiters = waiters_of(engine)
        with anyio.fail_after(20):
            await waiters.start(8, {"forever": True})
            os.kill(engine.pid or 0, signal.SIGKILL)
            await waiters.all_failed(8)
            await engine.wait_ready()
            stream = await engine.start("new", {"count": 100})
            assert len([item async for item in stream]) == 100
    assert engine.incarnation == 2


async def test_deaths_are_logged_once(
    make_engine: MakeEngine, waiters_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """128 streams, one death, one record; none for an orderly end."""
    async with make_engine("--step", "0.01") as engine:
        await engine.wait_ready()
        waiters = waiters_of(engine)
        with anyio.fail_after(20):
            await waiters.start(128, {"forever": True})
            os.kill(engine.pid or 0, signal.SIGKILL)
            await waiters.all_failed(128)
            await engine.wait_ready()
    assert [record.message for record in caplog.records] == [
        "engine 1 ended: killed; it starts again in 0.0 s"
    ]


def _is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
