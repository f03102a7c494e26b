"""Starlette and FastAPI: `install`, `admitted`, and responses that stream.

The only module here that imports a web framework.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final, cast

import anyio
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket, WebSocketState

from lifecycle import CostTooLarge, GateClosed, Lease, Refused
from lifecycle.events import Observer
from lifecycle_asgi import resume
from lifecycle_asgi.asgi_types import AnyGate, App, Message, Receive, Scope, Send
from lifecycle_asgi.endpoint import ConnectionWatch
from lifecycle_asgi.limits import BodyLimit
from lifecycle_asgi.middleware import CLIENT_CLOSED_REQUEST, LifecycleMiddleware
from lifecycle_asgi.refusals import describe, refusal_response
from lifecycle_asgi.request import asynchronous, call_when_closed, request_of

__all__ = (
    "ManagedResponse",
    "ResumableResponse",
    "ResumableStreams",
    "admitted",
    "install",
    "refusal_handler",
)

_CLOSE_SECONDS: Final = 5.0  # as the middleware's `grace`
_HANDLERS: Final = "starlette.exception_handlers"
_REFUSED: Final = "lifecycle.refused"
_DENIAL: Final = "websocket.http.response"
# Close codes of WebSockets, by their registry; the last one is "try again later".
_CLOSE_CODES: Final = ((CostTooLarge, 1009), (GateClosed, 1001))
_TRY_AGAIN: Final = 1013
_MAX_REASON: Final = 123  # bytes


def install(
    app: Starlette,
    *,
    max_body: int = 64 * 2**20,
    observer: Observer | None = None,
) -> None:
    """Install all that this package has for a Starlette or FastAPI application.

    That is a `LifecycleMiddleware`, a `BodyLimit`, and `refusal_handler` for every
    `Refused`. The status of a response is sent together with the first part of its
    body, so that a stream that is refused at its first item never becomes a 200 with an
    empty body.

    Args:
        app: The application, before it serves its first request.
        max_body: Maximum size of one request body, in bytes.
        observer: Called with the events of requests; see `RequestEvent`.

    Raises:
        TypeError: *app* is no Starlette or FastAPI application.
        RuntimeError: *app* has a `LifecycleMiddleware` already, or serves requests.
        ValueError: *max_body* is negative.
    """
    given: object = app  # a mistake that types do not prevent
    if not isinstance(given, Starlette):
        kind = type(app).__name__
        raise TypeError(f"install takes a Starlette or FastAPI application, not {kind}")
    added: list[object] = [each.cls for each in app.user_middleware]
    if LifecycleMiddleware in added:
        raise RuntimeError("the application has a LifecycleMiddleware: install it once")
    if not max_body >= 0:  # here and now, not when the server starts
        raise ValueError(f"max_body must not be negative, got {max_body}")
    app.add_middleware(_RefusedResponse)
    app.add_middleware(BodyLimit, max_bytes=max_body)
    app.add_middleware(LifecycleMiddleware, observer=observer)
    app.add_exception_handler(Refused, refusal_handler)


async def refusal_handler(request: Request, refusal: Exception) -> Response:
    """Return the response to a `Refused`; an exception handler of Starlette.

    A WebSocket that was accepted is closed, with 1013 (try again later), with 1009 for
    what can never fit, or with 1001 where the gate is closed.

    Raises:
        TypeError: *refusal* is another exception.

    Cancellation:
        None: it does not wait.
    """
    if not isinstance(refusal, Refused):
        kind = type(refusal).__name__
        raise TypeError(f"refusal_handler is a handler of Refused, not of {kind}")
    if isinstance(request, WebSocket) and not _can_deny(request):
        is_closed = request.application_state is WebSocketState.DISCONNECTED
        return _Nothing() if is_closed else _Closing(refusal)
    return _response_to(refusal)


def _can_deny(websocket: WebSocket) -> bool:
    """Whether a handshake is open that the server can answer with a response."""
    is_open = websocket.application_state is WebSocketState.CONNECTING
    return is_open and _DENIAL in websocket.scope.get("extensions", {})


class _Nothing(Response):
    """Sends nothing, where the application has closed the WebSocket itself."""

    async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
        """Do nothing."""


class _Closing(Response):
    """Closes a WebSocket, where no response can be sent."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__()
        codes = (code for kind, code in _CLOSE_CODES if isinstance(refusal, kind))
        self._code = next(codes, _TRY_AGAIN)
        reason = describe(refusal).message.encode()[:_MAX_REASON]
        self._reason = reason.decode(errors="ignore")

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        close = {"type": "websocket.close", "code": self._code}
        await send({**close, "reason": self._reason})


def _response_to(refusal: Refused) -> Response:
    status, headers, body = refusal_response(refusal)
    pairs = {name.decode(): value.decode() for name, value in headers}
    return Response(body, status, pairs)


def admitted(
    gate: AnyGate,
    *,
    cost: int | Callable[[HTTPConnection], int] = 0,
    slots: int = 1,
) -> Callable[[HTTPConnection], AsyncIterator[Lease]]:
    """Return a dependency of FastAPI that waits at *gate*: ``Depends(admitted(gate))``.

    Its value is the lease, which is released when the request or WebSocket has ended.
    A refused client gets the response of `refusal_handler`, unless the application has
    a handler for the refusal. For a client that leaves in line, the endpoint is not
    called. In Starlette, ``contextlib.asynccontextmanager(admitted(gate))`` takes the
    request.

    Args:
        gate: Admits the request; a `SharedGate` does, too.
        cost: Bytes, or a function that returns those of a request or WebSocket.
        slots: What it costs in slots.
    """
    watch = ConnectionWatch()

    async def admit(connection: HTTPConnection) -> AsyncIterator[Lease]:
        nbytes = cost(connection) if callable(cost) else cost
        leases: list[Lease] = []
        with ExitStack() as stack:

            async def wait() -> None:
                lease = await gate.admit(bytes=nbytes, slots=slots)
                leases.append(stack.enter_context(lease))

            try:
                left = await watch.run(connection, wait)
            except Refused as refusal:
                _have_answered(connection, refusal)
                raise
            if left or not leases:
                raise HTTPException(CLIENT_CLOSED_REQUEST, "The client disconnected")
            yield leases[0]  # noqa: ASYNC119 - FastAPI closes it

    return admit


def _have_answered(connection: HTTPConnection, refusal: Refused) -> None:
    """Have `refusal_handler` answer, where the application handles no such error.

    Starlette has its table of handlers in hand by now, and asks no other, so there is
    one more in it from the first refusal on. That leaves all other errors alone.
    """
    handlers = connection.scope.get(_HANDLERS, ({},))[0]
    if not any(kind in handlers for kind in type(refusal).__mro__):
        handlers[Refused] = _handle_marked
    connection.scope[_REFUSED] = id(refusal)  # the error itself would be a cycle


async def _handle_marked(request: Request, refusal: Exception) -> Response:
    if request.scope.get(_REFUSED) != id(refusal):
        raise refusal
    return await refusal_handler(request, refusal)


class ManagedResponse(StreamingResponse):
    """A response that is admitted before it begins, and closes its stream.

    It asks *stream* for its first item before the status is sent, so that a refusal
    becomes 413 or 503. The stream is closed, and its lease released, when the response
    is over, whether it is complete, the client has disconnected, or it has failed.

    Args:
        stream: An async iterator, such as a generator or a `lifecycle.Stream`, or an
            iterator that blocks, which runs in a thread: see `lifecycle.in_thread`. The
            lease is kept until the thread has closed it, at its next item.
        gate: Admits the response before the stream is asked for anything; a
            `SharedGate` does, too.
        bytes: What the response costs there, in bytes.
        slots: What it costs there, in slots.
        options: Those of Starlette's ``StreamingResponse``.

    Raises:
        TypeError: *stream* cannot be iterated, or a cost is given without a gate.
        LookupError: When called: the application is not installed.
        Refused: When called: the gate refused.
    """

    def __init__(
        self,
        stream: AsyncIterator[Any] | Iterator[Any],
        *,
        gate: AnyGate | None = None,
        bytes: int | None = None,  # noqa: A002 - as in `Gate.admit`
        slots: int | None = None,
        **options: Any,
    ) -> None:
        stream = asynchronous(stream)
        if not hasattr(stream, "__anext__"):
            kind = type(stream).__name__
            raise TypeError(f"ManagedResponse takes an iterator, not {kind}")
        costs = {"bytes": bytes, "slots": slots}
        self._gate = gate
        self._costs: dict[str, Any] = {
            name: cost for name, cost in costs.items() if cost is not None
        }
        if gate is None and self._costs:
            raise TypeError("ManagedResponse has a cost and no gate: pass gate=, too")
        super().__init__(stream, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Cancellation:
            Goes through to the stream, which is then closed.
        """
        request = request_of(scope)
        source: Any = request.own(cast("Any", self.body_iterator))
        async with AsyncExitStack() as stack:
            if self._gate is not None:
                # One lease at a time: the handler has taken the body.
                request.release_body()
                lease = await self._gate.admit(**self._costs)
                # A thread may work on for a client that left, and uses it meanwhile:
                # the block is left before it gives the lease back.
                lease.owned_by_start = True
                stack.callback(call_when_closed, [source], lease.release)
                stack.enter_context(lease)
            stack.push_async_callback(_close, source)
            self.body_iterator = await request.begin(source)
            await super().__call__(scope, receive, send)


class ResumableResponse(resume.ResumableResponse, Response):
    """A response of `ResumableStreams`, for Starlette and FastAPI.

    Attributes:
        status_code: Of a response that has events; the stream decides.
        background: What runs when the response is over.
    """

    status_code = 200
    background: BackgroundTask | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; see `lifecycle_asgi.ResumableStreams`.

        Cancellation:
            Counts as the client's leaving: the policy of the stream decides.
        """
        await super().__call__(scope, receive, send)
        if self.background is not None:
            await self.background()


class ResumableStreams(resume.ResumableStreams):
    """As `lifecycle_asgi.ResumableStreams`, for Starlette and FastAPI."""

    _response = ResumableResponse

    def start(
        self,
        source: AsyncIterator[Any] | Iterator[Any],
        *,
        on_disconnect: resume.OnDisconnect = "cancel",
        owner: str | None = None,
    ) -> ResumableResponse:
        """Return the response that starts *source* when it is sent."""
        found = super().start(source, on_disconnect=on_disconnect, owner=owner)
        return cast("ResumableResponse", found)

    def resume(
        self, last_event_id: str | None, *, owner: str | None = None
    ) -> ResumableResponse:
        """Return the response that sends what follows *last_event_id*, and goes on."""
        return cast("ResumableResponse", super().resume(last_event_id, owner=owner))


async def _close(source: Any) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            await close()


class _RefusedResponse:
    """Sends the status with what follows it, or the response to a refusal instead."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[Message] = []
        sent = False

        async def send_together(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start" and not sent:
                held.append(message)
                return
            sent = True
            while held:
                await send(held.pop())
            await send(message)

        try:
            await self._app(scope, receive, send_together)
        except Exception as error:
            refusal = _refusal_in(error)
            if sent or refusal is None:
                raise
        else:
            while held:  # it was cut off before its body began
                await send(held.pop())
            return
        await _response_to(refusal)(scope, receive, send)


def _refusal_in(error: BaseException | None) -> Refused | None:
    """Return the refusal that *error* is or was caused by: Starlette wraps it."""
    while error is not None and not isinstance(error, Refused):
        error = error.__cause__
    return error
