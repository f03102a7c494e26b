"""Each recipe ends its work when a real client leaves, and says so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*_app.py"))
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
# Serves one recipe and tells what became of its sessions when its input ends.
SERVE = """
import sys, threading, importlib
sys.path.insert(0, sys.argv[1])
import words
def tell():
    for _ in sys.stdin:
        now = words.sessions.statistics()
        ended = {name: n for name, n in now.outcomes.items() if n}
        print(now.live, now.closing, ended, flush=True)
threading.Thread(target=tell, daemon=True).start()
recipe = importlib.import_module(sys.argv[2])
if hasattr(recipe, "main"):
    recipe.main(int(sys.argv[3]))
else:
    import uvicorn
    uvicorn.run(recipe.app, port=int(sys.argv[3]), log_level="error")
"""


def test_keeps_recipes_short() -> None:
    """A recipe is fewer than forty lines."""
    for path in RECIPES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 40, path.name


@pytest.mark.parametrize("name", NAMES)
def test_ends_work_of_client_who_left(name: str) -> None:
    """One session, counted as client_gone, and nothing left of it."""
    framework = {"grpc_app": "grpc"}.get(name, name.removesuffix("_app"))
    pytest.importorskip(framework)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, RECIPES, name, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        (leave_grpc if framework == "grpc" else leave_http)(port, process)
        assert outcome(process) == "0 0 {'client_gone': 1}\n"
    finally:
        process.kill()
        process.communicate(timeout=10)


def outcome(process: subprocess.Popen[str]) -> str:
    """Return what is live, what is closing, and the outcomes, once all is quiet."""
    assert process.stdin is not None
    assert process.stdout is not None
    said, until = "", time.monotonic() + 10
    while time.monotonic() < until and not said.startswith("0 0 {'"):
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stdout.readline()
        time.sleep(0.01)
    return said


def leave_grpc(port: int, process: subprocess.Popen[str]) -> None:
    """Read the first words and cancel the call."""
    import grpc

    connected(port, process).close()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/words/speak")(b"", timeout=20)
        assert [next(call) for _ in range(3)][2] == b"word 2\n"
        call.cancel()


def leave_http(port: int, process: subprocess.Popen[str]) -> None:
    """Read the first words and close."""
    with connected(port, process) as peer:
        peer.sendall(REQUEST)
        seen = b""
        while b"word 2" not in seen:
            seen += peer.recv(1000)


def connected(port: int, process: subprocess.Popen[str]) -> socket.socket:
    """Connect, as soon as the server listens."""
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        try:
            return socket.create_connection(("127.0.0.1", port), 10)
        except OSError:
            time.sleep(0.02)
    assert process.stderr is not None
    raise AssertionError(
        process.stderr.read() if process.poll() is not None else "slow"
    )
