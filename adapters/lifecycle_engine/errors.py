"""Errors in the shape of each API."""

from __future__ import annotations

import math
from typing import Any

from lifecycle import (
    CostTooLarge,
    EngineLost,
    GateClosed,
    Refused,
    SessionEnded,
    SessionExists,
    StartTimeout,
    StreamTimeout,
)
from lifecycle.lowlevel import clear_traceback_frames
from lifecycle_asgi import BodyTooLarge, BodyTooSlow, ClientLimitExceeded
from lifecycle_zmq import EngineFailed, RequestRejected


class BadChat(ValueError):
    """A chat that cannot become a prompt. The message never quotes its content."""


class BadImage(ValueError):
    """An image that cannot be used. The message never quotes its content.

    Raised without traceback and context, so that it does not keep the image's bytes
    alive.
    """


def discard_error(error: BaseException) -> None:
    """Detach *error* from all that it keeps alive, once it has been reported.

    Frames that still run cannot be cleared, and an exception that is raised again keeps
    the frames of each time.
    """
    clear_traceback_frames(error)
    error.__traceback__ = error.__cause__ = error.__context__ = None


_LONGEST_RETRY = 60.0
_INVALID = ("invalid_request", "invalid_tensors", "context_length_exceeded")


class ApiError(Exception):
    """An error response.

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
            "type": _error_type(self.status),
            "param": self.param,
            "code": self.code,
        }

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


INTERNAL = ApiError(500, "The server failed; see its log", code="internal_error")
"""For internal errors: the client gets no details."""


def not_started() -> ApiError:
    """Return a 503 for an application that is served without its lifespan."""
    return ApiError(
        503,
        "The application runs without its lifespan, so there is no engine; serve with "
        "lifespan on",
        code="not_started",
        retry=False,
    )


def bad_request(
    message: str, *, param: str | None = None, code: str = "invalid_value"
) -> ApiError:
    """Return a 400 about one field."""
    return ApiError(400, message, code=code, param=param)


def to_api_error(error: Exception) -> ApiError | None:
    """Return what the client gets for *error*; ``None`` for an internal error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (Refused, BodyTooLarge, BodyTooSlow)):
        return _refused(error)
    if isinstance(error, EngineLost):
        message = f"The engine is not available ({error.reason}); try again later"
        after = 1.0 if error.retry_after is None else error.retry_after
        return ApiError(503, message, code="engine_lost", retry_after=after)
    if isinstance(error, (StartTimeout, StreamTimeout)):
        message = "The engine took too long; try again later"
        return ApiError(504, message, code="engine_timeout", retry_after=1.0)
    if isinstance(error, (SessionEnded, SessionExists)):
        return _session(error)
    if isinstance(error, (BadChat, BadImage)):
        param, code = "messages", "invalid_image"
        if isinstance(error, BadChat):
            code = "invalid_value"
        return bad_request(_capitalized(str(error)), param=param, code=code)
    if isinstance(error, RequestRejected):
        return _rejected(error)
    return _engine_failed(error) if isinstance(error, EngineFailed) else None


def is_slow_client(error: Exception) -> bool:
    """Whether *error* is that the client read its answer too slowly."""
    return isinstance(error, EngineFailed) and error.code == "slow_client"


def _engine_failed(error: EngineFailed) -> ApiError:
    status, message = 500, "The engine failed on this request"
    if is_slow_client(error):
        status, message = (
            408,
            "The client stopped reading the answer for too long; read faster",
        )
    return ApiError(status, message, code=error.code, retry=False)


def _refused(error: Refused | BodyTooLarge | BodyTooSlow) -> ApiError:
    if isinstance(error, BodyTooSlow):
        message = f"The request body took over {error.limit:g} s; send it faster"
        return ApiError(408, message, code="body_timeout")
    if isinstance(error, BodyTooLarge):
        message = f"The request body is larger than {error.limit} bytes; send less"
        return ApiError(413, message, code="request_too_large")
    if isinstance(error, CostTooLarge):
        message = "The request is larger than this server's limits; send less"
        return ApiError(413, message, code="request_too_large")
    if isinstance(error, GateClosed):
        message = "The server is shutting down"
        return ApiError(503, message, code="shutting_down", retry=False)
    after = 1.0 if error.retry_after is None else error.retry_after
    if isinstance(error, ClientLimitExceeded):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=after)
    message = f"The server is full; try again in {math.ceil(after)} s"
    return ApiError(503, message, code="server_overloaded", retry_after=after)


def _session(error: SessionEnded | SessionExists) -> ApiError:
    if isinstance(error, SessionExists):
        message = "Another request with this x-request-id is running; use a new id"
        return ApiError(409, message, code="session_busy", retry_after=1.0)
    if error.outcome == "shutdown":
        message = "The server is shutting down"
        return ApiError(503, message, code="shutting_down", retry=False)
    return ApiError(499, "The request was cancelled", code="cancelled", retry=False)


def _rejected(error: RequestRejected) -> ApiError:
    if error.code == "too_large":
        message = "The request is larger than the engine takes; send less"
        return ApiError(413, message, code="request_too_large")
    if error.code in ("full", "overloaded", "shutting_down"):
        message = "The engine is full; try again later"
        return ApiError(503, message, code="server_overloaded", retry_after=1.0)
    if error.code in _INVALID:
        return bad_request(_capitalized(error.message), code=error.code)
    message = "The engine could not take this request"
    return ApiError(500, message, code="engine_error", retry=False)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
