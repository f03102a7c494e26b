"""Engine processes alone: how they end, what is said of it, and who may reach them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from lifecycle_zmq.process import engine_process as process_module
from lifecycle_zmq.process.engine_process import EngineProcess

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

NOBODY = 65534


@pytest.fixture
def gone(watched: Any) -> Any:
    """Wait until a process has ended."""

    async def wait(pid: int) -> None:
        with watched(pid) as descriptor, anyio.fail_after(20):
            await anyio.wait_readable(descriptor)

    return wait


async def _exists(path: Path) -> None:
    with anyio.fail_after(20):
        while not path.exists():
            await anyio.sleep(0.002)


async def test_engine_leaves_when_its_pipe_closes(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, gone: Any
) -> None:
    """End of file on standard input ends it, idle in its poll or not (`fault-33`)."""
    socket = tmp_path / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{socket}", "--incarnation", "1"]
    with subprocess.Popen(  # noqa: ASYNC220
        argv, env=environment, stdin=subprocess.PIPE
    ) as engine:
        assert engine.stdin is not None
        await _exists(socket)
        assert engine.poll() is None
        engine.stdin.close()
        await gone(engine.pid)
        assert engine.wait(20) == 70


async def test_engine_leaves_with_its_parent_although_the_pipe_is_open(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, gone: Any
) -> None:
    """The kernel kills it too, should somebody still hold the pipe (`fault-31`)."""
    socket = tmp_path / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{socket}", "--incarnation", "1"]
    spawn = (
        "import subprocess, sys;"
        "print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    )
    read, write = os.pipe()
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", spawn, *argv],
        env=environment,
        stdin=read,
        stdout=subprocess.PIPE,
    ) as parent:
        os.close(read)
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        await _exists(socket)
        parent.kill()
        await gone(pid)
    os.close(write)


@pytest.mark.parametrize("descriptors", [True, False], ids=["pidfd", "thread"])
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("import sys; sys.exit(3)", "exit"),
        ("pass", "exit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "segfault"),
        ("import os; os.abort()", "aborted"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", "signal"),
        ("import os; os.kill(os.getpid(), 40)", "signal"),
    ],
)
async def test_reason_tells_how_a_process_ended(
    monkeypatch: pytest.MonkeyPatch, descriptors: bool, end: str, reason: str
) -> None:
    """One word for each way to go, with and without process descriptors."""
    if not descriptors:
        monkeypatch.setattr(process_module, "open_pidfd", lambda _: None)
    process = EngineProcess([sys.executable, "-S", "-c", end])
    with anyio.fail_after(20):
        await process.wait()
        await process.wait()
        assert process.reap() == reason
        assert await process.close() == reason
    process.kill()  # its number may be somebody else's by now: nothing is sent


async def test_reason_is_oom_when_the_kernel_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL beside a counted out-of-memory kill of our group is told as such."""
    kills = iter([4, 5])
    monkeypatch.setattr(process_module, "_count_oom_kills", lambda: next(kills))
    process = EngineProcess([sys.executable, "-S", "-c", "input()"])
    assert await process.close() == "oom"


async def test_close_ends_the_whole_session_of_the_engine(watched: Any) -> None:
    """What the engine has spawned in its session goes with it."""
    spawn = (
        "import subprocess, sys, os;"
        "argv = [sys.executable, '-S', '-c', 'import time; time.sleep(600)'];"
        "child = subprocess.Popen(argv);"
        "os.write(1, b'%d\\n' % child.pid); input()"
    )
    process = EngineProcess([sys.executable, "-S", "-c", spawn])
    with anyio.fail_after(20):
        while "\n" not in process.output:
            process.read_output()
            await anyio.sleep(0.002)
    with watched(int(process.output)) as child:
        assert await process.close() == "killed"
        with anyio.fail_after(20):
            await anyio.wait_readable(child)


async def test_output_without_end_is_read_in_bounded_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that writes faster than it is read does not hold the loop up."""
    process = EngineProcess([sys.executable, "-S", "-c", "input()"])
    reads: list[int] = []

    def endless(_descriptor: int, size: int) -> bytes:
        reads.append(size)
        assert len(reads) < 1000
        return b"x" * size

    with monkeypatch.context() as patch:
        patch.setattr(process_module.os, "read", endless)
        assert process.read_output()
        assert process.output == "x" * 2**16
    await process.close()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_close_is_finished_when_its_task_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A native cancel gets through any shield; the descriptors are closed all the same."""
    process = EngineProcess([sys.executable, "-S", "-c", "input()"])
    monkeypatch.setattr(process, "wait", anyio.sleep_forever)
    closing = asyncio.create_task(process.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    process.reap()


@contextmanager
def _listening(argv: list[str], environment: dict[str, str]) -> Iterator[Any]:
    with subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE) as engine:
        yield engine
        engine.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_other_users_cannot_reach_the_socket(
    engine_argv: list[str], environment: dict[str, str]
) -> None:
    """Neither the directory nor the socket lets another uid in (`S2`, `N11`)."""
    python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no interpreter that another user may run")
    connect = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(20)\n"
        "try: s.connect(sys.argv[1]); print(len(s.recv(64)))\n"
        "except PermissionError: print('denied')\n"
        "except ConnectionError: print(0)\n"
    )
    directory = Path("/tmp") / f"lifecycle-test-{os.getpid()}"
    directory.mkdir(mode=0o700)
    socket = directory / "socket"
    argv = [*engine_argv, "--endpoint", f"ipc://{socket}", "--incarnation", "1"]

    def attempt(**user: Any) -> str:
        done = subprocess.run(
            [python, "-S", "-c", connect, str(socket)],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
            **user,
        )
        return done.stdout.strip()

    try:
        with _listening(argv, environment):
            deadline = time.monotonic() + 20
            while not socket.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            assert attempt(user=NOBODY) == "denied"
            directory.chmod(0o755)
            socket.chmod(0o777)
            assert attempt(user=NOBODY) == "0"
            assert int(attempt()) > 0
    finally:
        shutil.rmtree(directory)
