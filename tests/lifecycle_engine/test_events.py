from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from structlog.testing import LogCapture

from lifecycle.events import Event, structlog_observer
from lifecycle_engine import EngineMeasured, Scheduler, SimRunner
from lifecycle_engine.events import EngineMeter


class Engine:
    """A scheduler over a simulated model, whose clock moves by the model's costs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runner = SimRunner(slots=4, max_length=100, sleep=self._pass)
        self.scheduler = Scheduler(self.runner, chunk=4, clock=lambda: self.now)

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def start(self, *keys: str, count: int) -> None:
        for key in keys:
            request = {"input_ids": [1] * 6, "max_tokens": count}
            self.scheduler.start(key, request, {})

    def run(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()

    @property
    def status(self) -> dict[str, Any]:
        """As the link tells it."""
        return {"live": 0, "backend": self.scheduler.status()}


def test_event_tells_what_was_done_since_the_one_before() -> None:
    """Steps, tokens and seconds are those of the interval, prefill and decode apart."""
    engine, measures = Engine(), EngineMeter()
    engine.start("first", count=9)
    engine.run()
    assert list(measures.events(engine.status, 10)) == []
    began = engine.now
    engine.start("a", "b", count=3)
    engine.run()
    (event,) = measures.events(engine.status, 12)
    assert (event.engine, event.interval_s) == ("0", 2)
    assert (event.prefill_tokens, event.decode_tokens) == (12, 4)
    assert event.tokens_per_s == (2 + 4) / 2
    assert event.prefill_s + event.decode_s == pytest.approx(engine.now - began)
    assert event.step_s * event.steps == pytest.approx(engine.now - began)
    assert 1 <= event.batch <= 2
    assert (event.waiting, event.prefilling, event.running) == (0, 0, 0)
    assert (event.slots_free, event.kv_used, event.device_bytes) == (4, 0, None)
    (event,) = measures.events(engine.status, 13)
    assert (event.steps, event.step_s, event.batch, event.tokens_per_s) == (0, 0, 0, 0)


def test_event_counts_requests_of_each_phase() -> None:
    """Those who wait, who are read and who stream, and what they hold."""
    engine, measures = Engine(), EngineMeter()
    list(measures.events(engine.status, 0))
    engine.start(*"abcdef", count=5)
    for _ in range(3):
        engine.scheduler.step()
    (event,) = measures.events(engine.status, 1)
    assert (event.waiting, event.prefilling, event.running) == (2, 3, 1)
    assert event.slots_free == 0
    assert 0 < event.kv_used < 1


def test_engine_that_began_anew_is_measured_from_there() -> None:
    """Its counters went back: no count of an event is ever negative."""
    old, new, measures = Engine(), Engine(), EngineMeter()
    old.start(*"abc", count=9)
    old.run()
    list(measures.events(old.status, 0))
    new.start("a", count=2)
    new.run()
    (event,) = measures.events(new.status, 1)
    assert (event.prefill_tokens, event.decode_tokens) == (6, 1)


def test_engine_that_began_anew_and_made_more_steps_is_found_out() -> None:
    """Many short steps after few long ones: some counter went back all the same."""
    old, new, measures = Engine(), Engine(), EngineMeter()
    old.start(*"abc", count=1)
    old.run()
    list(measures.events(old.status, 0))
    new.start("a", count=50)
    new.run()
    assert new.status["backend"]["steps"] > old.status["backend"]["steps"]
    (event,) = measures.events(new.status, 1)
    assert (event.prefill_tokens, event.decode_tokens) == (6, 49)


def test_rest_is_not_a_part_of_the_interval() -> None:
    """The rate after an hour without requests is that of the requests."""
    engine, measures = Engine(), EngineMeter()
    list(measures.events(engine.status, 0))
    measures.idle(3600)
    engine.start("a", count=10)
    engine.run()
    (event,) = measures.events(engine.status, 3601)
    assert event.tokens_per_s == 10


def test_each_of_several_engines_has_an_event() -> None:
    """By its number; an engine that tells other counters than ours has none."""
    engines, measures = [Engine(), Engine()], EngineMeter()
    other = {"live": 0, "backend": {"mine": 1}}

    def status() -> dict[str, Any]:
        told = {str(at): each.status for at, each in enumerate(engines)}
        return {"replicas": told | {"2": other, "3": {}}}

    assert list(measures.events(status(), 0)) == []
    engines[1].start("a", count=1)
    engines[1].run()
    events = list(measures.events(status(), 1))
    assert [each.engine for each in events] == ["0", "1"]
    assert [each.prefill_tokens for each in events] == [0, 6]
    assert list(measures.events(other, 2)) == []


def test_is_an_event_like_the_others() -> None:
    """Frozen, of counts and seconds alone; the observers of the core write it down."""
    engine, measures = Engine(), EngineMeter()
    list(measures.events(engine.status, 0))
    (event,) = measures.events(engine.status, 1)
    assert isinstance(event, Event)
    with pytest.raises(AttributeError):
        event.steps = 1  # type: ignore[misc]
    capture = LogCapture()
    import structlog

    structlog_observer(structlog.wrap_logger(None, processors=[capture]))(event)
    (line,) = capture.entries
    assert line["event"] == "lifecycle.engine_measured"
    assert {each.name for each in fields(EngineMeasured)} <= line.keys()
