"""One route without the middleware: `cancel_on_disconnect`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_origin

from lifecycle_asgi.asgi_types import Message, Receive, Scope, Send
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
_FRAMEWORKS: Final = {"starlette", "litestar"}
_LEFT: Final = "The client disconnected"
_GOING_AWAY: Final = 1001
# What a WebSocket of Litestar notes of each message.
_STATES: Final = MappingProxyType(
    {"websocket.connect": "connect", "websocket.receive": "receive"}
)


def cancel_on_disconnect(endpoint: Endpoint) -> Endpoint:
    """Cancel *endpoint* when its client disconnects: a decorator for one route.

    Below the decorator of a route of FastAPI or Litestar, or around an endpoint of
    Starlette. Until the endpoint returns, it does what `LifecycleMiddleware` does for
    an application, without delay where the body was not read. Where that is installed,
    it does nothing. A WebSocket is cancelled where it waits at a gate.

    What the framework calls around an endpoint that was cancelled, such as dependencies
    with ``yield``, gets its ``HTTPException`` 499, or the exception of a WebSocket.

    Args:
        endpoint: An ``async def``. With Litestar it takes ``request``; FastAPI is asked
            for it where the endpoint does not take it.

    Raises:
        TypeError: *endpoint* is no ``async def`` that returns: a thread cannot be
            cancelled, and a generator runs when the endpoint has returned. Or there is
            Litestar only, and it takes no ``request``.
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

        left = await watch.run(connection, call)
        # A stream would never end where the server reports a disconnect once.
        if not result or (left and _is_stream(result[0])):
            raise _left(connection)
        return result.pop()

    signature = _with_connection(endpoint)
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


class ConnectionWatch(LifecycleMiddleware):
    """Cancels a call when the client of its request or WebSocket disconnects."""

    def __init__(self) -> None:
        super().__init__(_serve)

    async def run(self, connection: Any, call: Callable[[], Awaitable[None]]) -> bool:
        """Call *call*, which may use *connection*. A disconnect ends it.

        Returns:
            Whether the client of a request has left, though *call* may have returned.

        Cancellation:
            As for `LifecycleMiddleware`.
        """
        if is_handled(connection.scope):
            await call()
            return False
        watched = _Watched(connection, call)
        # The framework may have read the body: then the client was asked for it.
        head = [each for each in connection.scope["headers"] if each[0] != b"expect"]
        scope = {**connection.scope, "headers": head, _CALL: watched.serve}
        await self(scope, watched.receiver(), watched.send)
        return watched.left

    def _channel(self, scope: Scope, receive: Receive, send: Send) -> RequestChannel:
        channel = super()._channel(scope, receive, send)
        channel.request, channel.first_look = _EndpointScope(), 0.0
        return channel


class _Watched:
    """A call that uses a request or WebSocket of a framework, while it is watched."""

    def __init__(self, connection: Any, call: Callable[[], Awaitable[None]]) -> None:
        self.left = False
        self._call = call
        self._calling = False
        self._connection = connection
        # Of Starlette, and of Litestar.
        self._prefix = "_" if hasattr(connection, "_receive") else ""
        self._receive, self._send = self._get("receive"), self._get("send")
        # A WebSocket of Litestar notes what it receives, and here that is read ahead.
        self._state = getattr(connection, "connection_state", None)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call it, as the application."""
        request = scope.get(SCOPE_KEY)
        if request is not None:
            self._connection.scope[SCOPE_KEY] = request
        else:
            self._set("send", send)
        if self._state is not None:
            receive = self._noted(receive)
        self._set("receive", receive)
        self._calling = True
        try:
            await self._call()
        finally:
            self._calling = False
            self.left = request is not None and request.client_gone
            self._connection.scope.pop(SCOPE_KEY, None)
            self._set("send", self._send)
            if not self.left:  # else no server says so again
                receive = _followed(receive, self.receiver())
            self._set("receive", receive)

    def receiver(self) -> Receive:
        """Return the server's ``receive``, for one who reads ahead."""
        # The server's own for a request: it leads to the socket.
        return self._receive if self._state is None else self._receive_unnoted

    async def _receive_unnoted(self) -> Message:
        message: Message = await self._receive()
        self._connection.connection_state = self._state
        return message

    async def send(self, message: Message) -> None:
        """The server's, for the call alone: afterwards the framework answers."""
        if self._calling:
            await self._send(message)

    def _noted(self, receive: Receive) -> Receive:
        async def noted() -> Message:
            message = await receive()
            self._state = _STATES.get(message["type"], "disconnect")
            self._connection.connection_state = self._state
            return message

        return noted

    def _get(self, name: str) -> Any:
        return getattr(self._connection, self._prefix + name)

    def _set(self, name: str, value: object) -> None:
        setattr(self._connection, self._prefix + name, value)


class _EndpointScope(RequestScope):
    def own(self, _source: Any) -> Any:
        raise TypeError(
            "cancel_on_disconnect ends before a response does, and closes no streams: "
            "call lifecycle_asgi.starlette.install(app), or add LifecycleMiddleware"
        )


async def _serve(scope: Scope, receive: Receive, send: Send) -> None:
    await scope[_CALL](scope, receive, send)


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


def _with_connection(endpoint: Callable[..., Any]) -> inspect.Signature:
    """Return a signature that takes the connection, for FastAPI."""
    signature = inspect.signature(endpoint)
    try:
        known = inspect.signature(endpoint, eval_str=True)
    except Exception:  # noqa: BLE001 - a name that only type checkers know
        known = signature
    if any(_is_connection_type(each.annotation) for each in known.parameters.values()):
        return signature
    try:
        from starlette.requests import HTTPConnection as Kind  # given beside a Request
    except ImportError:
        name = getattr(endpoint, "__qualname__", "the endpoint")
        raise TypeError(f"{name} takes no request: let it take one") from None

    added = inspect.Parameter(_ADDED, inspect.Parameter.KEYWORD_ONLY, annotation=Kind)
    parameters = [*signature.parameters.values(), added]
    return signature.replace(parameters=sorted(parameters, key=lambda each: each.kind))


def _is_connection_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in _CONNECTIONS
    bases = getattr(get_origin(annotation) or annotation, "__mro__", ())
    return any(
        each.__name__ in _CONNECTIONS
        and each.__module__.partition(".")[0] in _FRAMEWORKS
        for each in bases
    )


def _is_connection(value: object) -> bool:
    return _is_connection_type(type(value))


def _is_stream(response: object) -> bool:
    return hasattr(response, "body_iterator") or hasattr(response, "iterator")


def _left(connection: Any) -> Exception:
    """Return what tells the framework of *connection* that its client has left."""
    is_socket = connection.scope["type"] == "websocket"
    if any(
        each.__module__.startswith("litestar.") for each in type(connection).__mro__
    ):
        from litestar import exceptions as litestar

        if is_socket:
            return litestar.WebSocketDisconnect(detail=_LEFT, code=_GOING_AWAY)
        return litestar.HTTPException(_LEFT, status_code=CLIENT_CLOSED_REQUEST)
    from starlette.exceptions import HTTPException, WebSocketException

    if not is_socket:
        return HTTPException(CLIENT_CLOSED_REQUEST, _LEFT)
    connection._send = _unraised(connection._send)  # noqa: SLF001 - has no other
    return WebSocketException(_GOING_AWAY, _LEFT)


def _unraised(send: Send) -> Send:
    """Return a ``send`` for the handler that closes what its client has left."""

    async def unraised(message: Message) -> None:
        with suppress(OSError, RuntimeError):
            await send(message)

    return unraised
