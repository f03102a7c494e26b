"""Metrics of Admission by one variable, in a real server of somebody else's code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from lifecycle_asgi import Admission

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

APP = """
from fastapi import FastAPI
from prometheus_client import Counter, make_asgi_app
from lifecycle_asgi import Admission

Counter("their_own", "What the server counts itself").inc()
app = FastAPI()
app.mount("/metrics", make_asgi_app())
app.add_middleware(Admission)

@app.post("/")
async def echo(body: dict) -> dict:
    return body
"""
REFUSED = 'lifecycle_gate_over_limit_total{gate="admission-small"}'
WAITED = 'lifecycle_gate_wait_seconds_count{gate="admission-small"}'


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Any]:
    """Run the application under uvicorn; yields its address and what it has logged."""
    (folder / "theirs.py").write_text(APP)
    kept = {key: os.environ[key] for key in os.environ if "LIFECYCLE" not in key}
    argv = [sys.executable, "-m", "uvicorn", "theirs:app", "--port=0", *options]
    said: list[str] = []
    address = None
    with subprocess.Popen(
        argv, cwd=folder, env={**kept, **environment}, stderr=subprocess.PIPE, text=True
    ) as server:
        guard = threading.Timer(120, server.kill)
        guard.start()
        while "Application startup complete" not in "".join(said) or address is None:
            said.append(server.stderr.readline())
            assert said[-1], said
            address = address or re.search(r"http://[\d.:]+", said[-1])
        try:
            yield address[0], said
        finally:
            guard.cancel()
            server.terminate()
            said.append(server.communicate(timeout=120)[1])


def fetch(url: str, data: bytes | None = None) -> str:
    """What is at *url*."""
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read(), "utf-8")


def values(text: str) -> dict[str, float]:
    """The samples of an exposition by their names with labels."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (it.rsplit(" ", 1) for it in lines)}


@pytest.mark.parametrize("where", ["server", "port", "host"])
def test_shows_the_lanes_where_one_variable_says(tmp_path: Path, where: str) -> None:
    """At the server's own `/metrics`, among what that has, or at a port of its own."""
    port = free_port()
    told = {"server": "server", "port": f"{port}", "host": f"127.0.0.1:{port}"}[where]
    limits = {"LIFECYCLE_SHADOW": "1", "LIFECYCLE_MAX_BODY": "1000"}
    with serving(tmp_path, LIFECYCLE_METRICS=told, **limits) as (address, _):
        own = f"http://127.0.0.1:{port}/metrics"
        scrape = f"{address}/metrics/" if where == "server" else own
        before = values(fetch(scrape))
        assert fetch(address, b"{}") == "{}"
        assert fetch(address, b'{"long": "%s"}' % (b"x" * 2000)) != "{}"
        after = values(fetch(scrape))
        theirs = values(fetch(f"{address}/metrics/"))
    assert (before[REFUSED], after[REFUSED]) == (0, 1)
    assert after[WAITED] == before.get(WAITED, 0) + 2
    assert theirs["their_own_total"] == 1
    assert (REFUSED in theirs) is (where == "server")


def test_says_which_metrics_are_not_there(tmp_path: Path) -> None:
    """A port that is taken stops no server, and is a warning."""
    port = free_port()
    with (
        serving(tmp_path, LIFECYCLE_METRICS=f"{port}") as (_, said),
        serving(tmp_path, LIFECYCLE_METRICS=f"{port}") as (address, second),
    ):
        assert fetch(address, b"{}") == "{}"
    warning = f"Admission: no metrics at {port}: Address already in use"
    assert warning in "".join(second)
    assert warning not in "".join(said)


def test_warns_where_processes_share_a_folder_of_metrics(tmp_path: Path) -> None:
    """Custom collectors of prometheus_client are not shown then."""
    folder = tmp_path / "multi"
    folder.mkdir()
    shown = {"LIFECYCLE_METRICS": "server", "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    with serving(tmp_path, **shown) as (_, said):
        pass
    assert "PROMETHEUS_MULTIPROC_DIR is set" in "".join(said)


def test_keeps_the_metrics_of_a_first_admission(caplog, monkeypatch) -> None:
    """A second one in the process leaves the registry as it is."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    monkeypatch.setattr("lifecycle_asgi.prometheus.REGISTRY", registry)
    first = Admission(None, environment={}, metrics="server")  # type: ignore[arg-type]
    before = generate_latest(registry)
    Admission(None, environment={}, metrics="server")  # type: ignore[arg-type]
    assert generate_latest(registry) == before
    assert 'lifecycle_gate_waiting{gate="admission-small"}' in before.decode()
    assert "metrics of another Admission" in caplog.text
    first.close()


@pytest.mark.parametrize("where", ["{}", "127.0.0.1:{}", ":{}", "[::1]:{}", int])
def test_listens_where_an_argument_says(where: Any) -> None:
    """A port by its number, too, and IPv6 addresses as in an URL."""
    port = free_port()
    told = port if where is int else where.format(port)
    Admission(None, environment={}, metrics=told)  # type: ignore[arg-type]
    host = "[::1]" if "::" in str(told) else "127.0.0.1"
    assert REFUSED in fetch(f"http://{host}:{port}/metrics")


def test_ends_no_server_for_a_host_that_is_none(caplog) -> None:
    """A name that nothing can look up is a warning, like a port that is taken."""
    Admission(None, environment={}, metrics=f"a..b:{free_port()}").close()  # type: ignore[arg-type]
    assert "Admission: no metrics at a..b:" in caplog.text


def test_listens_for_no_admission_that_cannot_be_made() -> None:
    """A mistake in another argument leaves no listener behind."""
    port = free_port()
    with pytest.raises(ValueError, match="no lane"):
        Admission(None, environment={}, metrics=port, gates={"odd": None})  # type: ignore[arg-type,dict-item]
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("where", ["0", "65536", "here", "here:", "1.5", "", "-1"])
def test_refuses_what_is_no_place(where: str) -> None:
    """With the value and what is permitted."""
    with pytest.raises(ValueError, match=f"HOST:PORT, not '{where}'"):
        Admission(None, environment={}, metrics=where)  # type: ignore[arg-type]
