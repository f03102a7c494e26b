"""What both processes do at run time: nothing is unpickled, whatever is sent."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

# Beside what Python says of classes that a pickle asks for, of code from `marshal`
# there is nothing to be reported: imports are made of it.
PROGRAM = """
import sys
found = []
sys.addaudithook(
    lambda event, _: found.append(event) if event.startswith("pickle.") else None
)
import runpy
try:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("unpickled" if found else "clean", file=sys.stderr, flush=True)
"""
CLIENT = """
import socket
import sys
import anyio
from lifecycle import Payload
from lifecycle_zmq.process import EngineProcess
from lifecycle_zmq import ZmqEngine, ProtocolError
from lifecycle_zmq import protocol as wire

async def main():
    evil = open(sys.argv[1], "rb").read()
    async with ZmqEngine(sys.argv[2:]) as engine:
        await engine.wait_ready()
        link = engine._supervisor.client._link
        box = Payload({"x": bytearray(evil) * 4096})
        stream = await engine.start("a#1", {"count": 2, "evil": evil}, box)
        assert [item async for item in stream] == [[0], [1]]
        await engine.end("a#1")
        # Not killed, so that it can say what it saw.
        EngineProcess.kill = lambda _: link._socket.shutdown(socket.SHUT_RDWR)
        current = engine._supervisor.current
        for parts in ([evil], [evil, evil], [b"", evil]):
            link.send(parts)
            try:
                wire.decode(parts, accept=wire.FROM_ENGINE)
            except ProtocolError:
                pass
        with anyio.fail_after(120):
            while not current.output:
                await anyio.sleep(0.01)
        assert current.reason == "protocol"
        engine._supervisor.closing = True
    print(current.output.strip(), file=sys.stderr)

anyio.run(main)
"""


class Evil:
    """What unpickling would run."""

    def __reduce__(self) -> object:
        return os.getpid, ()


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_nothing_is_unpickled_on_either_side(
    engine_argv: list[str], environment: dict[str, str], tmp_path: Path, protocol: int
) -> None:
    """Pickles as frames, items and tensors: no class is ever looked for (`S1`, `N11`)."""
    evil, watched, client = (tmp_path / name for name in ("evil", "watch.py", "c.py"))
    evil.write_bytes(pickle.dumps(Evil(), protocol))
    watched.write_text(PROGRAM)
    client.write_text(CLIENT)
    watch = [sys.executable, str(watched)]
    done = subprocess.run(
        [*watch, str(client), str(evil), *watch, *engine_argv[1:]],
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The engine's own verdict, which its parent repeats, and the parent's.
    verdicts = [it for it in done.stderr.split() if it in {"clean", "unpickled"}]
    assert verdicts == ["clean", "clean"], done.stderr
