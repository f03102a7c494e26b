"""Quart: a stream that ends when its client disconnects.

Run it: uvicorn quart_app:app
"""

from __future__ import annotations

from typing import Any

from quart import Quart, Response, request
from words import sessions, words

from lifecycle_asgi import LifecycleMiddleware, request_of

quart = Quart(__name__)
app = LifecycleMiddleware(quart)


@quart.get("/")
async def speak() -> Response:
    """Stream words."""
    client = request_of(request.scope)
    return Response(await client.begin(words(client)))


@quart.while_serving
async def run_sessions() -> Any:
    """Run the registry while the server runs."""
    async with sessions:
        yield  # noqa: ASYNC119 - the form that the framework requires
