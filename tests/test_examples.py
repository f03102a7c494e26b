"""Each example runs as a user would run it, and stays short."""

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHOWN = {
    "quickstart.py": "nothing is left",
    "engine.py": "engine sessions left: 0",
    "ray_cluster.py": "actors made: 3; sessions left: 0",
    "own_runner.py": "slots free: 4 of 4",
    "who_holds.py": "nothing holds the picture",
    "fastapi_gate.py": None,  # a server; it has a test of its own below
}


def test_knows_every_example() -> None:
    """Every example is tested."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_keeps_example_short(name: str) -> None:
    """An example has fewer than a hundred lines."""
    assert len((EXAMPLES / name).read_text().splitlines()) < 100


@pytest.mark.parametrize("name", [name for name, text in SHOWN.items() if text])
def test_runs_example(name: str) -> None:
    """The example runs without a warning and prints its last line."""
    if name == "ray_cluster.py":
        pytest.importorskip("ray", reason="Ray is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


@pytest.fixture
def server() -> Iterator[int]:
    """Run the FastAPI example on a free port, and return the port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "fastapi_gate.py"],
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr
        for line in process.stderr:
            if "Uvicorn running" in line:
                break
        yield port
    finally:
        process.terminate()
        process.communicate(timeout=120)


def ask(port: int, path: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_refuses_what_can_never_fit(server: int) -> None:
    """The example answers 413 at once to a request beyond the gate's capacity."""
    assert ask(server, "/thumbnail?pixels=1000000")[0] == 200
    status, _, body = ask(server, "/thumbnail?pixels=100000000")
    assert status == 413
    assert "too_large" in body


def test_admits_next_when_client_leaves(server: int) -> None:
    """The example releases the lease of a client that disconnects."""
    leaver = http.client.HTTPConnection("127.0.0.1", server, timeout=120)
    leaver.request("GET", "/thumbnail?pixels=2000000&seconds=3600")
    wait_for(server, '"bytes_in_use":6000000')
    leaver.close()
    wait_for(server, '"bytes_in_use":0')
    assert ask(server, "/thumbnail?pixels=2000000")[0] == 200


def test_refuses_when_queue_is_full(server: int) -> None:
    """The example answers 503 with Retry-After when the queue is full."""
    held = [http.client.HTTPConnection("127.0.0.1", server) for _ in range(3)]
    try:
        for number, connection in enumerate(held):
            connection.request("GET", "/thumbnail?pixels=2000000&seconds=3600")
            wait_for(server, f'"bytes_in_use":6000000,"waiting":{number}')
        status, headers, _ = ask(server, "/thumbnail?pixels=2000000")
        assert status == 503
        assert int(headers["retry-after"]) >= 1
    finally:
        for connection in held:
            connection.close()


def wait_for(port: int, text: str) -> None:
    """Poll the status until it shows *text*."""
    for _ in range(2000):
        if text in ask(port, "/status")[2]:
            return
    pytest.fail(f"the status never showed {text}")
