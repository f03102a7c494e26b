"""LMDeploy's own API server on a machine without a GPU: `serve` over a fake engine.

``peers_lmdeploy_rig.py none MODEL PORT`` runs `lmdeploy.serve.openai.api_server.serve`
as ``lmdeploy serve api_server MODEL --backend pytorch`` does: its routes, its
`VLAsyncEngine` with sessions and handles, its decoding and preparing of pictures. Only
the engine behind that is a fake: it drops what a request brought, and generates tokens.
With ``admission`` in front, it runs the lines of docs/howto/servers.md before.

``GET /engine`` has the number of requests that the engine works on, and of its tokens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

# Seconds between two tokens of a request.
STEP = 0.02
TOKEN = 100


def argv(way: str, model: str, port: int) -> list[str]:
    """The command line of a server."""
    return [sys.executable, __file__, way, model, str(port)]


class Handle:
    """A place in the engine.

    Args:
        engine: That it belongs to.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cancelled = False

    async def async_stream_infer(
        self, _session_id: int, *, gen_config: Any, **_inputs: Any
    ) -> AsyncIterator[Any]:
        """Generate tokens; what came with the request is dropped."""
        from lmdeploy.messages import EngineOutput, ResponseType

        del _inputs
        self._cancelled = False
        self._engine.active += 1
        try:
            for left in reversed(range(gen_config.max_new_tokens)):
                await asyncio.sleep(STEP)
                if self._cancelled:
                    yield EngineOutput(ResponseType.CANCEL, [])
                    return
                self._engine.tokens += 1
                done = ResponseType.SUCCESS if left else ResponseType.FINISH
                yield EngineOutput(done, [TOKEN])
        finally:
            self._engine.active -= 1

    async def async_cancel(self, _session_id: int) -> None:
        """Stop generating."""
        self._cancelled = True


class Engine:
    """As far as `AsyncEngine` knows its engine.

    Args:
        config: Of LMDeploy.

    Attributes:
        active: Requests that it works on.
        tokens: That it has generated.
    """

    def __init__(self, config: Any) -> None:
        self.engine_config = config
        self.active = 0
        self.tokens = 0

    def create_instance(self) -> Handle:
        """Return a place."""
        return Handle(self)

    def start_loop(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to close."""

    async def get_health_status(self) -> dict[str, Any]:
        """Well."""
        return {"alive": True, "message": "", "schedule_metrics": None}


def declare_operators() -> Any:
    """Declare two operators of torchvision, which was built for CUDA.

    It imports beside a torch for CPUs if they exist. Nothing here calls them.
    """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(name + schema)
    return library


def serve(way: str, model: str, port: int) -> None:
    """Be LMDeploy's API server."""
    library = declare_operators()
    import uvicorn
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.serve.core.async_engine import AsyncEngine
    from lmdeploy.serve.openai.api_server import serve as serve_api

    engines: list[Engine] = []

    def build(*_: Any, backend_config: Any, **__: Any) -> Engine:
        engines.append(Engine(backend_config))
        return engines[0]

    AsyncEngine._build_pytorch = build  # noqa: SLF001 - the engine is what is faked
    run = uvicorn.run

    def run_with_state(app: Any, **options: Any) -> None:
        if way == "admission":
            from lifecycle_asgi import Admission

            app = Admission(app)
        run(_with_state(app, engines), **options)

    uvicorn.run = run_with_state
    config = PytorchEngineConfig(session_len=8192, max_batch_size=64, dtype="float16")
    serve_api(
        model, backend="pytorch", backend_config=config, server_port=port,
        server_name="127.0.0.1",
    )  # fmt: skip
    del library


def _with_state(app: Any, engines: list[Engine]) -> Any:
    """Answer ``GET /engine`` in front of the server."""

    async def route(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != "/engine":
            await app(scope, receive, send)
            return
        body = f"{engines[0].active} {engines[0].tokens}".encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return route


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
