"""Refusals in the format of the API of a request."""

from __future__ import annotations

import json
from typing import Final

from lifecycle import CostTooLarge, Refused
from lifecycle_asgi._types import Scope
from lifecycle_asgi.body import BodyTooLarge, BodyTooSlow
from lifecycle_asgi.limits import Refusal, openai_refusal
from lifecycle_asgi.responses import Headers, Response

REFUSALS: Final = (BodyTooLarge, BodyTooSlow, Refused)
"""What `protocol_refusal` has a response for, besides `Unauthorised`."""

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Unauthorised(Exception):
    """A request has none of the keys that the server accepts."""


def protocol_refusal(scope: Scope, refusal: Refusal | Unauthorised) -> Response:
    """Return the response to a refused request, in the format of its API.

    Anthropic's format for its messages, OpenAI's for other paths under ``/v1/`` and for
    JSON, plain text for anything else. The status is 401 for a missing key, 408 for a
    body that is too slow, 413 for what can never fit, 429 for a client over its share
    and 503 for a full server. The last two have ``Retry-After``.

    Args:
        scope: The ASGI scope of the request.
        refusal: Why it is refused.

    Returns:
        Status, headers and body.
    """
    return _protocol_response(scope, *_openai_error(scope, refusal))


def protocol_error(scope: Scope, status: int, *, code: str, message: str) -> Response:
    """Return the response to a request that failed, in the format of its API.

    Args:
        scope: The ASGI scope of the request.
        status: Of the response.
        code: What is wrong, as a word.
        message: The same, as a sentence without payload.

    Returns:
        Status, headers and body, as from `protocol_refusal`.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return _protocol_response(scope, status, [], error)


def _protocol_response(
    scope: Scope, status: int, headers: Headers, error: dict[str, str | None]
) -> Response:
    path = str(scope.get("path", ""))
    request_headers = dict(scope["headers"])
    if path.endswith("/messages") or b"anthropic-version" in request_headers:
        other = "invalid_request_error" if status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status, other)
        details = {"type": kind, "message": error["message"]}
        return _json(status, headers, {"type": "error", "error": details})
    if "/v1/" in path or b"json" in request_headers.get(b"content-type", b""):
        return _json(status, headers, {"error": error})
    text = str(error["message"]).encode()
    return _response(status, headers, b"text/plain; charset=utf-8", text)


def _openai_error(
    scope: Scope, refusal: Refusal | Unauthorised
) -> tuple[int, Headers, dict[str, str | None]]:
    """Return status, headers without those of the body, and OpenAI's error."""
    if isinstance(refusal, Unauthorised):
        error: dict[str, str | None] = {
            "message": "The API key is missing or unknown; send a valid one",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
        return 401, [(b"www-authenticate", b"Bearer")], error
    status, headers, body = openai_refusal(scope, refusal)
    error = json.loads(body)["error"]
    if isinstance(refusal, CostTooLarge):
        what = "The request needs more memory than this server admits"
        error["message"] = f"{what}; send less, or smaller media"
    kept = [each for each in headers if not each[0].startswith(b"content-")]
    return status, kept, error


def _json(status: int, headers: Headers, content: object) -> Response:
    return _response(status, headers, b"application/json", json.dumps(content).encode())


def _response(status: int, headers: Headers, kind: bytes, body: bytes) -> Response:
    headers = [
        *headers,
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
    ]
    return status, headers, body
