"""LMDeploy itself, by the script and the command of docs/howto/servers.md.

Only its engine is left out, by a ``sitecustomize``: it needs a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lmdeploy_without_engine
import pytest
from conformance_kit import report
from howto import how_to
from lmdeploy_without_engine import BEGUN, QUEUED, WHOLE
from stranger import CLAIMED, Client, Stranger, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lmdeploy") is None, reason="see make strangers"),
]
LIMIT = {"LIFECYCLE_BYTES": "4MiB"}
STARTED = "Uvicorn running on"
CHAT = "/v1/chat/completions"
# As LMDeploy is, without the script.
PLAIN = "from lmdeploy.cli.entrypoint import run\n__name__ == '__main__' and run()\n"


@contextmanager
def serving(
    folder: Path, *options: str, script: str | None = None, **environment: str
) -> Iterator[Stranger]:
    """Start LMDeploy on a tiny checkpoint, as the page says, until it listens."""
    from tiny_checkpoint import cached

    page = how_to("LMDeploy")
    (folder / "serve.py").write_text(script or page.code)
    (folder / "sitecustomize.py").write_text(lmdeploy_without_engine.STARTUP)
    argv = [str(cached("qwen3")) if it == "MODEL" else it for it in page.argv]
    argv += ["--backend=pytorch", "--model-name=tiny", "--server-name=127.0.0.1"]
    # Without a number, it asks the GPU for one.
    argv += ["--server-port=PORT", "--max-batch-size=64", *options]
    variables = {**page.environment, **LIMIT, **environment}
    with launched(folder, *argv, **variables) as server:
        assert STARTED in server.until(STARTED), server.said
        yield server


def ask(
    server: Stranger,
    tokens: int,
    *,
    stream: bool = False,
    headers: dict[str, str] | None = None,
) -> Client:
    """Send a request; LMDeploy ignores the blanks, and `Admission` counts them."""
    item = {"role": "user", "content": "hello"}
    asked: dict[str, Any] = {"model": "tiny", "messages": [item]}
    asked |= {"max_tokens": tokens, "stream": stream, "temperature": 0}
    return server.post(
        CHAT, json.dumps(asked).encode() + b" " * 200_000, **(headers or {})
    )


def test_limits_lmdeploy(tmp_path: Path) -> None:
    """The page's script limits the server, by the bytes that its command sets."""
    with serving(tmp_path) as server:
        answer = ask(server, WHOLE, headers=CLAIMED).answer()
        assert answer.status == 413
        assert b"request body is larger than 262144 bytes" in answer.read()


def test_answers_the_same(tmp_path: Path) -> None:
    """With and without the script, streamed and not."""
    answers = []
    for script in (PLAIN, None):
        with serving(tmp_path, script=script) as server:
            whole = json.loads(ask(server, WHOLE).answer().read())
            parts = [
                json.loads(line.removeprefix(b"data: "))
                for line in ask(server, WHOLE, stream=True).answer().read().split(b"\n")
                if line.startswith(b"data: {")
            ]
        for each in (whole, *parts):
            assert each.pop("id")
            assert each.pop("created")
        assert whole["usage"]["completion_tokens"] == WHOLE
        answers.append((whole, parts))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("stream", [False, True])
def test_ends_what_nobody_waits_for(tmp_path: Path, *, stream: bool) -> None:
    """The engine is told, though nothing of the answer is there."""
    with serving(tmp_path) as server:
        client = ask(server, QUEUED, stream=stream)
        assert "engine has" in server.until("engine has")
        client.leave()
        said = server.until("engine cancelled")
        assert said.count("engine cancelled") == 1, said
        assert ask(server, WHOLE).answer().status == 200


def test_hands_off_with_the_first_token_of_a_stream(tmp_path: Path) -> None:
    """More streams go on at once than there is memory for; the rest keep their bytes.

    Five that are not streamed have all that there are.
    """
    with serving(tmp_path, LIFECYCLE_MAX_WAIT="1") as server:
        for _ in range(8):
            answer = ask(server, BEGUN, stream=True).answer()
            assert answer.status == 200
            assert b'"role": "assistant"' in answer.readline()
            server.until("engine has")
        for _ in range(5):
            ask(server, QUEUED)
            assert server.until("engine has")
        assert ask(server, QUEUED).answer().status == 503
        assert "".join(server.said).count("engine has") == 13


def test_checks_keys_first(tmp_path: Path) -> None:
    """With the keys of ``--api-keys``, before a body is read.

    A budget that the machine does not have is a line of the log.
    """
    keys = {"LIFECYCLE_API_KEYS": "first,second", "LIFECYCLE_BYTES": "1024TiB"}
    with serving(tmp_path, "--api-keys", "first", "second", **keys) as server:
        line = "Admission: 1073741824 MiB for requests is more than"
        assert line in "".join(server.said)
        for key, status in (("other", 401), ("second", 413)):
            bearer = {"authorization": f"Bearer {key}", **CLAIMED}
            assert ask(server, WHOLE, headers=bearer).answer().status == status
        bearer = {"authorization": "Bearer second"}
        assert ask(server, WHOLE, headers=bearer).answer().status == 200


@pytest.mark.parametrize("admission", ["", ", in Admission"])
def test_is_in_the_table_of_servers(tmp_path: Path, admission: str) -> None:
    """The benchmark starts it with an engine that generates, and checks it."""
    name = "lmdeploy-admission" if admission else "lmdeploy"
    found = report(name, tmp_path)
    assert found["server"] == f"LMDeploy {version('lmdeploy')}{admission}"
    assert [each["id"] for each in found["findings"]] == ["leave.connected"]
