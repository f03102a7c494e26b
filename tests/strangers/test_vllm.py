"""vLLM itself, by its own command line, in front of an engine on another machine.

The engine is a fake one at the far end of vLLM's own protocol: a real one needs a GPU.
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm_fake_engine
import vllm_platform
from conformance_kit import report
from ports import free_port
from stranger import CLAIMED, SECONDS, Client, Stranger, install_plugin, launched

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="see make strangers"),
]
VLLM = str(Path(sys.executable).with_name("vllm"))
STARTED = "Application startup complete"
BLANKS = 200_000
BYTES = 4 * 2**20
# So many bodies have room.
MOST = BYTES // BLANKS
# So many requests one server lets in alone, by what they cost with their decoding.
ALONE = 5


@dataclass(frozen=True)
class Serving:
    """A server and its engine."""

    vllm: Stranger
    engine: vllm_fake_engine.Engine
    model: str

    def complete(self, *, stream: bool = False, **headers: str) -> Client:
        """Send a request; vLLM ignores the blanks, and `Admission` counts them."""
        asked = {"model": self.model, "prompt": "hello", "stream": stream}
        body = json.dumps({**asked, "max_tokens": 1000}) + " " * BLANKS
        return self.vllm.post("/v1/completions", body.encode(), **headers)

    def event(self) -> tuple[str, str]:
        """Wait for what happens to a request in the engine: that, and its name."""
        what, request, _server = self.engine.events.get(timeout=SECONDS)
        return what, request


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[Serving]:
    """Start vLLM on a tiny checkpoint, as the documentation does."""
    from tiny_checkpoint import cached

    install_plugin(folder, vllm_platform, "vllm.platform_plugins")
    model, port = str(cached("qwen3")), free_port()
    remote = ("--data-parallel-size-local=0", "--data-parallel-address=127.0.0.1")
    where = (*remote, f"--data-parallel-rpc-port={port}", "--port=PORT")
    argv = (VLLM, "serve", model, "--middleware", "lifecycle_asgi.Admission")
    settings = {"LIFECYCLE_BYTES": str(BYTES), "LIFECYCLE_MAX_WAIT": "1"}
    engine = vllm_fake_engine.Engine(port)
    try:
        with launched(folder, *argv, *where, *options, **settings, **environment) as it:
            yield Serving(it, engine, model)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Start one server for several tests."""
    with serving(tmp_path_factory.mktemp("vllm")) as server:
        assert STARTED in server.vllm.until(STARTED)
        yield server


def test_limits_vllm(served: Serving) -> None:
    """vLLM has loaded `Admission`, which says its limit and refuses what is above."""
    said = "".join(served.vllm.said)
    assert said.count("Admission: 4 MiB for requests, of ") == 1, said
    answer = served.complete(**CLAIMED).answer()
    assert answer.status == 413
    assert b"request body is larger than 262144 bytes" in answer.read()


@pytest.mark.parametrize("stream", [True, False])
def test_aborts_for_a_client_that_leaves(served: Serving, stream: bool) -> None:
    """The engine is told that nobody waits, streamed or not."""
    client = served.complete(stream=stream)
    what, request = served.event()
    assert what == "add"
    if stream:
        assert client.answer().readline().startswith(b"data: ")
    client.leave()
    assert served.event() == ("abort", request)


def test_hands_off_to_the_engine(served: Serving) -> None:
    """More requests reach it, none of them answered, than there is memory for at once."""
    clients = [served.complete() for _ in range(MOST + 4)]
    assert [served.event()[0] for _ in clients] == ["add"] * len(clients)


def test_counts_for_two_servers_together(tmp_path: Path) -> None:
    """Both serve, and what they hold has room in the bytes of one.

    They hold it to the end, as the plug-in that reports hand-off is left out.
    """
    shared = {"LIFECYCLE_SHARED": str(tmp_path / "shared")}
    only = {"VLLM_PLUGINS": vllm_platform.__name__}
    options = ("--api-server-count=2",)
    with serving(tmp_path, *options, **shared, **only) as server:
        for _ in range(2):
            said = server.vllm.until(STARTED)
        assert said.count(STARTED) == 2, said
        assert said.count("for the requests of all worker processes that share") == 2
        clients = [server.complete() for _ in range(4 * ALONE)]
        refused = len(clients) - wait_for_admitted(server, clients)
        reached = Counter(each[2] for each in list(server.engine.events.queue))
        assert set(reached) == {0, 1}
        assert reached.total() <= ALONE
        assert refused == len(clients) - reached.total()


def wait_for_admitted(server: Serving, clients: list[Client]) -> int:
    """Wait until each client has an answer, or its request is in the engine."""
    events = server.engine.events.queue
    while True:
        sockets = [each.socket for each in clients]
        answered = len(select.select(sockets, [], [], 0.05)[0])
        if answered + len(events) == len(clients):
            return len(events)


def test_says_that_each_server_has_a_budget(tmp_path: Path) -> None:
    """Where there are several, and they share none."""
    with serving(tmp_path, "--api-server-count=2") as server:
        for _ in range(2):
            said = server.vllm.until(STARTED)
    assert said.count("Admission: 4 MiB for requests in each worker process") == 2, said


def test_does_not_start_without_python(tmp_path: Path) -> None:
    """vLLM's Rust front end has no middleware, and says so."""
    with serving(tmp_path, VLLM_USE_RUST_FRONTEND="1") as server:
        said = server.vllm.until(STARTED, "is ready to accept requests")
        assert "not implemented in Rust frontend yet:\n- middleware" in said
        assert "ready to accept" not in said
        assert f"LIFECYCLE_BYTES={BYTES} limits nothing: " in said


@pytest.mark.parametrize("admission", ["", ", in Admission"])
def test_is_in_the_table_of_servers(tmp_path: Path, admission: str) -> None:
    """The benchmark starts it with an engine that generates, and checks it."""
    name = "vllm-admission" if admission else "vllm"
    found = report(name, tmp_path)
    assert found["server"] == f"vLLM {version('vllm')}{admission}"
    assert [each["id"] for each in found["findings"]] == ["leave.connected"]
