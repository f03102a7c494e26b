"""The engine in another process: its streams, its deaths, its successors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from zmq_wire import FrameReader, ZmqClientTransport

from lifecycle import EngineLost, Payload, SessionRegistry
from lifecycle_zmq import EngineFailed, RequestRejected, ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

MakeEngine = Callable[..., ZmqEngine]


@pytest.fixture(params=["pair", "ipc"])
def transport(request: pytest.FixtureRequest) -> Any:
    """Run every test of this file over both."""
    return request.param


async def collect(stream: Any) -> list[Any]:
    """All items of a stream."""
    return [item async for item in stream]


async def test_streams_deliver_every_item_in_order(make_engine: MakeEngine) -> None:
    """64 streams at a time each get their own items, in order, and end."""
    results: dict[str, list[Any]] = {}

    async def one(key: str, count: int) -> None:
        results[key] = await collect(await engine.start(key, {"count": count}))
        await engine.end(key)

    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(64):
                    tasks.start_soon(one, f"s#{number}", number)
        status = await engine.status()
        assert engine.streams == 0
    assert results == {f"s#{n}": [[i] for i in range(n)] for n in range(64)}
    assert status["backend"]["live"] == []
    assert (status["starts"], status["ends"], status["live"]) == (64, 64, 0)
    assert (status["duplicate_ends"], status["ends_before_start"]) == (0, 0)


async def test_generic_stream_delivers_each_distinct_item(
    make_engine: MakeEngine,
) -> None:
    """Large items come one by one, none merged or lost, also beyond one message."""
    async with make_engine() as engine:
        await engine.wait_ready()
        request = {"count": 8, "size": 40_000, "each": 16}
        stream = await engine.start("a#1", request)
        with anyio.fail_after(20):
            assert await collect(stream) == [b"x" * 40_000] * 128


async def test_cancel_stops_a_stream_at_a_step(make_engine: MakeEngine) -> None:
    """A cancelled stream just ends; its end is still acknowledged."""
    async with make_engine() as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"forever": True})
        assert await anext(stream) == [0]
        engine.cancel("a#1")
        with anyio.fail_after(20):
            await collect(stream)
            await engine.end("a#1")
        assert (await engine.status())["backend"]["live"] == []


async def test_end_forgets_a_running_stream(make_engine: MakeEngine) -> None:
    """When `end` returns, the backend has released the stream (`peers-30`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        await engine.start("a#1", {"forever": True})
        with anyio.fail_after(20):
            await engine.end("a#1")
            assert (await engine.status())["backend"]["live"] == []


async def test_start_raises_the_refusal_of_the_backend(make_engine: MakeEngine) -> None:
    """A refusal keeps its code, a crash its type, not its words (`fault-27`, `S9`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with pytest.raises(RequestRejected) as refused:
            await engine.start("a#1", {"reject": "too_long"})
        with pytest.raises(RequestRejected) as crashed:
            await engine.start("b#1", {"raise_in_start": "canary"})
        assert (refused.value.code, crashed.value.code) == ("too_long", "internal")
        assert crashed.value.message == "start raised RuntimeError"
        assert "canary" not in engine.output
        assert await collect(await engine.start("c#1", {"count": 1})) == [[0]]


async def test_failure_of_one_stream_leaves_the_others_alone(
    make_engine: MakeEngine,
) -> None:
    """A failing stream and one with an invalid item fail; siblings continue."""
    async with make_engine() as engine:
        await engine.wait_ready()
        good = await engine.start("good", {"count": 30})
        for request, code in (
            ({"fail_at": 3}, "asked"),
            ({"odd_item_at": 3}, "unencodable"),
        ):
            bad = await engine.start(code, request)
            items = []
            with anyio.fail_after(20), pytest.raises(EngineFailed) as caught:
                while True:
                    items.append(await anext(bad))
            assert (items, caught.value.code) == ([[0], [1], [2]], code)
            await engine.end(code)
        with anyio.fail_after(20):
            assert len(await collect(good)) == 30


async def test_payload_arrives_as_it_was_sent(make_engine: MakeEngine) -> None:
    """32 MiB cross the process boundary unharmed, beside a stream that goes on."""
    async with make_engine() as engine:
        await engine.wait_ready()
        other = await engine.start("other", {"forever": True})
        raw = bytes(range(256)) * 2**17
        box = Payload({"x": memoryview(raw).cast("H", (2, 2**11, 2**12))})
        await engine.start("a#1", {"hold": True}, box)
        assert await anext(other)
        seen = (await engine.status())["backend"]["seen"]
        assert seen == [["x", "H", [2, 2**11, 2**12], sum(raw[:64])]]


async def test_death_fails_each_waiter_once(
    make_engine: MakeEngine,
) -> None:
    """With 32 streams each waiter fails once; then the next engine serves (`fault-22`)."""
    reported: Counter[str] = Counter()

    async def read(key: str) -> None:
        items = 0
        stream = await engine.start(key, {"forever": True})
        ready.append(key)
        if len(ready) == 32:
            all_ready.set()
        with pytest.raises(EngineLost) as caught:
            async for item in stream:
                assert item == [items]
                items += 1
        assert caught.value.reason == "killed"
        assert caught.value.retry_after is not None
        assert 1 <= caught.value.retry_after <= 60
        reported[key] += 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await engine.end(key)

    ready: list[str] = []
    all_ready = anyio.Event()
    async with make_engine(backoff=0.3) as engine:
        await engine.wait_ready()
        first = engine.pid
        assert first is not None
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(32):
                    tasks.start_soon(read, f"s#{number}")
                await all_ready.wait()
                os.kill(first, signal.SIGKILL)
        assert reported == Counter({f"s#{number}": 1 for number in range(32)})
        assert not engine.ready
        with anyio.fail_after(20), pytest.raises(EngineLost) as refused:
            await engine.start("late", {"count": 1})
        assert refused.value.retry_after is not None
        assert 1 <= refused.value.retry_after <= 60
        with pytest.raises(EngineLost):
            await engine.status()
        with anyio.fail_after(20):
            await engine.wait_ready()
            assert (engine.incarnation, engine.pid != first) == (2, True)
            assert await collect(await engine.start("s#0", {"count": 2})) == [[0], [1]]
        status = await engine.status()
        assert status["backend"]["calls"][:1] == ["start s#0"]
        assert status["bad_frames"] == 0


async def test_death_during_a_start_is_reported(make_engine: MakeEngine) -> None:
    """A start whose engine dies before ACCEPTED fails with the reason; no retry."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await engine.start("a#1", {"exit": 3})
        assert caught.value.reason == "exit"
        await engine.end("a#1")
        with anyio.fail_after(20):
            await engine.wait_ready()
        assert (await engine.status())["backend"]["calls"] == []


async def test_start_sent_to_a_stopped_engine_never_reaches_the_next(
    make_engine: MakeEngine,
) -> None:
    """START queued for an engine that then dies is gone with it (`fault-47`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        reported: list[str] = []

        async def start(key: str) -> None:
            with pytest.raises(EngineLost) as caught:
                await engine.start(key, {"count": 1}, Payload({"x": bytes(2**16)}))
            reported.append(caught.value.reason)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(start, f"old#{number}")
                await anyio.wait_all_tasks_blocked()
                os.kill(pid, signal.SIGKILL)
            assert reported == ["killed"] * 8
            await engine.wait_ready()
            await engine.start("new#1", {"hold": True})
        assert (await engine.status())["backend"]["calls"] == ["start new#1"]


async def test_every_kill_in_a_row_is_survived(
    make_engine: MakeEngine, becomes: Any
) -> None:
    """Three kills, in and out of work: no zombie, no descriptor left (`fault-55`)."""
    async with make_engine(backoff=0.01, max_backoff=0.01) as engine:
        descriptors = set()
        for number in range(3):
            with anyio.fail_after(20):
                await engine.wait_ready()
                descriptors.add(psutil.Process().num_fds())
                if number % 2:
                    await engine.start("a#1", {"forever": True})
                assert engine.incarnation == number + 1
                pid = engine.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await becomes(engine, lambda: not engine.ready)
        with anyio.fail_after(20):
            await engine.wait_ready()
        assert len(descriptors) == 1
        children = psutil.Process().children()
        assert [child.pid for child in children] == [engine.pid]


async def test_engine_that_breaks_the_protocol_is_replaced(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad frame ends the engine, and nothing else (`fault-43`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        pid = engine.pid
        stream = await engine.start("a#1", {"forever": True})
        await anext(stream)
        bad = [b"\x80\x04noise"]

        def instead_of(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda it: [bad.pop()] if bad else original(it)

        monkeypatch.setattr(FrameReader, "take", instead_of(FrameReader.take))
        monkeypatch.setattr(
            ZmqClientTransport, "receive", instead_of(ZmqClientTransport.receive)
        )
        with anyio.fail_after(20):
            with pytest.raises(EngineLost) as caught:
                await collect(stream)
            assert caught.value.reason == "protocol"
            await engine.wait_ready()
        assert engine.pid != pid
        assert not psutil.pid_exists(pid or 0)


async def test_engine_that_cannot_start_is_reported_with_its_words(
    make_engine: MakeEngine,
) -> None:
    """`wait_ready` raises with the end of what the engine wrote (`fault-54`)."""
    async with make_engine("--fail", "no such checkpoint") as engine:
        for _ in range(2):
            with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
                await engine.wait_ready()
            assert caught.value.reason == "exit"
            assert "no such checkpoint" in str(caught.value)
        with pytest.raises(EngineLost, match="retry in") as refused:
            await engine.start("a#1", {})
        assert "checkpoint" not in str(refused.value)


async def test_program_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    """A spawn that fails is a reason like any other, not a crash of the server."""
    async with ZmqEngine([str(tmp_path / "none")], directory=tmp_path) as engine:
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await engine.wait_ready()
        assert caught.value.reason == "spawn_failed"
        assert "FileNotFoundError" in str(caught.value)
        assert engine.pid is None


async def test_reports_a_directory_with_too_long_a_path(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The error for too long a socket path names the remedy."""
    long = tmp_path / ("d" * 90)
    long.mkdir()
    async with make_engine(directory=long, transport="ipc") as engine:
        with anyio.fail_after(20), pytest.raises(EngineLost, match="directory="):
            await engine.wait_ready()
    assert list(long.iterdir()) == []


async def test_engine_that_never_gets_ready_is_replaced(
    make_engine: MakeEngine,
) -> None:
    """The time to get ready is bounded; a start meanwhile fails at once (`fault-29`, `peers-79`)."""
    async with make_engine("--never-ready", ready_timeout=0.3) as engine:
        with anyio.fail_after(20), pytest.raises(EngineLost) as caught:
            await engine.start("a#1", {})
        assert caught.value.reason == "starting"
        assert caught.value.retry_after == 1.0
        with anyio.fail_after(20), pytest.raises(EngineLost) as failed:
            await engine.wait_ready()
        assert failed.value.reason == "start_timeout"


async def test_output_of_the_engine_never_blocks_it(make_engine: MakeEngine) -> None:
    """A megabyte on standard error is drained, its end kept (`fault-54`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(20):
            await engine.start("a#1", {"hold": True, "stderr": 2**20})
        assert len(engine.output) == 64 * 2**10


async def test_socket_cannot_be_found_once_the_engine_serves(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The directory is gone after the connection, so that no kill can leave it."""
    async with make_engine() as engine:
        await engine.wait_ready()
        assert list(tmp_path.glob("lifecycle-*")) == []
        assert await collect(await engine.start("a#1", {"count": 1})) == [[0]]


async def test_engine_inherits_only_what_is_listed(
    make_engine: MakeEngine, environment: dict[str, str]
) -> None:
    """No socket of the server, no file: three descriptors and those passed (`S6`)."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        async with make_engine() as engine:
            await engine.wait_ready()
            without = (await engine.status())["backend"]["descriptors"]
            process = psutil.Process(engine.pid)
            assert os.getsid(process.pid) == process.pid
            assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
            score = Path(f"/proc/{process.pid}/oom_score_adj").read_text()
            assert int(score) == 500
        async with make_engine(pass_fds=[read]) as engine:
            await engine.wait_ready()
            assert (await engine.status())["backend"]["descriptors"] == without + 1
    finally:
        os.close(read)
        os.close(write)


async def test_closing_tells_the_streams_and_lets_the_engine_leave(
    make_engine: MakeEngine,
) -> None:
    """Leaving the block ends streams, process and wait for readiness (`fault-60`)."""
    reported: list[str] = []

    async def read() -> None:
        with pytest.raises(EngineLost) as caught:
            await collect(await engine.start("a#1", {"hold": True}))
        reported.append(caught.value.reason)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks, make_engine() as engine:
            await engine.wait_ready()
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            pid = engine.pid
        assert reported == ["exit"]
        assert not psutil.pid_exists(pid or 0)
        for call in (engine.wait_ready(), engine.start("b", {}), engine.status()):
            with pytest.raises(EngineLost) as caught:
                await call
            assert caught.value.reason == "closed"
        await engine.end("a#1")
        engine.cancel("a#1")


async def test_closing_kills_an_engine_that_does_not_leave(
    make_engine: MakeEngine,
) -> None:
    """One that is in a step gets its time to leave, then SIGKILL (`fault-61`)."""
    with anyio.fail_after(20):
        async with make_engine(stop_timeout=0.1) as engine:
            await engine.wait_ready()
            pid = engine.pid
            assert pid is not None
            stuck = {"forever": True, "sleep_at": 1, "seconds": 60}
            assert await anext(await engine.start("a#1", stuck)) == [0]
    assert not psutil.pid_exists(pid)


async def test_closing_does_not_wait_for_an_engine_that_is_stopped(
    make_engine: MakeEngine,
) -> None:
    """What cannot leave is killed at once, however long it might take (`peers-74`)."""
    async with make_engine(stop_timeout=60.0, stopped_after=60.0) as engine:
        await engine.wait_ready()
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        deadline = anyio.current_time() + 20
    assert anyio.current_time() < deadline
    assert not psutil.pid_exists(pid)


async def test_close_fails_all_waiters_now_and_kills(make_engine: MakeEngine) -> None:
    """An end is sent even when its caller cannot wait for it (`fault-62`)."""
    async with make_engine(stop_timeout=60.0) as engine:
        await engine.wait_ready()
        stuck = {"forever": True, "sleep_at": 1, "seconds": 60}
        stream = await engine.start("a#1", stuck)
        with anyio.fail_after(20):
            engine.close()
            engine.close()
            with pytest.raises(EngineLost) as caught:
                await collect(stream)
            assert caught.value.reason == "closed"
            await engine.end("a#1")
            assert (engine.health, engine.ready) == ("closed", False)
            deadline = anyio.current_time() + 20
    assert anyio.current_time() < deadline


async def test_cancelling_everything_leaves_nothing_behind(
    make_engine: MakeEngine,
) -> None:
    """An outer cancellation at any moment of a life ends process and files."""
    for number in range(6):
        with anyio.move_on_after(0.05 * number) as scope:
            async with make_engine() as engine:
                await engine.wait_ready()
                await collect(await engine.start("a#1", {"forever": True}))
        assert scope.cancelled_caught
        assert psutil.Process().children() == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_closing_is_finished_when_its_task_is_cancelled(
    make_engine: MakeEngine,
) -> None:
    """A native cancel cuts the time to leave short, and leaves no process behind."""
    engine = make_engine(stop_timeout=20.0)
    leaves = anyio.Event()

    async def serve() -> None:
        async with engine:
            await engine.wait_ready()
            stuck = {"forever": True, "sleep_at": 1, "seconds": 60}
            assert await anext(await engine.start("a#1", stuck)) == [0]
            leaves.set()

    with anyio.fail_after(45):
        serving = asyncio.create_task(serve())
        await leaves.wait()
        assert engine.health == "closed"
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert psutil.Process().children() == []


async def test_error_of_the_block_is_not_wrapped(make_engine: MakeEngine) -> None:
    """What the block raises comes out as it is, not in a group."""
    with pytest.raises(KeyError):
        async with make_engine():
            raise KeyError("mine")


async def test_engine_goes_away_with_a_killed_api_process(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """SIGKILL of the API process: the engine is gone, no file is left (`fault-31`)."""
    script = Path(__file__).with_name("scripted_api.py")
    environment["TMPDIR"] = str(tmp_path)
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(script), *engine_argv],
        env=environment,
        stdout=subprocess.PIPE,
    ) as api:
        assert api.stdout is not None
        engine = int(api.stdout.readline())
        descriptor = os.pidfd_open(engine)
        try:
            api.kill()
            with anyio.fail_after(20):
                await anyio.wait_readable(descriptor)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
    assert list(tmp_path.iterdir()) == []


async def test_sessions_of_the_core_run_over_the_link(make_engine: MakeEngine) -> None:
    """START and END of 40 sessions, a third cut short, balance exactly (`N3`)."""

    async def one(number: int) -> None:
        key = ""

        async def open_() -> Any:
            return await engine.start(key, {"count": 20})

        async def end(_: Any) -> None:
            await engine.end(key)

        with (
            anyio.move_on_after(0.002 * number if number % 3 == 0 else 20),
            sessions.open(f"r{number}") as session,
        ):
            key = session.key
            source = await session.start(open_, end=end)
            async with session.stream(source) as items:
                assert len([item async for item in items]) == 20

    async with make_engine() as engine:
        await engine.wait_ready()
        with anyio.fail_after(20):
            async with (
                SessionRegistry() as sessions,
                anyio.create_task_group() as tasks,
            ):
                for number in range(40):
                    tasks.start_soon(one, number)
        status = await engine.status()
        assert status["starts"] == status["ends"] >= 26
        assert (status["duplicate_ends"], status["ends_before_start"]) == (0, 0)
        assert (status["live"], engine.streams) == (0, 0)
        assert status["backend"]["live"] == []
