"""Collectors: statistics of gates and sessions, read at a scrape; request counters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lifecycle import GateStatistics, SessionRegistry, SessionStatistics
from lifecycle_asgi.asgi_types import AnyGate
from lifecycle_asgi.lanes import Lane

if TYPE_CHECKING:
    from lifecycle.events import Outcome
    from lifecycle_asgi.events import FirstItem, RequestEnded, RequestStarted

_MAX_READS: Final = 1000
_RETRY_SECONDS: Final = 1e-4


class StatisticsCollector(Collector):
    """Reads statistics of gates and registries at each scrape.

    All values of one gate belong to one moment. Counters incremented beside the
    statistics could differ from them by what happens between two increments.

    Args:
        gates: Gates, or lanes, each with a different name.
        registries: Session registries; their statistics are added up.
    """

    def __init__(
        self, gates: Sequence[AnyGate | Lane], registries: Sequence[SessionRegistry]
    ) -> None:
        self._gates = gates
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry of prometheus_client."""
        yield from _gate_metrics(
            [(gate.name, gate.statistics()) for gate in self._gates]
        )
        yield from _session_metrics([_consistent(each) for each in self._registries])


def _consistent(registry: SessionRegistry) -> SessionStatistics:
    """Return statistics from between two changes.

    They change in the registry's event loop, and a scrape may run in another thread.
    """
    for _ in range(_MAX_READS):
        now = registry.statistics()
        if now.opened == now.live + sum(now.outcomes.values()):
            break
        time.sleep(_RETRY_SECONDS)  # the event loop's thread has to run
    return now


def _gate_metrics(gates: list[tuple[str, GateStatistics]]) -> Iterator[Metric]:
    label = ["gate", "state"]
    slots = GaugeMetricFamily("lifecycle_gate_slots", "Slots of a gate", labels=label)
    size = GaugeMetricFamily("lifecycle_gate_bytes", "Bytes of a gate", labels=label)
    waiting = GaugeMetricFamily(
        "lifecycle_gate_waiting", "Requests in the queue of a gate", labels=["gate"]
    )
    saturation = GaugeMetricFamily(
        "lifecycle_gate_saturation",
        "The larger share of slots and bytes in use, at least 1 while requests wait",
        labels=["gate"],
    )
    requests = CounterMetricFamily(
        "lifecycle_gate_requests",
        "Requests to a gate, by result",
        labels=["gate", "result"],
    )
    released = CounterMetricFamily(
        "lifecycle_gate_leases_released",
        "Leases released by their owner, or only by the garbage collector",
        labels=["gate", "released_by"],
    )
    over_limit = CounterMetricFamily(
        "lifecycle_gate_over_limit",
        "Requests that a gate that only counts would have refused or kept waiting",
        labels=["gate"],
    )
    for name, gate in gates:
        for family, limit, used in (
            (slots, gate.slots, gate.slots_in_use),
            (size, gate.bytes, gate.bytes_in_use),
        ):
            family.add_metric([name, "in_use"], used)
            family.add_metric([name, "limit"], float("inf") if limit is None else limit)
        waiting.add_metric([name], gate.waiting)
        saturation.add_metric([name], gate.saturation)
        requests.add_metric([name, "admitted"], gate.admitted)
        requests.add_metric([name, "refused"], gate.refused)
        requests.add_metric([name, "cancelled"], gate.cancelled)
        over_limit.add_metric([name], gate.over_limit)
        released.add_metric([name, "owner"], gate.released - gate.lost)
        released.add_metric([name, "collector"], gate.lost)
    yield from (slots, size, waiting, saturation, requests, over_limit, released)


def _session_metrics(registries: list[SessionStatistics]) -> Iterator[Metric]:
    def gauge(name: str, documentation: str, value: int) -> Metric:
        return GaugeMetricFamily(f"lifecycle_{name}", documentation, value=value)

    def counter(name: str, documentation: str, value: int) -> Metric:
        return CounterMetricFamily(f"lifecycle_{name}", documentation, value=value)

    yield gauge("sessions_live", "Open sessions", sum(each.live for each in registries))
    yield gauge(
        "sessions_closing",
        "Closed sessions whose END the engine has not confirmed yet",
        sum(each.closing for each in registries),
    )
    yield gauge("payloads", "Payloads held", sum(each.payloads for each in registries))
    yield gauge(
        "payload_bytes",
        "Bytes of payloads held",
        sum(each.payload_bytes for each in registries),
    )
    yield counter(
        "sessions_opened", "Sessions opened", sum(each.opened for each in registries)
    )
    yield counter(
        "session_ends_failed",
        "Sessions that the engine may still hold, as their END failed",
        sum(each.ends_failed for each in registries),
    )
    ended = CounterMetricFamily(
        "lifecycle_sessions_ended", "Sessions ended, by outcome", labels=["outcome"]
    )
    for outcome in registries[0].outcomes if registries else ():
        ended.add_metric([outcome], sum(each.outcomes[outcome] for each in registries))
    yield ended


class RequestCollector(Collector):
    """Counts each request when it starts and once when it ends.

    Both are read under one lock: at every scrape, from any thread, the started
    requests are the ended ones and the live ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: Counter[str] = Counter()
        self._live: dict[str, str] = {}
        self._first: dict[str, float] = {}
        self._ended: Counter[tuple[str, Outcome]] = Counter()
        self._counts: Counter[str] = Counter()

    def start(self, event: RequestStarted) -> None:
        """Count a start."""
        with self._lock:
            self._started[event.operation] += 1
            self._live[event.request] = event.operation

    def first_item(self, event: FirstItem) -> None:
        """Remember when a live request had its first item."""
        with self._lock:
            if event.request in self._live:
                self._first[event.request] = event.after_s

    def end(self, event: RequestEnded) -> bool:
        """Count an end; False if the request is unknown, or has ended already."""
        with self._lock:
            if self._live.pop(event.request, None) is None:
                return False
            self._ended[event.operation, event.outcome] += 1
            self._counts.update(event.counts)
            return True

    def seconds_a_token(self, event: RequestEnded) -> float | None:
        """Return the mean time between tokens of a request that has ended, once.

        ``None`` if it counted fewer than two ``output_tokens``, or had no first item.
        """
        with self._lock:
            first = self._first.pop(event.request, None)
        gaps = event.counts.get("output_tokens", 0) - 1
        if first is None or gaps < 1:
            return None
        return (event.duration_s - first) / gaps

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry of prometheus_client."""
        with self._lock:
            started, ended = dict(self._started), dict(self._ended)
            live, counts = Counter(self._live.values()), dict(self._counts)
        starts = CounterMetricFamily(
            "lifecycle_requests_started", "Requests started", labels=["operation"]
        )
        in_flight = GaugeMetricFamily(
            "lifecycle_requests_live", "Requests in flight", labels=["operation"]
        )
        for operation, number in started.items():
            starts.add_metric([operation], number)
            in_flight.add_metric([operation], live[operation])
        ends = CounterMetricFamily(
            "lifecycle_requests_ended",
            "Requests ended, by outcome",
            labels=["operation", "outcome"],
        )
        for (operation, outcome), number in ended.items():
            ends.add_metric([operation, outcome], number)
        totals = CounterMetricFamily(
            "lifecycle_request_counts",
            "Sums of what the application counted per request",
            labels=["name"],
        )
        for name, number in counts.items():
            totals.add_metric([name], number)
        yield from (starts, in_flight, ends, totals)
