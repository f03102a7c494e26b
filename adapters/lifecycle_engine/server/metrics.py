"""Prometheus metrics of the engine, by names that stay, each of a declared type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_STAGES: Final = ("prefill", "decode")


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


def _one(place: str) -> Mapping[str, str]:
    return {"": place}


_KINDS: Final = (
    _Kind("requests_waiting", "Requests in the engine's queue", _one("waiting")),
    _Kind("requests_prefilling", "Requests in prefill", _one("prefilling")),
    _Kind("requests_running", "Requests that decode", _one("running")),
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
    _Kind("answer_tokens_total", "Tokens of answers", _one("tokens")),
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
    _Kind("preempted_total", "Prompts whose prefill made way", _one("preempted")),
    _Kind(
        "slots",
        "KV slots: of all, those free, and of these the ones with a conversation",
        {"all": "slots", "free": "slots_free", "cached": "slots_cached"},
        "state",
    ),
    _Kind("kv_used_ratio", "Share of KV positions in use", _one("kv_used")),
    _Kind("payload_bytes", "Payloads in the engine", _one("payload_bytes")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What a scrape finds of the engine.

    Attributes:
        model: Name of the model, the label of every series.
        up: Whether the engine takes requests.
        incarnation: How many engines have been started.
        status: What the engine reports of itself; empty while there is none.
        memory: Resident bytes of the processes, by their name.
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
        registry.register(_Report(self))
        return generate_latest(registry)


class _Report(Collector):
    """Turns one report into metrics."""

    def __init__(self, report: EngineReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry of prometheus_client."""
        report = self._report
        yield self._family("engine_up", "Whether the engine takes requests", report.up)
        yield self._family(
            "engine_starts_total", "Engine processes started", report.incarnation
        )
        memory = {name: size for name, size in report.memory.items() if size}
        yield self._family("resident_bytes", "Memory of a process", memory, "process")
        ratios = {str(size): ratio for size, ratio in report.ratios.items()}
        about = "Actual bytes of payloads divided by estimated ones, by size"
        yield self._family("estimate_ratio", about, ratios, "below_bytes")
        backend = report.status.get("backend", {})
        for kind in _KINDS:
            found = {name: _at(backend, place) for name, place in kind.places.items()}
            values = {name: each for name, each in found.items() if each is not None}
            if values:
                shown = values if kind.label else values[""]
                yield self._family(f"engine_{kind.name}", kind.about, shown, kind.label)
        counters = backend.get("runner", {})
        own = {name: float(each) for name, each in counters.items() if _is_number(each)}
        yield self._family("engine_runner", "What the runner counts", own, "counter")

    def _family(
        self,
        name: str,
        about: str,
        values: Mapping[str, float] | float,
        label: str = "",
    ) -> Metric:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        labels = ["model", label] if label else ["model"]
        family = kind(f"lifecycle_{name}", about, labels=labels)
        series = values if isinstance(values, Mapping) else {"": values}
        for value, number in series.items():
            given = [self._report.model, value] if label else [self._report.model]
            family.add_metric(given, float(number))
        return family


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
