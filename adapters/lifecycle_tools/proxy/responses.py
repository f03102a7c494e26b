"""Responses of the proxy itself, in the format of the API of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from lifecycle import Refused
from lifecycle_asgi.refusals import ApiError, describe, protocol_response
from lifecycle_asgi.responses import send_response

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
    error = ApiError(status, reason, code=code)
    status, headers, body = protocol_response(scope, error)
    if status == 400:  # where the next request begins is in doubt
        headers = [*headers, (b"connection", b"close")]
    await send_response(send, (status, headers, body))


async def send_refusal(scope: Scope, send: Send, refusal: Refused) -> None:
    """Send a complete response to a request that was not admitted.

    Cancellation:
        The response may be cut off.
    """
    await send_response(send, protocol_response(scope, describe(refusal)))
