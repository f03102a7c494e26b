"""Memory that is passed between processes: who holds it, and what a kill leaves."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from descriptors import descriptors_before, open_descriptors

from lifecycle import EngineLost, Payload
from lifecycle_zmq import EngineClient, RequestRejected, ZmqEngine

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="no such memory"),
    pytest.mark.usefixtures("no_leaks"),
]


MIB = 2**20


COUNT = 16


DYING = """
import os, signal, socket, sys
from lifecycle_zmq.shared_memory import memfd as parcels
from lifecycle_zmq.transport import framing as passing
from lifecycle_zmq.transport.socketpair import SocketPairClient
link = SocketPairClient(socket.socket(fileno=int(sys.argv[1])), lambda _: True)
link._socket.setblocking(False)
for _ in range(5):
    assert link.send([b"head", bytes(2**20)])
memory = parcels.pack([memoryview(b"x")])
passing.send(link._socket, memoryview(bytes([129, 0, 0])), memory)
os.kill(os.getpid(), signal.SIGKILL)
"""


def held() -> float:
    """MiB of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    lines = [line for line in status.splitlines() if line.startswith(("RssA", "RssS"))]
    return sum(int(line.split()[1]) for line in lines) / 1024


async def send_all(client: EngineClient, reported: list[str]) -> None:
    """Hand over payloads of 8 MiB, and note how each ends."""
    source = memoryview(bytes(8 * MIB))

    async def send(key: str) -> None:
        try:
            async for _ in await client.start(
                key, {"count": 1}, Payload({"x": source})
            ):
                pass
            reported.append("served")
        except EngineLost as lost:
            reported.append(lost.reason)
        finally:
            with anyio.CancelScope(shield=True):
                await client.end(key)

    async with anyio.create_task_group() as tasks:
        for number in range(COUNT):
            tasks.start_soon(send, f"a#{number}")


@pytest.mark.anyio
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_engine_that_stands_still_lets_no_payload_pile_up_here(
    make_engine: Callable[..., ZmqEngine], eventually: Any, end: signal.Signals
) -> None:
    """16 of 8 MiB wait for it, and take none of this process; then it goes on, or dies."""
    async with make_engine(stopped_after=3600.0) as engine:
        await engine.wait_ready()
        pid, reported = engine.pid, []
        # Not by the engine, which refuses requests once it has seen that it is stopped.
        client = engine._client
        assert pid is not None
        assert client is not None
        # What is needed for the first ones is no difference.
        await send_all(client, reported)
        before, open_before = held(), descriptors_before()
        os.kill(pid, signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_all, client, reported)
            await eventually(lambda: client.streams == COUNT)
            assert held() - before < 8
            assert open_descriptors() == open_before
            os.kill(pid, end)
            if end is signal.SIGKILL:
                await eventually(lambda: len(reported) == 2 * COUNT)
        expected = "served" if end is signal.SIGCONT else "killed"
        assert reported == ["served"] * COUNT + [expected] * COUNT
        assert held() - before < 8


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("size", "left"), [(5000, 0), (MIB, 0), (MIB, MIB // 2), (16 * MIB, 8 * MIB)]
)
async def test_refuses_only_the_tensor_of_a_truncated_file(
    make_engine: Callable[..., ZmqEngine], tmp_path: Path, size: int, left: int
) -> None:
    """No other stream ends for it, and no signal is sent."""
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
        file.truncate(left)
    async with make_engine() as engine:
        await engine.wait_ready()
        other = await engine.start("other#1", {"forever": True})
        with anyio.fail_after(20):
            with pytest.raises(RequestRejected) as caught:
                await engine.start("a#1", {}, Payload({"x": memory}))
            assert caught.value.code == "unencodable"
            assert await anext(other)
        assert engine.incarnation == 1
    memory.close()


def test_client_that_is_killed_leaves_no_descriptor(
    make_ends: Callable[[], Any], environment: dict[str, str]
) -> None:
    """Complete unread messages, and one that its death has truncated."""
    with make_ends() as ends:
        before = descriptors_before()
        descriptor = ends.client.fileno()
        done = subprocess.run(
            [sys.executable, "-c", DYING, str(descriptor)],
            env=environment,
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        ends.client.close()
        messages = 0
        while ends.receive() is not None:
            messages += 1
        assert messages == 5
        assert len(open_descriptors()) == len(before) - 1
