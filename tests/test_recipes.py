"""Each recipe ends its work when a real client disconnects, and counts it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "recipes"
KIT = Path(__file__).resolve().parent / "kit"
# Their work runs in other processes; they have tests of their own below.
APART = {"ray_serve_app"}
NAMES = sorted({path.stem for path in RECIPES.glob("*_app.py")} - APART)
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
# Serves one recipe, and prints the session statistics for each line of input.
SERVE = """
import sys, threading, importlib
sys.path.insert(0, sys.argv[1])
import words
def report():
    for _ in sys.stdin:
        now = words.sessions.statistics()
        ended = {name: n for name, n in now.outcomes.items() if n}
        print(now.live, now.closing, ended, flush=True)
threading.Thread(target=report, daemon=True).start()
recipe = importlib.import_module(sys.argv[2])
if hasattr(recipe, "main"):
    recipe.main(int(sys.argv[3]))
else:
    import uvicorn
    uvicorn.run(recipe.app, port=int(sys.argv[3]), log_level="error")
"""


# A recipe may work without a pause: where the tests are killed, it must not go on.
ENDS_WITH_ITS_PARENT = """
import sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
"""


def test_keeps_recipes_short() -> None:
    """A recipe is fewer than forty lines."""
    for path in RECIPES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 40, path.name


@pytest.mark.parametrize("name", NAMES)
def test_ends_work_of_disconnected_client(name: str) -> None:
    """One session is counted as client_gone, and nothing of it is left."""
    framework = {"grpc_app": "grpc"}.get(name, name.removesuffix("_app"))
    pytest.importorskip(framework)
    port = free_port()
    with running(SERVE, name, port) as process:
        (leave_grpc if framework == "grpc" else leave_http)(port, process)
        assert outcome(process) == "0 0 {'client_gone': 1}\n"


@contextlib.contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run *code* with the recipes, and kill it and its children at the end."""
    paths = [str(RECIPES), str(KIT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS_WITH_ITS_PARENT + code, RECIPES]
        + [str(each) for each in arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        yield process
    finally:
        # SIGINT first: a killed process leaves semaphores in /dev/shm.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # it has exited
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def outcome(process: subprocess.Popen[str]) -> str:
    """Return the counts of live and closing sessions and outcomes, at the end."""
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
            more = peer.recv(1000)
            assert more, seen
            seen += more


def connected(port: int, process: subprocess.Popen[str]) -> socket.socket:
    """Connect as soon as the server listens."""
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        try:
            return socket.create_connection(("127.0.0.1", port), 10)
        except OSError:
            time.sleep(0.02)
    assert process.stderr is not None
    raise AssertionError(
        process.stderr.read() if process.poll() is not None else "slow"
    )


# Recipes whose work runs in other processes --------------------------------------------


def ask(
    port: int, path: str, document: object = None, timeout: float = 60
) -> http.client.HTTPConnection:
    """Send a request and return the connection, as soon as there is a server."""
    until = time.monotonic() + 100
    while True:
        peer = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        method, body = "GET", None
        if document is not None:
            method, body = "POST", json.dumps(document)
        try:
            peer.request(method, path, body, {"content-type": "application/json"})
        except OSError:
            assert time.monotonic() < until, "no server"
            time.sleep(0.1)
        else:
            return peer


def wait_healthy(port: int, path: str = "/health") -> None:
    """Wait until the server is healthy."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        with contextlib.closing(ask(port, path)) as peer:
            if peer.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise AssertionError("not healthy")


# What a server does without us shows that the tests can fail; `make prove` looks.
WITHOUT = pytest.param(True, id="without", marks=pytest.mark.slow)
BOTH = [pytest.param(False, id="with"), WITHOUT]

CHAT = "/v1/chat/completions"
BATCHED = ("--continuous-batching", "--cb-num-blocks=1024", "--cb-max-batch-tokens=256")
# The command of transformers, and ours.
TRANSFORMERS = """
import runpy, sys
sys.argv[1:] = ["serve", sys.argv[3], "--port", sys.argv[2], *sys.argv[4:]]
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("bare", BOTH)
def test_stops_transformers_serve_when_client_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool, batched: bool
) -> None:
    """A model without a client uses no CPU; without the plug-in it continues."""
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from tiny_checkpoint import build

    monkeypatch.setenv("HF_HUB_DISABLE_UPDATE_CHECK", "1")
    folder = build(tmp_path / "tiny", "qwen3")
    port = free_port()
    # By default its batches are as large as the memory allows.
    options = BATCHED if batched else ()
    module = "transformers.cli" if bare else "lifecycle_asgi"
    module += ".transformers" if bare else ".transformers_plugin"
    code = TRANSFORMERS.format(module=module)
    with running(code, port, folder, *options) as process:
        wait_healthy(port)
        body = {"model": str(folder)}
        body["messages"] = [{"role": "user", "content": "hello"}]
        with contextlib.closing(ask(port, CHAT, {**body, "max_tokens": 2})) as peer:
            assert peer.getresponse().status == 200
        endless = {"max_new_tokens": 10**6, "eos_token_id": [10**6]}
        body["generation_config"] = json.dumps(endless)
        for stream in [False] if bare else [True, False]:
            leave_working(process, ask(port, CHAT, {**body, "stream": stream}))
            assert goes_on(process) == bare


def leave_working(
    process: subprocess.Popen[str], peer: http.client.HTTPConnection
) -> None:
    """Disconnect when the work has taken half a second of CPU time."""
    idle, until = used(process), time.monotonic() + 60
    while used(process) < idle + 0.5:
        assert time.monotonic() < until, "no work"
        time.sleep(0.05)
    peer.close()


def goes_on(process: subprocess.Popen[str]) -> bool:
    """Whether it uses three more seconds of CPU time before two idle seconds."""
    left = before = used(process)
    while before - left < 3:
        time.sleep(2)
        now = used(process)
        if now - before < 0.15:
            return False
        before = now
    return True


def used(process: subprocess.Popen[str]) -> float:
    """Return the seconds of CPU time of a process and its descendants."""
    import psutil

    above = psutil.Process(process.pid)
    times = [each.cpu_times() for each in (above, *above.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


RAY = """
import sys, ray, ray_serve_app as r, words
@r.app.get("/outcomes")
async def outcomes():
    now = words.sessions.statistics()
    return [now.live, now.closing, {n: c for n, c in now.outcomes.items() if c}]
ray.init(
    address="local",
    num_cpus=2,
    object_store_memory=128 * 2**20,
    include_dashboard=False,
    log_to_driver=False,
    _temp_dir=sys.argv[3],
)
r.main(int(sys.argv[2]))
"""


def test_ends_work_in_replica_of_ray_serve() -> None:
    """The stream ends in the replica, another process than the HTTP proxy's."""
    pytest.importorskip("ray.serve", exc_type=ImportError)
    port = free_port()
    # Unix sockets need a short path.
    with (
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
        running(RAY, port, folder) as process,
    ):
        wait_healthy(port, "/outcomes")
        with contextlib.closing(ask(port, "/")) as peer:
            assert peer.getresponse().read(7) == b"word 0\n"
        # Ray cancels the request's task as well; either may come first.
        ends: list[Any] = [[0, 0, {"client_gone": 1}], [0, 0, {"cancelled": 1}]]
        until, said = time.monotonic() + 20, None
        while said not in ends and time.monotonic() < until:
            with contextlib.closing(ask(port, "/outcomes")) as peer:
                said = json.loads(peer.getresponse().read())
        assert said in ends
        # SIGINT stops its cluster, SIGKILL does not.
        process.send_signal(signal.SIGINT)
        process.wait(300)
