"""What became of requests, counted from what `LifecycleMiddleware` tells."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from lifecycle.events import Outcome
    from lifecycle_asgi.events import RequestEnded, RequestStarted


class Requests(Collector):
    """Counts each request when it starts and once when it ends.

    Both are read under one lock, so that at every scrape, from whatever thread,
    those started are those that ended and those that live.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: Tally[str] = Tally()
        self._live: dict[str, str] = {}
        self._ended: Tally[tuple[str, Outcome]] = Tally()
        self._counts: Tally[str] = Tally()

    def start(self, event: RequestStarted) -> None:
        """Take note of a start."""
        with self._lock:
            self._started[event.operation] += 1
            self._live[event.request] = event.operation

    def end(self, event: RequestEnded) -> bool:
        """Take note of an end; False if its start was never told, or its end was."""
        with self._lock:
            if self._live.pop(event.request, None) is None:
                return False
            self._ended[event.operation, event.outcome] += 1
            self._counts.update(event.counts)
            return True

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry of prometheus_client."""
        with self._lock:
            started, ended = dict(self._started), dict(self._ended)
            living, counts = Tally(self._live.values()), dict(self._counts)
        starts = CounterMetricFamily(
            "lifecycle_requests_started", "Requests", labels=["operation"]
        )
        lives = GaugeMetricFamily(
            "lifecycle_requests_live", "Requests now", labels=["operation"]
        )
        for operation, number in started.items():
            starts.add_metric([operation], number)
            lives.add_metric([operation], living[operation])
        ends = CounterMetricFamily(
            "lifecycle_requests_ended",
            "Requests by outcome",
            labels=["operation", "outcome"],
        )
        for (operation, outcome), number in ended.items():
            ends.add_metric([operation, outcome], number)
        totals = CounterMetricFamily(
            "lifecycle_counted",
            "What applications counted of requests",
            labels=["what"],
        )
        for what, number in counts.items():
            totals.add_metric([what], number)
        yield from (starts, lives, ends, totals)
