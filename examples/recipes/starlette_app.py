"""Starlette: a stream that ends when its client disconnects.

Run it: uvicorn starlette_app:app
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from words import lifespan, words

from lifecycle_asgi import LifecycleMiddleware, request_of


async def speak(request: Request) -> Response:
    """Stream words."""
    client = request_of(request.scope)
    return StreamingResponse(await client.begin(words(client)))


app = Starlette(
    routes=[Route("/", speak)],
    lifespan=lifespan,
    middleware=[Middleware(LifecycleMiddleware)],
)
