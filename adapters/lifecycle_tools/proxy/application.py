"""The proxy as an ASGI application."""

from __future__ import annotations

import logging
from typing import Final

import anyio
import h11
from anyio.abc import ByteStream
from websockets.exceptions import InvalidHandshake

from lifecycle import Refused
from lifecycle.lowlevel import check_int
from lifecycle_asgi.asgi_types import Message, Receive, Scope, Send
from lifecycle_asgi.body import ClientLeft
from lifecycle_asgi.refusals import ApiError, describe, protocol_response
from lifecycle_asgi.responses import send_response
from lifecycle_asgi.websocket import denial
from lifecycle_tools.proxy.connection import UpstreamError, UpstreamLost
from lifecycle_tools.proxy.exchange import Exchange, RequestStream
from lifecycle_tools.proxy.headers import (
    ForwardedHeaders,
    Header,
    ambiguity,
    is_operators,
    request_headers,
    tokens,
)
from lifecycle_tools.proxy.tunnel import Tunnel
from lifecycle_tools.proxy.upstream import Upstream

_LOG = logging.getLogger(__name__)
_OPERATORS_ONLY: Final = (
    "This proxy passes no operator's path on; ask the server behind it"
)
_NO_WEBSOCKETS: Final = (
    "This proxy passes no WebSockets; connect to the server behind it"
)
MAX_MESSAGE: Final = 16 * 2**20
"""Most bytes of a message of a WebSocket, unless another number is given."""


class Proxy:
    """Passes HTTP requests and WebSockets to one upstream, both ways as streams.

    Pure ASGI, for any server. When it is cancelled, as by `LifecycleMiddleware` or
    `Admission` after a disconnect, the connection to the upstream is closed at once.

    Args:
        upstream: Where requests go.
        keep_host: Pass on the client's ``Host``; if not, send that of the upstream.
        forwarded: What to do about ``X-Forwarded-*``.
        max_message: Most bytes of a message of a WebSocket; 0 refuses WebSockets. The
            server around this has a limit of its own on what clients send.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        keep_host: bool = True,
        forwarded: ForwardedHeaders = ForwardedHeaders.REPLACE,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        check_int(0, max_message=max_message)
        self._max_message = max_message
        self._upstream = upstream
        self._keep_host = keep_host
        self._forwarded = forwarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection.

        Cancellation:
            Closes the connection to the upstream.
        """
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        is_socket = scope["type"] == "websocket"
        if is_socket:
            await receive()  # its handshake, which has no answer yet
            answer, send = send, denial(scope, send)
        upgrades = b"websocket" in tokens(scope["headers"], b"upgrade")
        if self._max_message == 0 if is_socket else upgrades:
            await self._fail(scope, send, 501, "websocket", _NO_WEBSOCKETS)
        elif scope.get("method") == "CONNECT":
            text = "This proxy opens no tunnels"
            await self._fail(scope, send, 501, "not_supported", text)
        elif is_operators(scope["path"]):
            await self._fail(scope, send, 404, "not_found", _OPERATORS_ONLY)
        elif problem := ambiguity(scope):
            await self._fail(scope, send, 400, "invalid_request", problem)
        elif is_socket:
            await self._tunnel(scope, receive, answer)
        else:
            await self._forward(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Close unused connections in time, and all of them at shutdown."""
        await receive()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._upstream.reap)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            tasks.cancel_scope.cancel()
        await self._upstream.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = await self._read_request(scope, receive)
            lease = await self._upstream.gate.admit()
        except ClientLeft:
            return
        except h11.LocalProtocolError as error:
            await self._fail(scope, send, 400, "invalid_request", str(error))
            return
        except Refused as refusal:
            _log(scope, "refused", str(refusal))
            await _send_refusal(scope, send, refusal)
            return
        failure: UpstreamError | None = None
        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._exchange(scope, request, begin)
        except ClientLeft:
            return
        except UpstreamError as error:
            failure = error
        except h11.LocalProtocolError as error:
            failure = UpstreamError(str(error), status=400, code="invalid_request")
        finally:
            lease.release()
        if failure is not None and not begun:
            await self._fail(scope, send, failure.status, failure.code, str(failure))
        elif failure is not None:
            # The server cuts a response that nothing completes.
            _log(scope, "response cut", str(failure))

    async def _tunnel(self, scope: Scope, receive: Receive, send: Send) -> None:
        deny = denial(scope, send)
        stream: ByteStream | None = None
        try:
            with await self._upstream.gate.admit():
                stream = await self._upstream.open()
                tunnel = Tunnel(
                    scope,
                    receive,
                    send,
                    stream,
                    target=self._target(scope),
                    headers=self._headers(scope),
                    timeouts=self._upstream.timeouts,
                    max_message=self._max_message,
                )
                _LOG.info("WebSocket %s, which no budget limits", _path(scope))
                await tunnel.run()
        except Refused as refusal:
            _log(scope, "refused", str(refusal))
            await _send_refusal(scope, deny, refusal)
        except InvalidHandshake as error:
            await self._fail(scope, deny, 400, "invalid_request", str(error))
        except UpstreamError as error:
            await self._fail(scope, deny, error.status, error.code, str(error))
        finally:
            if stream is not None:
                await anyio.aclose_forcefully(stream)  # noqa: ASYNC102 - at once

    def _headers(self, scope: Scope) -> list[Header]:
        authority, forwarded = self._authority(scope), self._forwarded
        return request_headers(scope, authority=authority, forwarded=forwarded)

    def _target(self, scope: Scope) -> bytes:
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope["query_string"]
        return bytes(self._upstream.prefix + path + (b"?" + query if query else b""))

    async def _read_request(self, scope: Scope, receive: Receive) -> RequestStream:
        headers = self._headers(scope)
        # What follows waits in `receive` no more, and so is cancelled by a disconnect.
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        return RequestStream(
            scope,
            receive,
            target=self._target(scope),
            headers=headers,
            body=message.get("body", b""),
            more_body=message.get("more_body", False),
        )

    def _authority(self, scope: Scope) -> bytes | None:
        has_host = any(name == b"host" for name, _ in scope["headers"])
        return None if self._keep_host and has_host else self._upstream.authority

    async def _exchange(self, scope: Scope, request: RequestStream, send: Send) -> None:
        fresh = False
        while True:
            connection = await self._upstream.connect(fresh=fresh)
            exchange = Exchange(
                scope, request, connection, send, timeouts=self._upstream.timeouts
            )
            try:
                await exchange.run()
                return
            except UpstreamLost:
                # An unused connection may be closed while a request is on its way.
                stale = connection.reused and not exchange.begun
                if not stale or fresh or not request.can_be_sent_again:
                    raise
                fresh = True
            finally:
                await self._upstream.give_back(connection)  # noqa: ASYNC102 - shielded

    async def _fail(
        self, scope: Scope, send: Send, status: int, code: str, reason: str
    ) -> None:
        _log(scope, str(status), reason)
        await _send_error(scope, send, status, code, reason)


def _log(scope: Scope, what: str, reason: str) -> None:
    method = scope.get("method", "WebSocket")
    _LOG.warning("%s %s: %s: %s", method, _path(scope), what, reason)


def _path(scope: Scope) -> str:
    return bytes(scope.get("raw_path") or b"/").decode("ascii", "replace")


async def _send_error(
    scope: Scope, send: Send, status: int, code: str, reason: str
) -> None:
    """Send a complete response that says what is wrong.

    Cancellation:
        The response may be cut off.
    """
    error = ApiError(status, reason, code=code)
    status, headers, body = protocol_response(scope, error)
    if status == 400:  # where the next request begins is in doubt
        headers = [*headers, (b"connection", b"close")]
    await send_response(send, (status, headers, body))


async def _send_refusal(scope: Scope, send: Send, refusal: Refused) -> None:
    """Send a complete response to a request that was not admitted.

    Cancellation:
        The response may be cut off.
    """
    await send_response(send, protocol_response(scope, describe(refusal)))
