"""Spans are created from events, in any order, and exactly once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lifecycle.events import DrainStarted
from lifecycle_asgi import FirstItem, PhaseEnded, RequestEnded, RequestStarted
from lifecycle_asgi.opentelemetry import Spans


def made(
    attributes: dict[str, str] | None = None, **settings: Any
) -> tuple[Spans, InMemorySpanExporter]:
    """Return spans and their exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(attributes, tracer_provider=provider, **settings), exporter


def started(request: str = "r", **facts: Any) -> RequestStarted:
    """Return the event of an arrival."""
    return RequestStarted(request=request, operation="chat", **facts)


def ended(request: str = "r", **facts: Any) -> RequestEnded:
    """Return the event of an end."""
    facts = {"outcome": "completed", "status": 200, "duration_s": 1.0} | facts
    return RequestEnded(request=request, operation="chat", **facts)


def cleanup(request: str = "r", **facts: Any) -> PhaseEnded:
    """Return a clean-up of half a second, one second after the arrival."""
    of: Any = {"request": request, "operation": "chat", "phase": "cleanup"}
    return PhaseEnded(**of, began_s=1.0, duration_s=0.5, **facts)


def test_makes_a_span_of_a_cleanup_behind_the_end() -> None:
    """The span of a phase that ends after its request is still its child."""
    spans, exporter = made()
    for event in (started(), ended(), cleanup()):
        spans(event)
    root, late = exporter.get_finished_spans()
    assert late.parent.span_id == root.context.span_id
    assert late.start_time == pytest.approx(root.end_time, abs=1000)
    assert late.end_time - late.start_time == pytest.approx(5e8, abs=1000)


def test_span_has_the_data_of_the_events() -> None:
    """A request's span is its caller's child and has first item, failure and traceback."""
    spans, exporter = made(
        {"gen_ai.request.model": "m"}, operations={"chat": "generate"}
    )
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for event in (
        started(traceparent=caller),
        FirstItem(request="r", operation="chat", after_s=0.25),
        cleanup(error="Late"),
        ended(
            outcome="failed",
            status=500,
            session="s",
            error="E",
            counts={"input_tokens": 3, "images": 2},
            traceback=("a:1 in b", "c:2 in d"),
        ),
    ):
        spans(event)
    late, root = exporter.get_finished_spans()
    assert dict(late.attributes) == {"error.type": "Late"}
    assert root.name == "generate m"
    assert root.kind is SpanKind.SERVER
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert root.status.status_code is StatusCode.ERROR
    assert root.end_time - root.start_time == pytest.approx(1e9, abs=1000)
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "generate",
        "lifecycle.operation": "chat",
        "gen_ai.request.model": "m",
        "lifecycle.outcome": "failed",
        "http.response.status_code": 500,
        "lifecycle.session": "s",
        "error.type": "E",
        "gen_ai.usage.input_tokens": 3,
        "lifecycle.images": 2,
    }
    first, failure = root.events
    assert (first.name, failure.name) == ("first_item", "exception")
    assert first.timestamp - root.start_time == pytest.approx(2.5e8, abs=1000)
    assert dict(failure.attributes) == {
        "exception.type": "E",
        "exception.stacktrace": "a:1 in b\nc:2 in d",
    }


@pytest.mark.parametrize("outcome", ["deadline", "engine_lost"])
def test_names_a_failure_that_nothing_was_raised_for(outcome: str) -> None:
    """A failure without an exception has its outcome as type; a disconnect is no error."""
    spans, exporter = made()
    for request, how in (("r", outcome), ("other", "client_gone")):
        spans(started(request))
        spans(ended(request, outcome=how, status=None))
    failed, left = exporter.get_finished_spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == outcome
    assert left.status.status_code is StatusCode.UNSET
    assert not {"error.type", "http.response.status_code"} & set(left.attributes)
    assert (failed.events, left.events) == ((), ())


def test_keeps_nothing_of_an_ended_request_but_its_place() -> None:
    """Attributes and tracebacks of a span are freed once it has been exported."""
    spans, exporter = made()
    spans(started())
    spans(ended(error="E", traceback=("a:1 in b",)))
    (root,) = exporter.get_finished_spans()
    (kept,) = (one.span for one in spans._ended.values())
    assert kept.get_span_context() == root.context
    assert not hasattr(kept, "attributes")


def test_forgets_requests_that_ended_long_ago() -> None:
    """Only the latest of many ended requests are remembered."""
    spans, exporter = made()
    for number in range(4186):
        spans(started(str(number)))
        spans(ended(str(number)))
    assert len(spans._ended) == 4096
    assert not spans._live
    spans(cleanup("0"))
    spans(cleanup("4185"))
    assert len(exporter.get_finished_spans()) == 4187


def test_ignores_requests_without_a_start() -> None:
    """An end without a start, a second end, or another event creates no span."""
    spans, exporter = made()
    first = FirstItem(request="r", operation="chat", after_s=0.1)
    for event in (ended(), first, cleanup(), DrainStarted(live=0)):
        spans(event)
    assert exporter.get_finished_spans() == ()
    for event in (started(), ended(), ended()):
        spans(event)
    assert len(exporter.get_finished_spans()) == 1


def test_records_nothing_without_an_sdk() -> None:
    """With the API alone, events are ignored and leave no memory behind."""
    spans = Spans()
    for event in (started(), cleanup(), ended(error="E", traceback=("a:1 in b", "E"))):
        spans(event)
    assert not spans._live


def test_takes_an_event_of_a_finaliser_while_it_makes_a_span() -> None:
    """A lease collected in the middle of a start is reported to the same observer."""

    class Collects(SpanProcessor):
        """Runs the garbage collector where a span is created."""

        def on_start(self, span: Any, parent_context: Any = None) -> None:
            spans(DrainStarted(live=0))

    provider = TracerProvider()
    provider.add_span_processor(Collects())
    spans = Spans(tracer_provider=provider)
    thread = threading.Thread(target=spans, args=(started(),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
