"""One span for each request, and one below it for each of its phases."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lifecycle.events import Event
from lifecycle_asgi.events import FirstItem, PhaseEnded, RequestEnded, RequestStarted

from ._attributes import FAILURES, of_end

# Ended requests of which a late clean-up may still be told.
_MOST_ENDED: Final = 4096


@dataclass(frozen=True, slots=True)
class _Request:
    span: trace.Span
    began_ns: int


class Spans:
    """An observer that makes spans of what `LifecycleMiddleware` tells.

    A request is a span of kind server, named after its operation and below the span
    of its caller if that sent a ``traceparent``. Each phase is a span below it, made
    when the phase is over: that of the clean-up may end after the request has.
    Attributes are ids, counts and fixed words; what was said is in none.

    Args:
        attributes: For every request's span: ``gen_ai.request.model`` and
            ``gen_ai.provider.name``, for example.
        operations: What the conventions call an operation that has another name here.
        tracer_provider: By default the one that was set up for the process.
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
        self._callers = TraceContextTextMapPropagator()
        # A lost lease is told by the garbage collector, which may come at any
        # allocation of the thread that is in here already.
        self._lock = threading.RLock()
        self._live: dict[str, _Request] = {}
        self._ended: OrderedDict[str, _Request] = OrderedDict()

    def __call__(self, event: Event, /) -> None:
        """Take note of *event*."""
        with self._lock:
            match event:
                case RequestStarted():
                    self._start(event)
                case PhaseEnded():
                    self._phase(event)
                case FirstItem():
                    self._first(event)
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
            context=self._callers.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "lifecycle.operation": event.operation,
                **self._attributes,
            },
            start_time=now,
        )
        self._live[event.request] = _Request(span, now)

    def _first(self, event: FirstItem) -> None:
        one = self._live.get(event.request)
        if one is not None:
            at = one.began_ns + _ns(event.after_s)
            one.span.add_event("first_item", timestamp=at)

    def _phase(self, event: PhaseEnded) -> None:
        one = self._live.get(event.request) or self._ended.get(event.request)
        if one is None:  # so late that it was forgotten
            return
        # By the request's own clock: the one on the wall may have been set meanwhile.
        began = one.began_ns + _ns(event.began_s)
        span = self._tracer.start_span(
            event.phase,
            context=trace.set_span_in_context(one.span),
            attributes={} if event.error is None else {"error.type": event.error},
            start_time=began,
        )
        span.end(began + _ns(event.duration_s))

    def _end(self, event: RequestEnded) -> None:
        one = self._live.pop(event.request, None)
        if one is None:  # its start was never told
            return
        one.span.set_attributes(of_end(event))
        if event.outcome in FAILURES:
            one.span.set_status(trace.StatusCode.ERROR)
        if event.traceback:
            told = {"exception.stacktrace": "\n".join(event.traceback)}
            told["exception.type"] = event.error or ""
            one.span.add_event("exception", told)
        one.span.end(one.began_ns + _ns(event.duration_s))
        # Its place in the trace is all that a late phase needs of it.
        parent = trace.NonRecordingSpan(one.span.get_span_context())
        self._ended[event.request] = _Request(parent, one.began_ns)
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
