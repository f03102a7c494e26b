"""SGLang itself, by its own command lines and its own loader of plug-ins.

Only its schedulers are left out, by a second plug-in: they need a GPU.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import pytest
import sglang_without_engine
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
    body = json.dumps({"text": "hello", "stream": stream}) + " " * 200_000
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
        assert b"request body is larger than 67108864 bytes" in answer.read()


def test_hands_off_to_the_scheduler(tmp_path: Path) -> None:
    """More requests reach it, none of them answered, than there is memory for at once.

    SGLang's detokenizer, which loads plug-ins as well, does not import the server.
    """
    with serving(tmp_path, *SERVE, LIFECYCLE_MAX_WAIT="1") as sglang:
        assert STARTED in sglang.until(STARTED)
        for _ in range(8):
            generate(sglang)
            said = sglang.until("scheduled", "/generate HTTP")  # or an answer
            assert said.splitlines()[-1].startswith("scheduled"), said
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
    with serving(tmp_path, *SERVE, option, **environment) as sglang:
        said = sglang.until(STARTED)
        assert STARTED not in said
        assert "LIFECYCLE_BYTES=4MiB limits nothing: " in said
