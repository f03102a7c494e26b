"""`Admission` in several workers of a real server, which share one budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from shared_kit import stalled
from worker_kit import Client, connect, until

from lifecycle import GateFull
from lifecycle.shared import SharedGate
from lifecycle_asgi import Admission

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="a shared gate needs Linux"
)

APP = """
import asyncio, json, os
from pathlib import Path
from lifecycle_asgi import Admission

HERE = Path(__file__).parent

async def inner(scope, receive, send):
    if scope["path"] == "/hold":
        while (await receive()).get("more_body"):
            pass
        with (HERE / "log").open("a") as log:
            log.write(f"{os.getpid()}\\n")
        while not (HERE / "go").exists():
            await asyncio.sleep(0.005)
    slots = app.statistics()["slots"]
    body = json.dumps({"pid": os.getpid(), "waiting": slots.waiting}).encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

app = Admission(inner)
"""


@contextmanager
def workers(folder: Path) -> Iterator[dict[int, Client]]:
    """Run uvicorn with two workers; a connection to each, by its process."""
    (folder / "app.py").write_text(APP)
    port = free_port()
    more = {"LIFECYCLE_SHARED": str(folder / "gates"), "LIFECYCLE_SLOTS": "1"}
    command = [sys.executable, "-m", "uvicorn", "--workers", "2", "--lifespan", "off"]
    process = subprocess.Popen(
        [*command, "--log-level", "error", "--port", str(port), "app:app"],
        cwd=folder,
        env={**os.environ, **more},
    )
    found: dict[int, Client] = {}

    def is_new() -> bool:
        if client := connect(port, lambda pid: pid not in found):
            found[client.ask()["pid"]] = client
        return client is not None

    try:
        until(is_new)
        until(is_new)
        yield found
    finally:
        for client in found.values():
            client.close()
        process.terminate()
        process.wait(60)


def test_workers_share_slots_and_get_back_what_a_killed_one_held(
    tmp_path: Path,
) -> None:
    """A slot of one worker is taken in the other; with its process it comes back."""

    def entered() -> list[int]:
        log = tmp_path / "log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    with workers(tmp_path) as clients:
        (one, first), (two, second) = clients.items()
        first.request("POST", "/hold", b"{}")
        until(entered)
        second.request("POST", "/hold", b"{}")
        with closing(Client("127.0.0.1", second.port, timeout=120)) as other:
            until(lambda: other.ask()["waiting"])
        assert entered() == [one]
        os.kill(one, signal.SIGKILL)
        until(lambda: len(entered()) == 2)
        (tmp_path / "go").touch()
        assert second.answer()["pid"] == two
        assert entered() == [one, two]


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that nobody calls."""
    raise NotImplementedError


def test_refuses_a_folder_of_others_at_once(tmp_path: Path) -> None:
    """A server that could not share its budget does not start."""
    folder = tmp_path / "admission-small"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        Admission(nothing, shared=str(tmp_path))


@pytest.mark.asyncio
async def test_refuses_by_the_head_without_asking_the_leader(tmp_path: Path) -> None:
    """A leader that stands still does not hold up the event loop of another worker."""
    options: dict[str, Any] = {"shared": str(tmp_path), "slots": 1, "max_waiting": 0}
    one, two = (Admission(nothing, environment={}, **options) for _ in range(2))
    leader, follower = one.gates[-1], two.gates[-1]
    assert isinstance(leader, SharedGate)
    try:
        with await leader.admit():
            (await two.gates[0].admit(bytes=1)).release()
            assert follower.statistics().slots_in_use == 1
            with stalled(leader), pytest.raises(GateFull) as caught:
                two.check({"type": "http", "headers": [], "client": ("a", 1)})
        assert "is full, and 0 requests wait for it; retry in" in str(caught.value)
        assert caught.value.retry_after > 0
        assert two.statistics()["slots"].refused == 1
        assert one.statistics()["slots"].slots_in_use == 0
    finally:
        one.close()
        two.close()


@pytest.mark.asyncio
async def test_every_lane_is_shared(tmp_path: Path) -> None:
    """What one application admits, the other one of the same folder counts."""
    one, two = (Admission(nothing, shared=str(tmp_path), slots=2) for _ in range(2))
    try:
        for name, gate in zip(one.statistics(), one.gates, strict=True):
            assert isinstance(gate, SharedGate)
            with await gate.admit(bytes=3):
                assert two.statistics()[name].bytes_in_use == 3
            assert two.statistics()[name].bytes_in_use == 0
    finally:
        one.close()
        two.close()
