"""The demo: what it promises to show, and that it can fail."""

import copy
import http.client
import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from lifecycle_demo import pictures
from lifecycle_demo.clients import DemoStats
from lifecycle_demo.report import Findings, left, show
from lifecycle_demo.traffic import PHASES, plan

DEMO = [sys.executable, "-m", "lifecycle_demo"]
SERVE = [sys.executable, "-m", "lifecycle_engine.cli", "serve"]

QUIET = {
    "payloads": {"admitted": 7, "released": 7, "bytes_in_use": 0, "lost": 0},
    "in_flight": {"admitted": 9, "released": 9, "bytes_in_use": 0, "lost": 0},
    "sessions": {
        "opened": 9,
        "live": 0,
        "closing": 0,
        "ends_failed": 0,
        "payloads": 0,
        "outcomes": {"completed": 9, "cancelled": 0},
    },
    "engine": {
        "status": {
            "live": 0,
            "backend": {"slots": 8, "slots_free": 8, "payload_bytes": 0},
        }
    },
}


def findings(**changes: object) -> Findings:
    """Return the findings of a run in which all went well, but for *changes*."""
    values: dict[str, object] = {
        "stats": DemoStats(endings=Counter(answered=9)),
        "status": QUIET,
        "peak": 2**30,
        "idle": 2**28,
        "needed": 2**32,
        "requests": 9,
        "restarted": 3.0,
        "exit_status": 0,
        "outlived": False,
    }
    return Findings(**(values | changes))  # type: ignore[arg-type]


def verdict(**changes: object) -> tuple[int, str]:
    """Return exit status and text of the report about such findings."""
    console = Console(file=io.StringIO(), width=120)
    status = show(findings(**changes), console)
    return status, console.file.getvalue()  # type: ignore[attr-defined]


def test_ends_with_zero_when_nothing_is_left() -> None:
    """The exit status is 0 where every promise was kept."""
    status, text = verdict()
    assert status == 0
    assert "Nothing is left behind" in text
    assert "4.0 GiB" in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("payloads", "released"), 6),
        (("payloads", "bytes_in_use"), 1),
        (("in_flight", "released"), 8),
        (("in_flight", "lost"), 1),
        (("sessions", "live"), 1),
        (("sessions", "closing"), 1),
        (("sessions", "ends_failed"), 1),
        (("sessions", "payloads"), 1),
        (("sessions", "opened"), 10),
        (("engine", "status"), None),
        (("engine", "status", "live"), 1),
        (("engine", "status", "backend", "slots_free"), 7),
        (("engine", "status", "backend", "payload_bytes"), 1),
    ],
)
def test_fails_when_anything_is_left(path: tuple[str, ...], value: object) -> None:
    """One lease, session, payload or slot that is left fails the demo."""
    status = copy.deepcopy(QUIET)
    inner: dict[str, object] = status
    for name in path[:-1]:
        inner = inner[name]  # type: ignore[assignment]
    inner[path[-1]] = value
    code, text = verdict(status=status)
    assert code == 1
    assert "wrong:" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"restarted": None},
        {"exit_status": None},
        {"exit_status": 1},
        {"outlived": True},
        {"requests": 10},
        {"stats": DemoStats(endings=Counter(answered=9), problems=["request 3 hung"])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_fails_when_a_promise_is_broken(changes: dict[str, object]) -> None:
    """A client without an answer or a process that stays fails the demo."""
    assert verdict(**changes)[0] == 1


def test_counts_nothing_as_left_on_quiet_server() -> None:
    """Every line of what is left is zero on a quiet server."""
    assert set(left(QUIET).values()) == {0}


def test_plans_a_third_to_leave_in_every_phase() -> None:
    """A third of the clients leaves, in each phase alike, and some err."""
    jobs = plan(120, seed=1)
    leaving = Counter(job.leaves for job in jobs if job.leaves)
    assert dict(leaving) == dict.fromkeys(PHASES, 10)
    assert sum(job.bad is not None for job in jobs) == 10
    assert all(job.stream for job in jobs if job.leaves == "mid stream")


def test_plans_the_same_from_the_same_seed() -> None:
    """A seed fixes the requests and the disconnects."""
    assert plan(40, seed=7) == plan(40, seed=7)
    assert plan(40, seed=7) != plan(40, seed=8)


def test_draws_small_files_of_large_pictures() -> None:
    """The 4K picture is a small file that weighs hundreds of megabytes decoded."""
    album, _ = pictures.album(random.Random(1))
    largest = max(album, key=lambda picture: picture.pixels)
    assert largest.pixels == 3840 * 2160
    assert largest.encoded < 200 * 2**10
    assert largest.payload > 300 * 2**20


@pytest.mark.slow
def test_leaves_nothing_behind_under_unreliable_clients() -> None:
    """fault-22: a kill and a third that leaves; the demo ends with status 0."""
    done = subprocess.run(
        [*DEMO, "--runner", "sim", "--clients", "16", "--requests", "60"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL to engine no. 1" in done.stdout
    assert "engine no. 2 is ready" in done.stdout
    assert "hung up: mid stream" in done.stdout
    assert "bad input refused: decompression bomb (413)" in done.stdout
    assert "Nothing is left behind" in done.stdout


@pytest.fixture(scope="module")
def announced() -> Iterator[str]:
    """Serve the simulated model; yield what the server prints when it is ready."""
    process = subprocess.Popen(
        [*SERVE, "--runner", "sim", "--port", "0", "--hints"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("Stop it"):
            break
    yield text
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_prints_curl_line_that_works(announced: str) -> None:
    """The curl line, pasted into a shell, streams an answer to its end."""
    line = announced[announced.index("curl -sN") : announced.index("\n\nor with")]
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_prints_snippet_that_works(announced: str) -> None:
    """The Python snippet, pasted into a file, prints an answer."""
    found = re.search(r"  from openai.*?content\)\n", announced, re.DOTALL)
    assert found
    done = subprocess.run(
        [sys.executable, "-c", re.sub(r"^  ", "", found[0], flags=re.MULTILINE)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.strip()


def test_shows_live_request_until_its_client_leaves(announced: str) -> None:
    """A live request is shown by id and phase, and no longer once it is gone."""
    address, admin = re.findall(r"(?:ready at|top) http://(\S+)", announced)
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 2000}
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({"model": "sim", "stream": True, **body}),
        {"content-type": "application/json", "x-request-id": "shown-1"},
    )
    connection.getresponse().readline()
    assert {row["id"]: row["phase"] for row in live(admin)} == {"shown-1": "streaming"}
    assert live(admin)[0]["age_s"] > 0
    connection.close()
    for _ in range(2000):  # each turn waits for an answer
        if not live(admin):
            return
    pytest.fail("the request is still shown")


def live(address: str) -> list[dict[str, Any]]:
    """Return the live requests that a server shows."""
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", "/_lifecycle/requests")
        rows: list[dict[str, Any]] = json.loads(connection.getresponse().read())[
            "requests"
        ]
        return rows
    finally:
        connection.close()
