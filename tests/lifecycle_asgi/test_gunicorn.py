"""`Admission` in the workers of gunicorn, which are killed, replaced and reloaded."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from worker_kit import Client, connect, until

from lifecycle_asgi import Admission

# Not imported: `Admission` would take this process for one of gunicorn's workers.
INSTALLED = all(map(importlib.util.find_spec, ("gunicorn", "uvicorn_worker")))
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="gunicorn is not installed"),
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="a shared gate needs Linux"),
]

APP = """
import asyncio, json, os
from pathlib import Path
from lifecycle_asgi import Admission

HERE = Path(__file__).parent

def log(event):
    with (HERE / "log").open("a") as file:
        file.write(f"{event} {os.getpid()}\\n")

async def inner(scope, receive, send):
    if scope["type"] != "http":
        return
    while scope["method"] == "POST" and (await receive())["more_body"]:
        pass
    if scope["path"] == "/hold":
        log("entered")
        try:
            while not (HERE / "go").exists():
                await asyncio.sleep(0.005)
        finally:
            log("left")
    lanes = app.statistics().values()
    body = {"pid": os.getpid(), "waiting": sum(lane.waiting for lane in lanes)}
    body["bytes"] = sum(lane.bytes_in_use for lane in lanes)
    body = json.dumps(body).encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

app = Admission(inner)
"""
BUDGET = 2**20
# Four have room, as each byte of a body is charged three times.
BODY = b" " * 60_000
HELD = 3 * len(BODY)
AT_A_TIME = 4


@dataclass
class Server:
    """gunicorn with two workers."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def logged(self, event: str) -> Counter[int]:
        """Count an event of the application, by process."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(int(line.split()[1]) for line in lines if event in line)

    def connect(self, *without: int) -> Client:
        """Connect to a worker whose process is none of these."""
        found: Client = until(
            lambda: connect(self.port, lambda pid: pid not in without)
        )
        return found

    def ask(self, *without: int) -> dict[str, int]:
        """Ask a worker that is none of these, over a connection of its own."""

        def answer() -> dict[str, int] | None:
            # A worker that is being replaced may end between two requests.
            with suppress(ConnectionError), closing(self.connect(*without)) as client:
                return client.ask()
            return None

        found: dict[str, int] = until(answer)
        return found

    def end(self) -> str:
        """End it as a supervisor does; return what it logged."""
        self.process.terminate()
        assert self.process.wait(60) == 0
        return (self.folder / "errors").read_text()


@contextmanager
def gunicorn(folder: Path, *options: str) -> Iterator[Server]:
    """Run gunicorn with two workers, which share a budget."""
    (folder / "app.py").write_text(APP)
    port = free_port()
    more = {"LIFECYCLE_SHARED": str(folder / "gates"), "LIFECYCLE_BYTES": str(BUDGET)}
    command = [sys.executable, "-m", "gunicorn", "-k", "uvicorn_worker.UvicornWorker"]
    command += ["-w", "2", "-b", f"127.0.0.1:{port}", "--keep-alive", "120"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--no-control-socket", *options, "app:app"],
            cwd=folder,
            env={**os.environ, **more},
            stderr=errors,
        )
    try:
        yield Server(folder, port, process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("options", [(), ("--preload",)], ids=["", "preload"])
def test_workers_share_bytes_whatever_becomes_of_one(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A full budget, a worker killed, a reload: no more bytes than for all, and none are lost."""
    with gunicorn(tmp_path, *options) as server, ExitStack() as stack:
        one = server.connect()
        first = one.ask()["pid"]
        second = server.ask(first)["pid"]
        mine = [one, *(server.connect(second) for _ in range(2))]
        others = [server.connect(first) for _ in range(3)]
        for client in (*mine, *others):
            stack.callback(client.close)
            client.request("POST", "/hold", BODY)
        until(lambda: server.logged("entered").total() == AT_A_TIME)
        until(lambda: server.ask()["waiting"] == 2)
        assert server.logged("entered").total() == AT_A_TIME

        os.kill(first, signal.SIGKILL)
        until(lambda: server.logged("entered")[second] == 3)
        until(lambda: server.ask()["bytes"] == 3 * HELD)
        third = server.ask(first, second)
        assert third["bytes"] == 3 * HELD

        others.pop().close()
        until(lambda: server.logged("left")[second] == 1)

        server.process.send_signal(signal.SIGHUP)
        before = (first, second, third["pid"])
        until(lambda: server.ask(*before)["bytes"] == 2 * HELD)
        (tmp_path / "go").touch()
        assert [client.answer()["pid"] for client in others] == [second] * 2
        until(lambda: server.ask()["bytes"] == 0)
        assert "Traceback" not in server.end()
    assert in_use(tmp_path) == {0}


def test_workers_that_gunicorn_replaces_join_and_leave(tmp_path: Path) -> None:
    """With `--max-requests` each request is answered, and what is gone holds nothing."""
    pids: set[int] = set()
    with gunicorn(tmp_path, "--max-requests", "5") as server:
        while len(pids) < 4:
            # One that its worker accepted and did not read any more is sent again.
            with suppress(ConnectionError), closing(server.connect()) as client:
                client.request("POST", "/", BODY)
                answer = client.answer()
                pids.add(answer["pid"])
                # The request before may be answered, and not released for a moment.
                assert HELD <= answer["bytes"] <= 2 * HELD
        assert "Traceback" not in server.end()
    assert in_use(tmp_path) == {0}


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that nobody calls."""
    raise NotImplementedError


def in_use(folder: Path) -> set[int]:
    """Return what is in use in the lanes, for a worker that joins now."""
    late = Admission(
        nothing, environment={}, shared=str(folder / "gates"), bytes=BUDGET
    )
    try:
        return {lane.bytes_in_use for lane in late.statistics().values()}
    finally:
        late.close()
