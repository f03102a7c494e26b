"""SGLang itself, by its own command lines and its own loader of plug-ins.

Only its schedulers are left out, by a second plug-in: they need a GPU. Needs the package
``sglang``, of which its dependencies for a CPU are enough.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import sglang_without_engine
from ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed"),
]
SECONDS = 600.0
SCRIPT = """
import sys
if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    launch_server(prepare_server_args(sys.argv[1:]))
"""
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
WAYS = {
    "sglang serve": SERVE,
    "module": (sys.executable, "-m", "sglang.launch_server"),
    "script": (sys.executable, "script.py"),
    "workers": (*SERVE, "--tokenizer-worker-num=2"),
}
STARTED = "Uvicorn running on"


class Launched:
    """A process of SGLang, and what it has written.

    Attributes:
        port: Where it listens.
        said: Its lines until now.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.port = port
        self.said: list[str] = []
        self._lines = process.stdout or ()

    def until(self, *texts: str) -> str:
        """Read on to a line with one of *texts*, or to the end; return all lines."""
        for line in self._lines:
            self.said.append(line)
            if any(text in line for text in texts):
                break
        return "".join(self.said)

    def post(self, stack: ExitStack, **headers: str) -> http.client.HTTPConnection:
        """Send a request; SGLang ignores the blanks, and `Admission` counts them."""
        peer = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        stack.callback(peer.close)
        until = time.monotonic() + SECONDS
        while peer.sock is None:  # several workers listen after the line
            with suppress(ConnectionRefusedError):
                peer.connect()
            assert time.monotonic() < until
            time.sleep(0.05)
        body = json.dumps({"text": "hello"}) + " " * 200_000
        headers = {"content-type": "application/json", **headers}
        peer.request("POST", "/generate", body, headers)
        return peer


@contextmanager
def launched(folder: Path, *argv: str, **environment: str) -> Iterator[Launched]:
    """Start SGLang on a tiny checkpoint, and end it and its processes."""
    from tiny_checkpoint import cached

    (folder / "script.py").write_text(SCRIPT)
    plugin = folder / "without_engine-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: without-engine\n")
    (plugin / "entry_points.txt").write_text(sglang_without_engine.ENTRY_POINTS)
    kit = Path(sglang_without_engine.__file__).parent
    port = free_port()
    options = ("--device=cpu", "--skip-server-warmup", f"--port={port}")
    process = subprocess.Popen(
        [*argv, f"--model-path={cached('qwen3')}", *options],
        cwd=folder,
        env={
            **os.environ,
            "LIFECYCLE_BYTES": "4MiB",
            "PYTHONPATH": os.pathsep.join(map(str, (folder, kit))),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    guard = threading.Timer(SECONDS, end)
    guard.start()
    try:
        yield Launched(process, port)
    finally:
        guard.cancel()
        end()
        process.communicate(timeout=60)


@pytest.mark.parametrize("way", WAYS)
def test_limits_sglang(tmp_path: Path, way: str) -> None:
    """However SGLang is launched, it says its limit, and refuses what is above it."""
    with launched(tmp_path, *WAYS[way]) as sglang, ExitStack() as stack:
        said = sglang.until(STARTED)
        line = "Admission: 0.00391 GiB, profile sglang, released at the scheduler"
        assert said.count(line) == 1, said
        assert ("in each of 2 tokenizer workers" in said) is (way == "workers")
        answer = sglang.post(stack, **{"content-length": str(100 << 30)}).getresponse()
        assert answer.status == 413
        assert b"request body is larger than 67108864 bytes" in answer.read()


def test_hands_off_to_the_scheduler(tmp_path: Path) -> None:
    """More requests reach it, none of them answered, than there is memory for at once.

    SGLang's detokenizer, which loads plug-ins as well, does not import the server.
    """
    with (
        launched(tmp_path, *SERVE, LIFECYCLE_MAX_WAIT="1") as sglang,
        ExitStack() as stack,
    ):
        assert STARTED in sglang.until(STARTED)
        for _ in range(8):
            sglang.post(stack)
            said = sglang.until("scheduled", "/generate HTTP")  # or an answer
            assert said.endswith("scheduled\n"), said
        line = "the detokenizer has the HTTP server: "
        said = said if line in said else sglang.until(line)
        assert f"{line}False" in said


@pytest.mark.parametrize(
    ("option", "environment"),
    [
        ("--log-level=info", {"SGLANG_RUST_SERVER": "1"}),
        ("--encoder-only", {}),
        ("--smg-grpc-mode", {}),
    ],
)
def test_launches_no_other_server(
    tmp_path: Path, option: str, environment: dict[str, str]
) -> None:
    """Those that answer without `Admission` end with what to do."""
    with launched(tmp_path, *SERVE, option, **environment) as sglang:
        said = sglang.until(STARTED)
        assert STARTED not in said
        assert "LIFECYCLE_BYTES=4MiB limits nothing: " in said
