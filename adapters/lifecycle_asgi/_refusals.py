"""How a middleware says no."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from lifecycle import CostTooLarge, GateClosed, Refused
from lifecycle_asgi._types import Scope, Send


class BodyTooLarge(Exception):
    """Raised by ``receive`` under `BodyLimit` when a body passes the limit.

    Attributes:
        limit: Bytes that were allowed.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class BodyTooSlow(Exception):
    """Raised by ``receive`` under `BodyLimit` when a body is not there in time.

    Attributes:
        limit: Seconds that were allowed.
    """

    def __init__(self, limit: float) -> None:
        super().__init__(f"the request body took longer than {limit:g} s")
        self.limit = limit


class ShareUsedUp(Refused):
    """A client has as many requests in flight as one client may have."""


Headers = list[tuple[bytes, bytes]]
Refusal = BodyTooLarge | BodyTooSlow | Refused
Answer = Callable[[Scope, Refusal], tuple[int, Headers, bytes]]


async def say(send: Send, answer: tuple[int, Headers, bytes]) -> None:
    """Answer with a status, headers and a body.

    Cancellation:
        The answer may be cut.
    """
    status, headers, body = answer
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def openai_answer(_scope: Scope, refusal: Refusal) -> tuple[int, Headers, bytes]:
    """Return status, headers and body of a refusal, in the form of OpenAI's API."""
    status, code, message, headers = _told(refusal)
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    return status, headers, body


def _told(refusal: Refusal) -> tuple[int, str, str, Headers]:
    if isinstance(refusal, BodyTooLarge):
        message = f"The request body is larger than {refusal.limit} bytes; send less"
        return 413, "request_too_large", message, []
    if isinstance(refusal, BodyTooSlow):
        message = f"The request body took over {refusal.limit:g} s; send it faster"
        return 408, "body_timeout", message, []
    if isinstance(refusal, CostTooLarge):
        message = "The request body is larger than this server can hold; send less"
        return 413, "request_too_large", message, []
    after = min(max(refusal.retry_after or 1.0, 0.001), 60.0)
    headers = [
        (b"retry-after", str(math.ceil(after)).encode()),
        (b"retry-after-ms", str(math.ceil(1000 * after)).encode()),
    ]
    if isinstance(refusal, ShareUsedUp):
        return 429, "rate_limit_exceeded", f"{refusal}", headers
    if isinstance(refusal, GateClosed):
        gone = [(b"x-should-retry", b"false")]
        return 503, "shutting_down", "The server is shutting down", gone
    message = f"The server is full; try again in {math.ceil(after)} s"
    return 503, "server_overloaded", message, headers
