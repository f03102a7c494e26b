"""Real processes that come, go and come again; and what is left when all are gone."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import psutil
import pytest
import shared_memory
from pauses import noted_pauses

from lifecycle import EngineLost
from lifecycle_zmq import ZmqEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

MakeEngine = Callable[..., ZmqEngine]
API = Path(__file__).with_name("scripted_api.py")
BOUND = 120.0


async def test_crash_loop_breaks_the_engine(
    make_engine: MakeEngine, eventually: Any
) -> None:
    """No process any more, refused at once with the reason and a time (`fault-30`)."""
    options = {"backoff": 0.01, "max_backoff": 0.02, "max_crashes": 2}
    async with make_engine("--fail", "no model", **options) as engine:
        await eventually(lambda: engine.health == "broken")
        assert (engine.incarnation, engine.ready, engine.pid) == (3, False, None)
        assert psutil.Process().children() == []
        with anyio.fail_after(20):
            for call in (engine.start("a", {}), engine.wait_ready(), engine.status()):
                with pytest.raises(EngineLost) as caught:
                    await call
                assert caught.value.reason == "broken"
                assert caught.value.retry_after == pytest.approx(60, abs=10)
        assert "no model" in engine.output


async def test_wait_for_readiness_ends_when_the_engine_breaks(
    make_engine: MakeEngine,
) -> None:
    """Waiters get an error with the output of the last attempt."""
    options = {"max_crashes": 0, "backoff": 0.01}
    async with make_engine("--fail", "no model", **options) as engine:
        with anyio.fail_after(20), pytest.raises(EngineLost, match="no model") as lost:
            await engine.wait_ready()
        assert lost.value.reason == "broken"


async def test_broken_engine_is_tried_again_later(
    make_engine: MakeEngine, eventually: Any, tmp_path: Path
) -> None:
    """Half open: after its rest one process is tried; here it serves (`peers-75`)."""
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    options = {"backoff": 0.01, "max_crashes": 1, "broken_for": 0.3}
    async with make_engine("--fail-while", str(obstacle), **options) as engine:
        await eventually(lambda: engine.health == "broken")
        first = engine.incarnation
        await eventually(lambda: engine.incarnation > first + 1)
        obstacle.unlink()
        await eventually(lambda: engine.health == "serving")


async def test_reset_starts_a_broken_engine_now(
    make_engine: MakeEngine, eventually: Any, tmp_path: Path
) -> None:
    """After the cause is fixed, a reset skips an hour of waiting."""
    obstacle = tmp_path / "obstacle"
    obstacle.touch()
    options = {"backoff": 0.01, "max_crashes": 1, "broken_for": 3600.0}
    async with make_engine("--fail-while", str(obstacle), **options) as engine:
        await eventually(lambda: engine.health == "broken")
        obstacle.unlink()
        engine.reset()
        await eventually(lambda: engine.health == "serving")
        assert await engine.status()


async def test_next_process_starts_when_the_old_one_is_gone(
    make_engine: MakeEngine,
) -> None:
    """Its waiters have failed and its memory is free before (`fault-39`)."""
    async with make_engine("--ballast", str(512 * 2**20)) as engine:
        await engine.wait_ready()
        first = engine.pid
        assert first is not None
        stream = await engine.start("a#1", {"forever": True})
        os.kill(first, signal.SIGKILL)
        with anyio.fail_after(20):
            with pytest.raises(EngineLost):
                async for _ in stream:
                    pass
            assert psutil.pid_exists(first)
            while engine.pid in {None, first}:
                assert engine.incarnation == 1 or not psutil.pid_exists(first)
                await anyio.lowlevel.checkpoint()
            assert not psutil.pid_exists(first)


async def test_server_without_descriptors_recovers_by_itself(
    make_engine: MakeEngine, eventually: Any
) -> None:
    """None is left to start an engine with: refused, then served again (`fault-50`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = {"backoff": 0.05, "max_backoff": 0.05, "max_crashes": None}
    async with make_engine(**options) as engine:
        await engine.wait_ready()
        # The standard ones have all numbers below the limit, so what the dead one gives
        # back is of no use to the next one: each fails before it first waits.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            os.kill(engine.pid or 0, signal.SIGKILL)
            await eventually(lambda: engine._supervisor.false_starts)
            with pytest.raises(EngineLost) as caught:
                await engine.start("a#1", {})
            assert caught.value.reason == "spawn_failed"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with anyio.fail_after(BOUND):
            while not engine.ready:
                with suppress(EngineLost):  # of a start that failed meanwhile
                    await engine.wait_ready()
            assert await engine.status()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_engine_leaves_signals_to_its_parent(
    make_engine: MakeEngine, number: int
) -> None:
    """A signal to every process of the service does not cut its streams (`peers-80`, `fault-24`, `fault-62`)."""
    async with make_engine() as engine:
        await engine.wait_ready()
        stream = await engine.start("a#1", {"count": 100})
        assert await anext(stream) == [0]
        os.kill(engine.pid or 0, number)
        with anyio.fail_after(20):
            assert len([item async for item in stream]) == 99
            assert await engine.status()
    assert engine.incarnation == 1


@contextmanager
def _api(
    *arguments: str, environment: dict[str, str], place: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, str(API), *arguments],
        env=environment | {"TMPDIR": str(place)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as api:
        try:
            yield api
        finally:
            api.kill()


def _seconds_until_gone(descriptor: int, api: subprocess.Popen[bytes]) -> float:
    api.kill()
    begin = time.monotonic()
    assert select.select([descriptor], [], [], 20)[0]
    return time.monotonic() - begin


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("ready", [True, False])
async def test_engine_goes_with_its_killed_parent(
    engine_argv: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    eventually: Any,
    watched: Any,
    ready: bool,
) -> None:
    """Ready or still loading: gone in 100 ms, and no file is left (`fault-31`, `fault-56`, `N7`, `peers-78`)."""
    before = shared_memory.names()
    arguments = [*engine_argv] if ready else ["--early", *engine_argv, "--never-ready"]
    with _api(*arguments, environment=environment, place=tmp_path) as api:
        assert api.stdout is not None
        engine = int(api.stdout.readline())
        with watched(engine) as descriptor:
            # From the moment that its own code runs it is bound to its parent.
            await eventually(lambda: _threads(engine) > 1)
            with noted_pauses() as pauses:
                assert _seconds_until_gone(descriptor, api) < 0.1 + 5 * pauses()
    assert list(tmp_path.iterdir()) == []
    assert shared_memory.names() == before


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_engine_goes_although_a_fork_of_its_parent_lives(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, watched: Any
) -> None:
    """Orphaned before its own code began, its pipe held by a worker of the server (`fault-33`, `N7`)."""
    begin = tmp_path / "begin"
    arguments = ["--early", "--forked", *engine_argv, "--begin-when", str(begin)]
    with _api(*arguments, environment=environment, place=tmp_path) as api:
        assert api.stdout is not None
        with watched(int(api.stdout.readline())) as descriptor:
            api.kill()
            api.wait()
            assert not select.select([descriptor], [], [], 0)[0]
            begin.touch()
            assert select.select([descriptor], [], [], 20)[0]
    # The end of the block is also that of the fork, by its standard input.


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_engine_goes_with_its_parent_although_it_was_stopped_before_it_began(
    engine_argv: list[str],
    environment: dict[str, str],
    tmp_path: Path,
    eventually: Any,
    watched: Any,
) -> None:
    """Before it could ask the kernel for anything, and without being continued (`fault-33`, `N7`)."""
    arguments = ["--early", *engine_argv, "--begin-when", str(tmp_path / "never")]
    with _api(*arguments, environment=environment, place=tmp_path) as api:
        assert api.stdout is not None
        pid = int(api.stdout.readline())
        with watched(pid) as descriptor:
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: psutil.Process(pid).status() == "stopped")
            with noted_pauses() as pauses:
                assert _seconds_until_gone(descriptor, api) < 0.1 + 5 * pauses()


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_parent_killed_at_any_moment_leaves_nothing(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, watched: Any
) -> None:
    """From before the spawn until after READY, ten moments (`fault-33`, `N7`)."""
    for number in range(10):
        with _api(*engine_argv, environment=environment, place=tmp_path):
            await anyio.sleep(0.1 + 0.04 * number)
        for engine in _of(tmp_path):
            with suppress(ProcessLookupError), watched(engine) as descriptor:
                assert select.select([descriptor], [], [], 20)[0]
    assert list(tmp_path.iterdir()) == []


def _of(place: Path) -> list[int]:
    """The engines of servers that were given a place for their files."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "--endpoint" in (process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(place):
                    found.append(process.pid)
    return found
