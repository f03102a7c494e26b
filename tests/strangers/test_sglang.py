"""SGLang itself, by its own command lines and its own loader of plug-ins.

Only its schedulers are left out, by a second plug-in: they need a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import sglang_without_engine
from conformance_kit import report
from stranger import CLAIMED, Client, Stranger, install_plugin, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sglang") is None, reason="see make strangers"),
]
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
BLANKS = 200_000
BYTES = 4 * 2**20
# Not all of their bodies have room.
REQUESTS = BYTES // BLANKS + 4


def serving(
    folder: Path, *argv: str, **environment: str
) -> AbstractContextManager[Stranger]:
    """Start SGLang on a tiny checkpoint."""
    from tiny_checkpoint import cached

    (folder / "script.py").write_text(SCRIPT)
    install_plugin(folder, sglang_without_engine, sglang_without_engine.GROUP)
    model = (f"--model-path={cached('qwen3')}", "--device=cpu")
    options = (*model, "--skip-server-warmup", "--port=PORT")
    return launched(folder, *argv, *options, LIFECYCLE_BYTES="4MiB", **environment)


def generate(sglang: Stranger, *, stream: bool = False, **headers: str) -> Client:
    """Send a request; SGLang ignores the blanks, and `Admission` counts them."""
    body = json.dumps({"text": "hello", "stream": stream}) + " " * BLANKS
    return sglang.post("/generate", body.encode(), **headers)


@pytest.mark.parametrize("way", WAYS)
def test_limits_sglang(tmp_path: Path, way: str) -> None:
    """However SGLang is launched, it says its limit, and refuses what is above it."""
    with serving(tmp_path, *WAYS[way]) as sglang:
        said = sglang.until(STARTED)
        line = "Admission: 0.00391 GiB, profile sglang, released at the scheduler"
        assert said.count(line) == 1, said
        assert ("in each of 2 tokenizer workers" in said) is (way == "workers")
        answer = generate(sglang, **CLAIMED).answer()
        assert answer.status == 413
        assert b"request body is larger than 262144 bytes" in answer.read()


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """Start SGLang as most users do."""
    folder = tmp_path_factory.mktemp("sglang")
    # For ten minutes it does not look itself whether a client has left.
    blind = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "600"}
    with serving(folder, *SERVE, LIFECYCLE_MAX_WAIT="1", **blind) as started:
        assert STARTED in started.until(STARTED)
        yield started


@pytest.mark.parametrize("stream", [True, False])
def test_aborts_for_a_client_that_leaves(sglang: Stranger, stream: bool) -> None:
    """The scheduler is told at once that nobody waits, streamed or not."""
    client = generate(sglang, stream=stream)
    assert sglang.until("scheduled").endswith("scheduled\n")
    client.leave()
    assert sglang.until("aborted").endswith("aborted\n")


def test_hands_off_to_the_scheduler(sglang: Stranger) -> None:
    """More requests reach it, none of them answered, than there is memory for at once."""
    for _ in range(REQUESTS):
        generate(sglang)
        said = sglang.until("scheduled", "/generate HTTP")  # or an answer
        assert said.endswith("scheduled\n"), said


def test_imports_no_server_in_the_detokenizer(sglang: Stranger) -> None:
    """It loads plug-ins as well, and has nothing to limit."""
    line = "the detokenizer has the HTTP server: "
    said = "".join(sglang.said)
    assert f"{line}False" in (said if line in said else sglang.until(line))


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
    with serving(tmp_path, *SERVE, option, **environment) as sglang:
        said = sglang.until(STARTED)
        assert STARTED not in said
        assert "LIFECYCLE_BYTES=4MiB limits nothing: " in said


@pytest.mark.parametrize("admission", ["", ", in Admission"])
def test_is_in_the_table_of_servers(tmp_path: Path, admission: str) -> None:
    """The benchmark starts it with an engine that generates, and checks it."""
    name = "sglang-admission" if admission else "sglang"
    found = report(name, tmp_path)
    assert found["server"] == f"SGLang {version('sglang')}{admission}"
    assert [each["id"] for each in found["findings"]] == ["leave.connected"]
