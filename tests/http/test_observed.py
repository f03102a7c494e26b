"""Observation of requests of a real server: spans, log lines and counts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("structlog")
pytest.importorskip("prometheus_client")

import structlog
from http_kit import GatedProcessor, answer_to, encoded, post, running, user
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import LogCapture

from lifecycle import Gate
from lifecycle.events import combine_observers
from lifecycle_asgi import request_log
from lifecycle_asgi.opentelemetry import Spans
from lifecycle_asgi.prometheus import Metrics
from lifecycle_engine import AppSettings, Deadlines

pytestmark = pytest.mark.asyncio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PHASES = {"read", "queue", "prepare", "hand_off", "stream", "cleanup"}


class Observed:
    """A log and spans in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        attributes = {"gen_ai.request.model": "sim", "gen_ai.provider.name": "test"}
        spans = Spans(attributes, tracer_provider=provider)
        self._capture = LogCapture()
        logger = structlog.wrap_logger(None, processors=[self._capture])
        self.observer = combine_observers(spans, request_log(logger))

    @property
    def lines(self) -> list[Any]:
        """What was logged."""
        return self._capture.entries

    @property
    def spans(self) -> list[ReadableSpan]:
        """What has ended."""
        return list(self._exporter.get_finished_spans())

    def root(self) -> ReadableSpan:
        """The one request's."""
        (found,) = (span for span in self.spans if span.kind is SpanKind.SERVER)
        return found

    def phases(self) -> dict[str, ReadableSpan]:
        """The spans below the one request's."""
        root = self.root().context
        below = [span for span in self.spans if span.kind is not SpanKind.SERVER]
        assert all(span.parent.span_id == root.span_id for span in below)
        assert all(span.context.trace_id == root.trace_id for span in below)
        return {span.name: span for span in below}


@pytest.fixture
def told() -> Observed:
    return Observed()


def body(*content: str | bytes, **fields: Any) -> bytes:
    """A request as bytes."""
    ask = {"model": "sim", "messages": user(*content), "max_tokens": 4, **fields}
    return json.dumps(ask).encode()


async def test_makes_a_span_of_each_phase_below_the_caller_s(told: Observed) -> None:
    """A request is a span below its caller's, with one for each phase below itself."""
    trace = f"traceparent: 00-{TRACE}-{CALLER}-01".encode()
    async with asyncio.timeout(120), running(log=told.observer) as server:
        status, _, _ = await answer_to(server.port, body("x", encoded(), n=2), trace)
        assert status == 200
        await server.quiet()
    root, phases = told.root(), told.phases()
    assert root.name == "chat sim"
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == CALLER
    assert set(phases) == PHASES
    ids = {"lifecycle.session": "", "lifecycle.response_id": ""}
    assert dict(root.attributes or {}) | ids == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "sim",
        "gen_ai.provider.name": "test",
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": len("user: x[image]\n"),
        "gen_ai.usage.output_tokens": 8,
        "http.response.status_code": 200,
        "lifecycle.images": 1,
        "lifecycle.operation": "chat",
        "lifecycle.outcome": "completed",
        "lifecycle.session": "",
        "lifecycle.response_id": "",
    }
    assert root.status.status_code is StatusCode.UNSET
    assert [event.name for event in root.events] == ["first_item"]
    for name in PHASES - {"cleanup"}:
        assert root.start_time <= phases[name].start_time <= phases[name].end_time
        assert phases[name].end_time <= root.end_time + 1000
    order = ["read", "prepare", "hand_off", "stream"]
    starts = [phases[name].start_time for name in order]
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    "header",
    [
        b"traceparent: 00-" + b"0" * 32 + b"-" + CALLER.encode() + b"-01",
        b"traceparent: canary-7f3a",
        b"traceparent: 00-%b-%b-01\r\ntraceparent: 00-%b-%b-01"
        % ((TRACE.encode(), CALLER.encode()) * 2),
        b"x: y",
    ],
)
async def test_begins_a_trace_where_the_caller_s_is_none(
    told: Observed, header: bytes
) -> None:
    """Without a valid traceparent, or with two, the request is the root of a trace."""
    async with asyncio.timeout(120), running(log=told.observer) as server:
        await answer_to(server.port, body("x"), header)
        await server.quiet()
    assert told.root().parent is None
    assert "prepare" in told.phases()


async def test_tells_of_a_request_that_is_refused(told: Observed) -> None:
    """A refusal is no error of a span: it has its status, and waited in a queue."""
    gate = Gate(bytes=10**9, slots=1, max_waiting=0, name="payloads")
    async with asyncio.timeout(120), running(gate=gate, log=told.observer) as server:
        with gate.try_admit():
            status, _, _ = await answer_to(server.port, body("x", encoded()))
        assert status == 503
        await server.quiet()
    root = told.root()
    assert root.attributes["lifecycle.outcome"] == "refused"
    assert root.attributes["http.response.status_code"] == 503
    assert "error.type" not in root.attributes
    assert set(told.phases()) == {"read", "queue"}
    assert told.phases()["queue"].attributes == {"error.type": "GateFull"}
    (line,) = told.lines
    assert (line["log_level"], line["outcome"]) == ("info", "refused")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/chat/completions", 503), ("/v1/messages", 400)],
)
async def test_names_a_refused_request_as_its_answer_does(
    told: Observed, path: str, expected: int, given: bool
) -> None:
    """The id in the log and the span is what the client got, whoever has drawn it."""
    gate = Gate(bytes=10**9, slots=1, max_waiting=0, name="payloads")
    heads = [b"x-request-id: mine.1"] if given else []
    async with asyncio.timeout(120), running(gate=gate, log=told.observer) as server:
        with gate.try_admit():
            status, headers, _ = await answer_to(
                server.port, body("x", encoded()), *heads, path=path
            )
        assert status == expected
        await server.quiet()
    id_ = headers.get("x-request-id") or headers["request-id"]
    assert (id_ == "mine.1") is given
    assert [line["request"] for line in told.lines] == [id_]
    assert told.root().attributes["lifecycle.response_id"] == id_


@pytest.mark.parametrize("wrong", [b"{", body("x", model="canary-7f3a")])
async def test_tells_of_a_request_that_never_was_a_session(
    told: Observed, wrong: bytes
) -> None:
    """A refusal before the session is opened is reported once as well."""
    async with asyncio.timeout(120), running(log=told.observer) as server:
        status, _, _ = await answer_to(server.port, wrong)
        await server.quiet()
    (line,) = told.lines
    assert line["status"] == status
    assert line["outcome"] == told.root().attributes["lifecycle.outcome"] == "refused"
    assert set(told.phases()) <= {"read", "queue"}
    assert "canary" not in f"{told.lines}{[span.to_json() for span in told.spans]}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_tells_where_a_request_failed_and_nothing_that_it_says(
    told: Observed, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure is reported once: type and code locations, no message or locals."""

    class Broken(GatedProcessor):
        def prepare(self, chat: Any) -> Any:
            secret = "canary-7f3a"
            raise RuntimeError(secret)

    async with (
        asyncio.timeout(120),
        running(processor=Broken(), log=told.observer) as server,
    ):
        request = body("canary-7f3a")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        head += f"content-length: {len(request)}\r\n\r\n"
        writer.write(head.encode() + request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        await server.quiet()
    assert answer.startswith(b"HTTP/1.1 500")
    root = told.root()
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "RuntimeError"
    (event,) = root.events
    assert "in prepare" in event.attributes["exception.stacktrace"]
    assert told.phases()["prepare"].attributes == {"error.type": "RuntimeError"}
    (line,) = told.lines
    assert (line["log_level"], line["error"]) == ("error", "RuntimeError")
    assert line["traceback"][-1] == "RuntimeError"
    assert "in prepare" in line["traceback"][-2]
    everything = (
        f"{told.lines}{[s.to_json() for s in told.spans]}{caplog.text}{answer!r}"
    )
    assert "canary" not in everything
    assert caplog.text == ""


async def test_tells_of_a_client_that_left_at_level_info(told: Observed) -> None:
    """A disconnect mid-stream is a normal end; the clean-up after it is a span, too."""
    async with (
        asyncio.timeout(120),
        running("--sim-decode-step=0.05", log=told.observer) as server,
    ):
        reader, writer = await post(
            server.port, body("x", stream=True, max_tokens=4000, ignore_eos=True)
        )
        await reader.readuntil(b"data: ")
        writer.close()
        await server.quiet()
    assert told.root().attributes["lifecycle.outcome"] == "client_gone"
    assert told.root().status.status_code is StatusCode.UNSET
    assert set(told.phases()) == PHASES
    (line,) = told.lines
    assert (line["log_level"], line["outcome"]) == ("info", "client_gone")
    assert "error" not in line


async def test_writes_one_line_of_json_for_each_request(told: Observed) -> None:
    """Ten requests are ten lines, each with its own session and what it used."""
    async with asyncio.timeout(120), running(log=told.observer) as server:
        answers = [answer_to(server.port, body("x")) for _ in range(10)]
        ids = {a["x-request-id"] for _, a, _ in await asyncio.gather(*answers)}
        await server.quiet()
    assert len(told.lines) == 10
    assert {line["session"] for line in told.lines} == ids
    assert {line["output_tokens"] for line in told.lines} == {4}
    for line in told.lines:
        assert json.loads(json.dumps(line)) == line


class Scraper:
    """Scrapes from a thread of its own, all the time, and checks each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.scrapes = 0
        self.seen_live = 0.0
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._stop.is_set():
            now = sums(self._metrics)
            self.scrapes += 1
            self.seen_live = max(self.seen_live, now.get("lifecycle_requests_live", 0))
            for kind, started in (("sessions", "opened"), ("requests", "started")):
                begun = now.get(f"lifecycle_{kind}_{started}_total", 0)
                ended = now.get(f"lifecycle_{kind}_ended_total", 0)
                if begun != ended + now.get(f"lifecycle_{kind}_live", 0):
                    self.wrong.append(f"{kind}: {now}")


def sums(metrics: Metrics) -> dict[str, float]:
    """Each metric, all its series together."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


async def test_balances_at_every_scrape_from_another_thread(hasty: None) -> None:
    """Started is live and ended at each scrape, whatever becomes of the requests."""
    metrics = Metrics()
    asks = [
        body("x"),
        body("x", encoded()),
        body("x", model="other"),
        b"{",
        body("x", stream=True, max_tokens=40, ignore_eos=True),
    ]

    async def leave(port: int) -> None:
        reader, writer = await post(port, asks[-1])
        await reader.readuntil(b"data: ")
        writer.close()

    async def ask(port: int, number: int) -> None:
        if number % 6 == 5:
            await leave(port)
        elif number % 6 == 4:
            reader, writer = await post(port, asks[4])
            await reader.read()
            writer.close()
        else:
            await answer_to(port, asks[number % 6])

    async with asyncio.timeout(120), running(metrics=metrics) as server:
        with Scraper(metrics) as scraper:
            async with asyncio.TaskGroup() as tasks:
                for number in range(60):
                    tasks.create_task(ask(server.port, number))
            await server.quiet()
            await server.until(lambda: not sums(metrics)["lifecycle_requests_live"])
    now = sums(metrics)
    assert scraper.wrong == []
    assert scraper.scrapes > 5
    assert scraper.seen_live > 0
    assert now["lifecycle_requests_started_total"] == 60
    assert now["lifecycle_requests_ended_total"] == 60
    assert now["lifecycle_sessions_opened_total"] == 60
    assert now["lifecycle_request_duration_seconds_count"] == 60


@pytest.mark.parametrize(
    "outcome", ["cancelled", "engine_lost", "deadline", "shutdown"]
)
async def test_tells_of_streams_that_were_cut(told: Observed, outcome: str) -> None:
    """The outcome of an interrupted stream is the same in its span and log line."""
    deadlines = Deadlines(total=0.3 if outcome == "deadline" else None)
    settings = AppSettings(model="sim", deadlines=deadlines)
    async with (
        asyncio.timeout(120),
        running(
            "--sim-decode-step=0.05", log=told.observer, settings=settings
        ) as server,
    ):
        reader, writer = await post(
            server.port,
            body("x", stream=True, max_tokens=4000, ignore_eos=True),
            b"x-request-id: mine",
        )
        await reader.readuntil(b"data: ")
        service = server.service
        if outcome == "cancelled":
            await service.sessions.cancel("mine")
        elif outcome == "engine_lost":
            os.kill(service.engine.pid, signal.SIGKILL)
        elif outcome == "shutdown":
            await service.sessions.drain(0)
        last = await reader.read()
        writer.close()
        await server.until(lambda: told.lines)
    assert b'"error":{' in last
    root = told.root()
    assert root.attributes["lifecycle.outcome"] == outcome
    wrong = outcome in ("engine_lost", "deadline")
    assert (root.status.status_code is StatusCode.ERROR) is wrong
    assert ("error.type" in root.attributes) is wrong
    assert "stream" in told.phases()
    (line,) = told.lines
    assert (line["outcome"], line["session"]) == (outcome, "mine")
    assert line["log_level"] == ("warning" if wrong else "info")
