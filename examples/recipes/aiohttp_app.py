"""aiohttp: a stream that ends when its client disconnects.

Run it: python -c 'import aiohttp_app; aiohttp_app.main(8000)'
"""

from __future__ import annotations

from typing import Any

from aiohttp import web
from words import sessions, words

from lifecycle_asgi import request_scope


async def speak(request: web.Request) -> web.StreamResponse:
    """Stream words."""
    # Served with handler_cancellation, which cancels this on a disconnect.
    async with request_scope() as client:
        body = await client.begin(words(client))
        response = web.StreamResponse()
        await response.prepare(request)
        async for word in body:
            await response.write(word)
    return response


async def run_sessions(_app: web.Application) -> Any:
    """Run the registry while the server runs."""
    async with sessions:
        yield  # noqa: ASYNC119 - the form that the framework requires


def main(port: int) -> None:
    """Serve until interrupted."""
    app = web.Application()
    app.router.add_get("/", speak)
    app.cleanup_ctx.append(run_sessions)
    web.run_app(app, port=port, handler_cancellation=True)
