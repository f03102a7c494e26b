"""Prometheus metrics agree with the statistics at every scrape."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lifecycle import Gate, GateFull, SessionRegistry
from lifecycle.events import (
    Event,
    LeaseSettled,
    SessionClosed,
    StartSettled,
    StreamEnded,
)
from lifecycle_asgi import FirstItem, PhaseEnded, RequestEnded, RequestStarted
from lifecycle_asgi.prometheus import Metrics

pytestmark = pytest.mark.anyio


def samples(metrics: Metrics) -> dict[Any, float]:
    """Return every sample by its name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def of(samples: dict[Any, float], name: str) -> list[float]:
    """Return all series of one metric."""
    return [value for key, value in samples.items() if key[0] == name]


def test_reports_usage_of_a_gate() -> None:
    """Limits, use and waits come from the statistics, refusals with their reason."""
    metrics = Metrics()
    gate = Gate(slots=1, bytes=100, max_waiting=0, name="pictures", observer=metrics)
    metrics.watch(gate)
    lease = gate.try_admit(bytes=40)
    with pytest.raises(GateFull):
        gate.try_admit(bytes=40)
    now = samples(metrics)
    assert now["lifecycle_gate_bytes", "pictures", "in_use"] == 40
    assert now["lifecycle_gate_bytes", "pictures", "limit"] == 100
    assert now["lifecycle_gate_slots", "pictures", "in_use"] == 1
    assert now["lifecycle_gate_requests_total", "pictures", "admitted"] == 1
    assert now["lifecycle_gate_refusals_total", "pictures", "full"] == 1
    assert now["lifecycle_gate_wait_seconds_count", "pictures"] == 1
    lease.release()
    now = samples(metrics)
    assert now["lifecycle_gate_bytes", "pictures", "in_use"] == 0
    assert now["lifecycle_gate_leases_released_total", "pictures", "owner"] == 1


async def test_counts_outcomes_of_requests() -> None:
    """Requests are admitted, refused or cancelled; leases are released or collected."""
    metrics, gate = Metrics(), Gate(slots=1, max_waiting=1, name="g")
    metrics.watch(gate)
    for _ in range(2):
        gate.try_admit().release()
    lease = gate.try_admit()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.admit)
        await anyio.wait_all_tasks_blocked()
        assert samples(metrics)["lifecycle_gate_waiting", "g"] == 1
        for _ in range(4):
            with pytest.raises(GateFull):
                gate.try_admit()
        tasks.cancel_scope.cancel()
    with pytest.warns(ResourceWarning):
        del lease
    now = samples(metrics)
    names = ("requests_total", "leases_released_total")
    assert {key[2]: now[key] for key in now if key[0][15:] in names} == {
        "admitted": 3,
        "refused": 4,
        "cancelled": 1,
        "owner": 2,
        "collector": 1,
    }


SESSION: Any = {"session": "s", "generation": 1}
REQUEST: Any = {"request": "r", "operation": "chat"}


@pytest.mark.parametrize(
    ("event", "series", "value"),
    [
        (
            SessionClosed(**SESSION, outcome="failed", duration_s=3),
            "session_duration",
            3,
        ),
        (StartSettled(**SESSION, how="unknown", duration_s=4), "start_duration", 4),
        (StreamEnded(**SESSION, items=5), "stream_items", 5),
        (
            LeaseSettled(gate="g", estimated_bytes=4, actual_bytes=3),
            "gate_estimate_ratio",
            0.75,
        ),
        (
            PhaseEnded(**REQUEST, phase="queue", began_s=1, duration_s=2),
            "phase_duration",
            2,
        ),
        (FirstItem(**REQUEST, after_s=6), "time_to_first_item", 6),
    ],
)
def test_measures_each_event(event: Event, series: str, value: float) -> None:
    """Each event is recorded in its own histogram only."""
    metrics = Metrics()
    metrics(event)
    metrics(LeaseSettled(gate="none", estimated_bytes=0, actual_bytes=3))
    sums = {key: value for key, value in samples(metrics).items() if "_sum" in key[0]}
    found = {key[0]: value for key, value in sums.items() if value}
    unit = "" if series in ("stream_items", "gate_estimate_ratio") else "_seconds"
    assert found == {f"lifecycle_{series}{unit}_sum": value}


def test_counts_an_end_once() -> None:
    """The end of an unknown request, and a second end, are not counted."""
    metrics = Metrics()
    ended = RequestEnded(**REQUEST, outcome="completed", status=200, duration_s=1)
    for event in (ended, RequestStarted(**REQUEST), ended, ended):
        metrics(event)
    now = samples(metrics)
    assert now["lifecycle_requests_started_total", "chat"] == 1
    assert now["lifecycle_requests_ended_total", "chat", "completed"] == 1
    assert now["lifecycle_requests_live", "chat"] == 0
    assert now["lifecycle_request_duration_seconds_count", "chat"] == 1


def test_measures_the_time_between_tokens() -> None:
    """Once a request: of those that had a first item and counted two tokens or more."""
    metrics = Metrics()
    for number, tokens in enumerate((5, 1, 0)):
        request: Any = {"request": f"r{number}", "operation": "chat"}
        metrics(RequestStarted(**request))
        metrics(FirstItem(**request, after_s=2))
        ended = RequestEnded(
            **request,
            outcome="completed",
            status=200,
            duration_s=4,
            counts={"output_tokens": tokens},
        )
        metrics(ended)
        metrics(ended)
    metrics(FirstItem(**REQUEST, after_s=6))
    metrics(RequestStarted(**REQUEST))
    counts = {"output_tokens": 9}
    metrics(
        RequestEnded(
            **REQUEST, outcome="failed", status=500, duration_s=9, counts=counts
        )
    )
    now = samples(metrics)
    assert now["lifecycle_time_between_tokens_seconds_sum", "chat"] == 0.5
    assert now["lifecycle_time_between_tokens_seconds_count", "chat"] == 1


def test_reports_a_gate_without_limits() -> None:
    """A gate without limits reports infinity, which Prometheus supports."""
    metrics = Metrics()
    metrics.watch(Gate(slots=None, name="open"))
    assert samples(metrics)["lifecycle_gate_bytes", "open", "limit"] == float("inf")


def test_refuses_two_gates_of_one_name() -> None:
    """Two gates with one name would share a series, so the second is refused."""
    metrics = Metrics()
    gate = Gate(slots=None, name="a")
    metrics.watch(gate, gate)
    with pytest.raises(ValueError, match="'a' is watched already"):
        metrics.watch(Gate(slots=None, name="a"))


def test_uses_the_given_registry() -> None:
    """The registry can contain the application's own metrics."""
    registry = CollectorRegistry()
    assert Metrics(registry).registry is registry


async def test_balances_at_every_scrape() -> None:
    """Opened sessions are the live ones plus the sum of the outcomes."""
    metrics = Metrics()
    chance = random.Random(7)
    async with SessionRegistry(observer=metrics) as sessions:
        metrics.watch(sessions)

        async def request(number: int) -> None:
            with sessions.open(str(number)) as session:

                async def open_() -> Any:
                    await anyio.lowlevel.checkpoint()
                    if chance.random() < 0.3:
                        raise OSError

                await session.start(open_)
                if chance.random() < 0.3:
                    session.close("client_gone")

        async def client(number: int) -> None:
            try:
                await request(number)
            except OSError:
                pass

        async with anyio.create_task_group() as clients:
            for number in range(100):
                clients.start_soon(client, number)
                await anyio.lowlevel.checkpoint()
                now = samples(metrics)
                opened = now["lifecycle_sessions_opened_total",]
                ended = sum(of(now, "lifecycle_sessions_ended_total"))
                assert opened == now["lifecycle_sessions_live",] + ended
        now = samples(metrics)
        assert sum(of(now, "lifecycle_sessions_ended_total")) == 100
        assert sum(of(now, "lifecycle_session_duration_seconds_count")) == 100
        assert sum(of(now, "lifecycle_start_duration_seconds_count")) == 100


async def test_has_few_series_however_many_requests() -> None:
    """No label contains request data."""
    metrics = Metrics()
    gate = Gate(slots=10, observer=metrics)
    async with SessionRegistry(observer=metrics) as sessions:
        metrics.watch(gate, sessions)
        sizes = []
        for number in range(200):
            with sessions.open(f"secret-{number}"), await gate.admit(key=f"k{number}"):
                pass
            sizes.append(len(samples(metrics)))
        assert sizes[-1] == sizes[0]
        assert b"secret" not in metrics.text()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def scraped(
    metrics: Metrics, kind: str, started: str, done: threading.Event
) -> list[Any]:
    """Scrape until *done*; return every inconsistent scrape."""
    wrong = []
    while not done.is_set():
        now: dict[str, float] = {}
        for family in metrics.registry.collect():
            for sample in family.samples:
                now[sample.name] = now.get(sample.name, 0) + sample.value
        name = f"lifecycle_{kind}"
        begun = now.get(f"{name}_{started}_total", 0)
        ended = now.get(f"{name}_ended_total", 0)
        if begun != ended + now.get(f"{name}_live", 0):
            wrong.append(now)
    return wrong


async def test_balances_sessions_for_another_thread(hasty: None) -> None:
    """A scrape in another thread never sees a half-opened or half-closed session."""
    metrics, done = Metrics(), threading.Event()
    async with SessionRegistry() as sessions:
        metrics.watch(sessions)
        with ThreadPoolExecutor(1) as pool:
            wrong = pool.submit(scraped, metrics, "sessions", "opened", done)
            for number in range(30_000):
                with sessions.open(str(number)):
                    pass
            done.set()
    assert wrong.result(20) == []


def test_balances_requests_for_another_thread(hasty: None) -> None:
    """A scrape in another thread never sees a request between started and ended."""
    metrics, done = Metrics(), threading.Event()
    facts: Any = {"outcome": "completed", "status": 200, "duration_s": 0.1}
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(scraped, metrics, "requests", "started", done)
        for number in range(20_000):
            of: Any = {"request": str(number), "operation": f"o{number % 3}"}
            metrics(RequestStarted(**of))
            metrics(RequestEnded(**of, **facts))
        done.set()
    assert wrong.result(20) == []


async def test_dashboard_asks_for_series_that_exist() -> None:
    """Each panel's query uses existing names and labels of series."""
    series = await all_series()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            asked = SELECTOR.findall(target["expr"])
            assert asked, panel["title"]
            for name, matchers in asked:
                wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
                found = [
                    labels
                    for labels in series[name]
                    if wanted.items() <= labels.items()
                ]
                assert found, target["expr"]
                used = re.findall(r"by \(([^)]*)\)", target["expr"])
                named = {label.strip() for each in used for label in each.split(",")}
                labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                assert (named or set(labels)) <= found[0].keys(), target["expr"]
                assert set(labels) <= (named or found[0].keys()), target["legendFormat"]


def test_dashboard_can_be_loaded() -> None:
    """The dashboard has what Grafana requires: ids, positions and a data source."""
    page = dashboard()
    (source,) = page["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    panels = page["panels"]
    assert len(panels) == 16
    assert len({panel["id"] for panel in panels}) == 16
    places = set()
    for panel in panels:
        assert panel["datasource"]["uid"] == "${source}"
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        cells = {
            (at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])
        }
        assert not places & cells, panel["title"]
        places |= cells
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")


async def test_names_follow_the_rules_of_prometheus() -> None:
    """One prefix, no colon, base units, `_total` for counters alone, few labels."""
    metrics = await busy()
    for family in metrics.registry.collect():
        assert re.fullmatch(r"lifecycle_[a-z_]+[a-z]", family.name), family.name
        assert family.type == "counter" or not family.name.endswith("_total")
        assert not family.name.endswith(("_ms", "_milliseconds", "_kb", "_mb"))
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= LABELS | {"le"}, sample
            if sample.name.endswith("_created"):
                continue
            assert (family.type == "counter") == sample.name.endswith("_total")


LABELS = {
    "gate",
    "state",
    "result",
    "released_by",
    "outcome",
    "reason",
    "operation",
    "phase",
    "name",
}
SELECTOR = re.compile(r"(lifecycle_\w+)(\{[^}]*\})?")


def dashboard() -> Any:
    """Return the dashboard for Grafana."""
    return json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())


async def busy() -> Metrics:
    """Return metrics in which every series has a sample."""
    metrics = Metrics()
    gate = Gate(slots=1, bytes=9, max_waiting=0, observer=metrics)
    async with SessionRegistry(observer=metrics) as sessions:
        metrics.watch(gate, sessions)

        async def open_() -> Any:
            return items()

        async def items() -> Any:
            yield 1

        with sessions.open("x") as session:
            lease = gate.try_admit(bytes=4)
            lease.settle(bytes=3)
            with pytest.raises(GateFull):
                gate.try_admit()
            async with session.stream(await session.start(open_)) as stream:
                assert [item async for item in stream] == [1]
            lease.release()
    of: Any = {"request": "r", "operation": "chat"}
    metrics(RequestStarted(**of))
    metrics(FirstItem(**of, after_s=0.1))
    metrics(PhaseEnded(**of, phase="queue", began_s=0.0, duration_s=0.1))
    ended: Any = {"outcome": "completed", "status": 200, "duration_s": 1.0}
    metrics(RequestEnded(**of, **ended, counts={"output_tokens": 3}))
    return metrics


async def all_series() -> dict[str, list[dict[str, str]]]:
    """Return the labels of every series by its name."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families((await busy()).text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_refuses_to_watch_what_is_neither_gate_nor_registry() -> None:
    """A wrong argument raises at once, instead of failing every scrape."""
    metrics = Metrics()
    with pytest.raises(TypeError, match="lanes and registries are watched, not dict"):
        metrics.watch({})  # type: ignore[arg-type]
    assert metrics.text()
