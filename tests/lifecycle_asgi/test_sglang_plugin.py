"""SGLang's plug-in: `Admission` in its HTTP server, and hand-off to its scheduler.

The registry here has the signatures of `sglang.srt.plugins.hook_registry` in SGLang
0.5.23: `register(target, hook, hook_type)` with a dotted target, `apply_hooks()`, and
the wrapper of BEFORE. `test_sglang.py` drives SGLang's own.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope
from fastapi import FastAPI, Request

from lifecycle_asgi import Admission, sglang_plugin

pytestmark = pytest.mark.anyio
APP_PATH = "SGLANG_HTTP_SERVER_APP_PATH"
ARGUMENTS = "sglang.srt.server_args"
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

    return {HookType.BEFORE: before}[hook_type]


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
    rust = SimpleNamespace(get=lambda: False)
    module("sglang.srt.environ", envs=SimpleNamespace(SGLANG_RUST_SERVER=rust))
    methods = dict.fromkeys(("resolve_once", "check_server_args"), lambda self: None)
    arguments = type("ServerArgs", (SimpleNamespace,), methods)
    module(ARGUMENTS, ServerArgs=arguments)
    registry = Registry()
    module(REGISTRY, HookRegistry=registry, HookType=HookType)
    send = TokenizerManager._send_one_request
    manager = type("TokenizerManager", (TokenizerManager,), {"_send_one_request": send})
    module(MANAGER, TokenizerManager=manager)
    app = FastAPI()
    module(SERVER, app=app)
    monkeypatch.setenv("LIFECYCLE_BYTES", "1GiB")
    monkeypatch.setenv(APP_PATH, "")  # back as it was afterwards
    monkeypatch.delenv(APP_PATH)
    return SimpleNamespace(
        app=app, manager=manager, registry=registry, arguments=arguments, rust=rust
    )


def load_plugins(sglang: Any) -> None:
    """What SGLang does at its start."""
    sglang_plugin.register()
    sglang.registry.apply_hooks()


def launch(sglang: Any, **flags: Any) -> list[Any]:
    """What launchers do with their arguments; the middleware that is then served."""
    arguments = sglang.arguments(**flags)
    arguments.resolve_once()
    arguments.check_server_args()
    return [each.cls for each in sglang.app.user_middleware]


async def test_installs_before_the_server_runs(
    sglang: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The application has `Admission` once, when it is started, and the log says so."""
    caplog.set_level("INFO", "lifecycle")
    load_plugins(sglang)
    assert not sglang.app.user_middleware
    assert launch(sglang, tokenizer_worker_num=1) == [Admission]
    line = "Admission: 1 GiB, profile sglang, released at the scheduler"
    assert caplog.messages == [line]
    assert launch(sglang) == [Admission]


async def test_leaves_a_line_of_the_user_alone(sglang: Any) -> None:
    """A script that has added the middleware itself gets no second one."""
    sglang.app.add_middleware(Admission, bytes=2**20)
    load_plugins(sglang)
    assert launch(sglang) == [Admission]


async def test_does_nothing_unasked(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package alone limits no server."""
    monkeypatch.delenv("LIFECYCLE_BYTES")
    load_plugins(sglang)
    assert not sglang.registry.hooks


async def test_leaves_other_processes_alone(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a scheduler nor `Engine` imports the HTTP server."""
    monkeypatch.delitem(sys.modules, SERVER)
    monkeypatch.delitem(sys.modules, MANAGER)
    load_plugins(sglang)
    sglang.arguments().resolve_once()  # all that a scheduler calls
    assert not caplog.messages
    assert launch(sglang) == []
    idle = "LIFECYCLE_BYTES=1GiB: no HTTP server in this process, nothing to limit"
    assert caplog.messages == [idle]
    assert not {SERVER, MANAGER} & sys.modules.keys()


@pytest.mark.parametrize("flag", ["encoder_only", "smg_grpc_mode", "rust"])
async def test_starts_no_server_that_it_cannot_limit(sglang: Any, flag: str) -> None:
    """The error names the variable, its value and what to do."""
    load_plugins(sglang)
    sglang.rust.get = lambda: flag == "rust"
    with pytest.raises(RuntimeError, match=r"1GiB limits nothing: .*; unset .*proxy"):
        launch(sglang, **{flag: True})


@pytest.mark.parametrize("name", ["resolve_once", "check_server_args"])
async def test_starts_no_server_that_it_does_not_know(sglang: Any, name: str) -> None:
    """SGLang would log what a plug-in raises, and serve, unless it is an exit."""
    delattr(sglang.arguments, name)
    with pytest.raises(SystemExit, match=rf"1GiB limits nothing: .*'{name}'.*; unset"):
        load_plugins(sglang)


async def test_says_that_it_cannot_hand_off(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the method that all requests pass, they end with their answer."""
    monkeypatch.setattr(sys.modules[MANAGER], "TokenizerManager", SimpleNamespace)
    load_plugins(sglang)
    assert launch(sglang) == [Admission]
    late = "released with the answer: use SGLang 0.5.23, which has TokenizerManager._"
    assert late in caplog.text
    assert "WARNING" in caplog.text


async def test_counts_the_workers(
    sglang: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each tokenizer worker has the whole budget, unless they share one."""
    load_plugins(sglang)
    assert launch(sglang, tokenizer_worker_num=4, grpc_port=50051) == []
    assert "grpc_port=50051" in caplog.messages[0]
    assert caplog.messages[1] == (
        "LIFECYCLE_BYTES=1GiB counts in each of 4 tokenizer workers; "
        "set LIFECYCLE_SHARED"
    )
    assert pkgutil.resolve_name(os.environ[APP_PATH]) is sglang.app
    assert [each.cls for each in sglang.app.user_middleware] == [Admission]
    assert hasattr(sglang.manager._send_one_request, "__wrapped__")
    with pytest.raises(AttributeError):
        sglang_plugin.anything  # noqa: B018
    monkeypatch.setenv(APP_PATH, "theirs:app")
    monkeypatch.setenv("LIFECYCLE_SHARED", str(tmp_path))
    caplog.clear()
    launch(sglang, tokenizer_worker_num=2)
    assert "counts in each" not in caplog.text
    assert f"{APP_PATH}=theirs:app: not limited" in caplog.text
    monkeypatch.setenv("LIFECYCLE_BYTES", "auto")
    monkeypatch.delenv("LIFECYCLE_SHARED")
    with pytest.raises(
        RuntimeError, match="=auto is for one process, and there are 2 t"
    ):
        launch(sglang, tokenizer_worker_num=2)


async def test_learns_the_budget_of_one_process(
    sglang: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LIFECYCLE_BYTES=auto` reaches the `Admission` that the server gets."""
    monkeypatch.setenv("LIFECYCLE_BYTES", "auto")
    load_plugins(sglang)
    assert launch(sglang) == [Admission]
    (added,) = sglang.app.user_middleware
    assert added.kwargs["bytes"] == "auto"


def tokenized(rid: str, *nbytes: int | None) -> Any:
    """A request as SGLang sends it to its scheduler."""
    items = [SimpleNamespace(feature=SimpleNamespace(nbytes=each)) for each in nbytes]
    return SimpleNamespace(rid=rid, mm_inputs=SimpleNamespace(mm_items=items))


@pytest.mark.parametrize("single", [True, False])
async def test_hands_off_what_the_scheduler_has(sglang: Any, single: bool) -> None:
    """One request holds nothing once it is sent; a batch holds all until its end."""
    load_plugins(sglang)
    launch(sglang)
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


@pytest.mark.parametrize("state", ["runs", "background", "over"])
async def test_aborts_what_a_leaver_has_sent(sglang: Any, state: str) -> None:
    """Unless it is to be asked for later, or over; and keeps nothing of it until then."""
    load_plugins(sglang)
    launch(sglang)
    manager, freed, aborted = sglang.manager(), list[bool](), list[str]()
    manager.abort_request = aborted.append

    async def generate() -> dict[str, str]:
        asked = SimpleNamespace(background=state == "background")
        manager.rid_to_state["1"] = SimpleNamespace(obj=asked)
        tokenized = type("Tokenized", (), {"rid": "1"})()
        ref = weakref.ref(tokenized)
        await manager._send_one_request(tokenized)
        manager.sent.clear()
        del tokenized
        freed.append(ref() is None)
        if state == "over":
            manager.rid_to_state.clear()
        server.gone.set()
        await anyio.sleep_forever()
        return {}

    sglang.app.post("/generate")(generate)
    server = ScriptedServer(BODY)
    headers = [(b"content-length", str(len(BODY)).encode())]
    with anyio.fail_after(120):
        scope = http_scope("/generate", headers=headers)
        await sglang.app(scope, server.receive, server.send)
    assert freed == [True]
    assert aborted == (["1"] if state == "runs" else [])


async def test_leaves_requests_without_admission_alone(sglang: Any) -> None:
    """What SGLang's own code sends arrives as before, whatever its media."""
    load_plugins(sglang)
    launch(sglang)
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
