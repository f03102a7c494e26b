"""Responses of the proxy itself, in the format of the API of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from lifecycle import Refused
from lifecycle_asgi.refusals import protocol_error, protocol_refusal

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[Any]]


async def send_error(
    scope: Scope, send: Send, status: int, code: str, reason: str
) -> None:
    """Send a complete response that says what is wrong.

    Cancellation:
        The response may be cut off.
    """
    status, headers, body = protocol_error(scope, status, code=code, message=reason)
    if status == 400:  # where the next request begins is in doubt
        headers = [*headers, (b"connection", b"close")]
    await _send(send, status, headers, body)


async def send_refusal(scope: Scope, send: Send, refusal: Refused) -> None:
    """Send a complete response to a request that was not admitted.

    Cancellation:
        The response may be cut off.
    """
    await _send(send, *protocol_refusal(scope, refusal))


async def _send(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
