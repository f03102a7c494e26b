"""Prometheus metrics of gates, sessions and requests: `Metrics`.

Labels are names of gates and fixed words. So the number of series is small, however
many requests there are, and no label can contain data of a request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

try:
    from prometheus_client import (
        REGISTRY,
        CollectorRegistry,
        Counter,
        Histogram,
        generate_latest,
        start_http_server,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lifecycle_asgi.prometheus needs {error.name}; "
        'pip install "anyio-lifecycle[observe]"',
        name=error.name,
    ) from None

from lifecycle import Gate, SessionRegistry
from lifecycle.events import (
    AdmissionRefused,
    LeaseGranted,
    LeaseSettled,
    SessionClosed,
    StartSettled,
    StreamEnded,
)
from lifecycle.shared import SharedGate
from lifecycle_asgi.asgi_types import AnyGate
from lifecycle_asgi.events import (
    FirstItem,
    PhaseEnded,
    RequestEnded,
    RequestStarted,
)
from lifecycle_asgi.lanes import Lane
from lifecycle_asgi.prometheus_collectors import RequestCollector, StatisticsCollector

if TYPE_CHECKING:
    from lifecycle.events import Event

# Doubling, as the server histograms of OpenTelemetry's GenAI conventions do.
_SECONDS: Final = tuple(0.01 * 2**i for i in range(14))
_TOKEN_SECONDS: Final = tuple(0.001 * 2**i for i in range(14))
_ITEMS: Final = tuple(4**i for i in range(8))
_RATIOS: Final = (0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0)

__all__ = ("Metrics",)


class Metrics:
    """Prometheus metrics of gates, session registries and requests.

    An instance is an observer: pass it as the ``observer`` of gates, registries and
    `lifecycle_asgi.LifecycleMiddleware`. Gates and registries that are given to
    `watch`, too, are read at each scrape.

    Args:
        registry: Registry of the metrics. Default: a new one. A registry of
            prometheus_client takes only one `Metrics`.

    Attributes:
        registry: The registry, to which other metrics can be added.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._gates: list[AnyGate | Lane] = []
        self._registries: list[SessionRegistry] = []
        self._requests = RequestCollector()
        self._gate_wait = self._histogram(
            "gate_wait_seconds", "Time in the queue of a gate", "gate"
        )
        self._session_duration = self._histogram(
            "session_duration_seconds", "Duration of sessions", "outcome"
        )
        self._start_duration = self._histogram(
            "start_duration_seconds", "Duration of engine starts", "result"
        )
        self._phase_duration = self._histogram(
            "phase_duration_seconds", "Duration of the phases of requests", "phase"
        )
        self._request_duration = self._histogram(
            "request_duration_seconds", "Duration of requests", "operation"
        )
        self._time_to_first_item = self._histogram(
            "time_to_first_item_seconds",
            "Time from the arrival of a request to its first item",
            "operation",
        )
        self._time_between_tokens = self._histogram(
            "time_between_tokens_seconds",
            "Mean time between the tokens of a request that counts output_tokens",
            "operation",
            _TOKEN_SECONDS,
        )
        self._estimate_ratio = Histogram(
            "lifecycle_gate_estimate_ratio",
            "Actual bytes of a lease divided by the estimated bytes",
            ("gate",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._stream_items = Histogram(
            "lifecycle_stream_items",
            "Items per stream",
            buckets=_ITEMS,
            registry=self.registry,
        )
        self._refusals = Counter(
            "lifecycle_gate_refusals",
            "Refusals of a gate, by reason",
            ("gate", "reason"),
            registry=self.registry,
        )
        # Last: a registry that has those above refuses them.
        self.registry.register(StatisticsCollector(self._gates, self._registries))
        self.registry.register(self._requests)

    def watch(self, *parts: AnyGate | Lane | SessionRegistry) -> None:
        """Read the statistics of *parts* at each scrape. Idempotent.

        Args:
            *parts: Gates, registries, and the lanes of `Admission`.

        Raises:
            ValueError: Another gate of that name is watched already.
            TypeError: A part is neither a gate, a lane nor a registry.
        """
        for part in parts:
            if part in self._gates or part in self._registries:
                continue
            if isinstance(part, SessionRegistry):
                self._registries.append(part)
                continue
            given: Any = part
            if not isinstance(
                given, Gate | SharedGate | Lane
            ):  # else every scrape would fail
                kind = type(given).__name__
                raise TypeError(
                    f"gates, lanes and registries are watched, not {kind}; of an "
                    f"Admission, pass *admission.lanes"
                )
            if any(gate.name == part.name for gate in self._gates):
                raise ValueError(
                    f"a gate named {part.name!r} is watched already; the name is the "
                    f"label of the metrics, so give each gate a different one"
                )
            self._gates.append(part)

    def text(self) -> bytes:
        """Return all metrics, as ``text/plain; version=0.0.4``."""
        return generate_latest(self.registry)

    def __call__(self, event: Event, /) -> None:
        """Record *event*."""
        match event:
            case LeaseGranted():
                self._gate_wait.labels(event.gate).observe(event.waited_s)
            case AdmissionRefused():
                self._refusals.labels(event.gate, event.reason).inc()
            case SessionClosed():
                self._session_duration.labels(event.outcome).observe(event.duration_s)
            case StartSettled():
                self._start_duration.labels(event.how).observe(event.duration_s)
            case StreamEnded():
                self._stream_items.observe(event.items)
            case LeaseSettled() if event.estimated_bytes:
                ratio = event.actual_bytes / event.estimated_bytes
                self._estimate_ratio.labels(event.gate).observe(ratio)
            case _:
                self._record_request(event)

    def _record_request(self, event: Event) -> None:
        match event:
            case PhaseEnded():
                self._phase_duration.labels(event.phase).observe(event.duration_s)
            case FirstItem():
                self._requests.first_item(event)
                self._time_to_first_item.labels(event.operation).observe(event.after_s)
            case RequestStarted():
                self._requests.start(event)
            case RequestEnded():
                if self._requests.end(event):
                    duration = self._request_duration.labels(event.operation)
                    duration.observe(event.duration_s)
                pace = self._requests.seconds_a_token(event)
                if pace is not None:
                    self._time_between_tokens.labels(event.operation).observe(pace)
            case _:
                pass

    def _histogram(
        self,
        name: str,
        documentation: str,
        label: str,
        buckets: Sequence[float] = _SECONDS,
    ) -> Histogram:
        return Histogram(
            f"lifecycle_{name}",
            documentation,
            (label,),
            buckets=buckets,
            registry=self.registry,
        )


def export(where: str | int) -> Metrics:
    """Return metrics that can be scraped from now on; a warning says where not.

    Args:
        where: ``server`` for the registry of prometheus_client, which most servers show
            at their own ``/metrics``; or ``PORT`` or ``HOST:PORT`` of a listener that
            this starts, for the life of the process.
    """
    metrics, log = Metrics(), logging.getLogger("lifecycle")
    if where == "server":
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            log.warning(
                "Admission: PROMETHEUS_MULTIPROC_DIR is set, so /metrics shows waits "
                "and refusals, not what lanes hold; give LIFECYCLE_METRICS a port"
            )
        try:
            return Metrics(REGISTRY)
        except ValueError:
            log.warning(
                "Admission: this process shows the metrics of another Admission; give "
                "LIFECYCLE_METRICS a port for those of this one"
            )
        return metrics
    host, _, port = str(where).rpartition(":")
    try:
        host = host.strip("[]") or "127.0.0.1"  # an IPv6 address may have brackets
        start_http_server(int(port), host, registry=metrics.registry)
    except (OSError, UnicodeError) as error:  # a host may be no name at all
        # The server is not to end for it: another worker may have the port.
        why = getattr(error, "strerror", None) or error
        log.warning("Admission: no metrics at %s: %s", where, why)
    return metrics
