"""vLLM's plug-in: a request that is not streamed is released once the engine has it."""

from __future__ import annotations

import json
import sys
import types
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import Admission
from lifecycle_asgi.vllm_plugin import register, tensor_bytes

pytestmark = pytest.mark.anyio
URL = "https://example.org/a.png"
PART = {"type": "image_url", "image_url": {"url": URL}}
BODY = json.dumps({"messages": [{"role": "user", "content": [PART]}]}).encode()


class AsyncLLM:
    """As far as the plug-in knows vLLM's client of its engine."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def add_request(self, request: Any) -> str:
        """Prepare a request and send it."""
        await self._add_request(request, None)
        return "queue"

    async def _add_request(self, request: Any, parent: Any) -> str:
        self.sent.append(request)
        return "sent"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the engine of a vLLM that has loaded its plug-ins, twice."""
    kind = type("AsyncLLM", (AsyncLLM,), {"_add_request": AsyncLLM._add_request})
    module = types.ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = kind  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register()
    once = kind._add_request  # type: ignore[attr-defined]
    register()
    assert kind._add_request is once  # type: ignore[attr-defined]
    return kind()


async def test_releases_once_the_engine_has_the_request(engine: Any) -> None:
    """A response that is not streamed holds nothing while the engine works on it."""
    held = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        held.append(in_use())
        async with anyio.create_task_group() as tasks:  # as a task of the handler
            tasks.start_soon(engine.add_request, SimpleNamespace(mm_features=None))
        held.append(in_use())
        headers: list[Any] = []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    def in_use() -> int:
        return sum(lane.bytes_in_use for lane in admission.statistics().values())

    admission = Admission(app, environment={})
    server = ScriptedServer(BODY)
    headers = [(b"content-length", str(len(BODY)).encode())]
    with anyio.fail_after(120):
        await admission(http_scope(headers=headers), server.receive, server.send)
    assert server.status == 200
    assert held[0] > 2**20
    assert held[1] == 0
    assert engine.sent


async def test_leaves_requests_without_admission_alone(engine: Any) -> None:
    """What vLLM's own code calls works as before."""
    assert await engine.add_request("anything") == "queue"
    assert engine.sent == ["anything"]


class Broken(types.ModuleType):
    """A module that fails where it is used."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("missing", ["module", "method", "device"])
def test_leaves_other_versions_alone(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A vLLM without this client loads the plug-in and is not changed."""
    module = types.ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = object  # type: ignore[attr-defined]
    name = module.__name__
    found = {"module": None, "method": module, "device": Broken(name)}[missing]
    monkeypatch.setitem(sys.modules, name, found)
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    register()


def test_counts_tensors_of_a_request() -> None:
    """Tensors count wherever vLLM nests them, and what is none counts nothing."""
    tensor = SimpleNamespace(nbytes=100)
    item = SimpleNamespace(get_data=lambda: {"pixel_values": tensor, "sizes": [tensor]})
    features = [SimpleNamespace(data=item), SimpleNamespace(data=None)]
    assert tensor_bytes(SimpleNamespace(mm_features=features)) == 200
    nested = {"a": SimpleNamespace(data=tensor)}
    assert (
        tensor_bytes(SimpleNamespace(mm_features=[SimpleNamespace(data=nested)])) == 100
    )
    assert tensor_bytes(SimpleNamespace(mm_features=None)) == 0
    assert tensor_bytes(object()) == 0

    def fail() -> Any:
        raise ZeroDivisionError

    odd = SimpleNamespace(data=SimpleNamespace(get_data=fail))
    assert tensor_bytes(SimpleNamespace(mm_features=[odd])) == 0


def test_is_found_by_vllm() -> None:
    """The distribution has the entry point that vLLM looks for."""
    points = metadata.entry_points(group="vllm.general_plugins")
    if "lifecycle" not in points.names:
        pytest.skip("this environment was installed before the entry point existed")
    assert points["lifecycle"].load() is register


@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({"LIFECYCLE_BYTES": "1GiB", "VLLM_USE_RUST_FRONTEND": "1"}, True),
        ({"LIFECYCLE_BYTES": "1GiB", "VLLM_USE_RUST_FRONTEND": "0"}, False),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, False),
        ({"LIFECYCLE_BYTES": "1GiB"}, False),
    ],
)
def test_says_what_limits_nothing(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    warned: bool,
) -> None:
    """vLLM's front end in Rust takes no middleware."""
    for name in ("LIFECYCLE_BYTES", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    register()
    assert [
        each.startswith("LIFECYCLE_BYTES=1GiB limits nothing: ")
        for each in caplog.messages
    ] == [True] * warned
