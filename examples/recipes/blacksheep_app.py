"""BlackSheep: a stream that ends when its client disconnects.

Run it: uvicorn blacksheep_app:app
"""

from __future__ import annotations

from typing import Any

from blacksheep import Application, Request, Response, StreamedContent, get
from words import sessions, words

from lifecycle_asgi import LifecycleMiddleware, request_of

blacksheep = Application()
app = LifecycleMiddleware(blacksheep)


@get("/")
async def speak(request: Request) -> Response:
    """Stream words."""
    client = request_of(request.scope)
    body = await client.begin(words(client))

    async def parts() -> Any:
        async for word in body:
            yield word

    return Response(200, content=StreamedContent(b"text/plain", parts))


@blacksheep.lifespan
async def run_sessions(_app: Application) -> Any:
    """Run the registry while the server runs."""
    async with sessions:
        yield  # noqa: ASYNC119 - the form that the framework requires
