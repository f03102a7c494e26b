"""Who is told of requests: metrics, spans and the log."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from lifecycle.events import Event, Observer, guarded
from lifecycle_asgi import RequestScope, request_log
from lifecycle_asgi.events import RequestEnded

if TYPE_CHECKING:
    from lifecycle_engine.dialects.answers import Answer
    from lifecycle_engine.dialects.openai_wire import Usage
    from lifecycle_engine.dialects.texts import Piece
    from lifecycle_engine.incoming import Incoming

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/generate": "generate",
}
"""Words for metrics and logs, by path; no other path is told of."""

GEN_AI: Final = {
    "messages": "chat",
    "responses": "chat",
    "generate": "text_completion",
}
"""What OpenTelemetry's conventions call them, where it is another word."""


class LogName(StrEnum):
    """What the server logs on its standard error."""

    failures = "failures"
    json = "json"
    console = "console"


def operation_of(scope: Any) -> str | None:
    """What kind of request an ASGI scope is; ``None`` if none that is told of."""
    return OPERATIONS.get(scope["path"]) if scope["method"] == "POST" else None


def together(*observers: Observer | None) -> Observer:
    """One observer for several; one that fails keeps nothing from the others."""
    told = [emit for each in observers if (emit := guarded(each)) is not None]

    def observe(event: Event) -> None:
        for emit in told:
            emit(event)

    return observe


def log_failures(event: Event) -> None:
    """Tell the logger ``lifecycle`` of each request that failed, and where.

    Neither the words of an exception nor its locals are told: they may be a prompt.
    """
    if isinstance(event, RequestEnded) and event.error is not None:
        logging.getLogger("lifecycle").error(
            "request %s (%s) failed with %s\n  %s",
            event.request,
            event.operation,
            event.error,
            "\n  ".join(event.traceback),
        )


def log_of(name: LogName) -> Observer:
    """The log of that name; nothing is configured for the process.

    Raises:
        ImportError: structlog is needed and not installed.
    """
    if name is LogName.failures:
        return log_failures
    try:
        import structlog
    except ImportError:
        return request_log()  # which says what to install
    render: Any = structlog.processors.JSONRenderer()
    if name is LogName.console:
        render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    return request_log(
        structlog.wrap_logger(
            structlog.PrintLogger(sys.stderr),
            processors=[structlog.processors.add_log_level, stamp, render],
        )
    )


def spans_of(model: str) -> Observer | None:
    """Spans for the tracer of the process; ``None`` without OpenTelemetry."""
    try:
        from lifecycle_otel import Spans
    except ImportError:  # the server runs without its extra
        return None
    attributes = {"gen_ai.provider.name": "lifecycle", "gen_ai.request.model": model}
    return Spans(attributes, operations=GEN_AI)


def count(request: RequestScope, incoming: Incoming, usage: Usage) -> None:
    """Have what a request asked for and got told when it ends."""
    request.count(
        choices=incoming.choices,
        images=incoming.images,
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
    )


class Observed:
    """An answer of which the first piece is told.

    Args:
        answer: Takes the pieces.
        request: Is told.
    """

    __slots__ = ("_answer", "_request", "done", "finished")

    def __init__(self, answer: Answer, request: RequestScope) -> None:
        self._answer = answer
        self._request = request
        self.finished = answer.finished
        self.done = answer.done

    async def piece(self, index: int, piece: Piece) -> None:
        """Take a piece.

        Cancellation:
            As for the answer.
        """
        self._request.first_item()
        await self._answer.piece(index, piece)
