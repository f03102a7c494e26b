"""What gates and registries hold at the moment of a scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lifecycle import Gate, GateStatistics, SessionRegistry, SessionStatistics

_TRIES = 1000
_PAUSE = 1e-4


class Counts(Collector):
    """Reads statistics when Prometheus asks, so that they belong to one moment.

    Counters that are kept beside the books drift from them by whatever happens
    between two increments; these cannot.

    Args:
        gates: Each has a name of its own.
        registries: Added up.
    """

    def __init__(
        self, gates: Sequence[Gate], registries: Sequence[SessionRegistry]
    ) -> None:
        self._gates = gates
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry of prometheus_client."""
        now = [(gate.name, gate.statistics()) for gate in self._gates]
        yield from _of_gates(now)
        yield from _of_sessions([_balanced(each) for each in self._registries])


def _balanced(registry: SessionRegistry) -> SessionStatistics:
    """The books of a registry between two changes.

    They are written in its event loop, and a scrape may come from another thread.
    """
    for _ in range(_TRIES):
        now = registry.statistics()
        if now.opened == now.live + sum(now.outcomes.values()):
            break
        time.sleep(_PAUSE)  # whoever writes has to run
    return now


def _of_gates(now: list[tuple[str, GateStatistics]]) -> Iterator[Metric]:
    label = ["gate", "state"]
    slots = GaugeMetricFamily("lifecycle_gate_slots", "Slots of a gate", labels=label)
    size = GaugeMetricFamily("lifecycle_gate_bytes", "Bytes of a gate", labels=label)
    waiting = GaugeMetricFamily(
        "lifecycle_gate_waiting", "Requests in line", labels=["gate"]
    )
    requests = CounterMetricFamily(
        "lifecycle_gate_requests",
        "Requests that came to a gate, by what became of them",
        labels=["gate", "result"],
    )
    released = CounterMetricFamily(
        "lifecycle_gate_released",
        "Leases given back by their owner, or only by the garbage collector",
        labels=["gate", "how"],
    )
    for name, gate in now:
        for family, limit, used in (
            (slots, gate.slots, gate.slots_in_use),
            (size, gate.bytes, gate.bytes_in_use),
        ):
            family.add_metric([name, "in_use"], used)
            family.add_metric([name, "limit"], float("inf") if limit is None else limit)
        waiting.add_metric([name], gate.waiting)
        requests.add_metric([name, "admitted"], gate.admitted)
        requests.add_metric([name, "refused"], gate.refused)
        requests.add_metric([name, "cancelled"], gate.cancelled)
        released.add_metric([name, "owner"], gate.released - gate.lost)
        released.add_metric([name, "collector"], gate.lost)
    yield from (slots, size, waiting, requests, released)


def _of_sessions(now: list[SessionStatistics]) -> Iterator[Metric]:
    def gauge(name: str, words: str, value: int) -> Metric:
        return GaugeMetricFamily(f"lifecycle_{name}", words, value=value)

    def counter(name: str, words: str, value: int) -> Metric:
        return CounterMetricFamily(f"lifecycle_{name}", words, value=value)

    yield gauge("sessions_live", "Sessions now", sum(each.live for each in now))
    yield gauge(
        "sessions_closing",
        "Sessions that are closed while their engine is still being told",
        sum(each.closing for each in now),
    )
    yield gauge("payloads", "Payloads held", sum(each.payloads for each in now))
    yield gauge(
        "payload_bytes",
        "Bytes of payloads held",
        sum(each.payload_bytes for each in now),
    )
    yield counter("sessions_opened", "Sessions", sum(each.opened for each in now))
    yield counter(
        "ends_failed",
        "Sessions that the engine may still hold",
        sum(each.ends_failed for each in now),
    )
    ended = CounterMetricFamily(
        "lifecycle_sessions_ended", "Sessions by outcome", labels=["outcome"]
    )
    for outcome in now[0].outcomes if now else ():
        ended.add_metric([outcome], sum(each.outcomes[outcome] for each in now))
    yield ended
