"""Refusals of full, too large, lost and late: answers and ``Retry-After``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from http_kit import (
    GatedProcessor,
    Quiet,
    answer_to,
    data_url,
    make_engine,
    png,
    running,
    user,
)

from lifecycle import Gate
from lifecycle_asgi import MediaProfile, estimate_memory
from lifecycle_engine import (
    AppSettings,
    Deadlines,
    MediaLimits,
    read_image_size,
)

pytestmark = pytest.mark.asyncio
SLOW = ("--sim-decode-step=0.05",)


def body(*content: str | bytes, **fields: Any) -> bytes:
    """A request body."""
    ask = {"model": "sim", "messages": user(*content), "max_tokens": 2, **fields}
    return json.dumps(ask).encode()


def weight(image: bytes) -> int:
    """What the gate is charged for *image*."""
    return estimate_memory([read_image_size(image, MediaLimits(), param="here")]).total


@pytest.mark.parametrize(("seen", "charged"), [(None, 39), (3_000_000, 21)])
async def test_charges_decoded_weight_before_decoding(
    seen: int | None, charged: int
) -> None:
    """A 70 KiB PNG of 12 megapixels is charged as 12 megapixels, before a decode (S8).

    The tensors are charged as many pixels as the model sees.
    """
    image, processor = png(3000, 4000), GatedProcessor()
    processor.media = MediaProfile(tensor_pixels=seen)
    assert len(image) < 70 * 1024
    async with running(processor=processor) as server:
        asking = asyncio.create_task(answer_to(server.port, body("see", image)))
        await server.until(lambda: server.service.payloads.statistics().bytes_in_use)
        held = server.service.payloads.statistics().bytes_in_use
        assert held == len(image) + 12_000_000 * charged
        processor.release.set()
        status, _, _ = await asking
        assert status == 200
        await server.quiet()


@pytest.mark.parametrize("room", [2**30, 5_000_000])
async def test_charges_what_making_a_payload_takes(room: int) -> None:
    """Copies that a processor makes are charged meanwhile; at most, it has all alone."""
    image, processor = png(300, 400), GatedProcessor()
    processor.copies = 2
    most = weight(image) + 2 * 24 * 120_000
    assert weight(image) < 5_000_000 < most
    async with running(gate=Gate(bytes=room), processor=processor) as server:
        payloads = server.service.payloads
        asking = asyncio.create_task(answer_to(server.port, body("see", image)))
        await server.until(lambda: payloads.statistics().bytes_in_use)
        assert payloads.statistics().bytes_in_use == min(most, room)
        processor.release.set()
        status, _, _ = await asking
        assert status == 200
        await server.quiet()


async def test_refuses_what_never_fits_at_once() -> None:
    """What not even all bytes are enough for is 413, and nothing is allocated for it."""
    image, processor = png(3000, 4000), GatedProcessor()
    gate = Gate(bytes=weight(image) * 3 // 4 - 1, name="payloads")
    async with running(gate=gate, processor=processor) as server:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        status, headers, document = await answer_to(server.port, body("see", image))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert status == 413
        assert document["error"]["code"] == "request_too_large"
        assert "retry-after" not in headers
        assert after - before < 5 * 1024  # KiB (fault-17)
        assert not processor.entered.acquire(blocking=False)
        await server.quiet()
        assert server.service.sessions.statistics().outcomes["refused"] == 1


async def test_lets_text_pass_a_full_payload_gate() -> None:
    """Text alone never waits for payload bytes."""
    async with running() as server, server.client() as client:
        with server.service.payloads.try_admit(bytes=600_000_000):
            answer = await client.chat.completions.create(
                model="sim", messages=user("hello"), max_tokens=2
            )
        assert answer.usage.completion_tokens == 2
        await server.quiet()


@pytest.mark.parametrize("which", ["payloads", "in_flight"])
async def test_tells_when_to_come_back_where_gate_is_full(which: str) -> None:
    """A full line is 503 with both headers, 1 to 60 seconds."""
    gate = Gate(bytes=10**9, slots=1, max_waiting=0, name="payloads")
    in_flight = Gate(slots=1, max_waiting=0, name="in_flight")
    async with running(gate=gate, in_flight=in_flight) as server:
        full = gate if which == "payloads" else in_flight
        with full.try_admit():
            status, headers, document = await answer_to(
                server.port, body("see", png(64, 64))
            )
        assert status == 503
        assert document["error"]["code"] == "server_overloaded"
        assert document["error"]["type"] == "server_error"
        seconds, millis = int(headers["retry-after"]), int(headers["retry-after-ms"])
        assert 1 <= seconds <= 60
        assert (seconds - 1) * 1000 < millis <= seconds * 1000
        await server.quiet()


async def test_tells_when_waiting_was_in_vain() -> None:
    """A request that waited its whole time is 503, too."""
    gate = Gate(bytes=10**9, slots=1, max_wait=0.01, name="payloads")
    async with running(gate=gate) as server:
        with gate.try_admit():
            status, headers, _ = await answer_to(server.port, body("see", png(64, 64)))
        assert status == 503
        assert "retry-after" in headers
        await server.quiet()


async def test_is_retried_by_sdk_after_the_time_in_the_refusal() -> None:
    """The SDK retries after ``Retry-After``, and is served."""
    gate = Gate(bytes=10**9, slots=1, max_waiting=0, name="payloads")
    async with running(gate=gate) as server, server.client(max_retries=2) as client:
        lease = gate.try_admit()
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="sim", messages=user(png(64, 64)), max_tokens=1
            )
        )
        await server.until(lambda: gate.statistics().refused == 1)
        lease.release()
        assert (await asking).usage.completion_tokens == 1
        await server.quiet()


async def test_refuses_id_in_use_and_serves_it_again_afterwards() -> None:
    """An id belongs to one request at a time: 409, and free when it ends (fault-20)."""
    name = b"x-request-id: mine"
    processor = GatedProcessor()
    async with running(processor=processor) as server:
        first = asyncio.create_task(answer_to(server.port, body("a"), name))
        await server.until(server.service.sessions.live)
        status, _, document = await answer_to(server.port, body("b"), name)
        assert status == 409
        assert document["error"]["code"] == "session_busy"
        processor.release.set()
        assert (await first)[0] == 200
        assert (await answer_to(server.port, body("c"), name))[0] == 200
        await server.quiet()


async def test_answers_503_until_engine_is_there(tmp_path: Path) -> None:
    """Without an engine: not ready, 503 with Retry-After, never a hang (fault-29)."""
    begin = tmp_path / "begin"
    engine = make_engine(begin_when=begin)
    async with running(engine=engine, wait=False) as server, server.client() as client:
        service = server.service
        assert not service.engine.ready
        status, headers, document = await answer_to(server.port, body("early"))
        assert status == 503
        assert document["error"]["code"] == "engine_lost"
        assert 1 <= int(headers["retry-after"]) <= 60
        root = f"http://127.0.0.1:{server.port}"
        answer = await client._client.get(f"{root}/ready")
        assert answer.status_code == 503
        begin.touch()
        await service.engine.wait_ready()
        answer = await client._client.get(f"{root}/ready")
        assert answer.status_code == 200
        assert (await answer_to(server.port, body("now")))[0] == 200
        await server.quiet()


async def test_tells_every_stream_once_that_engine_died(tmp_path: Path) -> None:
    """SIGKILL under 16 streams: each fails once, none hangs (fault-22)."""
    begin = tmp_path / "begin"
    begin.touch()
    # Few tokens: a busy machine has to read them all before it reads the error.
    engine = make_engine("--sim-decode-step=0.2", "--max-batch=16", begin_when=begin)
    async with running(engine=engine) as server, server.client() as client:
        service, told, streaming = server.service, [], asyncio.Semaphore(0)

        async def ask(i: int) -> None:
            stream = await client.chat.completions.create(
                model="sim", messages=user(f"{i}"), max_tokens=4000, stream=True
            )
            try:
                await anext(stream)
                streaming.release()
                async for _ in stream:
                    pass
            except openai.APIError as error:
                told.append(error.code)

        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for i in range(16):
                tasks.create_task(ask(i))
            for _ in range(16):
                await streaming.acquire()
            begin.unlink()
            os.kill(engine.pid, signal.SIGKILL)
        assert told == ["engine_lost"] * 16
        # A client reads the end of its stream before its session has closed.
        await server.until(lambda: not Quiet(service).left_here())
        assert service.sessions.statistics().outcomes["engine_lost"] == 16
        status, headers, _ = await answer_to(server.port, body("down"))
        assert status == 503
        assert 1 <= int(headers["retry-after"]) <= 60
        begin.touch()
        await engine.wait_ready()
        assert (await answer_to(server.port, body("up")))[0] == 200
        await server.quiet()


async def test_answers_503_where_engine_dies_before_first_token() -> None:
    """Before the first token the death of the engine is still a status to retry."""
    async with running("--sim-prefill-token=5") as server:
        service = server.service
        asking = asyncio.create_task(answer_to(server.port, body("wait", stream=True)))
        await server.until(
            lambda: [s for s in service.sessions.live() if s.phase == "started"]
        )
        os.kill(service.engine.pid, signal.SIGKILL)
        status, headers, document = await asking
        assert status == 503
        assert document["error"]["code"] == "engine_lost"
        assert "retry-after" in headers


@pytest.mark.parametrize("stream", [True, False])
async def test_tells_client_that_engine_is_too_slow(stream: bool) -> None:
    """A first token that does not come in time is 504, and the engine is ended."""
    settings = AppSettings(model="sim", deadlines=Deadlines(first_token=0.05))
    async with running("--sim-prefill-token=0.1", settings=settings) as server:
        status, headers, document = await answer_to(
            server.port, body("wait", stream=stream)
        )
        assert status == 504
        assert document["error"]["code"] == "engine_timeout"
        assert "retry-after" in headers
        await server.quiet()
        assert server.service.sessions.statistics().outcomes["deadline"] == 1


async def test_refuses_body_that_stands_still() -> None:
    """A body that stops arriving is 408; there never was a session (fault-15, S7)."""
    settings = AppSettings(model="sim", body_timeout=0.05)
    async with running(settings=settings) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        writer.write(head + b"content-length: 90\r\n\r\n{")
        async with asyncio.timeout(120):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()
        await server.quiet()
        assert server.service.sessions.statistics().outcomes["refused"] == 1


async def test_refuses_body_that_trickles() -> None:
    """A client that sends single bytes does not block others for hours."""
    settings = AppSettings(model="sim", body_timeout=0.4)
    async with running(settings=settings) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        writer.write(head + b"content-length: 60000000\r\n\r\n{")

        async def trickle() -> None:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(b" ")
                    await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        async with asyncio.timeout(120):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408")
        trickling.cancel()
        writer.close()
        await server.quiet()


async def test_serves_requests_beside_slow_bodies() -> None:
    """Five that declare all that fits and stand still are charged what they sent."""
    settings = AppSettings(model="sim", body_bytes=10**6, total_bytes=32 * 10**6)
    async with running(settings=settings) as server:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        slow = []
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(head + b"content-length: 1000000\r\n\r\n{")
            slow.append(writer)
        lane = server.service.admission.statistics
        await server.until(lambda: lane()["bodies"].waiting == 3)
        async with asyncio.timeout(120):
            small = await answer_to(server.port, body("small"))
            assert lane()["bodies"].waiting == 3
            large = await answer_to(server.port, body("x", padding="x" * 500_000))
        assert (small[0], large[0]) == (200, 200)
        assert lane()["bodies"].slots_in_use == 5
        for writer in slow:
            writer.close()
        await server.quiet()


async def test_reads_body_that_takes_its_time() -> None:
    """A large body may take longer than a small one."""
    settings = AppSettings(model="sim")
    async with running(settings=settings) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % (6 * 65536))
        for _ in range(6):
            writer.write(b" " * 65536)
            await asyncio.sleep(0.25)
        async with asyncio.timeout(120):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")  # it says nothing, but was read
        writer.close()
        await writer.wait_closed()


async def test_tells_stream_that_is_cancelled_by_id() -> None:
    """A stream that is cancelled by id ends with an error, not silently."""
    async with running(*SLOW) as server, server.client() as client:
        stream = await client.chat.completions.create(
            model="sim",
            messages=user("long"),
            max_tokens=4000,
            stream=True,
            extra_headers={"x-request-id": "mine"},
        )
        await anext(stream)
        await server.service.sessions.cancel("mine")
        with pytest.raises(openai.APIError) as caught:
            [_ async for _ in stream]
        assert caught.value.code == "cancelled"
        await server.quiet()


async def test_hides_its_own_mistakes() -> None:
    """A mistake of the server is a 500 that tells nothing, and loses nothing."""

    class Broken(GatedProcessor):
        def prepare(self, chat: Any) -> Any:
            raise RuntimeError("secret prompt")

    async with running(processor=Broken()) as server:
        status, _, document = await answer_to(server.port, body("x", png(64, 64)))
        assert status == 500
        assert document["error"]["type"] == "server_error"
        assert "secret" not in json.dumps(document)
        await server.quiet()
        assert server.service.sessions.statistics().outcomes["failed"] == 1


async def test_shows_itself_live() -> None:
    """The live view counts gates, sessions and both processes, without identities."""
    processor = GatedProcessor()
    async with running(processor=processor) as server, server.client() as client:
        url = f"http://127.0.0.1:{server.admin_port}"
        image = png(640, 480)
        asking = asyncio.create_task(
            answer_to(server.port, body("canary", image), b"x-request-id: canary")
        )
        await server.until(lambda: processor.entered.acquire(blocking=False))
        text = (await client._client.get(f"{url}/_lifecycle/status")).text
        view = json.loads(text)
        assert view["ready"]
        assert view["payloads"]["bytes_in_use"] == weight(image)
        assert view["in_flight"]["slots_in_use"] == 1
        assert view["sessions"]["phases"] == {"starting": 1}
        assert view["engine"]["status"]["live"] == 0
        assert view["engine"]["rss_bytes"] > 2**20
        assert view["process"]["rss_bytes"] > 2**20
        assert "canary" not in text
        processor.release.set()
        await asking
        public = f"http://127.0.0.1:{server.port}/health"
        health = (await client._client.get(public)).json()
        assert health == {"status": "ok", "engine": "serving"}
        await server.quiet()


async def test_keeps_canaries_out_of_errors_and_logs(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """No prompt, image, id or user name is in an error body or a log (law 12, S9, N11)."""
    canary = "canary-7f3a"
    image = data_url(png(64, 64)[:-30] + canary.encode())
    messages = user(canary)
    messages[0]["content"].append({"type": "image_url", "image_url": {"url": image}})
    cases = [
        {"messages": messages},
        {"messages": user(canary), "user": canary * 50},
        {"messages": user(canary), "model": canary},
        {"messages": user(canary), "tool_choice": [canary]},
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": user(canary), "stop": [canary, 7]},
        {"messages": user(canary), "max_tokens": 10**9},
        {"messages": [{"role": "user", "content": [{"type": canary}]}]},
    ]
    async with running() as server:
        for case in cases:
            ask = json.dumps({"model": "sim", **case}).encode()
            status, _, document = await answer_to(server.port, ask)
            assert 400 <= status < 500
            assert canary not in json.dumps(document)
        ask = b'{"' + canary.encode() + b'": nope}'
        assert canary not in json.dumps((await answer_to(server.port, ask))[2])
        await server.quiet()
    assert canary not in caplog.text
    assert canary not in "".join(capfd.readouterr())
