"""No prompt, image or key is in any log, metric, span, error or `repr`.

A unique word is put wherever a client can put something, into valid and malformed
requests of every API, and into requests that fail on either side. Then all output of
the server is searched for it, except what a model generated (law 12).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")


pytest.importorskip("structlog")


pytest.importorskip("prometheus_client")


import structlog
from canaries import (
    CANARY,
    CHAT,
    GENERATE,
    MESSAGES,
    RESPONSES,
    block,
    good,
    pictures,
    traces_of,
    url,
)
from http_kit import ENV, FAST, running, user
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import LogCapture

from lifecycle.events import combine_observers, structlog_observer
from lifecycle_asgi import request_log
from lifecycle_asgi.events import log_failures
from lifecycle_asgi.opentelemetry import Spans
from lifecycle_asgi.prometheus import Metrics
from lifecycle_engine import AppSettings, SimProcessor
from lifecycle_zmq import ZmqEngine

pytestmark = pytest.mark.asyncio


KEY = f"sk-{CANARY}-key"


WORKER = Path(__file__).parents[1] / "kit" / "leaky_worker.py"


class Witness:
    """All output of the server, as one text."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        spans = Spans({"gen_ai.request.model": "sim"}, tracer_provider=provider)
        self.capture = LogCapture()
        logger = structlog.wrap_logger(None, processors=[self.capture])
        self.metrics = Metrics()
        self.log = combine_observers(
            spans, request_log(logger), log_failures, structlog_observer(logger)
        )
        self.told: list[str] = []

    def tell(self, name: str, text: str) -> None:
        """Take note of *text*."""
        self.told.append(f"<{name}> {text}")

    def leaks(self) -> list[str]:
        """Where any trace of the canary is, with what stands around it."""
        self.tell("metrics", self.metrics.text().decode())
        self.tell("log", json.dumps(self.capture.entries, default=repr))
        for span in self.exporter.get_finished_spans():
            self.tell("span", str(span.to_json()))
        found = []
        for text in self.told:
            for word in traces_of(CANARY):
                at = text.find(word)
                if at >= 0:
                    name = text.partition(">")[0]
                    found.append(f"{name}> …{text[max(0, at - 300) : at + 40]}…")
        return found


class _Everything(logging.Handler):
    def __init__(self, witness: Witness) -> None:
        super().__init__(logging.DEBUG)
        self.witness = witness

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.split(".")[0] in ("asyncio", "hypothesis"):
            return
        text = f"{record.name} {record.getMessage()} {record.args!r}"
        if record.exc_info and record.exc_info[1]:
            text += "".join(traceback.format_exception(record.exc_info[1]))
        self.witness.tell("logging", text)


@pytest.fixture
def witness(capfd: pytest.CaptureFixture[str]) -> Iterator[Witness]:
    """Listens to all loggers at level debug, to warnings and to both outputs."""
    witness, root = Witness(), logging.getLogger()
    handler, before = _Everything(witness), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield witness
    root.removeHandler(handler)
    root.setLevel(before)
    said = "".join(capfd.readouterr()) + "".join(str(each.message) for each in caught)
    assert CANARY not in said


class LeakyProcessor(SimProcessor):
    """Fails where the prompt says so, and says the prompt."""

    def prepare(self, chat: Any) -> Any:
        """Fail if the chat says so."""
        words = repr([list(message.content) for message in chat.messages])
        if "fail-prepare" in words:
            try:
                raise KeyError(words)
            except KeyError as error:
                raise RuntimeError(words) from error
        if "fail-group" in words:
            raise ExceptionGroup(words, [ValueError(words), OSError(words)])
        return super().prepare(chat)


# What a client can send ------------------------------------------------------------


def wrong() -> list[tuple[str, bytes]]:
    """Requests with the canary in every place that they are wrong in."""
    found = []
    for path, ask in good(CANARY):
        whole = json.dumps(ask).encode()
        found += [(path, whole[:-9]), (path, CANARY.encode()), (path, b'"%b"' % whole)]
        for name in [*ask, "tools", "metadata", "temperature", CANARY]:
            for value in (CANARY, [CANARY], {CANARY: CANARY}, [{"type": CANARY}]):
                found.append((path, json.dumps({**ask, name: value}).encode()))
        found.append((path, json.dumps({**ask, "model": CANARY}).encode()))
    for kind in ("image_url", "input_audio", "video_url", "file", CANARY):
        part = {"type": kind, kind: {"url": CANARY, "data": CANARY}}
        messages = [{"role": "user", "content": [part]}]
        body = {"model": "sim", "messages": messages, "max_tokens": 2}
        found += [(path, json.dumps(body).encode()) for path in (CHAT, MESSAGES)]
    for scheme in ("https", "file", CANARY):
        part = {"type": "image_url", "image_url": {"url": f"{scheme}://{CANARY}"}}
        messages = [{"role": "user", "content": [part]}]
        found.append(
            (CHAT, json.dumps({"model": "sim", "messages": messages}).encode())
        )
    return found


def with_pictures() -> list[tuple[str, bytes]]:
    """Every picture by every API."""
    many = {"model": "sim", "messages": user(*pictures()[:1] * 70)}
    found = [(CHAT, json.dumps(many).encode())]
    for image in pictures():
        part = {"type": "input_image", "image_url": url(image)}
        asks: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"model": "sim", "messages": user(image), "max_tokens": 2}),
            (GENERATE, {"text": "x", "images": [url(image)], "max_tokens": 2}),
            (
                RESPONSES,
                {"model": "sim", "input": [{"role": "user", "content": [part]}]},
            ),
        ]
        content = [{"role": "user", "content": [block(image)]}]
        asks.append((MESSAGES, {"model": "sim", "messages": content, "max_tokens": 2}))
        found += [(path, json.dumps(ask).encode()) for path, ask in asks]
    return found


HEADERS = [
    f"authorization: Bearer {KEY}",
    f"x-api-key: {KEY}",
    f"cookie: session={CANARY}",
    f"traceparent: {CANARY}",
    f"user-agent: {CANARY}",
    f"x-stainless-read-timeout: {CANARY}",
    f"{CANARY}: {CANARY}",
]


ODD_HEADERS = [f"x-request-id: {CANARY} {CANARY}", f"content-type: {CANARY}"]


class Caller:
    """Asks a server by hand: the SDKs log what they send."""

    def __init__(self, port: int, witness: Witness) -> None:
        self.port, self.witness = port, witness
        self.statuses: list[int] = []

    async def ask(
        self,
        path: str,
        body: bytes = b"",
        *headers: str,
        method: str = "POST",
        port: int = 0,
    ) -> int:
        """Send a request; the witness records what the client receives."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port)
        head = f"{method} {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        head += "".join(f"{each}\r\n" for each in (*HEADERS, *headers))
        head += f"content-length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            answer = await reader.read()
        except ConnectionError:  # of a body that was refused while it was being sent
            return 0
        finally:
            writer.close()
        status = int(answer.split()[1])
        self.statuses.append(status)
        fields, _, document = answer.partition(b"\r\n\r\n")
        self.witness.tell(f"head {status}", fields.decode("latin-1"))
        # Answers of a model and what an API repeats in them are the client's own.
        if status >= 400 or b'"error":{' in document or method == "GET":
            self.witness.tell(f"body {status}", document.decode(errors="replace"))
        return status

    async def ask_all(self, asks: list[tuple[str, bytes]]) -> None:
        """Send requests, eight at a time."""
        few = asyncio.Semaphore(8)

        async def one(path: str, body: bytes) -> None:
            async with few:
                await self.ask(path, body)

        await asyncio.gather(*(one(path, body) for path, body in asks))


async def look(caller: Caller, server: Any) -> None:
    """Ask for everything that can be seen of a server."""
    operators = ["/metrics", "/_lifecycle/status", "/_lifecycle/requests"]
    for path in [*operators, f"/_lifecycle/{CANARY}"]:
        await caller.ask(f"{path}?x={CANARY}", method="GET", port=server.admin_port)
    paths = [
        *operators,
        "/health",
        "/ready",
        "/openapi.json",
        "/v1/models",
        f"/v1/models/{CANARY}",
        f"/{CANARY}",
    ]
    for path in paths:
        await caller.ask(f"{path}?x={CANARY}", method="GET")
    for path in (f"/v1/requests/{CANARY}/cancel", f"/v1/responses/{CANARY}"):
        await caller.ask(path)
    service = server.service
    shown = [service, service.parser, service.sessions, *service.gates]
    shown += service.sessions.live()
    caller.witness.tell("repr", repr(shown))
    caller.witness.tell("engine output", service.engine.output)


def leaky_engine() -> ZmqEngine:
    """An engine process that quotes prompts where it fails."""
    argv = [sys.executable, str(WORKER), "--runner=sim", *FAST, "--max-length=8192"]
    return ZmqEngine(argv, env=ENV)


async def test_keeps_canaries_of_good_and_bad_requests(witness: Witness) -> None:
    """Good, malformed and damaged requests of every API leave no trace of what they say."""
    settings = AppSettings(model="sim", body_bytes=150_000, per_client=64)
    async with (
        asyncio.timeout(120),
        running(
            engine=leaky_engine(),
            metrics=witness.metrics,
            log=witness.log,
            settings=settings,
        ) as server,
    ):
        caller = Caller(server.port, witness)
        for path, ask in good(CANARY):
            assert await caller.ask(path, json.dumps(ask).encode()) == 200
            for header in ODD_HEADERS:
                await caller.ask(path, json.dumps(ask).encode(), header)
        logging.getLogger("anybody").debug("heard at debug")
        await caller.ask_all([*wrong(), *with_pictures()])
        await look(caller, server)
        await server.quiet()
        await look(caller, server)
    assert {200, 400, 404, 413} <= set(caller.statuses)
    assert any("heard at debug" in text for text in witness.told)
    assert witness.leaks() == []


KINDS = {
    "fail-prepare": "RuntimeError",
    "fail-group": "ExceptionGroup",
    "fail-prefill": "ValueError at leaky_worker.py",
    "fail-decode": "RuntimeError at leaky_worker.py",
}


@pytest.mark.parametrize("failure", KINDS)
async def test_keeps_canaries_of_requests_that_fail(
    witness: Witness, failure: str
) -> None:
    """When either side fails with an error that quotes the prompt, it is not passed on."""
    async with (
        asyncio.timeout(120),
        running(
            engine=leaky_engine(),
            processor=LeakyProcessor(),
            metrics=witness.metrics,
            log=witness.log,
        ) as server,
    ):
        caller = Caller(server.port, witness)
        for path, asked in good(f"{CANARY} {failure}"):
            ask = {**asked, "max_tokens": 9, "ignore_eos": True}
            ask.pop("ignore_eos" if path in (MESSAGES, RESPONSES) else "none", None)
            ask.pop("max_tokens" if path == RESPONSES else "none", None)
            await caller.ask(path, json.dumps(ask).encode())
        await look(caller, server)
        failed = server.service.sessions.statistics().outcomes["failed"]
        assert failed == len(good("x"))
        told = "".join(witness.told) + server.service.engine.output
        assert KINDS[failure] in told
    assert witness.leaks() == []


async def test_keeps_canaries_of_an_engine_that_dies(witness: Witness) -> None:
    """Streams of a killed engine get that error, and nothing else."""
    engine = leaky_engine()
    async with (
        asyncio.timeout(120),
        running(engine=engine, metrics=witness.metrics, log=witness.log) as server,
    ):
        caller = Caller(server.port, witness)
        ask = {"model": "sim", "messages": user(CANARY), "stream": True}
        ask |= {"max_tokens": 8000, "ignore_eos": True}
        asking = asyncio.create_task(caller.ask(CHAT, json.dumps(ask).encode()))
        await server.until(
            lambda: [s for s in server.service.sessions.live() if s.phase == "started"]
        )
        await look(caller, server)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await asking
        await look(caller, server)
    assert witness.leaks() == []
