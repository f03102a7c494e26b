"""SGLang's plug-in: `Admission` in its HTTP server, and hand-off to its scheduler.

The registry here has the signatures of `sglang.srt.plugins.hook_registry` in SGLang
0.5.23: `register(target, hook, hook_type)` with a dotted target, `apply_hooks()`, and
the wrappers of BEFORE and AROUND.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope
from fastapi import FastAPI, Request

from lifecycle_asgi import Admission, sglang_plugin

pytestmark = pytest.mark.anyio
SERVER = "sglang.srt.entrypoints.http_server"
MANAGER = "sglang.srt.managers.tokenizer_manager"
REGISTRY = "sglang.srt.plugins.hook_registry"
PART = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
BODY = json.dumps({"messages": [{"role": "user", "content": [PART]}]}).encode()


class HookType(Enum):
    """As in SGLang 0.5.23."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Registry:
    """SGLang's `HookRegistry`, as far as plug-ins call it."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[tuple[HookType, Any]]] = defaultdict(list)

    def register(
        self,
        target: str,
        hook: Callable[..., Any],
        hook_type: HookType = HookType.AFTER,
        *,
        source: Any = None,
    ) -> None:
        """Keep a hook."""
        del source
        self.hooks[target].append((hook_type, hook))

    def apply_hooks(self) -> None:
        """Import the parent of each target, and wrap the target."""
        for target, hooks in self.hooks.items():
            parent, name = target.rsplit(".", 1)
            found = pkgutil.resolve_name(parent)
            for hook_type, hook in hooks:
                wrapped = wrap(getattr(found, name), hook, hook_type)
                setattr(found, name, wrapped)


def wrap(original: Any, hook: Any, hook_type: HookType) -> Any:
    """SGLang's `_wrap_fn`."""

    @functools.wraps(original)
    def before(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is not None:
            args, kwargs = result
        return original(*args, **kwargs)

    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return {HookType.BEFORE: before, HookType.AROUND: around}[hook_type]


class TokenizerManager:
    """SGLang's, as far as a request passes through it."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        self.sent.append(tokenized_obj)

    async def generate(self, *parts: Any, single: bool) -> None:
        """Send the parts of a request, as `generate_request` does."""
        for part in parts:
            # Parts of a batch have no such attribute in SGLang.
            obj = SimpleNamespace(is_single=True) if single else SimpleNamespace()
            self.rid_to_state[part.rid] = SimpleNamespace(obj=obj)
            await self._send_one_request(part)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of an SGLang that has not loaded its plug-ins yet."""

    def module(name: str, **attributes: Any) -> Any:
        made = types.ModuleType(name)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, made, raising=False)
        return made

    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        module(name)
    for name in ("sglang.srt.entrypoints", "sglang.srt.managers"):
        module(name)
    registry = Registry()
    module(REGISTRY, HookRegistry=registry, HookType=HookType)
    send = TokenizerManager._send_one_request
    manager = type("TokenizerManager", (TokenizerManager,), {"_send_one_request": send})
    module(MANAGER, TokenizerManager=manager)
    runs: list[Any] = []

    def run(server_args: Any, *args: Any) -> None:
        del args
        runs.append((server_args, [each.cls for each in app.user_middleware]))

    app = FastAPI()
    module(SERVER, app=app, _setup_and_run_http_server=run)
    monkeypatch.setenv("LIFECYCLE_BYTES", "1GiB")
    return SimpleNamespace(app=app, manager=manager, registry=registry, runs=runs)


def load_plugins(sglang: Any) -> None:
    """What SGLang does at its start."""
    sglang_plugin.register()
    sglang.registry.apply_hooks()


def launch(args: str) -> None:
    """What `launch_server` does after its processes have started."""
    sys.modules[SERVER]._setup_and_run_http_server(args, None)


async def test_installs_before_the_server_runs(sglang: Any) -> None:
    """The application has `Admission` once, when it is started."""
    load_plugins(sglang)
    assert not sglang.app.user_middleware
    launch("args")
    launch("args")
    assert sglang.runs == [("args", [Admission])] * 2


async def test_leaves_a_line_of_the_user_alone(sglang: Any) -> None:
    """A script that has added the middleware itself gets no second one."""
    sglang.app.add_middleware(Admission, bytes=2**20)
    load_plugins(sglang)
    launch("args")
    assert sglang.runs == [("args", [Admission])]


async def test_does_nothing_unasked(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package alone limits no server."""
    monkeypatch.delenv("LIFECYCLE_BYTES")
    load_plugins(sglang)
    assert not sglang.registry.hooks


async def test_leaves_other_processes_alone(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler does not import the HTTP server; a server in a child has it."""
    monkeypatch.setitem(sys.modules, "__mp_main__", types.ModuleType("__mp_main__"))
    with monkeypatch.context() as scheduler:
        scheduler.delitem(sys.modules, SERVER)
        load_plugins(sglang)
        assert not sglang.registry.hooks
    load_plugins(sglang)
    launch("args")
    assert sglang.runs == [("args", [Admission])]


async def test_serves_workers_that_import_the_application(sglang: Any) -> None:
    """``SGLANG_HTTP_SERVER_APP_PATH`` takes the name of an application."""
    app = vars(sglang_plugin)["__getattr__"]("app")
    assert app is sglang.app
    assert [each.cls for each in app.user_middleware] == [Admission]
    with pytest.raises(AttributeError):
        sglang_plugin.anything  # noqa: B018


def tokenized(rid: str, *nbytes: int | None) -> Any:
    """A request as SGLang sends it to its scheduler."""
    items = [SimpleNamespace(feature=SimpleNamespace(nbytes=each)) for each in nbytes]
    return SimpleNamespace(rid=rid, mm_inputs=SimpleNamespace(mm_items=items))


@pytest.mark.parametrize("single", [True, False])
async def test_hands_off_what_the_scheduler_has(sglang: Any, single: bool) -> None:
    """One request holds nothing once it is sent; a batch holds all until its end."""
    load_plugins(sglang)
    launch("args")
    manager, held = sglang.manager(), []

    async def chat(request: Request) -> dict[str, Any]:
        await request.json()
        held.append(in_use())
        parts = [tokenized("a", 100)] if single else [tokenized("a"), tokenized("b")]
        await manager.generate(*parts, single=single)
        held.append(in_use())
        return {}

    sglang.app.post("/v1/chat/completions")(chat)

    def in_use() -> int:
        layer = sglang.app.middleware_stack
        while not isinstance(layer, Admission):
            layer = layer.app
        return sum(lane.bytes_in_use for lane in layer.statistics().values())

    server = ScriptedServer(BODY)
    headers = [(b"content-length", str(len(BODY)).encode())]
    scope = http_scope("/v1/chat/completions", headers=headers)
    with anyio.fail_after(120):
        await sglang.app(scope, server.receive, server.send)
    assert server.status == 200
    assert held[0] > 2**20
    assert (held[1] == 0) is single
    assert len(manager.sent) == (1 if single else 2)
    assert in_use() == 0


async def test_leaves_requests_without_admission_alone(sglang: Any) -> None:
    """What SGLang's own code sends arrives as before, whatever its media."""
    load_plugins(sglang)
    manager = sglang.manager()
    odd = [tokenized("a"), SimpleNamespace(rid="b"), tokenized("c", None, 3)]
    await manager.generate(*odd, single=True)
    assert manager.sent == odd


def test_is_found_by_sglang() -> None:
    """The distribution has the entry point that SGLang looks for."""
    points = metadata.entry_points(group="sglang.srt.plugins")
    if "lifecycle" not in points.names:
        pytest.skip("this environment was installed before the entry point existed")
    assert points["lifecycle"].load() is sglang_plugin.register
