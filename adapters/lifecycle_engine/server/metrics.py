"""Prometheus metrics of the engine, by names that stay, each of a declared type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_STAGES: Final = ("prefill", "decode")
# Labels with their values, and a number.
_Series: TypeAlias = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One metric of the engine.

    Attributes:
        name: Without ``lifecycle_engine_``; that of a counter ends with ``_total``.
        about: For its HELP line.
        label: Name of the label that tells its series apart, if it has several.
        places: Where each value is in the engine's status, by the label's value.
    """

    name: str
    about: str
    places: Mapping[str, str]
    label: str = ""


_KINDS: Final = (
    _Kind("requests_waiting", "Requests in the engine's queue", {"": "waiting"}),
    _Kind("requests_prefilling", "Requests in prefill", {"": "prefilling"}),
    _Kind("requests_running", "Requests that decode", {"": "running"}),
    _Kind(
        "requests_total",
        "Requests that left the engine, by outcome",
        {
            how: f"finished.{how}"
            for how in ("completed", "cancelled", "failed", "ended")
        },
        "outcome",
    ),
    _Kind(
        "tokens_total",
        "Tokens that the model computed, and those of prompts that were reused",
        {stage: f"times.{stage}.tokens" for stage in _STAGES}
        | {"reused": "tokens_resumed"},
        "stage",
    ),
    _Kind(
        "draft_tokens_total",
        "Drafts that steps checked, and those that were right",
        {"checked": "runner.draft_tokens", "right": "runner.draft_tokens_accepted"},
        "result",
    ),
    _Kind("answer_tokens_total", "Tokens of answers", {"": "tokens"}),
    _Kind(
        "runs_total",
        "Passes of the model",
        {stage: f"times.{stage}.runs" for stage in _STAGES},
        "stage",
    ),
    _Kind(
        "run_seconds_total",
        "Time in the model, and in the scheduler around it",
        {stage: f"times.{stage}.seconds" for stage in _STAGES}
        | {"scheduling": "times.overhead_seconds"},
        "stage",
    ),
    _Kind(
        "longest_run_seconds",
        "The longest pass of late",
        {stage: f"times.{stage}.longest_recent_run_seconds" for stage in _STAGES},
        "stage",
    ),
    _Kind("preempted_total", "Prompts whose prefill made way", {"": "preempted"}),
    _Kind(
        "slots",
        "KV slots: of all, those free, and of these the ones with a conversation",
        {"all": "slots", "free": "slots_free", "cached": "slots_cached"},
        "state",
    ),
    _Kind("kv_used_ratio", "Share of KV positions in use", {"": "kv_used"}),
    _Kind("payload_bytes", "Payloads in the engine", {"": "payload_bytes"}),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineReport(Collector):
    """What a scrape finds of the engine.

    Attributes:
        incarnation: How many engines have been started.
        status: What the engine reports of itself; empty while there is none.
        ratios: Actual bytes of payloads divided by estimated ones, by the size below
            which they are.
    """

    model: str
    up: bool
    incarnation: int
    status: Mapping[str, Any]
    memory: Mapping[str, int | None]
    ratios: Mapping[int, float]

    def text(self) -> bytes:
        """Return the metrics, as ``text/plain; version=0.0.4``."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry of prometheus_client."""
        yield _family(
            "engine_up", "Whether the engine takes requests", [self._of(self.up)]
        )
        yield _family(
            "engine_starts_total",
            "Engine processes started",
            [self._of(self.incarnation)],
        )
        yield _family(
            "resident_bytes",
            "Memory of a process",
            [self._of(size, process=it) for it, size in self.memory.items() if size],
        )
        yield _family(
            "estimate_ratio",
            "Actual bytes of payloads divided by estimated ones, by size",
            [self._of(each, below_bytes=size) for size, each in self.ratios.items()],
        )
        for kind in _KINDS:
            yield _family(f"engine_{kind.name}", kind.about, [*self._series(kind)])
        yield _family("engine_runner", "What the runner counts", [*self._counters()])

    def _of(self, value: float, **labels: object) -> _Series:
        texts = {name: str(each) for name, each in labels.items()}
        return {"model": self.model} | texts, float(value)

    def _series(self, kind: _Kind) -> Iterator[_Series]:
        for replica, backend in self._backends():
            for word, place in kind.places.items():
                value = _at(backend, place)
                if value is not None:
                    more = {kind.label: word} if kind.label else {}
                    yield self._of(value, replica=replica, **more)

    def _counters(self) -> Iterator[_Series]:
        for replica, backend in self._backends():
            for name, value in _mapping(backend.get("runner")).items():
                if _is_number(value):
                    yield self._of(value, replica=replica, counter=name)

    def _backends(self) -> Iterator[tuple[object, Mapping[str, Any]]]:
        """Yield what each replica says of its work; a process alone is replica 0.

        Sums over them would fall when one ends, and be no shares and no maxima.
        """
        status = self.status
        replicas = _mapping(status.get("replicas")) or {"0": status}
        for replica, each in replicas.items():
            yield replica, _mapping(_mapping(each).get("backend"))


def _family(name: str, about: str, series: Sequence[_Series]) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(
        f"lifecycle_{name}", about, labels=list(series[0][0]) if series else ()
    )
    for labels, value in series:
        family.add_metric(list(labels.values()), value)
    return family


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return *value*, or an empty mapping for what a runner returns by mistake."""
    return value if isinstance(value, Mapping) else {}


def _at(status: Mapping[str, Any], place: str) -> float | None:
    """Return a number of a nested status; ``None`` where the engine has none."""
    found: Any = status
    for name in place.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return float(found) if _is_number(found) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
