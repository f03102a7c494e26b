"""Admission that only counts: no request is refused, delayed or cut."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from asgi_kit import ScriptedServer, http_scope

from lifecycle_asgi import Admission, AdmissionSettings, MemoryEstimate, lanes
from lifecycle_asgi.prometheus import Metrics

pytestmark = pytest.mark.anyio
OK = {"type": "http.response.start", "status": 200, "headers": []}
ON = {"LIFECYCLE_SHADOW": "1"}


def shadow(app: Any, **options: Any) -> Admission:
    """Admission that only counts."""
    return Admission(app, environment=ON, **options)


async def echo(_scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send(OK)
    await send({"type": "http.response.body", "body": body})


async def ask(
    admission: Admission, *chunks: bytes, declared: int | None = None
) -> ScriptedServer:
    """Send one request; return what its client got."""
    server = ScriptedServer(*chunks)
    del server.messages[-1]  # the last part says itself that it is the last
    server.messages[-1]["more_body"] = False
    length = sum(map(len, chunks)) if declared is None else declared
    headers = [(b"content-length", str(length).encode())]
    with anyio.fail_after(120):
        await admission(http_scope(headers=headers), server.receive, server.send)
    return server


def over_limit(admission: Admission) -> dict[str, int]:
    """Requests that would have been refused or delayed, by lane."""
    return {name: now.over_limit for name, now in admission.statistics().items()}


async def test_lets_all_through_that_do_not_fit() -> None:
    """Beyond bytes, slots and queues: all are served at once, and each is counted."""
    inside, all_inside = 0, anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal inside
        inside += 1
        if inside == 5:
            all_inside.set()
        await all_inside.wait()
        await echo(scope, receive, send)

    admission = shadow(app, slots=2, max_waiting=1, bytes=160)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask, admission, b"x" * 10)
    assert over_limit(admission)["slots"] == 3
    assert not any(now.refused for now in admission.statistics().values())


async def test_lets_through_what_costs_too_much() -> None:
    """A price above all there is delays no request."""
    admission = shadow(echo, bytes=160, price=lambda *_: MemoryEstimate(work=10**6))
    assert (await ask(admission, b"x")).status == 200
    assert over_limit(admission)["requests"] == 1


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("declared", [None, 10, 3000])
async def test_passes_on_a_body_that_is_too_large(
    declared: int | None, count: int
) -> None:
    """Whole and in order, whether its length was known, and it is counted once."""
    chunks = [bytes([letter]) * 240 * 6 for letter in b"abcdef"[:count]]
    admission = shadow(echo, max_body=1000, bytes=10**6)
    server = await ask(admission, *chunks, declared=declared)
    assert (server.status, server.body) == (200, b"".join(chunks))
    assert sum(over_limit(admission).values()) == 1


async def test_passes_on_a_body_that_finds_no_room() -> None:
    """Whole, also without a length, and it is counted once however long it is."""
    chunks = [bytes([letter]) * 2000 for letter in b"abcdef"]
    admission = shadow(echo, bytes=16000)
    server = ScriptedServer(*chunks)
    bodies = admission.gates[1]
    with bodies.try_admit(bytes=1500), anyio.fail_after(120):
        await admission(http_scope(), server.receive, server.send)
    assert (server.status, server.body) == (200, b"".join(chunks))
    assert over_limit(admission)["bodies"] == 1


async def test_counts_once_a_body_that_found_no_room_to_begin() -> None:
    """Its bytes are charged though there are none: it is let in, and needs no more."""
    admission = shadow(echo, bytes=16000)
    bodies = admission.gates[1]
    with bodies.try_admit(bytes=bodies.statistics().bytes):
        assert (await ask(admission, b"x" * 900, b"yz")).body == b"x" * 900 + b"yz"
    assert over_limit(admission)["bodies"] == 1


async def test_passes_on_a_body_that_is_slow() -> None:
    """The application waits for the rest of it as long as the server does."""
    began = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await echo(scope, receive, send)

    server = ScriptedServer(b"abc", b"def")
    rest, server.messages = server.messages[1:], server.messages[:1]
    late = anyio.Event()
    receive = server.receive

    async def slow() -> Any:
        if server.messages:
            return await receive()
        await late.wait()
        return rest.pop(0)

    admission = shadow(app, body_timeout=0.01)
    headers = [(b"content-length", b"6")]
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admission, http_scope(headers=headers), slow, server.send)
            await began.wait()
            late.set()
    assert (server.status, server.body) == (200, b"abcdef")
    assert over_limit(admission)["small"] == 1


async def test_asks_for_keys_all_the_same() -> None:
    """A key that is asked for here may be asked for nowhere else."""
    server = await ask(shadow(echo, api_keys=("k",)), b"x")
    assert server.status == 401


async def test_says_that_it_limits_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and what it would have done, once a minute at most."""
    caplog.set_level(logging.WARNING, "lifecycle")
    admission = shadow(echo, max_body=1)
    assert "refuses no request" in caplog.text
    await ask(admission, b"xy")
    assert "would have refused or delayed 1 in small, 0 in bodies" in caplog.text
    caplog.clear()
    await ask(admission, b"xy")
    assert caplog.text == ""
    monkeypatch.setattr(lanes, "_SECONDS_BETWEEN_SUMMARIES", 0.0)
    admission = shadow(echo, max_body=1)
    caplog.clear()
    for _ in range(2):
        await ask(admission, b"xy")
    assert len(caplog.records) == 2
    await ask(admission, b"x")  # nothing has changed
    assert len(caplog.records) == 2


async def test_shows_its_counts_in_metrics() -> None:
    """Those of lanes, too, which their gates do not know."""
    metrics, admission = Metrics(), shadow(echo, max_body=1)
    metrics.watch(*admission.lanes)
    await ask(admission, b"xy")
    line = 'lifecycle_gate_over_limit_total{gate="admission-small"} 1.0'
    assert line in metrics.text().decode()


@pytest.mark.parametrize(("text", "is_on"), [("1", True), ("True", True), ("0", False)])
def test_is_switched_by_the_environment(text: str, is_on: bool) -> None:
    """Off unless it is asked for."""
    read = AdmissionSettings.from_environment
    assert read({"LIFECYCLE_SHADOW": text}).shadow is is_on
    assert read({}).shadow is False


def test_refuses_options_that_are_no_switch_and_no_time() -> None:
    """Text that reads as off would switch all limits off."""
    with pytest.raises(TypeError, match="shadow must be True or False, not '0'"):
        Admission(echo, environment={}, shadow="0")
    with pytest.raises(ValueError, match="body_timeout must be above 0 s"):
        Admission(echo, environment={}, body_timeout=0)


def test_refuses_a_switch_that_says_neither() -> None:
    """A limit that somebody wants, or does not want, is no matter of guesses."""
    with pytest.raises(ValueError, match="LIFECYCLE_SHADOW must be 1 or 0, not 'on'"):
        AdmissionSettings.from_environment({"LIFECYCLE_SHADOW": "on"})
