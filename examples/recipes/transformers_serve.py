"""transformers serve: a model that stops when its client leaves, streamed or not.

Run it: python -c 'import transformers_serve as it; it.main("some/model", 8000)'
"""

import asyncio
from typing import Any

import torch
from transformers.cli.serve import Serve
from transformers.cli.serving import server, utils

from lifecycle_asgi import LifecycleMiddleware

build, generate = server.build_server, utils.GenerateManager.generate_non_streaming


async def stoppable(
    self: Any, model: Any, of: Any, inputs: Any, *a: Any, **k: Any
) -> Any:
    """Generate until nobody waits for it."""
    left = asyncio.Event()

    def stop(ids: Any, _scores: Any, **_: Any) -> torch.Tensor:
        return torch.full(ids.shape[:1], left.is_set(), device=ids.device)

    inputs = {**inputs, "stopping_criteria": [stop]}
    try:  # Shielded: its thread tells a future that must not have been cancelled.
        return await asyncio.shield(generate(self, model, of, inputs, *a, **k))
    finally:
        left.set()


def main(model: str, port: int) -> None:
    """Serve until interrupted."""
    utils.GenerateManager.generate_non_streaming = stoppable
    server.build_server = lambda *a, **k: LifecycleMiddleware(build(*a, **k))
    Serve(force_model=model, port=port)
