"""One application a framework that reads a body its usual way and then streams.

Every item of the stream is the memory of this process in bytes. ``/release`` drops the
framework's copies at hand-off, ``/keep`` does not.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio

from lifecycle_asgi import LifecycleMiddleware, request_of, request_scope

PAGE = 4096


async def memory() -> AsyncIterator[bytes]:
    """Report the memory of this process for as long as a client listens."""
    while True:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield b"%d\n" % (PAGE * pages)
        await anyio.sleep(0.05)


def hand_off(scope: Any, request: Any, path: str) -> None:
    """Say that nothing needs the body any more, or say nothing."""
    if path.endswith("/release"):
        request_of(scope).release_body(request)


def starlette() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def speak(request: Request) -> Response:
        await request.json()
        hand_off(request.scope, request, request.url.path)
        return StreamingResponse(memory())

    return Starlette(routes=[Route("/{how}", speak, methods=["POST"])])


def fastapi() -> Any:
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse
    from pydantic import BaseModel

    app = FastAPI()

    class Document(BaseModel):
        """What is sent."""

        text: str

    async def speak(request: Request, document: Document) -> StreamingResponse:
        hand_off(request.scope, request, request.url.path)
        return StreamingResponse(memory())

    # What the annotations of an inner function mean is not looked up.
    speak.__annotations__ = {"request": Request, "document": Document}
    app.post("/{how}")(speak)
    return app


def litestar() -> Any:
    from litestar import Litestar, Request, post
    from litestar.response import Stream

    async def speak(request: Any, data: Any) -> Any:
        hand_off(request.scope, request, request.url.path)
        return Stream(memory())

    speak.__annotations__ = {
        "request": Request,
        "data": dict[str, str],
        "return": Stream,
    }
    return Litestar([post("/{how:str}")(speak)], request_max_body_size=None)


def quart() -> Any:
    from quart import Quart, Response, request

    app = Quart(__name__)
    app.config["MAX_CONTENT_LENGTH"] = None

    @app.post("/<how>")
    async def speak(how: str) -> Response:
        await request.get_json()
        hand_off(request.scope, request, request.path)
        return Response(memory())

    return app


def django() -> Any:
    import json

    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import StreamingHttpResponse
    from django.urls import path

    settings.configure(
        ROOT_URLCONF=type("urls", (), {"urlpatterns": []}),
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="none",
        DATA_UPLOAD_MAX_MEMORY_SIZE=None,
    )

    async def speak(request: Any, how: str) -> StreamingHttpResponse:
        json.loads(request.body)
        hand_off(request.scope, request, request.path)
        return StreamingHttpResponse(memory())

    settings.ROOT_URLCONF.urlpatterns.append(path("<how>", speak))
    return get_asgi_application()


def blacksheep() -> Any:
    from blacksheep import Application, Request, Response, StreamedContent

    app = Application()

    async def speak(request: Any) -> Response:
        await request.json()
        hand_off(request.scope, request, request.scope["path"])
        return Response(200, content=StreamedContent(b"text/plain", memory))

    speak.__annotations__ = {"request": Request, "return": Response}
    app.router.add_post("/:how", speak)

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if not app.started:
            await app.start()
        await app(scope, receive, send)

    return served


def run_aiohttp(port: int) -> None:
    """Serve it with its own server."""
    from aiohttp import web

    async def speak(request: web.Request) -> web.StreamResponse:
        async with request_scope() as client:
            await request.json()
            if request.path == "/release":
                client.release_body(request)
            response = web.StreamResponse()
            await response.prepare(request)
            async for each in client.own(memory()):
                await response.write(each)
        return response

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/{how}", speak)
    web.run_app(app, port=port, handler_cancellation=True)


def main(name: str, port: int) -> None:
    """Serve the application of framework *name*."""
    if name == "aiohttp":
        run_aiohttp(port)
        return
    import uvicorn

    app = LifecycleMiddleware(globals()[name]())
    uvicorn.run(app, port=port, log_level="error", lifespan="off")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
