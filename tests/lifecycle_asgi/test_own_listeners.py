"""Applications that hear of their client's leaving themselves, in tasks of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import anyio
import pytest
from asgi_kit import serving
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lifecycle_asgi import LifecycleMiddleware, request_of

pytestmark = pytest.mark.asyncio
REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


class Work:
    """The work of a handler until it is stopped, within its time limit."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cleaned = asyncio.Event()

    async def run(self) -> None:
        """Work for an hour; clean up for a moment."""
        try:
            self.begun.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            self.cleaned.set()
            raise


def racing(work: Work) -> Any:
    """An application as vLLM decorates its own: the first of two tasks ends the other."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await request.body()

        async def listen() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(listen()), asyncio.create_task(work.run())]
        _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await JSONResponse(None)(scope, receive, send)

    return app


def of_django(work: Work) -> Any:
    """A view of Django, which does the same for each."""
    pytest.importorskip("django")
    from django.conf import settings
    from django.core.handlers.asgi import ASGIHandler
    from django.http import HttpResponse
    from django.test import override_settings
    from django.urls import path

    async def view(request: Any) -> HttpResponse:
        await work.run()
        return HttpResponse()

    class Urls:
        urlpatterns = (path("", view),)

    if not settings.configured:
        settings.configure(SECRET_KEY="none")
        import django

        django.setup()
    used = override_settings(ROOT_URLCONF=Urls, ALLOWED_HOSTS=["*"])
    used.enable()
    handler = ASGIHandler()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await handler(scope, receive, send)
        finally:
            used.disable()

    return app


async def _dispatch(request: Any, call_next: Any) -> Any:
    return await call_next(request)


STACKS = {
    "plain": LifecycleMiddleware,
    "above": lambda app: LifecycleMiddleware(BaseHTTPMiddleware(app, _dispatch)),
    "below": lambda app: BaseHTTPMiddleware(LifecycleMiddleware(app), _dispatch),
}


async def left_behind(app: Any, begun: asyncio.Event) -> contextlib.AsyncExitStack:
    """A server whose one client has left as soon as its work had begun."""
    server = contextlib.AsyncExitStack()
    port = await server.enter_async_context(serving(app, ws="none", lifespan="off"))
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(REQUEST)
        async with asyncio.timeout(120):
            await begun.wait()
    return server


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("make", [racing, of_django])
async def test_leaves_no_task_of_theirs_behind(make: Any, stack: str) -> None:
    """A handler that ends its tasks itself has the time to do so."""
    work = Work()
    async with await left_behind(STACKS[stack](make(work)), work.begun):
        async with asyncio.timeout(0.9):
            await work.cleaned.wait()


async def test_cancels_an_application_that_ignores_the_disconnect() -> None:
    """An application that makes nothing of it is cancelled like any other."""
    begun, notified = asyncio.Event(), asyncio.Event()
    cancelled: asyncio.Future[float] = asyncio.Future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["more_body"] is False
        task = asyncio.create_task(receive())
        task.add_done_callback(lambda _: notified.set())
        await asyncio.sleep(0)
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            assert request_of(scope).client_gone
            cancelled.set_result(time.monotonic())

    wrapped = LifecycleMiddleware(app, disconnect_grace=0.5)
    async with await left_behind(wrapped, begun):
        async with asyncio.timeout(120):
            await notified.wait()
            assert not cancelled.done()
            await cancelled


@pytest.mark.parametrize("where", ["itself", "a task group"])
async def test_cancels_a_listener_that_continues_after_its_grace(where: str) -> None:
    """An application that takes the disconnect and goes on is cancelled in the end."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["more_body"] is False
        begun.set()
        try:
            if where == "itself":
                await receive()
                await asyncio.sleep(3600)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await asyncio.sleep(3600)
        finally:
            cancelled.set()

    wrapped = LifecycleMiddleware(app, disconnect_grace=0.01)
    async with await left_behind(wrapped, begun):
        async with asyncio.timeout(120):
            await cancelled.wait()


async def test_cancels_an_application_that_stopped_listening() -> None:
    """One that looked once may look again, and is cancelled when it has not."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["more_body"] is False
        task = asyncio.create_task(receive())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    wrapped = LifecycleMiddleware(app, disconnect_grace=0.01)
    async with await left_behind(wrapped, begun):
        async with asyncio.timeout(120):
            await cancelled.wait()


async def test_sends_disconnect_to_a_thread() -> None:
    """Nothing stops a thread; that of an endpoint which is no coroutine may look."""
    loop, begun, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def endpoint(request: Request) -> JSONResponse:
        client = request_of(request.scope)
        loop.call_soon_threadsafe(begun.set)
        until = time.monotonic() + 600
        while not client.client_gone and time.monotonic() < until:
            time.sleep(0.005)
        loop.call_soon_threadsafe(ended.set)
        return JSONResponse(None)

    app = Starlette(routes=[Route("/", endpoint)])
    async with await left_behind(LifecycleMiddleware(app), begun):
        async with asyncio.timeout(120):
            await ended.wait()
