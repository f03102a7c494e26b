"""Ray Serve: a stream that ends when its client disconnects.

Run it: python -c 'import ray_serve_app; ray_serve_app.main(8000)'
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from words import lifespan, words

from lifecycle_asgi import LifecycleMiddleware, request_of

app = FastAPI(lifespan=lifespan)
app.add_middleware(LifecycleMiddleware)


@app.get("/")
async def speak(request: Request) -> StreamingResponse:
    """Stream words."""
    client = request_of(request.scope)
    return StreamingResponse(await client.begin(words(client)))


class Speaker:
    """A replica: the application runs in its process, with its own registry."""


def main(port: int) -> None:
    """Serve until interrupted."""
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(serve.ingress(app)(Speaker))
    serve.run(deployment.bind())
    while True:
        time.sleep(1)
