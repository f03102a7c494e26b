"""What the endpoint makes of whatever an engine does, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Self

import anyio
import anyio.lowlevel
import pytest
from asgi_kit import ScriptedServer, http_scope
from http_kit import Quiet, user

from lifecycle import EngineLost, Gate, StreamTimeout
from lifecycle_engine import AppSettings, Deadlines, SimProcessor, create_app
from lifecycle_zmq import EngineFailed, RequestRejected

pytestmark = pytest.mark.anyio


WORDS = [list(b"a "), list("é".encode()[:1]), list("é".encode()[1:])]


class ScriptedEngine:
    """An engine with scripted answers.

    Args:
        items: Of every stream; an exception is raised in its place.
        refusal: Raised by every start.
    """

    ready, pid, incarnation = True, None, 1

    def __init__(self, *items: Any, refusal: Exception | None = None) -> None:
        self.items = items
        self.refusal = refusal
        self.starts: list[str] = []
        self.ends: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def wait_ready(self) -> None:
        pass

    async def status(self) -> dict[str, Any]:
        live = len(self.starts) - len(self.ends)
        return {
            "live": live,
            "starts": len(self.starts),
            "ends": len(self.ends),
            "ends_before_start": 0,
            "duplicate_ends": 0,
            "lost_with_peer": 0,
            "backend": {"slots": 0, "slots_free": 0, "payload_bytes": 0},
        }

    async def start(self, key: str, request: Any, tensors: Any = None) -> Any:
        tensors.take()
        await anyio.lowlevel.checkpoint()
        if self.refusal is not None:
            raise self.refusal
        self.starts.append(key)
        return self._stream()

    async def _stream(self) -> AsyncIterator[Any]:
        for item in self.items:
            await anyio.lowlevel.checkpoint()
            if isinstance(item, Exception):
                raise item
            if item is None:
                await anyio.sleep_forever()
            yield item

    async def end(self, key: str) -> None:
        self.ends.append(key)


async def ask(
    engine: ScriptedEngine, *, deadlines: Deadlines | None = None, **fields: Any
) -> tuple[ScriptedServer, dict[str, int]]:
    """One request to *engine*; returns the answer and the outcomes."""
    settings = AppSettings(model="m", deadlines=deadlines or Deadlines())
    app = create_app(engine, SimProcessor(), gate=Gate(bytes=1), settings=settings)
    body = json.dumps({"model": "m", "messages": user("hi"), **fields}).encode()
    server = ScriptedServer(body)
    with anyio.fail_after(120):
        async with app.router.lifespan_context(app):
            service = app.state.service
            scope = http_scope("/v1/chat/completions")
            await app(scope, server.receive, server.send)
            await Quiet(service).reached()
            outcomes = service.sessions.statistics().outcomes
    assert sorted(engine.starts) == sorted(engine.ends)
    return server, {name: count for name, count in outcomes.items() if count}


def events(server: ScriptedServer) -> list[Any]:
    """The events of a streamed answer."""
    lines = server.body.decode().split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def test_streams_whole_characters_only() -> None:
    """Half a character waits for its other half."""
    engine = ScriptedEngine(*WORDS, {"finish_reason": "stop"})
    server, outcomes = await ask(engine, stream=True)
    deltas = [e["choices"][0]["delta"] for e in events(server)[:-1]]
    assert [d.get("content") for d in deltas] == ["", "a ", "é", None]
    assert outcomes == {"completed": 1}


async def test_flushes_half_a_character_at_the_end() -> None:
    """A text that ends inside a character ends in a replacement character."""
    engine = ScriptedEngine(*WORDS[:2], {"finish_reason": "length"})
    server, _ = await ask(engine)
    choice = json.loads(server.body)["choices"][0]
    assert choice["message"]["content"] == "a \ufffd"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_a_stream_without_tokens(stream: bool) -> None:
    """A model that stops at once gives an empty answer, in both forms."""
    engine = ScriptedEngine({"finish_reason": "stop"})
    server, outcomes = await ask(engine, stream=stream)
    assert outcomes == {"completed": 1}
    if stream:
        first, last, done = events(server)
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert last["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
    else:
        document = json.loads(server.body)
        assert document["choices"][0]["message"]["content"] == ""
        assert document["usage"]["completion_tokens"] == 0


FAILURES = {
    "slow": (EngineFailed("slow_client", "secret"), 408, "slow_client"),
    "failed": (EngineFailed("decode_failed", "secret"), 500, "decode_failed"),
    "lost": (EngineLost("gone", reason="killed"), 503, "engine_lost"),
    "late": (StreamTimeout("late", deadline="idle"), 504, "engine_timeout"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("stream", [True, False])
async def test_tells_failure_before_first_token_by_status(
    stream: bool, failure: Any
) -> None:
    """As long as nothing was sent a failure is a status, streamed or not."""
    error, status, code = failure
    server, outcomes = await ask(ScriptedEngine(error), stream=stream)
    assert server.status == status
    assert json.loads(server.body)["error"]["code"] == code
    assert b"secret" not in server.body
    assert sum(outcomes.values()) == 1


@pytest.mark.parametrize("count", [1, 3])
async def test_takes_a_slow_reader_for_no_failure(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow client is counted as disconnected, and nothing is logged."""
    engine = ScriptedEngine(list(b"a"), EngineFailed("slow_client", "secret"))
    server, outcomes = await ask(engine, stream=True, n=count)
    assert events(server)[-1]["error"]["code"] == "slow_client"
    assert outcomes == {"client_gone": 1}
    assert caplog.messages == []
    _, outcomes = await ask(ScriptedEngine(FAILURES["failed"][0]))
    assert outcomes == {"failed": 1}
    assert ["failed with EngineFailed" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_tells_failure_mid_stream_by_last_event(failure: Any) -> None:
    """Behind the first token a failure is the last event, and there is no [DONE]."""
    error, _, code = failure
    server, _ = await ask(ScriptedEngine(list(b"a"), error), stream=True)
    assert server.status == 200
    *chunks, last = events(server)
    assert chunks[1]["choices"][0]["delta"]["content"] == "a"
    assert last["error"]["code"] == code
    assert server.complete.is_set()


@pytest.mark.parametrize("stream", [True, False])
async def test_takes_a_stream_that_just_stops_for_a_failure(stream: bool) -> None:
    """An answer is whole only if the engine says why it ended."""
    server, outcomes = await ask(ScriptedEngine(list(b"a")), stream=stream)
    document = events(server)[-1] if stream else json.loads(server.body)
    assert document["error"]["code"] == "stream_cut"
    assert outcomes == {"failed": 1}


async def test_ends_stream_that_is_idle_too_long() -> None:
    """A stream without items for too long gets an error and is ended."""
    deadlines = Deadlines(first_token=0.5, idle=0.02)
    engine = ScriptedEngine(list(b"a"), None)
    server, outcomes = await ask(engine, deadlines=deadlines, stream=True)
    assert events(server)[-1]["error"]["code"] == "engine_timeout"
    assert outcomes == {"deadline": 1}


@pytest.mark.parametrize(
    ("refusal", "status", "outcome"),
    [
        (RequestRejected("invalid_tensors", "no"), 400, "refused"),
        (RequestRejected("overloaded", "no"), 503, "refused"),
        (RequestRejected("too_large", "no"), 413, "refused"),
        (RequestRejected("internal", "no"), 500, "refused"),
        (EngineLost("gone", reason="killed", retry_after=4.2), 503, "engine_lost"),
        (KeyError("ours"), 500, "failed"),
    ],
)
async def test_ends_nothing_that_was_not_started(
    refusal: Exception, status: int, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused start is reported, counted, and never ended."""
    engine = ScriptedEngine(refusal=refusal)
    server, outcomes = await ask(engine)
    assert server.status == status
    assert outcomes == {outcome: 1}
    assert engine.ends == []
    # A mistake of ours is logged, once, without its words.
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (status == 500)
    assert "'ours'" not in caplog.text
