"""``transformers serve`` under the plug-in: what it generates ends with its client.

The modules here have the names and the shapes of transformers 5.24. The server itself
is in `test_recipes.py`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import Admission
from lifecycle_asgi.transformers_plugin import register

pytestmark = pytest.mark.anyio
SERVING = "transformers.cli.serving"


@pytest.fixture
def anyio_backend() -> str:
    """transformers serve runs on asyncio."""
    return "asyncio"


class Ids:
    """A tensor of token ids, of one row."""

    shape = (1, 3)

    def never(self) -> bool:
        """A criterion that is never met."""
        return False

    def new_full(self, shape: tuple[int, ...], value: object) -> Any:
        """A tensor of one value."""
        assert shape == (1,)
        return SimpleNamespace(bool=lambda: value)


class Model:
    """Generates until a criterion stops it."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.calls = 0

    def generate(self, *, stopping_criteria: Any = ()) -> str:
        """Generate; without criteria, one token."""
        self.calls += 1
        self.begun.set()
        while not any(stop(Ids()) for stop in stopping_criteria):
            if self.ended.wait(0.001):
                break
        self.ended.set()
        return "text"


def modules_of_transformers(app: Any) -> Any:
    """Return the modules, by their names, and what is in them."""

    class DirectStreamer:
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def cancel(self) -> None:
            self.cancelled.set()

    class GenerateManager:
        def __init__(self) -> None:
            self.pool = ThreadPoolExecutor(1)

        def async_submit(self, work: Any, *args: Any, **options: Any) -> Any:
            loop = asyncio.get_running_loop()
            future = loop.create_future()

            def run() -> None:
                result = work(*args, **options)
                loop.call_soon_threadsafe(future.set_result, result)

            self.pool.submit(run)
            return future

        async def generate_non_streaming(self, model: Any, **options: Any) -> Any:
            return await self.async_submit(model.generate, **options)

        def generate_streaming(self) -> Any:
            return utils.DirectStreamer()

    class ContinuousBatchingManager:
        def __init__(self) -> None:
            self.cancelled: list[str] = []
            self.queue = SimpleNamespace(put=self.cancelled.append)

        def add_request(self, ids: Any, request_id: str | None = None) -> str | None:
            return request_id

        def cancel_request(self, request_id: str) -> None:
            self.queue.put(request_id)

    class CBGenerateManager:
        def __init__(self) -> None:
            self.batches = ContinuousBatchingManager()

        async def generate_non_streaming(self, request_id: str) -> None:
            self.batches.add_request([1], request_id=request_id)
            await anyio.sleep_forever()

        def generate_streaming(self, request_id: str) -> None:
            self.batches.add_request([1], request_id=request_id)

    class Serve:
        def __init__(self) -> None:
            self.app = server.build_server()

    server = types.ModuleType("transformers.cli.serving.server")
    server.build_server = lambda: app  # type: ignore[attr-defined]
    serve = types.ModuleType("transformers.cli.serve")
    serve.Serve = Serve  # type: ignore[attr-defined]
    utils: Any = types.ModuleType("transformers.cli.serving.utils")
    utils.DirectStreamer, utils.GenerateManager = DirectStreamer, GenerateManager
    utils.CBGenerateManager = CBGenerateManager
    batches: Any = types.ModuleType(
        "transformers.generation.continuous_batching.continuous_api"
    )
    batches.ContinuousBatchingManager = ContinuousBatchingManager
    found = (server, serve, utils, batches)
    return {each.__name__: each for each in found}


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a transformers has that is not hooked yet; its server calls `handler`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive())["more_body"]:
                pass
            await made.handler()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})

    monkeypatch.setenv("LIFECYCLE_BYTES", "1GiB")
    modules = modules_of_transformers(app)
    for name in modules:
        while name := name.rpartition(".")[0]:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    serve, utils = modules["transformers.cli.serve"], modules[f"{SERVING}.utils"]
    made = SimpleNamespace(
        serve=serve.Serve,
        utils=utils,
        server=modules[f"{SERVING}.server"],
        alone=utils.GenerateManager(),
        batched=utils.CBGenerateManager(),
        model=Model(),
    )
    return made


async def serve(
    kit: Any, handler: Any, leave: Callable[[], bool] = lambda: False
) -> ScriptedServer:
    """Serve one request with *handler*; its client leaves as soon as *leave* says so."""
    register()
    kit.handler = handler
    app, server = kit.serve().app, ScriptedServer(b"{}")
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app, http_scope(), server.receive, server.send)
            while not (leave() or server.complete.is_set()):
                await anyio.sleep(0.001)
            server.gone.set()
    return server


async def test_stops_generation_that_is_not_streamed(kit: Any) -> None:
    """The criterion stops it, and the client's own criteria stay."""
    failed: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failed.append(context))
    model = kit.model

    async def whole() -> None:
        await kit.alone.generate_non_streaming(model, stopping_criteria=[Ids.never])

    await serve(kit, whole, leave=model.begun.is_set)
    # With its thread, what that has for the loop is there.
    await anyio.to_thread.run_sync(kit.alone.pool.shutdown)
    assert model.ended.is_set()
    await checkpoint()
    assert failed == []


async def test_does_not_begin_what_was_left_in_line(kit: Any) -> None:
    """The thread is busy with another request; the one behind it is skipped."""
    pool = kit.alone.pool
    busy = threading.Event()
    pool.submit(busy.wait, 20)
    waits = anyio.Event()

    async def whole() -> None:
        waits.set()
        await kit.alone.generate_non_streaming(kit.model)

    await serve(kit, whole, leave=waits.is_set)
    busy.set()
    pool.shutdown()
    assert kit.model.calls == 0


async def test_answers_whoever_stays_as_before(kit: Any) -> None:
    """The result is the model's, and nothing is cancelled at the end."""
    found: list[object] = []

    async def all_of_it() -> None:
        kit.model.ended.set()
        found.append(await kit.alone.generate_non_streaming(kit.model))
        found.append(await kit.alone.async_submit(len, "four"))
        found.append(kit.alone.generate_streaming().cancelled)
        kit.batched.generate_streaming("mine")

    assert (await serve(kit, all_of_it)).status == 200
    assert found[:2] == ["text", 4]
    assert not found[2].is_set()  # type: ignore[attr-defined]
    assert kit.batched.batches.cancelled == []


async def test_ends_a_stream_that_was_not_begun(kit: Any) -> None:
    """Its generator would never learn that it has no reader."""
    begun: list[Any] = []

    async def stream() -> None:
        begun.append(kit.alone.generate_streaming())
        await anyio.sleep_forever()

    await serve(kit, stream, leave=lambda: bool(begun))
    assert begun[0].cancelled.is_set()


@pytest.mark.parametrize("streamed", [False, True])
async def test_takes_a_leaver_out_of_the_batch(kit: Any, streamed: bool) -> None:
    """Under the id that the batch has it by; one that was refused has none."""
    waits = anyio.Event()

    async def batched() -> None:
        kit.batched.generate_streaming(None)
        waits.set()
        if streamed:
            kit.batched.generate_streaming("mine")
            await anyio.sleep_forever()
        await kit.batched.generate_non_streaming("mine")

    await serve(kit, batched, leave=waits.is_set)
    assert kit.batched.batches.cancelled == ["mine"]


async def test_says_which_model_cannot_be_stopped(
    kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes no criteria, and gets none."""

    def generate() -> str:
        return "text"

    found: list[object] = []

    async def whole() -> None:
        found.append(await kit.alone.async_submit(generate))

    await serve(kit, whole)
    assert found == ["text"]
    assert "it does not end when a client leaves" in caplog.text


async def test_leaves_alone_what_is_no_request(kit: Any) -> None:
    """Work outside of requests is submitted as it is; a lifespan passes."""
    register()
    register()
    app = kit.serve().app
    assert isinstance(app, Admission)
    await app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert await kit.alone.async_submit(len, "four") == 4
    assert not kit.alone.generate_streaming().cancelled.is_set()
    assert kit.batched.batches.add_request([1], request_id="mine") == "mine"


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("server", None, "build_server"),
        ("utils", None, "DirectStreamer"),
        ("utils", "GenerateManager", "async_submit"),
        ("utils", "GenerateManager", "generate_streaming"),
        ("utils", "CBGenerateManager", "generate_non_streaming"),
    ],
)
def test_refuses_a_version_without_what_it_hooks(
    kit: Any, module: str, owner: str | None, name: str
) -> None:
    """One line says what is missing, and what to do."""
    found = getattr(kit, module)
    delattr(getattr(found, owner) if owner else found, name)
    with pytest.raises(SystemExit, match=rf"{name}.*; install transformers.*proxy`$"):
        register()


def test_refuses_a_version_that_does_not_call_what_it_hooks(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is there and unused: a hook would fail in silence."""

    async def generate_non_streaming(self: Any, model: Any) -> Any:
        return model.generate()

    kind = kit.utils.GenerateManager
    monkeypatch.setattr(kind, "generate_non_streaming", generate_non_streaming)
    with pytest.raises(SystemExit, match=r"generate_non_streaming has no async_submit"):
        register()


def test_refuses_to_start_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a version that is too old."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "transformers.cli.serve", raising=False)
    with pytest.raises(SystemExit, match=r"transformers.*; install transformers"):
        register()
