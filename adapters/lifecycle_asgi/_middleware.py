"""Tell an ASGI application that its client left, on every server alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio

from lifecycle.events import Observer, guarded
from lifecycle_asgi._exchange import Exchange
from lifecycle_asgi._record import Record
from lifecycle_asgi._request import KEY, RequestScope
from lifecycle_asgi._types import App, Receive, Scope, Send

CLIENT_CLOSED_REQUEST = 499


def _http(_: Scope) -> str:
    return "http"


class LifecycleMiddleware:
    """Cancels the application when its client leaves before the response is complete.

    Pure ASGI, so it works above and below any other middleware. Per request:

    * One task reads ``receive`` and replays it; the application runs in the task
      that the server called, so context variables and native cancellation keep
      working.
    * The application finds a `RequestScope` in ``scope["lifecycle"]``.
    * If the client leaves first, everything attached to the request is told, then
      the application is cancelled; where it waits for ``http.disconnect`` itself, it
      has that before, and a second more where it does so in a task out of reach, as
      those of ``asyncio.create_task`` are, which it is to end. If the response had
      not begun, 499 is answered on its behalf, as somebody above may still count on
      an answer.
    * A cancellation from outside always propagates, and an exception of the
      application arrives as it was raised.
    * When the response is complete, reading ends; what the application still does
      is not cancelled by the client any more.
    * What the request owns, such as the generator of its body, is closed in the task
      that the server called.

    Lifespan and websocket scopes pass through, and so does a request that another
    `LifecycleMiddleware` already watches.

    Args:
        app: The application to wrap.
        read_ahead: Bytes of request body to read before the application asks.
        grace: Seconds that each thing that a request owns may take to close.
        observer: Told of requests, as in `lifecycle_asgi.events`.
        operation: What kind of request a scope is, as a fixed word; ``None`` where the
            observer need not be told. By default every one is ``"http"``.
    """

    def __init__(
        self,
        app: App,
        *,
        read_ahead: int = 65536,
        grace: float = 5.0,
        observer: Observer | None = None,
        operation: Callable[[Scope], str | None] = _http,
    ) -> None:
        if read_ahead < 1:
            message = f"read_ahead must be at least 1 byte, got {read_ahead}"
            raise ValueError(message)
        self._app = app
        self._read_ahead = read_ahead
        self._grace = grace
        self._emit = guarded(observer)
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Cancellation:
            From outside it reaches the application and then the caller; by the
            client it reaches the application only.
        """
        if scope["type"] != "http" or _watched(scope):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(receive, send, read_ahead=self._read_ahead)
        # That a send tells of the leaving (spec_version 2.4) is not said: Starlette
        # would listen no more, and so read no body away from who streams; but a stream
        # in a task of an application's own would go on for nobody.
        scope[KEY] = exchange.request
        self._begin_record(scope, exchange.request)
        error: BaseException | None = None
        try:
            await self._run(scope, exchange)
        except BaseException as raised:
            error = raised
            raise
        finally:
            exchange.request.end(exchange.progress.status, error)
            del error  # a frame that names what it raised would be a cycle
        if exchange.request.client_gone and not exchange.progress.started:
            # The client cannot read this; a server that minds is right, too.
            with suppress(OSError):
                await _answer_closed(send)

    def _begin_record(self, scope: Scope, request: RequestScope) -> None:
        if self._emit is None:
            return
        operation = self._operation(scope)
        if operation is not None:
            record = Record(self._emit, operation, scope)
            request.begin_record(record)

    async def _run(self, scope: Scope, exchange: Exchange) -> None:
        failure: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.read)
            try:
                with exchange.work:
                    await self._app(scope, exchange.receive, exchange.send)
            except BaseException as error:  # noqa: ASYNC103, BLE001
                # Raised below, out of reach of the task group: it would wrap an
                # error in an exception group, and being shielded it would take a
                # cancellation from outside for its own and swallow it.
                failure = error
            exchange.stop()
            # Only the reader is left to wait for, and it is stopping. Being
            # cancelled in that wait would lose the application's own error.
            tasks.cancel_scope.shield = True
            try:
                await exchange.request.close(self._grace)
            except Exception as error:  # noqa: BLE001 - raised below, as above
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            # A frame in a traceback that names the exception is a cycle, and
            # would keep the application's locals alive until the collector runs.
            del failure


def _watched(scope: Scope) -> bool:
    found = scope.get(KEY)
    return isinstance(found, RequestScope) and found.live


async def _answer_closed(send: Send) -> None:
    headers = [(b"content-length", b"0")]
    status = CLIENT_CLOSED_REQUEST
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
