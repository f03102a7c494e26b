"""Readers that are slow, gone or hostile, with real processes on both sides."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from lifecycle import SessionRegistry
from lifecycle_zmq import EngineClient, EngineFailed, ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

MakeEngine = Callable[..., ZmqEngine]
HERE = Path(__file__).parent
DISCONNECTS = {"asyncio": 90_000, "trio": 10_000}


@asynccontextmanager
async def engine_for_two(
    engine_argv: list[str], environment: dict[str, str], folder: Path, *arguments: str
) -> AsyncIterator[tuple[str, EngineClient]]:
    """An engine that any process may connect to, and a client of it."""
    endpoint = f"ipc://{folder}/shared"
    argv = [*engine_argv, "--endpoint", endpoint, "--incarnation", "1"]
    with subprocess.Popen(  # noqa: ASYNC220
        [*argv, *arguments], env=environment, stdin=subprocess.PIPE
    ) as process:
        try:
            with anyio.fail_after(120):
                async with EngineClient(endpoint, incarnation=1) as client:
                    await client.wait_ready()
                    yield endpoint, client
        finally:
            process.kill()


@pytest.mark.parametrize("credit", ["open", "none"])
async def test_killed_client_loses_its_streams_and_no_other(
    engine_argv: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    eventually: Any,
    credit: str,
) -> None:
    """With credit it is missed at the next item, without at the stall limit (`N3`)."""
    many = {"forever": True, "size": 30_000, "merge": "concatenate"}
    request = {"forever": True, "merge": "concatenate"} if credit == "open" else many
    stall = "60" if credit == "open" else "3"
    async with engine_for_two(engine_argv, environment, tmp_path, "--stall", stall) as (
        endpoint,
        client,
    ):
        stream = await client.start("stays", {"forever": True})
        seen: list[list[int]] = []

        async def read() -> None:
            async for item in stream:
                seen.append(item)  # noqa: PERF401 - looked at while it grows

        async def until(condition: Callable[[dict[str, Any]], bool]) -> None:
            while not condition(await client.status()):
                await anyio.sleep(0.005)

        argv = [sys.executable, str(HERE / "scripted_client.py"), endpoint, "12"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            with subprocess.Popen(  # noqa: ASYNC220
                [*argv, json.dumps(request)], env=environment, stdout=subprocess.PIPE
            ) as other:
                assert other.stdout is not None
                assert other.stdout.readline() == b"12\n"
                if credit == "none":
                    await until(lambda status: status["held"] >= 12)
                other.kill()
            # Items of the stream that stays are held while this process has no turn.
            await until(lambda status: (status["live"], status["held"]) == (1, 0))
            status = await client.status()
            assert status["lost_with_peer"] == 12
            assert status["backend"]["live"] == ["stays"]
            enough = len(seen) + 20
            await eventually(lambda: len(seen) >= enough)
            tasks.cancel_scope.cancel()
        assert seen == [[n] for n in range(len(seen))]


async def test_reader_that_never_reads_ends_alone_and_costs_little(
    make_engine: MakeEngine,
) -> None:
    """Others are not affected; it fails once, with limits on both sides (`fault-13`)."""
    reported: list[str] = []
    async with make_engine("--step", "0.0002", "--stall", "6") as engine:
        await engine.wait_ready()
        tokens = {"forever": True, "merge": "concatenate"}
        slow = await engine.start("slow", tokens)
        process = psutil.Process(engine.pid)
        before = process.memory_info().rss

        async def read(key: str) -> None:
            stream, seen = await engine.start(key, tokens), 0
            async for item in stream:
                # A reader that keeps up gets its items one by one and in order.
                assert item[0] == seen
                seen += len(item)
                if reported:
                    await engine.end(key)
                    return

        async def watch() -> None:
            held = 0
            while not reported:
                status = await engine.status()
                held = max(held, status["held_bytes"])
                if status["slow_clients"]:
                    reported.append("slow_client")
                await anyio.sleep(0.005)
            assert 0 < held <= 15 * 2**17

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(15):
                    tasks.start_soon(read, f"fast#{number}")
                tasks.start_soon(watch)
        assert process.memory_info().rss - before < 8 * 2**20
        items = 0
        with pytest.raises(EngineFailed) as caught:
            while True:
                await anext(slow)
                items += 1
        assert caught.value.code == "slow_client"
        # A window of items and no more has come here.
        assert 900 < items < 1000
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
        with anyio.fail_after(20):
            await engine.end("slow")
        status = await engine.status()
        assert "slow" not in status["backend"]["live"]
        assert (status["slow_clients"], status["held"]) == (1, 0)


async def test_paused_reader_gets_everything_when_it_reads_on(
    make_engine: MakeEngine,
) -> None:
    """A reader may rest within the limit: nothing is lost, whatever the rule is."""
    async with make_engine("--step", "0") as engine:
        await engine.wait_ready()
        for rule, each in (("concatenate", 5_000), ("never", 3_000)):
            stream = await engine.start(rule, {"count": each, "merge": rule})
            with anyio.fail_after(30):
                # More than one item: a slow engine would be kept up with.
                while (await engine.status())["held_bytes"] < 1_000:
                    await anyio.sleep(0.002)
                items = [item async for item in stream]
                await engine.end(rule)
            assert [it for item in items for it in item] == list(range(each))
            assert (len(items) == each) is (rule == "never")
        assert (await engine.status())["slow_clients"] == 0


async def test_generic_stream_keeps_256_distinct_objects_apart(
    make_engine: MakeEngine,
) -> None:
    """Objects that cannot merge all arrive, in order, also at a slow reader."""
    async with make_engine("--step", "0") as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"count": 256, "distinct": True})
        got = []
        with anyio.fail_after(20):
            async for item in stream:
                got.append(item)
                await anyio.sleep(0.0005)  # slower than the engine makes them
        assert got == [{"n": n, "text": "x" * n} for n in range(256)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_random_disconnects_leave_nothing_behind(
    make_engine: MakeEngine, anyio_backend: str
) -> None:
    """Sessions cut at random moments: every stream is ended once (`N3`)."""
    spec = importlib.util.spec_from_file_location("d", HERE / "disconnects.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    count = DISCONNECTS[anyio_backend]
    async with make_engine("--step", "0") as engine:
        await engine.wait_ready()
        process = psutil.Process()
        own, its = process.num_fds(), psutil.Process(engine.pid).num_fds()
        with anyio.fail_after(3500):
            async with SessionRegistry() as sessions:
                await script.disconnect(engine, sessions, count=count, seed=count)
        await script.check_nothing_left(engine)
        assert engine.incarnation == 1
        # One of the beginning, such as a handshake's, may be gone by now.
        assert process.num_fds() <= own
        assert psutil.Process(engine.pid).num_fds() <= its
