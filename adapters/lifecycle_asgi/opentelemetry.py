"""OpenTelemetry spans of requests: `Spans`, with the names of the GenAI conventions.

Only the API of OpenTelemetry is needed. Without a configured SDK nothing is recorded.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lifecycle_asgi.opentelemetry needs {error.name}; "
        'pip install "anyio-lifecycle[observe]"',
        name=error.name,
    ) from None

from lifecycle.events import Event
from lifecycle_asgi.events import FirstItem, PhaseEnded, RequestEnded, RequestStarted

# Ended requests that are remembered for a late cleanup phase.
_MAX_ENDED: Final = 4096
_FAILURES: Final = frozenset({"failed", "deadline", "engine_lost"})
# Counts that the GenAI conventions define; others are named ``lifecycle.*``.
_COUNT_ATTRIBUTES: Final = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "choices": "gen_ai.request.choice.count",
}

__all__ = ("Spans",)


@dataclass(frozen=True, slots=True)
class _RequestSpan:
    span: trace.Span
    began_ns: int


class Spans:
    """An observer that makes OpenTelemetry spans of request events.

    A request is a span of kind server, named after its operation. Its parent is the
    span of the caller if the request has a valid ``traceparent``. Each phase is a child
    span, made when the phase has ended; the cleanup may end after the request.
    Attributes are ids, counts and fixed words, never content.

    Args:
        attributes: Attributes of every request span, such as ``gen_ai.request.model``
            and ``gen_ai.provider.name``.
        operations: Operation names of the GenAI conventions, by the operations of the
            application, where they differ.
        tracer_provider: Default: the global one of the process.
    """

    def __init__(
        self,
        attributes: Mapping[str, str] | None = None,
        *,
        operations: Mapping[str, str] | None = None,
        tracer_provider: trace.TracerProvider | None = None,
    ) -> None:
        self._attributes = dict(attributes or {})
        self._operations = dict(operations or {})
        self._tracer = trace.get_tracer("lifecycle", tracer_provider=tracer_provider)
        self._propagator = TraceContextTextMapPropagator()
        # The event of a lost lease is emitted by the garbage collector, which may run
        # at any allocation of the thread that already holds the lock.
        self._lock = threading.RLock()
        self._live: dict[str, _RequestSpan] = {}
        self._ended: OrderedDict[str, _RequestSpan] = OrderedDict()

    def __call__(self, event: Event, /) -> None:
        """Record *event*."""
        with self._lock:
            match event:
                case RequestStarted():
                    self._start(event)
                case PhaseEnded():
                    self._add_phase(event)
                case FirstItem():
                    self._add_first_item(event)
                case RequestEnded():
                    self._end(event)
                case _:
                    pass

    def _start(self, event: RequestStarted) -> None:
        headers = {"traceparent": event.traceparent} if event.traceparent else {}
        operation = self._operations.get(event.operation, event.operation)
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {self._attributes.get('gen_ai.request.model', '')}".strip(),
            context=self._propagator.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "lifecycle.operation": event.operation,
                **self._attributes,
            },
            start_time=now,
        )
        self._live[event.request] = _RequestSpan(span, now)

    def _add_first_item(self, event: FirstItem) -> None:
        request = self._live.get(event.request)
        if request is not None:
            at = request.began_ns + _ns(event.after_s)
            request.span.add_event("first_item", timestamp=at)

    def _add_phase(self, event: PhaseEnded) -> None:
        request = self._live.get(event.request) or self._ended.get(event.request)
        if request is None:  # later than _MAX_ENDED other requests
            return
        # By the monotonic clock of the request: the system clock may have been set.
        began = request.began_ns + _ns(event.began_s)
        span = self._tracer.start_span(
            event.phase,
            context=trace.set_span_in_context(request.span),
            attributes={} if event.error is None else {"error.type": event.error},
            start_time=began,
        )
        span.end(began + _ns(event.duration_s))

    def _end(self, event: RequestEnded) -> None:
        request = self._live.pop(event.request, None)
        if request is None:  # this observer was not called with its start
            return
        request.span.set_attributes(_end_attributes(event))
        if event.outcome in _FAILURES:
            request.span.set_status(trace.StatusCode.ERROR)
        if event.traceback:
            attributes = {"exception.stacktrace": "\n".join(event.traceback)}
            attributes["exception.type"] = event.error or ""
            request.span.add_event("exception", attributes)
        request.span.end(request.began_ns + _ns(event.duration_s))
        # A late phase needs only the span's context, not its data.
        parent = trace.NonRecordingSpan(request.span.get_span_context())
        self._ended[event.request] = _RequestSpan(parent, request.began_ns)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


def _end_attributes(event: RequestEnded) -> Mapping[str, str | int]:
    attributes: dict[str, str | int] = {"lifecycle.outcome": event.outcome}
    if event.status is not None:
        attributes["http.response.status_code"] = event.status
    if event.session is not None:
        attributes["lifecycle.session"] = event.session
    if event.response_id is not None:
        attributes["lifecycle.response_id"] = event.response_id
    error = event.error or (event.outcome if event.outcome in _FAILURES else None)
    if error is not None:
        attributes["error.type"] = error
    for name, count in event.counts.items():
        attributes[_COUNT_ATTRIBUTES.get(name, f"lifecycle.{name}")] = count
    return attributes


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
