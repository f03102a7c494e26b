"""One line of the log for each request."""

from __future__ import annotations

from typing import Any, Final

from lifecycle.events import Event, Observer
from lifecycle_asgi.events import RequestEnded

# A client that leaves is an ordinary end of a stream, and a refusal is what a gate is
# for. These need somebody's attention; the last one is a mistake in the code.
_LEVELS: Final = {"deadline": "warning", "engine_lost": "warning", "failed": "error"}


def request_log(logger: Any = None) -> Observer:
    """Log each request once, when it has ended, with structlog.

    The line is named ``request`` and has the operation, the outcome, the status, the
    seconds and what the application counted. A failure has the type of the exception
    and the places it came through, never its words or locals.

    Args:
        logger: A structlog logger; by default a new one named ``lifecycle``.

    Raises:
        ImportError: structlog is not installed.
    """
    if logger is None:
        try:
            import structlog
        except ImportError as error:
            raise ImportError(
                "request_log needs structlog; install anyio-lifecycle[structlog]"
            ) from error
        logger = structlog.get_logger("lifecycle")

    def observe(event: Event) -> None:
        if isinstance(event, RequestEnded):
            write = getattr(logger, _LEVELS.get(event.outcome, "info"))
            write("request", **_fields(event))

    return observe


def _fields(event: RequestEnded) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request": event.request,
        "session": event.session,
        "operation": event.operation,
        "outcome": event.outcome,
        "status": event.status,
        "duration_s": round(event.duration_s, 6),
        **event.counts,
    }
    if event.error is not None:
        fields |= {"error": event.error, "traceback": list(event.traceback)}
    return fields
