"""A body that was handed off is in no framework's memory while the answer streams."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import servers
from ports import free_port

from lifecycle_asgi import RequestScope

APPS = Path(servers.__file__).with_name("body_apps.py")
NAMES = (
    "aiohttp",
    "blacksheep",
    "django",
    "fastapi",
    "litestar",
    "quart",
    "starlette",
)
MIB = 1 << 20
SIZE = 32 * MIB


def wait_up(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts connections, for as long as its process runs."""
    until = time.monotonic() + 600
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 60).close()
            return
        except ConnectionRefusedError:
            assert process.poll() is None, f"it exited with {process.returncode}"
            assert time.monotonic() < until, "no server"
            time.sleep(0.05)


def memory(port: int, path: str, size: int) -> int:
    """Send a body of *size* and return the server's memory while it streams."""
    body = json.dumps({"text": "a" * size})
    peer = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    peer.request("POST", path, body, {"content-type": "application/json"})
    answer = peer.getresponse()
    assert answer.status in (200, 201)
    seen = min(int(answer.readline()) for _ in range(3))
    peer.close()
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_drops_copies_of_framework_at_hand_off(name: str) -> None:
    """Of 32 MiB nothing is left, and without the call at least one copy."""
    pytest.importorskip(name)
    port = free_port()
    env = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        # Else what is freed may stay with the process, for its next allocation.
        "MALLOC_MMAP_THRESHOLD_": "131072",
    }
    process = subprocess.Popen(
        [sys.executable, APPS, name, str(port)],
        env=env,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_up(port, process)
        idle = memory(port, "/keep", 1)
        assert memory(port, "/release", SIZE) - idle < 4 * MIB
        assert memory(port, "/keep", SIZE) - idle > 28 * MIB
    finally:
        process.kill()
        process.wait(10)


def test_says_that_it_does_not_know_a_request() -> None:
    """A copy that stays is not passed over in silence; without one, nothing happens."""
    with pytest.raises(TypeError, match="starlette, litestar.* not SimpleNamespace"):
        RequestScope().release_body(SimpleNamespace())
    RequestScope().release_body()


@pytest.mark.parametrize("framework", ["aiohttp", "blacksheep", "django", "quart"])
def test_says_that_it_does_not_know_a_version(framework: str) -> None:
    """A framework with other attributes raises an error instead of keeping copies."""
    of_tomorrow = type("Request", (), {"__module__": f"{framework}.wrappers"})
    with pytest.raises(TypeError, match=f"this version of {framework}: no [a-z_]+;"):
        RequestScope().release_body(of_tomorrow())


def test_says_that_it_does_not_know_a_version_of_litestar() -> None:
    """As of the others."""
    pytest.importorskip("litestar")
    of_tomorrow = type("Request", (), {"__module__": "litestar.connection"})
    with pytest.raises(TypeError, match="this version of litestar: no _body;"):
        RequestScope().release_body(of_tomorrow())
