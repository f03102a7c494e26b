"""The load test: its figures, and its errors where no server answers."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading

from http_kit import ENV, ROOT
from ports import free_port

LOAD = [sys.executable, ROOT / "benchmarks" / "load.py"]


def load(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*LOAD, *options],
        capture_output=True,
        check=False,
        text=True,
        env=ENV,
        timeout=600,
    )


def test_measures_server_of_its_own() -> None:
    """Without a URL it starts one, and every request is accounted for."""
    done = load("--requests", "12", "--clients", "3", "--tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "answered   12 of 12" in done.stdout
    for name in ("throughput", "first token p50", "whole      p50"):
        assert name in done.stdout


def test_says_that_it_is_another_server() -> None:
    """One line and status 1, where what answers is no server of models."""
    handler = http.server.BaseHTTPRequestHandler  # 501, whatever it is asked
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        done = load("--url", f"http://127.0.0.1:{other.server_port}/health")
        other.shutdown()
    assert done.returncode == 1
    assert "without a path" in done.stderr
    assert "Traceback" not in done.stderr


def test_says_that_no_server_is_there() -> None:
    """One line and status 1, where nothing listens."""
    done = load("--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "is a server running" in done.stderr
    assert "Traceback" not in done.stderr
