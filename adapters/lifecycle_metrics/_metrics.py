"""Counts and durations, in the text format of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from lifecycle import Gate, SessionRegistry
from lifecycle.events import (
    AdmissionRefused,
    LeaseGranted,
    LeaseSettled,
    SessionClosed,
    StartSettled,
    StreamEnded,
)
from lifecycle_asgi.events import FirstItem, PhaseEnded, RequestEnded, RequestStarted

from ._counts import Counts
from ._requests import Requests

if TYPE_CHECKING:
    from lifecycle.events import Event

# Doubling, as the server histograms of OpenTelemetry's GenAI conventions do.
_SECONDS: Final = tuple(0.01 * 2**i for i in range(14))
_ITEMS: Final = tuple(4**i for i in range(8))
_RATIOS: Final = (0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0)


class Metrics:
    """The metrics of some gates, registries and requests.

    An instance is an observer: give it to gates and registries when they are made,
    and `watch` them, so that what they hold is read at each scrape. A
    `lifecycle_asgi.LifecycleMiddleware` tells it of requests.

    Args:
        registry: Where the metrics are entered; by default a new one. One registry
            of prometheus_client takes one `Metrics`.

    Attributes:
        registry: The registry, for what else is to be told beside.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._gates: list[Gate] = []
        self._registries: list[SessionRegistry] = []
        self.registry.register(Counts(self._gates, self._registries))
        self._requests = Requests()
        self.registry.register(self._requests)
        self._waits = self._histogram("gate_wait_seconds", "Wait in line", "gate")
        self._lives = self._histogram("session_seconds", "Life of sessions", "outcome")
        self._starts = self._histogram("start_seconds", "Time to start", "how")
        self._phases = self._histogram("phase_seconds", "Phases of requests", "phase")
        self._took = self._histogram("request_seconds", "Requests", "operation")
        self._firsts = self._histogram(
            "first_item_seconds", "Arrival to first item", "operation"
        )
        self._settled = Histogram(
            "lifecycle_settled_ratio",
            "Actual bytes by estimated ones",
            ("gate",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self._items = Histogram(
            "lifecycle_stream_items",
            "Items of streams",
            buckets=_ITEMS,
            registry=self.registry,
        )
        self._refused = Counter(
            "lifecycle_refusals",
            "Refusals by reason",
            ("gate", "reason"),
            registry=self.registry,
        )

    def watch(self, *parts: Gate | SessionRegistry) -> None:
        """Tell at each scrape what *parts* hold. Idempotent.

        Raises:
            ValueError: Another gate of that name is watched already.
            TypeError: It is neither a gate nor a registry.
        """
        for part in parts:
            if part in self._gates or part in self._registries:
                continue
            if isinstance(part, SessionRegistry):
                self._registries.append(part)
                continue
            given: Any = part
            if not isinstance(given, Gate):  # else every scrape would fail
                kind = type(given).__name__
                raise TypeError(f"gates and registries are watched, not {kind}")
            if any(gate.name == part.name for gate in self._gates):
                raise ValueError(
                    f"a gate named {part.name!r} is watched already; series are told "
                    f"apart by the name, so give each gate one of its own"
                )
            self._gates.append(part)

    def text(self) -> bytes:
        """Return all metrics, as ``text/plain; version=0.0.4``."""
        return generate_latest(self.registry)

    def __call__(self, event: Event, /) -> None:
        """Take note of *event*."""
        match event:
            case LeaseGranted():
                self._waits.labels(event.gate).observe(event.waited_s)
            case AdmissionRefused():
                self._refused.labels(event.gate, event.reason).inc()
            case SessionClosed():
                self._lives.labels(event.outcome).observe(event.duration_s)
            case StartSettled():
                self._starts.labels(event.how).observe(event.duration_s)
            case StreamEnded():
                self._items.observe(event.items)
            case LeaseSettled() if event.estimated_bytes:
                ratio = event.actual_bytes / event.estimated_bytes
                self._settled.labels(event.gate).observe(ratio)
            case _:
                self._note_request(event)

    def _note_request(self, event: Event) -> None:
        match event:
            case PhaseEnded():
                self._phases.labels(event.phase).observe(event.duration_s)
            case FirstItem():
                self._firsts.labels(event.operation).observe(event.after_s)
            case RequestStarted():
                self._requests.start(event)
            case RequestEnded():
                if self._requests.end(event):
                    self._took.labels(event.operation).observe(event.duration_s)
            case _:
                pass

    def _histogram(self, name: str, words: str, label: str) -> Histogram:
        return Histogram(
            f"lifecycle_{name}",
            words,
            (label,),
            buckets=_SECONDS,
            registry=self.registry,
        )
