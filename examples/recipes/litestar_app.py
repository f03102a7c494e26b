"""Litestar: a stream that ends when its client disconnects.

Run it: uvicorn litestar_app:app
"""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, get
from litestar.response import Stream
from words import lifespan, words

from lifecycle_asgi import LifecycleMiddleware, request_of


@get("/")
async def speak(request: Request[Any, Any, Any]) -> Stream:
    """Stream words."""
    client = request_of(request.scope)
    return Stream(await client.begin(words(client)))


litestar = Litestar([speak], lifespan=[lifespan])
app = LifecycleMiddleware(litestar)
