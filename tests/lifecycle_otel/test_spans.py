"""Spans are made of events alone: in whatever order they come, and none too many."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lifecycle.events import DrainStarted
from lifecycle_asgi.events import FirstItem, PhaseEnded, RequestEnded, RequestStarted
from lifecycle_metrics import Metrics
from lifecycle_otel import Spans, _spans


def made() -> tuple[Spans, InMemorySpanExporter]:
    """Spans, and where they go."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(tracer_provider=provider), exporter


def started(request: str = "r", **facts: Any) -> RequestStarted:
    """A request that has arrived."""
    return RequestStarted(request=request, operation="chat", **facts)


def ended(request: str = "r", **facts: Any) -> RequestEnded:
    """A request that is over."""
    facts = {"outcome": "completed", "status": 200, "duration_s": 1.0} | facts
    return RequestEnded(request=request, operation="chat", **facts)


def cleanup(request: str = "r") -> PhaseEnded:
    """A clean-up that took half a second, one second after the arrival."""
    of: Any = {"request": request, "operation": "chat", "phase": "cleanup"}
    return PhaseEnded(**of, began_s=1.0, duration_s=0.5)


def test_makes_a_span_of_a_cleanup_behind_the_end() -> None:
    """What is told when the request is over still stands below it, at its time."""
    spans, exporter = made()
    for event in (started(), ended(), cleanup()):
        spans(event)
    root, late = exporter.get_finished_spans()
    assert late.parent.span_id == root.context.span_id
    assert late.start_time == pytest.approx(root.end_time, abs=1000)
    assert late.end_time - late.start_time == pytest.approx(5e8, abs=1000)


def test_keeps_nothing_of_an_ended_request_but_its_place() -> None:
    """What a span was told, tracebacks among it, goes with whoever exports it."""
    spans, exporter = made()
    spans(started())
    spans(ended(error="E", traceback=("a:1 in b",)))
    (root,) = exporter.get_finished_spans()
    (kept,) = (one.span for one in spans._ended.values())
    assert kept.get_span_context() == root.context
    assert not hasattr(kept, "attributes")


def test_forgets_requests_that_ended_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many ended requests the last ones alone are remembered."""
    monkeypatch.setattr(_spans, "_MOST_ENDED", 10)
    spans, exporter = made()
    for number in range(100):
        spans(started(str(number)))
        spans(ended(str(number)))
    assert len(spans._ended) == 10
    assert not spans._live
    spans(cleanup("0"))
    spans(cleanup("99"))
    assert len(exporter.get_finished_spans()) == 101


def test_takes_no_notice_of_what_it_was_not_told_the_start_of() -> None:
    """An end without a start, or a second one, is no span; nor is any other event."""
    spans, exporter = made()
    first = FirstItem(request="r", operation="chat", after_s=0.1)
    for event in (ended(), first, cleanup(), DrainStarted(live=0)):
        spans(event)
    assert exporter.get_finished_spans() == ()
    for event in (started(), ended(), ended()):
        spans(event)
    assert len(exporter.get_finished_spans()) == 1


def test_counts_an_end_once() -> None:
    """For metrics it is the same: one start, one end."""
    pytest.importorskip("prometheus_client")
    metrics = Metrics()
    for event in (ended(), started(), ended(), ended()):
        metrics(event)
    text = metrics.text().decode()
    assert 'lifecycle_requests_started_total{operation="chat"} 1.0' in text
    ends = 'lifecycle_requests_ended_total{operation="chat",outcome="completed"} 1.0'
    assert ends in text
    assert 'lifecycle_requests_live{operation="chat"} 0.0' in text
    assert 'lifecycle_request_seconds_count{operation="chat"} 1.0' in text


def test_records_nothing_where_nobody_has_set_up_an_sdk() -> None:
    """With the API alone every event passes, and costs no memory in the end."""
    spans = Spans()
    for event in (started(), cleanup(), ended(error="E", traceback=("a:1 in b", "E"))):
        spans(event)
    assert not spans._live


def test_takes_an_event_of_a_finaliser_while_it_makes_a_span() -> None:
    """A lease that is collected in the midst of a start is told to the same observer."""

    class Collects(SpanProcessor):
        """Where the garbage collector may come, too."""

        def on_start(self, span: Any, parent_context: Any = None) -> None:
            spans(DrainStarted(live=0))

    provider = TracerProvider()
    provider.add_span_processor(Collects())
    spans = Spans(tracer_provider=provider)
    thread = threading.Thread(target=spans, args=(started(),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
