"""The default budget of `Admission`: what the cgroup may have, or the machine."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cgroup_kit import memory_group
from PIL import Image
from ports import free_port

from lifecycle import Gate
from lifecycle_asgi import Admission
from lifecycle_asgi.memory_limit import MAX_BUDGET, memory_limit, size_text

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20

# The groups of a process, files of limits below /sys/fs/cgroup, and what holds.
TREES = {
    "version 2": ("0::/a/b\n", {"a/b/memory.max": "1048576\n"}, MIB),
    "a group around it": (
        "0::/a/b\n",
        {"a/memory.max": "1048576\n", "a/b/memory.max": "max\n"},
        MIB,
    ),
    "a container's own": ("0::/\n", {"memory.max": "1048576\n"}, MIB),
    "the host's name of it": ("0::/pod/x\n", {"memory.max": "1048576\n"}, MIB),
    "a name that is no text": (
        "0::/\udcff\n",
        {"\udcff/memory.max": "1048576\n"},
        MIB,
    ),
    "version 1": (
        "5:cpu,memory:/a\n1:name=systemd:/\n0::/\n",
        {"memory/a/memory.limit_in_bytes": "1048576\n"},
        MIB,
    ),
    "version 1, no limit": (
        "5:memory:/\n",
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        MACHINE,
    ),
    "version 1, in a container that hides the group with the limit": (
        "5:memory:/a\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.stat": "rss 1\nhierarchical_memory_limit 1048576\nx 1\n",
        },
        MIB,
    ),
    "more than there is": ("0::/\n", {"memory.max": f"{2 * MACHINE}\n"}, MACHINE),
    "unreadable": ("0::/a\n", {"a/memory.max": "what\n"}, MACHINE),
    "without groups": ("", {}, MACHINE),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_finds_the_lowest_limit(tmp_path: Path, tree) -> None:
    """Of the process's group and of those around it, in both versions."""
    groups, files, limit = tree
    if groups:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_bytes(os.fsencode(groups))
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = memory_limit(tmp_path)
    assert found is not None
    assert found.bytes == limit
    assert found.budget == min(MAX_BUDGET, limit // 2)
    assert found.owner == ("this machine" if limit == MACHINE else "this cgroup")


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup of 300 MiB."""
    with memory_group(300 * MIB) as made:
        yield made


IN_GROUP = """
import logging, os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from lifecycle_asgi import Admission
limits = [each.bytes for each in (lane.statistics() for lane in Admission(None).lanes)]
print(sum(limits) // 2**20)
"""


def test_fits_into_a_cgroup(group: Path) -> None:
    """And says why it admits so little."""
    argv = [sys.executable, "-c", IN_GROUP, str(group)]
    environment = {key: os.environ[key] for key in os.environ if "LIFECYCLE" not in key}
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    said, admitted = done.stdout.splitlines()
    assert said == (
        "Admission: 150 MiB for requests, as 300 MiB is what this cgroup has; "
        "LIFECYCLE_BYTES sets another budget; a body may have 9.4 MiB"
    )
    assert int(admitted) in (149, 150)


SERVER = """
import base64, io, json, os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import anyio.to_thread, uvicorn
from PIL import Image
from lifecycle_asgi import Admission

def decode(body):
    url = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    pixels = picture.convert("RGB").tobytes()
    time.sleep(0.3)  # what a server does with them
    return len(pixels)

async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = b"%d" % await anyio.to_thread.run_sync(decode, body)
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})

if sys.argv[2] == "guarded":
    app = Admission(app, max_wait=120.0)
uvicorn.run(app, fd=int(sys.argv[3]), lifespan="off", log_level="error")
"""
SIDE = 2500


def ask_about_a_picture(port: int) -> bytes | None:
    """Return the answer to one that is few bytes, and 6 megapixels."""
    png = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE)).save(png, "PNG")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"messages": [{"role": "user", "content": content}]})
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as client:
        try:
            client.request("POST", "/v1/x", body, {"content-type": "application/json"})
            return client.getresponse().read()
        except (OSError, HTTPException):
            return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bare", "guarded"])
def test_sixteen_pictures_at_once_end_no_server_in_a_small_cgroup(
    group: Path, kind: str
) -> None:
    """Each of them needs an eighth of its memory."""
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        argv = [sys.executable, "-c", SERVER, str(group), kind]
        argv.append(str(listening.fileno()))
        with subprocess.Popen(argv, pass_fds=[listening.fileno()]) as server:
            port = listening.getsockname()[1]
            listening.close()
            try:
                with ThreadPoolExecutor(16) as clients:
                    answers = list(clients.map(ask_about_a_picture, [port] * 16))
                killed = server.poll() == -signal.SIGKILL
            finally:
                server.kill()
    if kind == "bare":
        assert killed
        assert None in answers
    else:
        assert answers == [b"%d" % (3 * SIDE**2)] * 16
        assert not killed


def test_warns_of_a_budget_that_is_more_than_there_is(caplog) -> None:
    """As such a budget limits nothing."""
    limit = memory_limit()
    assert limit is not None
    caplog.set_level(logging.INFO, logger="lifecycle")
    Admission(None, environment={}, bytes=limit.bytes)  # type: ignore[arg-type]
    assert [each.levelname for each in caplog.records] == ["INFO"]
    caplog.clear()
    Admission(None, environment={}, bytes=2 * limit.bytes)  # type: ignore[arg-type]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert f"{limit.owner} has; give fewer bytes" in caplog.text


UVICORN = ("uvicorn", "--port=0", "--lifespan=off", "idle:app")
HYPERCORN = ("hypercorn", "--bind=127.0.0.1:0", "idle:app")
GRANIAN = ("granian", "--interface=asgi", "--port={port}", "--no-ws", "idle:app")


def said_by(folder: Path, *command: str, processes: int, **environment: str) -> str:
    """What is logged about budgets until the application is in all processes."""
    (folder / "idle.py").write_text(
        "import os\n"
        "from lifecycle_asgi import Admission\n"
        "app = Admission(None)\n"
        "os.write(1, b'imported\\n')\n"  # at once: others write there, too
    )
    kept = {key: os.environ[key] for key in os.environ if "LIFECYCLE" not in key}
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", *(each.format(port=free_port()) for each in command)],
        cwd=folder,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        guard = threading.Timer(120, os.killpg, (server.pid, signal.SIGKILL))
        guard.start()
        while sum("imported" in line for line in said) < processes:
            said.append(server.stdout.readline())
            assert said[-1], said
        guard.cancel()
        os.killpg(server.pid, signal.SIGKILL)
    return "".join(line for line in said if line.startswith("Admission: "))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "processes", "knowing"),
    [
        ((*UVICORN, "--workers=2"), 2, 2),
        ((*HYPERCORN, "--workers=2"), 2, 2),
        # Imports the application itself, too, to know which files to watch.
        ((*HYPERCORN, "--workers=2", "--reload"), 3, 2),
        # Its first worker cannot know of the second.
        ((*GRANIAN, "--workers=2"), 2, 1),
    ],
    ids=["uvicorn", "hypercorn", "reload", "granian"],
)
def test_says_that_each_worker_has_a_budget(
    tmp_path: Path, command: tuple[str, ...], processes: int, knowing: int
) -> None:
    """And how all have one: where a server starts several, and they share none."""
    pytest.importorskip(command[0])
    said = said_by(tmp_path, *command, processes=processes, LIFECYCLE_BYTES="64MiB")
    assert (
        said.count("Admission: 64 MiB for requests in each worker process") == knowing
    )
    assert said.count("name a folder with shared= or LIFECYCLE_SHARED") == knowing
    lanes = str(tmp_path / "lanes")
    assert (
        said_by(tmp_path, *command, processes=processes, LIFECYCLE_SHARED=lanes) == ""
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        UVICORN,
        # It ignores the number of workers then, and has one.
        (*UVICORN, "--reload", "--workers=4"),
        HYPERCORN,
        GRANIAN,
    ],
    ids=["uvicorn", "reload", "hypercorn", "granian"],
)
def test_says_nothing_of_workers_to_a_single_one(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Which has all bytes for itself."""
    pytest.importorskip(command[0])
    assert said_by(tmp_path, *command, processes=1, LIFECYCLE_BYTES="64MiB") == ""


@pytest.mark.parametrize(
    ("settings", "ending"),
    [
        ({"bytes": 2**30}, "has"),
        ({"bytes": 2**26}, "has; a body may have 4.0 MiB"),
        ({"bytes": 2**26, "max_body": 2**20}, "has"),
        ({"shared": "lanes"}, "lanes; a body may have 5.0 MiB"),
    ],
)
def test_says_what_a_budget_leaves_to_a_body(
    settings: dict[str, Any], ending: str, caplog, tmp_path: Path, monkeypatch
) -> None:
    """In the line of the budget, if that is less than bodies have otherwise."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="lifecycle")
    gates = {} if "5.0" not in ending else {"bodies": Gate(bytes=15 * MIB)}
    Admission(None, environment={}, gates=gates, **settings)  # type: ignore[arg-type]
    (line,) = caplog.messages
    assert line.endswith((f" {ending}", f"/{ending}"))


def test_says_what_a_learned_budget_leaves_to_a_body(caplog) -> None:
    """Beside the warning that names the one that was asked for."""
    caplog.set_level("INFO", logger="lifecycle")
    Admission(None, environment={}, bytes="auto", max_body=2**40)  # type: ignore[arg-type]
    warning, line = caplog.messages
    most = int(warning.partition("above ")[2].split()[0])
    assert line.endswith(f"has; a body may have {size_text(most)}")


def test_says_what_all_workers_share(caplog, tmp_path: Path) -> None:
    """Its size and the folder, for the operator who wants to be sure of it."""
    caplog.set_level("INFO", logger="lifecycle")
    Admission(None, environment={}, bytes=2**26, shared=str(tmp_path / "lanes"))  # type: ignore[arg-type]
    assert "Admission: 64 MiB, of " in caplog.text
    assert f"all worker processes that share {tmp_path / 'lanes'}" in caplog.text


def test_says_so_in_workers_of_gunicorn(caplog, monkeypatch) -> None:
    """They are forked by the process that has this module."""
    monkeypatch.setitem(sys.modules, "gunicorn.arbiter", ModuleType("arbiter"))
    # Imported by a client of another service, which is no worker of BentoML.
    context = SimpleNamespace(server_context=SimpleNamespace(worker_index=None))
    monkeypatch.setitem(sys.modules, "bentoml._internal.context", context)
    Admission(None, environment={})  # type: ignore[arg-type]
    assert "in each worker process" in caplog.text
