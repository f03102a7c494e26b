"""Responses to refused requests, in the format of the API of each."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal
from urllib.parse import quote

from lifecycle import CostTooLarge, GateClosed, Refused
from lifecycle_asgi.asgi_types import Scope, Send
from lifecycle_asgi.body import BodyTooLarge, BodyTooSlow
from lifecycle_asgi.request import ID, IDS, SAFE_ID
from lifecycle_asgi.responses import Headers, Response, gives_ids

REFUSALS: Final = (BodyTooLarge, BodyTooSlow, Refused)
"""What `describe` knows, besides `Unauthorised`."""

_LONGEST_SHOWN: Final = 128
_LONGEST_RETRY: Final = 60.0
_TYPES: Final = {429: "rate_limit_error"}
# Error types that the SDK knows; the status distinguishes the rest.
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ClientLimitExceeded(Refused):
    """A client has as many requests in flight, or in a queue, as one may have."""

    reason: Literal["client_share", "client_limit"] = "client_share"


class TooManyInFlight(ClientLimitExceeded):
    """A client has as many requests in flight as one may have."""

    reason = "client_limit"


class MemoryTooLarge(CostTooLarge):
    """A request needs more than all memory; its text is for the client."""


class Unauthorised(Exception):
    """A request has none of the keys that the server accepts."""


class ApiError(Exception):
    """An error response; its format is that of the API of the request.

    Attributes:
        status: The HTTP status.
        message: The value, the limit and the remedy; never content of a request.
        code: Machine-readable code.
        param: Path of the offending field, such as ``messages[0].content``.
        retry_after: Seconds until a retry is worthwhile, or ``None``.
        retry: ``False`` tells clients not to retry by themselves.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.retry = retry

    @property
    def fields(self) -> dict[str, Any]:
        """The content of ``error`` in OpenAI's format."""
        return {
            "message": self.message,
            "type": _TYPES.get(self.status, _kind(self.status, "server_error")),
            "param": self.param,
            "code": self.code,
        }

    @property
    def anthropic_fields(self) -> dict[str, str]:
        """The content of ``error`` in Anthropic's format."""
        kind = _kind(self.status, "api_error")
        kind = _ANTHROPIC_TYPES.get(self.status, kind)
        return {"type": kind, "message": self.message}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """``Retry-After`` in whole seconds, and the headers that the SDKs read."""
        headers = []
        if self.retry_after is not None:
            seconds = min(max(self.retry_after, 0.001), _LONGEST_RETRY)
            headers += [
                (b"retry-after", str(math.ceil(seconds)).encode()),
                (b"retry-after-ms", str(math.ceil(seconds * 1000)).encode()),
            ]
        if self.retry is not None:
            headers.append((b"x-should-retry", str(self.retry).lower().encode()))
        return headers


Refusal = BodyTooLarge | BodyTooSlow | Refused | ApiError


def _kind(status: int, of_server: str) -> str:
    return "invalid_request_error" if status < 500 else of_server


def describe(refusal: Refusal | Unauthorised) -> ApiError:
    """Return the error that the client of a refused request gets.

    An `ApiError` is what it is.

    The status is 401 for a missing key, 408 for a body that is too slow, 413 for what
    can never fit, 429 for a client over its share and 503 for a full server. The last
    two have ``Retry-After``.
    """
    if isinstance(refusal, ApiError):
        return refusal
    if isinstance(refusal, Unauthorised):
        message = "The API key is missing or unknown; send a valid one"
        return ApiError(401, message, code="invalid_api_key")
    if isinstance(refusal, BodyTooSlow):
        message = f"The request body took over {refusal.limit:g} s; send it faster"
        return ApiError(408, message, code="body_timeout")
    if isinstance(refusal, BodyTooLarge):
        message = f"The request body is larger than {refusal.limit} bytes; send less"
        return ApiError(413, message, code="request_too_large")
    if isinstance(refusal, MemoryTooLarge):
        return ApiError(413, str(refusal), code="request_too_large")
    if isinstance(refusal, CostTooLarge):
        what = "The request needs more memory than this server admits"
        message = f"{what}; send less, or smaller media"
        return ApiError(413, message, code="request_too_large")
    if isinstance(refusal, GateClosed):
        message = "The server is shutting down"
        return ApiError(503, message, code="shutting_down", retry=False)
    after = min(refusal.retry_after or 1.0, _LONGEST_RETRY)
    if isinstance(refusal, ClientLimitExceeded):
        code = "rate_limit_exceeded"
        return ApiError(429, str(refusal), code=code, retry_after=after)
    message = f"The server is full; try again in {math.ceil(after)} s"
    return ApiError(503, message, code="server_overloaded", retry_after=after)


def refusal_response(refusal: Refusal) -> Response:
    """Return the response to a refused request, in the format of OpenAI's API.

    Args:
        refusal: A `lifecycle.Refused`, `BodyTooLarge` or `BodyTooSlow`.

    Returns:
        Status, headers and JSON body: 413 if the request can never be admitted, 408 for
        a slow body, 429 above a client's own limit, and 503 with ``Retry-After`` if the
        server is full.
    """
    error = describe(refusal)
    return _json(error, {"error": error.fields})


def protocol_response(scope: Scope, error: ApiError) -> Response:
    """Return the response to a request that failed, in the format of its API.

    Anthropic's format for its messages, OpenAI's for other paths under ``/v1/`` and for
    JSON, plain text for anything else.
    """
    path = str(scope.get("path", ""))
    request_headers = dict(scope["headers"])
    if path.endswith("/messages") or b"anthropic-version" in request_headers:
        return _json(error, {"type": "error", "error": error.anthropic_fields})
    if "/v1/" in path or b"json" in request_headers.get(b"content-type", b""):
        return _json(error, {"error": error.fields})
    return _response(error, b"text/plain; charset=utf-8", error.message.encode())


def identified(
    scope: Scope,
    send: Send,
    refusal: Refusal | Unauthorised,
    waiting: Callable[[], Mapping[str, int]],
) -> Send:
    """Return a *send* by which a refusal has an ``x-request-id`` and a line in the log.

    The id is that of the response where it has one, else the client's own, else drawn.
    An application that gives ids itself, around this, gets no second one.

    Args:
        scope: The ASGI scope of the request.
        send: The server's.
        refusal: Why it is refused. An `ApiError`, an error in the request itself, is
            its client's business, and not logged.
        waiting: Returns the requests that wait, by the names of gates.
    """

    async def send_with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            id_ = next((value for name, value in headers if name.lower() in IDS), None)
            if id_ is None:
                id_ = _id_of(scope)
                if not gives_ids(scope.get("app")):
                    message = {**message, "headers": [*headers, (ID, id_)]}
            if not isinstance(refusal, ApiError):
                _log(scope, id_.decode("latin-1"), refusal, waiting())
        await send(message)

    return send_with_id


def _id_of(scope: Scope) -> bytes:
    given = [value for name, value in scope["headers"] if name == ID]
    if len(given) == 1 and SAFE_ID.fullmatch(given[0]):
        return bytes(given[0])
    return secrets.token_hex(8).encode()


def _log(
    scope: Scope, id_: str, refusal: Refusal | Unauthorised, waiting: Mapping[str, int]
) -> None:
    error, client = describe(refusal), scope.get("client")
    why = str(refusal) if isinstance(refusal, Refused) else error.message
    after = dict(error.headers).get(b"retry-after")
    # One client may be refused for its own sake, as often as it likes.
    own = isinstance(refusal, Unauthorised | ClientLimitExceeded)
    level = logging.INFO if own else logging.WARNING
    logging.getLogger("lifecycle").log(
        level,
        "request %s of %s: %s %s refused with %d %s: %s%s; waiting: %s",
        _printable(id_),
        _printable(client[0] if client else "unknown"),
        _printable(scope.get("method", "WebSocket")),
        # As it came, without the query.
        _printable(scope["path"]),
        error.status,
        error.code,
        why,
        "" if after is None else f"; Retry-After {after.decode()}",
        ", ".join(f"{count} at {gate}" for gate, count in waiting.items()),
    )


def _printable(given: object) -> str:
    """Return what a client said as text that a terminal and a log may have."""
    return quote(str(given)[:_LONGEST_SHOWN], safe="/:%@[]", errors="replace")


def _json(error: ApiError, document: dict[str, Any]) -> Response:
    return _response(error, b"application/json", json.dumps(document).encode())


def _response(error: ApiError, kind: bytes, body: bytes) -> Response:
    headers: Headers = [
        *error.headers,
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return error.status, headers, body
