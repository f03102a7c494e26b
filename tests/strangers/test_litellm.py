"""LiteLLM's proxy itself, by the file and the command of docs/howto/servers.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from chat_backend import BEGUN, QUEUED, WHOLE, Backend, backend
from conformance_kit import report
from howto import how_to
from stranger import CLAIMED, Client, Stranger, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("litellm") is None, reason="see make strangers"),
]
KEY = "sk-of-the-test"
# What the proxy says of a key that it would have to look for.
NO_DATABASE = 400
STARTED = "Uvicorn running on"
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
# As the proxy is, without `Admission`.
PLAIN = "from litellm.proxy.proxy_server import app\n"


@contextmanager
def serving(
    folder: Path, chat: Backend, *, script: str | None = None, **environment: str
) -> Iterator[Stranger]:
    """Start the proxy in front of a backend, as the page says, until it listens."""
    page = how_to("LiteLLM")
    (folder / "proxy.py").write_text(script or page.code)
    parameters = {"model": "openai/sim", "api_key": "none", "api_base": chat.url}
    models = [{"model_name": "sim", "litellm_params": parameters}]
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps({"model_list": models}))
    argv = ["PORT" if word.isdigit() else word for word in page.argv]
    variables = {**page.environment, "LIFECYCLE_BYTES": "4MiB", **environment}
    variables |= {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with launched(folder, *argv, **variables) as server:
        assert STARTED in server.until(STARTED), server.said
        yield server


def ask(
    server: Stranger,
    text: str,
    *,
    path: str = PATHS[0],
    stream: bool = False,
    key: str = KEY,
    headers: dict[str, str] | None = None,
) -> Client:
    """Send a request; the proxy ignores the blanks, and `Admission` counts them."""
    item = {"role": "user", "content": text}
    asked = {"model": "sim", "max_tokens": 16, "messages": [item], "stream": stream}
    if path == "/v1/responses":
        asked = {"model": "sim", "input": [item], "stream": stream}
    body = json.dumps(asked).encode() + b" " * 200_000
    return server.post(path, body, authorization=f"Bearer {key}", **(headers or {}))


def test_limits_litellm(tmp_path: Path) -> None:
    """The page's file limits the proxy, by the bytes that its command sets."""
    with backend() as chat, serving(tmp_path, chat) as server:
        answer = ask(server, WHOLE, headers=CLAIMED).answer()
        assert answer.status == 413
        assert b"request body is larger than 262144 bytes" in answer.read()


def test_answers_the_same(tmp_path: Path) -> None:
    """With and without the file, streamed and not."""
    answers = []
    for script in (PLAIN, None):
        with backend() as chat, serving(tmp_path, chat, script=script) as server:
            whole = ask(server, WHOLE).answer()
            parts = ask(server, WHOLE, stream=True).answer()
            assert (whole.status, parts.status) == (200, 200)
            read = [line for line in parts.read().split(b"\n") if b'"created"' in line]
            found = [whole.read(), *(line.removeprefix(b"data: ") for line in read)]
        answers.append([json.loads(each) for each in found])
        for each in answers[-1]:
            assert each.pop("id")
            assert each.pop("created")
    assert answers[0] == answers[1]
    assert answers[0][0]["choices"][0]["message"]["content"] == "hello"


def test_ends_what_nobody_waits_for(tmp_path: Path) -> None:
    """The backend is left, whatever the API, streamed or not."""
    with backend() as chat, serving(tmp_path, chat) as server:
        for path in PATHS:
            client = ask(server, QUEUED, path=path)
            assert chat.event() == "has"
            client.leave()
            assert chat.event() == "left"
        client = ask(server, BEGUN, stream=True)
        assert client.answer().readline().startswith(b"data: {")
        assert chat.event() == "has"
        client.leave()
        assert chat.event() == "left"
        assert ask(server, WHOLE).answer().status == 200
        assert [chat.event(), chat.event()] == ["has", "finished"]


def test_lets_the_backend_finish_by_itself(tmp_path: Path) -> None:
    """Without `Admission`, the proxy waits for an answer that nobody reads."""
    with backend() as chat, serving(tmp_path, chat, script=PLAIN) as server:
        client = ask(server, QUEUED)
        assert chat.event() == "has"
        client.leave()
        for _ in range(5):
            assert ask(server, WHOLE).answer().status == 200
            assert [chat.event(), chat.event()] == ["has", "finished"]
        chat.finish.set()
        assert chat.event() == "finished"


def test_hands_off_with_the_first_bytes_of_a_stream(tmp_path: Path) -> None:
    """More streams go on at once than there is memory for; the rest keep their bytes.

    Five that are not streamed have all that there are.
    """
    short = {"LIFECYCLE_MAX_WAIT": "1"}
    with backend() as chat, serving(tmp_path, chat, **short) as server:
        for _ in range(8):
            answer = ask(server, BEGUN, stream=True).answer()
            assert answer.status == 200
            assert answer.readline().startswith(b"data: {")
            assert chat.event() == "has"
        for _ in range(5):
            ask(server, QUEUED)
            assert chat.event() == "has"
        assert ask(server, QUEUED).answer().status == 503


def test_checks_the_master_key_first(tmp_path: Path) -> None:
    """Before a body is read; without ``LIFECYCLE_API_KEYS`` the proxy checks it.

    A budget that the machine does not have is a line of the log.
    """
    more = {"LIFECYCLE_API_KEYS": KEY, "LIFECYCLE_BYTES": "1024TiB"}
    with backend() as chat, serving(tmp_path, chat, **more) as server:
        line = "Admission: 1073741824 MiB for requests is more than"
        assert line in "".join(server.said)
        for key, status in (("sk-another", 401), (KEY, 413)):
            assert (
                ask(server, WHOLE, key=key, headers=CLAIMED).answer().status == status
            )
        assert ask(server, WHOLE).answer().status == 200
    (tmp_path / "own").mkdir()
    with backend() as chat, serving(tmp_path / "own", chat) as server:
        assert (
            ask(server, WHOLE, key="sk-another", headers=CLAIMED).answer().status == 413
        )
        assert ask(server, WHOLE, key="sk-another").answer().status == NO_DATABASE
        assert ask(server, WHOLE).answer().status == 200


@pytest.mark.parametrize("admission", ["", ", in Admission"])
def test_is_in_the_table_of_servers(tmp_path: Path, admission: str) -> None:
    """The benchmark starts it with an engine that generates, and checks it."""
    name = "litellm-admission" if admission else "litellm"
    found = report(name, tmp_path)
    assert found["server"] == f"LiteLLM proxy {version('litellm')}{admission}"
    assert [each["id"] for each in found["findings"]] == ["leave.connected"]
