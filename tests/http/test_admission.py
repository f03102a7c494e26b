"""Admission and refusals over a socket: each API, each reason."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import anthropic
import httpx
import openai
import pytest
from http_kit import GatedProcessor, answer_to, encoded, post, running, user
from pauses import noted_pauses

from lifecycle import Gate
from lifecycle_asgi import ClientIdentity
from lifecycle_asgi.prometheus import Metrics
from lifecycle_engine import AppSettings

pytestmark = pytest.mark.asyncio


SLOW = ("--sim-decode-step=0.02",)


def body(*content: str | bytes, **fields: Any) -> bytes:
    """A request as bytes."""
    ask = {"model": "sim", "messages": user(*content), "max_tokens": 4, **fields}
    return json.dumps(ask).encode()


def full(name: str) -> Gate:
    """A gate that has one slot and no line."""
    return Gate(bytes=10**9, slots=1, max_waiting=0, name=name)


async def test_serves_text_while_no_payload_gets_in() -> None:
    """With the payload gate full and its line long, text is answered all the same."""
    gate = Gate(bytes=10**9, slots=1, max_waiting=8, name="payloads")
    async with asyncio.timeout(120), running(gate=gate) as server:
        with gate.try_admit():
            waiting = [
                asyncio.create_task(answer_to(server.port, body("x", encoded())))
                for _ in range(3)
            ]
            await server.until(lambda: gate.statistics().waiting == 3)
            parts = [{"role": "user", "content": [{"type": "text", "text": "data:"}]}]
            for text in (body("x"), body("x", messages=parts), body("x", n=3)):
                assert (await answer_to(server.port, text))[0] == 200
            assert gate.statistics().waiting == 3
            assert gate.statistics().admitted == 1
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 3
        await server.quiet()


async def test_gives_each_key_its_share() -> None:
    """A key with its share in flight is 429 with a time to retry; others are served."""
    known = ClientIdentity(["mine", "yours"])
    settings = AppSettings(model="sim", per_client=1, client=known)
    processor = GatedProcessor()
    mine, yours = b"authorization: Bearer mine", b"x-api-key: yours"
    async with (
        asyncio.timeout(120),
        running(processor=processor, settings=settings) as server,
    ):
        first = asyncio.create_task(answer_to(server.port, body("x"), mine))
        other = asyncio.create_task(answer_to(server.port, body("x"), yours))
        await server.until(lambda: processor.entered.acquire(blocking=False))
        await server.until(lambda: processor.entered.acquire(blocking=False))
        status, headers, document = await answer_to(server.port, body("x"), mine)
        assert (status, document["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(headers["retry-after"]) <= 60
        assert 0 < int(headers["retry-after-ms"]) <= 60_000
        processor.release.set()
        assert [(await first)[0], (await other)[0]] == [200, 200]
        assert (await answer_to(server.port, body("x"), mine))[0] == 200
        await server.quiet()


async def test_is_retried_by_both_sdks_where_a_share_is_used_up() -> None:
    """Both SDKs know the refusal for what it is, and come back when they may."""
    known = ClientIdentity(["none", "a"])
    settings = AppSettings(model="sim", per_client=1, client=known)
    processor = GatedProcessor()
    async with (
        asyncio.timeout(120),
        running(processor=processor, settings=settings) as server,
        server.client() as patient,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{server.port}", api_key="a", max_retries=0
        ) as other,
    ):
        root = f"http://127.0.0.1:{server.port}"
        head = b"authorization: Bearer none", b"x-api-key: a"
        busy = [
            asyncio.create_task(answer_to(server.port, body("x"), key)) for key in head
        ]
        for _ in busy:
            await server.until(lambda: processor.entered.acquire(blocking=False))
        ask: Any = {"model": "sim", "messages": user("x"), "max_tokens": 2}
        with pytest.raises(openai.RateLimitError):
            await patient.chat.completions.create(**ask)
        with pytest.raises(anthropic.RateLimitError):
            await other.messages.create(**ask)
        refused = asyncio.Event()

        async def hear(response: Any) -> None:
            if response.status_code == 429:
                refused.set()

        heard = anthropic.DefaultAsyncHttpxClient(event_hooks={"response": [hear]})
        async with anthropic.AsyncAnthropic(
            base_url=root, api_key="a", http_client=heard
        ) as again:
            retried = asyncio.create_task(again.messages.create(**ask))
            await refused.wait()
            processor.release.set()
            assert (await retried).usage.output_tokens == 2
        await asyncio.gather(*busy)
        await server.quiet()


async def test_counts_no_look_at_the_server() -> None:
    """Health, metrics and models are asked without a share."""
    settings = AppSettings(model="sim", per_client=1)
    async with asyncio.timeout(120), running(*SLOW, settings=settings) as server:
        asking = asyncio.create_task(
            answer_to(server.port, body("x", max_tokens=40, ignore_eos=True))
        )
        await server.until(server.service.sessions.live)
        async with server.client() as client:
            for path in ("health", "ready", "v1/models", "_lifecycle/status"):
                port = server.admin_port if path[0] == "_" else server.port
                answer = await client._client.get(f"http://127.0.0.1:{port}/{path}")
                assert answer.status_code == 200
        assert (await asking)[0] == 200


REFUSALS = {
    "too large": (413, None, None),
    "share": (429, True, None),
    "full": (503, True, None),
    "draining": (503, False, "false"),
}


ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "sim", "messages": user("x")},
    "/v1/responses": {"model": "sim", "input": "x"},
    "/v1/messages": {"model": "sim", "messages": user("x"), "max_tokens": 1},
    "/generate": {"text": "x"},
}


async def test_shows_clients_over_their_share_as_refused() -> None:
    """The same in /metrics and in the status: a gate alone knows nothing of them."""
    metrics, in_flight = Metrics(), Gate(slots=1, max_waiting=2, name="in_flight")
    ask = json.dumps({"model": "sim", "messages": user("x"), "max_tokens": 1}).encode()
    async with (
        asyncio.timeout(120),
        running(in_flight=in_flight, metrics=metrics) as server,
    ):
        with in_flight.try_admit():
            waiting = asyncio.create_task(answer_to(server.port, ask))
            await server.until(lambda: in_flight.statistics().waiting)
            status, _, _ = await answer_to(server.port, ask)
            assert status == 429
        assert (await waiting)[0] == 200
        status = f"http://127.0.0.1:{server.admin_port}/_lifecycle/status"
        async with httpx.AsyncClient() as client:
            shown = (await client.get(status)).json()
        assert shown["in_flight"]["refused"] == 1
        await server.quiet()
    refused = 'lifecycle_gate_requests_total{gate="in_flight",result="refused"} 1.0'
    assert refused in metrics.text().decode()


async def test_counts_and_serves_all_in_shadow() -> None:
    """With all slots taken and a body that is too large, and /metrics tells of both."""
    metrics = Metrics()
    slots = Gate(slots=1, max_waiting=0, enforce=False, name="in_flight")
    limits = {"total_bytes": 64_000, "body_bytes": 2000}
    settings = AppSettings(model="sim", shadow=True, **limits)
    large = json.dumps({"model": "sim", "messages": user("x" * 3000), "max_tokens": 1})
    async with (
        asyncio.timeout(120),
        running(in_flight=slots, settings=settings, metrics=metrics) as server,
    ):
        with slots.try_admit():
            status, _, _ = await answer_to(server.port, large.encode())
        assert status == 200
        await server.quiet()
    shown = metrics.text().decode()
    assert 'lifecycle_gate_over_limit_total{gate="in_flight"} 1.0' in shown
    assert 'lifecycle_gate_over_limit_total{gate="admission-bodies"} 1.0' in shown


@pytest.mark.parametrize("size", [10, 100_000])
async def test_text_waits_behind_no_pictures(size: int) -> None:
    """However long it is: what it needs is not theirs."""
    payloads = Gate(bytes=10**6, name="payloads")
    fields = {"model": "sim", "messages": user("x"), "max_tokens": 1}
    fields["padding"] = "x" * size
    async with asyncio.timeout(120), running(gate=payloads) as server:
        with payloads.try_admit(bytes=10**6):
            answer = await answer_to(server.port, json.dumps(fields).encode())
            assert answer[0] == 200
        await server.quiet()


async def test_says_no_to_an_id_in_use_before_the_body_is_sent() -> None:
    """The client can send all of it, and then reads why."""
    fields = {"model": "sim", "messages": user("x"), "max_tokens": 2000}
    first = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    second = json.dumps({**fields, "padding": "x" * 20_000_000}).encode()
    mine = b"x-request-id: mine"
    async with (
        asyncio.timeout(120),
        running("--sim-decode-step=0.05") as server,
    ):
        reader, writer = await post(server.port, first, mine)
        await reader.readline()
        status, _, document = await answer_to(server.port, second, mine)
        assert (status, document["error"]["code"]) == (409, "session_busy")
        writer.close()
        await server.quiet()


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("why", REFUSALS)
async def test_says_no_in_each_api(path: str, why: str) -> None:
    """Each reason has its status, and only where it helps a time to come back."""
    status, comes_back, should = REFUSALS[why]
    in_flight = full("in_flight")
    settings = AppSettings(model="sim", body_bytes=2000, per_client=1)
    async with (
        asyncio.timeout(120),
        running(in_flight=in_flight, settings=settings) as server,
    ):
        if why == "draining":
            server.service.admission.close()
            for gate in server.service.gates:
                gate.close()
        held = in_flight.try_admit() if why == "full" else None
        ask = dict(ASKS[path])
        if why == "too large":
            ask["padding"] = "x" * 3000
        answer = await raw(server, path, json.dumps(ask).encode(), why == "share")
        if held is not None:
            held.release()
    head, _, document = answer.partition(b"\r\n\r\n")
    expected = 529 if (path, status) == ("/v1/messages", 503) else status
    assert head.startswith(b"HTTP/1.1 %d" % expected), answer
    lines = head.decode().lower().split("\r\n")[1:]
    fields = dict(line.split(": ", 1) for line in lines)
    assert ("retry-after" in fields) == ("retry-after-ms" in fields) == bool(comes_back)
    if comes_back:
        assert 0 < int(fields["retry-after-ms"]) <= 60_000
        assert int(fields["retry-after"]) == math.ceil(
            int(fields["retry-after-ms"]) / 1000
        )
    assert fields.get("x-should-retry") == should
    assert json.loads(document)["error"]["message"]


async def raw(server: Any, path: str, ask: bytes, used_up: bool) -> bytes:
    """Send *ask*; behind another one of the same client where the share is to be used up."""
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
    head += f"content-length: {len(ask)}\r\n\r\n"
    first = None
    if used_up:
        first = await asyncio.open_connection("127.0.0.1", server.port)
        waits = head.encode()[:-2] + b"expect: 100-continue\r\n\r\n"
        first[1].write(waits)  # and no body: it is being read
        await first[0].readuntil(b"100 Continue\r\n\r\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + ask)
    answer = await reader.read()
    for each in (writer, *([first[1]] if first else [])):
        each.close()
        await each.wait_closed()
    return answer


async def test_refuses_at_once_what_would_come_too_late() -> None:
    """Behind a long queue, a client with a short timeout is refused, others wait."""
    in_flight = Gate(slots=1, max_waiting=64, name="in_flight")
    slow = body("x", max_tokens=30, ignore_eos=True)
    async with (
        asyncio.timeout(120),
        running("--sim-decode-step=0.02", in_flight=in_flight) as server,
    ):
        line = [asyncio.create_task(answer_to(server.port, slow)) for _ in range(12)]
        hasty = b"x-stainless-read-timeout: 1"
        patient = b"x-stainless-read-timeout: 600"
        await server.until(lambda: in_flight.statistics().waiting == 11)
        # These teach it how fast the line moves.
        await server.until(lambda: in_flight.statistics().released >= 1)
        line += [asyncio.create_task(answer_to(server.port, slow, patient))]
        await server.until(lambda: in_flight.statistics().released >= 4)
        line += [asyncio.create_task(answer_to(server.port, slow, patient))]
        await server.until(lambda: in_flight.statistics().waiting >= 8)
        with noted_pauses() as pauses:
            began = asyncio.get_running_loop().time()
            status, headers, document = await answer_to(server.port, slow, hasty)
            assert asyncio.get_running_loop().time() - began < 0.9 + pauses()
        assert (status, document["error"]["code"]) == (503, "server_overloaded")
        assert "retry-after" in headers
        assert [answer[0] for answer in await asyncio.gather(*line)] == [200] * 14
        await server.quiet()
        assert server.service.sessions.statistics().outcomes["refused"] == 1
        status, _, _ = await answer_to(server.port, body("x"), hasty)
        assert status == 200


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file"])
async def test_refuses_media_that_it_has_no_use_for(kind: str) -> None:
    """Audio, video and files are refused by name, with the place where they stand."""
    part = {"type": kind, kind: {"data": "canary", "url": "canary", "format": "wav"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    async with asyncio.timeout(120), running() as server:
        status, _, document = await answer_to(server.port, body("x", messages=messages))
        error = document["error"]
        assert (status, error["code"]) == (400, "unsupported_media")
        assert error["param"] == "messages[0].content[1].type"
        assert "send text and images" in error["message"]
        assert "canary" not in json.dumps(document)


async def test_learns_what_images_become_and_tells() -> None:
    """The ratio of tensors to their estimate is a metric, and moves what is asked for."""
    pytest.importorskip("prometheus_client")

    class Small(GatedProcessor):
        def prepare(self, chat: Any) -> Any:
            made = super().prepare(chat)
            made.tensors["pixels"] = made.tensors["pixels"][:1].copy()
            return made

    processor = Small()
    processor.release.set()
    metrics = Metrics()
    gate = Gate(bytes=10**8, name="payloads", observer=metrics)
    async with (
        asyncio.timeout(120),
        running(processor=processor, gate=gate, metrics=metrics) as server,
        server.client() as client,
    ):
        for _ in range(3):
            await answer_to(server.port, body("x", encoded(64, 64)))
        url = f"http://127.0.0.1:{server.admin_port}/metrics"
        text = (await client._client.get(url)).text
    (ratio,) = server.service.admission.ratios.values()
    assert 0.8 < ratio < 0.9
    labels = 'below_bytes="262144",model="sim"'
    assert f"lifecycle_estimate_ratio{{{labels}}} {ratio}" in text
    assert 'lifecycle_gate_estimate_ratio_bucket{gate="payloads",le="0.1"} 3.0' in text
