"""What Prometheus is told is what the books say, at every scrape."""

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
from lifecycle_asgi.events import RequestEnded, RequestStarted
from lifecycle_metrics import Metrics

pytestmark = pytest.mark.anyio


def told(metrics: Metrics) -> dict[Any, float]:
    """Every sample by its name and its labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def of(samples: dict[Any, float], name: str) -> list[float]:
    """All series of one metric."""
    return [value for key, value in samples.items() if key[0] == name]


def test_tells_what_a_gate_holds() -> None:
    """Limits, use and waits come from the books, refusals with their reason."""
    metrics = Metrics()
    gate = Gate(slots=1, bytes=100, max_waiting=0, name="pictures", observer=metrics)
    metrics.watch(gate)
    lease = gate.try_admit(bytes=40)
    with pytest.raises(GateFull):
        gate.try_admit(bytes=40)
    now = told(metrics)
    assert now["lifecycle_gate_bytes", "pictures", "in_use"] == 40
    assert now["lifecycle_gate_bytes", "pictures", "limit"] == 100
    assert now["lifecycle_gate_slots", "pictures", "in_use"] == 1
    assert now["lifecycle_gate_requests_total", "pictures", "admitted"] == 1
    assert now["lifecycle_refusals_total", "pictures", "full"] == 1
    assert now["lifecycle_gate_wait_seconds_count", "pictures"] == 1
    lease.release()
    now = told(metrics)
    assert now["lifecycle_gate_bytes", "pictures", "in_use"] == 0
    assert now["lifecycle_gate_released_total", "pictures", "owner"] == 1


def test_tells_of_a_gate_without_limits() -> None:
    """No limit is infinity, which Prometheus knows."""
    metrics = Metrics()
    metrics.watch(Gate(name="open"))
    assert told(metrics)["lifecycle_gate_bytes", "open", "limit"] == float("inf")


def test_refuses_two_gates_of_one_name() -> None:
    """Two gates in one series would be a lie."""
    metrics = Metrics()
    gate = Gate(name="a")
    metrics.watch(gate, gate)
    with pytest.raises(ValueError, match="'a' is watched already"):
        metrics.watch(Gate(name="a"))


def test_enters_itself_where_it_is_told() -> None:
    """The metrics of an application can stand beside ours."""
    registry = CollectorRegistry()
    assert Metrics(registry).registry is registry


async def test_balances_at_every_scrape() -> None:
    """Opened is live and the sum of the outcomes, whatever happens meanwhile."""
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
                now = told(metrics)
                opened = now["lifecycle_sessions_opened_total",]
                ended = sum(of(now, "lifecycle_sessions_ended_total"))
                assert opened == now["lifecycle_sessions_live",] + ended
        now = told(metrics)
        assert sum(of(now, "lifecycle_sessions_ended_total")) == 100
        assert sum(of(now, "lifecycle_session_seconds_count")) == 100
        assert sum(of(now, "lifecycle_start_seconds_count")) == 100


async def test_has_few_series_however_many_requests() -> None:
    """Nothing of a request becomes a label."""
    metrics = Metrics()
    gate = Gate(slots=10, observer=metrics)
    async with SessionRegistry(observer=metrics) as sessions:
        metrics.watch(gate, sessions)
        sizes = []
        for number in range(200):
            with sessions.open(f"secret-{number}"), await gate.admit(key=f"k{number}"):
                pass
            sizes.append(len(told(metrics)))
        assert sizes[-1] == sizes[0]
        assert b"secret" not in metrics.text()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def scraped(
    metrics: Metrics, kind: str, started: str, done: threading.Event
) -> list[Any]:
    """Scrape until *done*; returns every scrape that does not balance."""
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
    """A scrape in a thread never sees a session half opened or half closed."""
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
    """A scrape in a thread never sees a request between started and ended."""
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


def test_dashboard_asks_for_metrics_that_exist() -> None:
    """Each panel of the dashboard shows something."""
    metrics = Metrics()
    metrics.watch(Gate(slots=1))
    families = text_string_to_metric_families(metrics.text().decode())
    known = {f"{family.name}{end}" for family in families for end in ENDS}
    page = Path(__file__).parents[2] / "docs" / "grafana.json"
    panels = json.loads(page.read_text())["panels"]
    asked = re.findall(r"lifecycle_\w+", json.dumps(panels))
    assert len(panels) == 10
    assert set(asked) <= known


ENDS = ("", "_total", "_bucket")
