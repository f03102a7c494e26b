"""Errors in the shape of each API."""

from __future__ import annotations

from lifecycle import (
    EngineLost,
    SessionEnded,
    SessionExists,
    StartTimeout,
    StreamTimeout,
)
from lifecycle.lowlevel import clear_traceback_frames
from lifecycle_asgi.refusals import REFUSALS, ApiError, describe
from lifecycle_zmq import EngineFailed, RequestRejected


class BadChat(ValueError):
    """A chat that cannot become a prompt. The message never quotes its content."""


class ChatTooLong(BadChat):
    """A chat whose images are more tokens than the engine takes."""


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


_INVALID = ("invalid_request", "invalid_tensors", "context_length_exceeded")

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
    if isinstance(error, REFUSALS):
        return describe(error)
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
            long = isinstance(error, ChatTooLong)
            code = "context_length_exceeded" if long else "invalid_value"
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
