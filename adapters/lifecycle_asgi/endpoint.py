"""One route without the middleware: `cancel_on_disconnect`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, get_origin

from lifecycle_asgi._types import Message, Receive, Scope, Send
from lifecycle_asgi.middleware import (
    CLIENT_CLOSED_REQUEST,
    DISCONNECT,
    LifecycleMiddleware,
    RequestChannel,
)
from lifecycle_asgi.request import SCOPE_KEY, RequestScope, is_handled

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Any]])

_ADDED: Final = "lifecycle_connection"
_CALL: Final = "lifecycle.endpoint"
_CONNECTIONS: Final = {"Request", "WebSocket", "HTTPConnection", "ASGIConnection"}


def cancel_on_disconnect(endpoint: Endpoint) -> Endpoint:
    """Cancel *endpoint* when its client disconnects: a decorator for one route.

    Below the decorator of a route of FastAPI or Litestar, or around an endpoint of
    Starlette. Until the endpoint returns, it does what `LifecycleMiddleware` does for
    an application, without delay where the body was not read. Where that is installed,
    it does nothing. A WebSocket is cancelled where it waits at a gate.

    Args:
        endpoint: An ``async def``. With Litestar it takes ``request``; FastAPI is asked
            for it where the endpoint does not take it.

    Raises:
        TypeError: *endpoint* is no ``async def`` that returns: a thread cannot be
            cancelled, and a generator runs when the endpoint has returned.
    """
    if not inspect.iscoroutinefunction(endpoint):
        name = getattr(endpoint, "__qualname__", type(endpoint).__name__)
        raise TypeError(
            f"cancel_on_disconnect takes an async def that returns, not {name}"
        )
    watch = ConnectionWatch()

    @functools.wraps(endpoint)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(_ADDED, None)
        candidates = (given, *args, *kwargs.values())
        connection = next(filter(_is_connection, candidates), None)
        if connection is None:  # called by other code, such as a test
            return await endpoint(*args, **kwargs)
        result: list[Any] = []

        async def call() -> None:
            result.append(await endpoint(*args, **kwargs))

        await watch.run(connection, call)
        return result.pop() if result else _nothing_for(connection)

    signature = _with_connection(inspect.signature(endpoint))
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


class ConnectionWatch(LifecycleMiddleware):
    """Cancels a call when the client of its request or WebSocket disconnects."""

    def __init__(self) -> None:
        super().__init__(_serve)

    async def run(self, connection: Any, call: Callable[[], Awaitable[None]]) -> None:
        """Call *call*, which may read *connection*. A disconnect ends it.

        Cancellation:
            As for `LifecycleMiddleware`.
        """
        scope = connection.scope
        if is_handled(scope):
            await call()
            return
        # Of Starlette, and of Litestar.
        name = "_receive" if hasattr(connection, "_receive") else "receive"
        server: Receive = getattr(connection, name)

        async def serve(inner: Scope, receive: Receive) -> None:
            setattr(connection, name, receive)
            if SCOPE_KEY in inner:
                scope[SCOPE_KEY] = inner[SCOPE_KEY]
            try:
                await call()
            finally:
                scope.pop(SCOPE_KEY, None)
                setattr(connection, name, _followed(receive, server))

        # The framework may have read the body: then the client was asked for it.
        head = [each for each in scope["headers"] if each[0] != b"expect"]
        await self({**scope, "headers": head, _CALL: serve}, server, _drop)

    def _channel(self, scope: Scope, receive: Receive, send: Send) -> RequestChannel:
        channel = super()._channel(scope, receive, send)
        channel.request, channel.first_look = _EndpointScope(), 0.0
        return channel


class _EndpointScope(RequestScope):
    def own(self, _source: Any) -> Any:
        raise TypeError(
            "cancel_on_disconnect ends before a response does, and closes no streams: "
            "call lifecycle_asgi.starlette.install(app), or add LifecycleMiddleware"
        )


async def _serve(scope: Scope, receive: Receive, _send: Send) -> None:
    await scope[_CALL](scope, receive)


async def _drop(_message: Message) -> None:
    """Send nothing: the framework answers."""


def _followed(first: Receive, then: Receive) -> Receive:
    """Return a ``receive`` for what *first* has read ahead, and then *then*."""
    sources = [first]

    async def receive() -> Message:
        for source in sources:
            if (message := await source())["type"] != DISCONNECT:
                return message
        sources.clear()  # *first* has nothing more
        return await then()

    return receive


def _with_connection(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature that takes the connection, for FastAPI."""
    parameters = list(signature.parameters.values())
    for each in parameters:
        untyped = each.annotation is each.empty and each.name in ("request", "socket")
        if untyped or _is_connection_type(each.annotation):
            return signature
    from starlette.requests import HTTPConnection as Kind  # given beside a Request

    added = inspect.Parameter(_ADDED, inspect.Parameter.KEYWORD_ONLY, annotation=Kind)
    parameters = sorted([*parameters, added], key=lambda each: each.kind)
    return signature.replace(parameters=parameters)


def _is_connection_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in _CONNECTIONS
    bases = getattr(get_origin(annotation) or annotation, "__mro__", ())
    return any(each.__name__ in _CONNECTIONS for each in bases)


def _is_connection(value: object) -> bool:
    return hasattr(value, "scope") and _is_connection_type(type(value))


def _nothing_for(connection: Any) -> Any:
    """Return what the framework of *connection* sends to a client that has left."""
    if connection.scope["type"] == "websocket":
        return None
    if type(connection).__module__.startswith("litestar."):
        import litestar

        return litestar.Response(None, status_code=CLIENT_CLOSED_REQUEST)
    from starlette.responses import Response

    return Response(status_code=CLIENT_CLOSED_REQUEST)
