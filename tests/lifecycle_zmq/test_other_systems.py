"""What the link makes do with where the system has less; stand-ins for such systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="nothing to take away"),
    pytest.mark.usefixtures("no_leaks"),
]

# Read by both interpreters before anything else.
SYSTEMS = {
    "macos": """
import fcntl, mmap, os, resource, socket, sys
import trio  # which would look for what is macOS's own
sys.platform = "darwin"
lacks = {
    os: "memfd_create pidfd_open waitid posix_fallocate MFD_CLOEXEC MFD_ALLOW_SEALING",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE"
    " F_SETSIG",
    mmap: "MADV_DONTDUMP MADV_NOHUGEPAGE",
    resource: "prlimit",
    socket: "MSG_CMSG_CLOEXEC MSG_NOSIGNAL",
}
for module, names in lacks.items():
    for name in names.split():
        delattr(module, name)
""",
    "sandbox": """
import errno, os
def refuse(*arguments):
    raise PermissionError(errno.EPERM, "not permitted")
os.memfd_create = os.pidfd_open = refuse
""",
    "32 bits": """
import sys
sys.maxsize = 2**31 - 1
""",
}
SEALED = """
import fcntl
for name in [it for it in dir(fcntl) if "SEAL" in it]:
    delattr(fcntl, name)
from lifecycle_zmq.shared_memory import memfd
print(memfd.create(2**16).kind)
tensors = memfd.unpack(memfd.pack([memoryview(b"ab")]), [2])
print(memfd.SUPPORTED, bytes(tensors[0]))
"""
PROGRAM = """
import ctypes, os, sys
import anyio
from lifecycle import EngineLost, Payload
from lifecycle_zmq import ZmqEngine
from lifecycle_zmq.shared_memory import memfd as parcels

async def main():
    assert ctypes.sizeof(parcels._MappedTensors) <= sys.maxsize
    size = int(sys.argv[3])
    async with ZmqEngine(sys.argv[4:], arena_bytes=size, backoff=0.01) as engine:
        for _ in range(2):
            await engine.wait_ready()
            box = Payload({"x": bytes(2**20), "y": b"1" * 8 * 2**20, "z": b"small"})
            stream = await engine.start("a#1", {"forever": True}, box)
            assert await anext(stream) == [0]
            seen = (await engine.status())["backend"]["seen"]
            assert [it[2] for it in seen] == [[2**20], [8 * 2**20], [5]]
            if engine.incarnation == 2:
                await engine.end("a#1")
                break
            os.kill(engine.pid, 9)
            try:
                async for _ in stream:
                    pass
            except EngineLost as lost:
                print(lost.reason)

anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("arena_bytes", [0, 2**25])
@pytest.mark.parametrize("system", SYSTEMS)
def test_engine_serves_and_is_replaced_on_other_systems(
    system: str,
    arena_bytes: int,
    backend: str,
    environment: dict[str, str],
    engine_argv: list[str],
    tmp_path: Path,
) -> None:
    """No memory to pass, no process descriptors, shorter numbers: only slower."""
    (tmp_path / "sitecustomize.py").write_text(SYSTEMS[system])
    paths = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    given = [system, backend, str(arena_bytes), *engine_argv]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given],
        env={**environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("killed\n", 0), done.stderr


def test_seals_memory_without_names_of_seals(environment: dict[str, str]) -> None:
    """A Python that was built for an old glibc has none, on a kernel with seals."""
    done = subprocess.run(
        [sys.executable, "-c", SEALED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("memfd\nTrue b'ab'\n", "")
