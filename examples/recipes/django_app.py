"""Django: a stream that ends when its client disconnects.

Run it: uvicorn django_app:app
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import StreamingHttpResponse
from django.urls import path
from words import sessions, words

from lifecycle_asgi import LifecycleMiddleware, request_of

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="none")


async def speak(request: Any) -> StreamingHttpResponse:
    """Stream words."""
    client = request_of(request.scope)
    return StreamingHttpResponse(await client.begin(words(client)))


urlpatterns = [path("", speak)]
django = LifecycleMiddleware(get_asgi_application())


async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: RET503
    """Serve Django, and the lifespan that it lacks."""
    if scope["type"] != "lifespan":
        return await django(scope, receive, send)
    async with sessions:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})
