"""transformers serve that stops on a disconnect. Start it with `main("a/model")`."""

import asyncio
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import server, utils

from lifecycle_asgi import LifecycleMiddleware

build, Alone, Many = server.build_server, utils.GenerateManager, utils.CBGenerateManager
alone, many = Alone.generate_non_streaming, Many.generate_non_streaming


async def one(self: Any, model: Any, of: Any, inputs: Any, *a: Any, **k: Any) -> Any:
    left = asyncio.Event()

    def stop(ids: Any, *_: Any, **__: Any) -> Any:
        return ids.new_full(ids.shape[:1], left.is_set()).bool()

    inputs = {**inputs, "stopping_criteria": [stop]}
    try:  # Shielded: its thread sets a future that must not be cancelled.
        return await asyncio.shield(alone(self, model, of, inputs, *a, **k))
    finally:
        left.set()


async def batched(self: Any, *a: Any, request_id: str) -> Any:
    try:
        return await many(self, *a, request_id=request_id)
    except asyncio.CancelledError:
        self._cb.cancel_request(request_id)
        raise


def main(model: str, **options: Any) -> None:
    Alone.generate_non_streaming, Many.generate_non_streaming = one, batched
    server.build_server = lambda *a, **k: LifecycleMiddleware(build(*a, **k))
    Serve(force_model=model, **options)
