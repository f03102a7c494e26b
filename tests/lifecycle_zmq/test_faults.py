"""Faults around a real engine that no other file is about: threads, loops, moments."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import psutil
import pytest

from lifecycle import EngineLost
from lifecycle_zmq import ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

MakeEngine = Callable[..., ZmqEngine]


async def collect(stream: Any) -> list[Any]:
    """All items of a stream."""
    return [item async for item in stream]


async def test_every_engine_is_spawned_in_the_thread_of_the_loop(
    make_engine: MakeEngine, becomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and those after a death; threads that come and go end none (`fault-32`)."""
    spawned: list[int] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            spawned.append(threading.get_ident())
            super().__init__(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    async with make_engine(backoff=0.01) as engine:
        with anyio.fail_after(20):
            for number in (1, 2):
                await engine.wait_ready()
                # Asked for by a thread that is gone afterwards.
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()
                stream = await engine.start(f"s{number}", {"count": 3})
                assert len(await collect(stream)) == 3
                assert engine.incarnation == number
                os.kill(engine.pid or 0, signal.SIGKILL)
                await becomes(engine, lambda: not engine.ready)
            await engine.wait_ready()
    assert spawned == [threading.get_ident()] * 3


async def test_call_from_another_thread_is_refused_and_breaks_nothing(
    make_engine: MakeEngine,
) -> None:
    """Use from the wrong loop raises an error and affects no others (`fault-63`)."""
    reported: list[str] = []

    def elsewhere(backend: str) -> None:
        async def call() -> None:
            for name in ("start", "status", "wait_ready", "end"):
                arguments = {"start": ("b#1", {}), "end": ("a#1",)}.get(name, ())
                with anyio.fail_after(20), pytest.raises(RuntimeError) as caught:
                    await getattr(engine, name)(*arguments)
                reported.append(str(caught.value))

        anyio.run(call, backend=backend)

    async with make_engine() as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"count": 200})
        for backend in ("asyncio", "trio"):
            await anyio.to_thread.run_sync(elsewhere, backend)
        assert len(reported) == 8
        assert all("anyio.from_thread" in text for text in reported)
        with anyio.fail_after(20):
            assert len(await collect(stream)) == 200
        assert engine.incarnation == 1
        assert (await engine.status())["starts"] == 1


async def test_two_loops_have_an_engine_each(make_engine: MakeEngine) -> None:
    """Threads with loops of their own, of either kind, do not share anything (`fault-63`)."""
    items: dict[str, int] = {}

    async def serve(name: str) -> None:
        with anyio.fail_after(20):
            async with make_engine() as engine:
                await engine.wait_ready()
                stream = await engine.start("same", {"count": 50})
                items[name] = len(await collect(stream))

    def elsewhere(name: str) -> None:
        anyio.run(serve, name, backend=name)

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            for name in ("asyncio", "trio"):
                tasks.start_soon(anyio.to_thread.run_sync, elsewhere, name)
            await serve("here")
    assert items == {"here": 50, "asyncio": 50, "trio": 50}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("how", ["leave", "raise", "sys.exit", "lose the loop"])
async def test_process_with_live_streams_ends(
    engine_argv: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    watched: Any,
    how: str,
) -> None:
    """However it ends, it does not hang, and takes its engine along (`fault-63`)."""
    ends = {
        "leave": "return",
        "raise": "raise KeyError",
        "sys.exit": "sys.exit(0)",
        "lose the loop": "asyncio.get_running_loop().stop(); await asyncio.sleep(9)",
    }
    program = (
        "import asyncio, sys\n"
        "from lifecycle_zmq import ZmqEngine\n"
        "async def main():\n"
        "    async with ZmqEngine(sys.argv[1:], stop_timeout=0.2) as engine:\n"
        "        await engine.wait_ready()\n"
        "        streams = [await engine.start(str(n), {'forever': True})\n"
        "                   for n in range(8)]\n"
        "        [await anext(stream) for stream in streams]\n"
        "        print(engine.pid, flush=True)\n"
        f"        {ends[how]}\n"
        "asyncio.run(main())\n"
    )
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", program, *engine_argv],
            env=environment | {"TMPDIR": str(tmp_path)},
            capture_output=True,
            timeout=20,
            check=False,
        )
    )
    with suppress(ProcessLookupError), watched(int(done.stdout)) as engine:
        assert select.select([engine], [], [], 20)[0]
    assert list(tmp_path.iterdir()) == []


async def test_pause_of_the_loop_is_not_held_against_the_engine(
    make_engine: MakeEngine,
) -> None:
    """Blocked for longer than any bound: the engine is there, and nothing is lost (`fault-58`, `N6`)."""
    options = {"stopped_after": 0.3, "stalled_after": 1.0}
    async with make_engine(**options) as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"forever": True})
        assert await anext(stream) == [0]
        for number in range(3):
            time.sleep(1.2)  # noqa: ASYNC251 - the fault
            assert engine.health == "serving"
            with anyio.fail_after(20):
                other = await engine.start(f"b#{number}", {"count": 5})
                assert await collect(other) == [[n] for n in range(5)]
        await anyio.sleep(0.2)  # late enough for a notice
        assert (engine.health, engine.incarnation) == ("serving", 1)
        engine.cancel("a#1")
        seen = 0
        with anyio.fail_after(20):
            async for item in stream:
                assert item[0] > seen
                assert item == list(range(item[0], item[-1] + 1))
                seen = item[-1]


async def test_engine_that_served_while_the_loop_stood_still_is_not_late(
    make_engine: MakeEngine,
) -> None:
    """A message sent in time counts, even if it is read after the timeout (`fault-58`)."""
    async with make_engine(ready_timeout=0.2) as engine:
        with anyio.fail_after(20):
            while engine.pid is None:
                await anyio.lowlevel.checkpoint()
        for _ in range(20):  # until the client has greeted, and waits
            await anyio.lowlevel.checkpoint()
        assert engine._client is not None
        link: Any = engine._client._link
        select.select([link._socket], [], [], 20)
        time.sleep(0.2)  # noqa: ASYNC251 - the fault
        with anyio.fail_after(20):
            await engine.wait_ready()
        assert engine.incarnation == 1


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.3])
async def test_leaving_while_the_engine_loads_takes_no_time(
    make_engine: MakeEngine, moment: float
) -> None:
    """The start is given up and the process killed, within two seconds (`fault-60`)."""
    begin = time.monotonic()
    async with make_engine("--never-ready", stop_timeout=60.0) as engine:
        await anyio.sleep(moment)
        left = time.monotonic()
        pid = engine.pid
    assert time.monotonic() - left < 20.0 + (left - begin - moment)
    assert pid is None or not psutil.pid_exists(pid)


async def test_death_while_loading_is_reported_at_once(
    make_engine: MakeEngine, eventually: Any
) -> None:
    """It is watched from its spawn on, not from READY (`peers-73`)."""
    async with make_engine("--never-ready", ready_timeout=600.0) as engine:
        await eventually(lambda: engine.pid)
        os.kill(engine.pid or 0, signal.SIGKILL)
        with anyio.fail_after(20):
            with pytest.raises(EngineLost) as caught:
                await engine.wait_ready()
    assert caught.value.reason == "killed"


async def test_question_that_is_open_when_the_engine_dies_is_answered(
    make_engine: MakeEngine,
) -> None:
    """Not only streams: a pending request for its counters fails, too (`peers-83`)."""
    reported: list[str] = []

    async def ask() -> None:
        with pytest.raises(EngineLost) as caught:
            await engine.status()
        reported.append(caught.value.reason)

    async with make_engine(stopped_after=60.0) as engine:
        await engine.wait_ready()
        os.kill(engine.pid or 0, signal.SIGSTOP)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                os.kill(engine.pid or 0, signal.SIGKILL)
    assert reported == ["killed"] * 4


async def test_starts_that_an_engine_cannot_read_yet_are_not_lost(
    make_engine: MakeEngine,
) -> None:
    """More than any queue of the socket library holds by default (`fault-45`, `S4`)."""
    count, heard = 3_000, 0

    async def one(number: int) -> None:
        nonlocal heard
        request = {"count": 1, "padding": "x" * 9_000}
        stream = await engine.start(f"s{number}", request)
        assert await collect(stream) == [[0]]
        heard += 1

    async with make_engine("--step", "0") as engine:
        await engine.wait_ready()
        # It reads nothing while it is in a step.
        stuck = {"count": 2, "sleep_at": 1, "seconds": 2.0}
        stream = await engine.start("stuck", stuck)
        assert await anext(stream) == [0]
        with anyio.fail_after(100):
            async with anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(one, number)
            assert heard == count
            status = await engine.status()
    assert (status["starts"], status["bad_frames"]) == (count + 1, 0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_answers_that_a_client_cannot_read_yet_are_not_lost(
    make_engine: MakeEngine,
) -> None:
    """A server that stands still finds all that was said meanwhile (`fault-45`, `S4`)."""
    async with make_engine("--step", "0") as engine:
        await engine.wait_ready()
        request = {"count": 4_000, "size": 40, "merge": "never"}
        streams = [await engine.start(f"s{n}", request) for n in range(16)]
        time.sleep(1.0)  # noqa: ASYNC251 - the fault
        with anyio.fail_after(60):
            lengths = await asyncio.gather(*(collect(it) for it in streams))
        assert [len(items) for items in lengths] == [4_000] * 16
