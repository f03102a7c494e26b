"""What comes behind a last answer, given before the body was there."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from typing import Any

import pytest
import uvloop
from asgi_kit import serving
from http_kit import ENV

from lifecycle_engine import ConnectionLimits, http_protocol


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_answers_a_client_that_is_still_sending_before_the_end(loop: str) -> None:
    """Refused by its head, a last request is heard out, not reset; it hears the end."""
    size = 20_000_000
    asked = b"POST / HTTP/1.1\r\nconnection: close\r\nhost: x\r\n"
    asked += b"content-length: %d\r\n\r\n" % size

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", b"2")
        await send({"type": "http.response.start", "status": 503, "headers": [length]})
        await send({"type": "http.response.body", "body": b"no"})

    def client(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
            peer.sendall(asked)
            answer = peer.recv(4096)
            peer.sendall(bytes(size // 2))
            while part := peer.recv(4096):
                answer += part
            peer.sendall(bytes(size - size // 2))
            return answer

    async def main() -> bytes:
        http = http_protocol(ConnectionLimits(rest=20))
        async with serving(refusing, http=http, lifespan="off") as port:
            return await asyncio.to_thread(client, port)

    factory = asyncio.new_event_loop if loop == "asyncio" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        answer = runner.run(asyncio.wait_for(main(), 30))
    assert answer.startswith(b"HTTP/1.1 503")
    assert answer.endswith(b"no")
    assert b"connection: close" in answer


@pytest.mark.asyncio
async def test_reads_no_client_for_ever() -> None:
    """A client that keeps sending after a last answer has a limited time."""

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", b"0")
        await send({"type": "http.response.start", "status": 503, "headers": [length]})
        await send({"type": "http.response.body", "body": b""})

    http = http_protocol(ConnectionLimits(rest=0.3))
    async with (
        asyncio.timeout(120),
        serving(refusing, http=http, lifespan="off") as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nconnection: close\r\nhost: x\r\n")
        writer.write(b"content-length: 100000000\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        with pytest.raises(ConnectionError):
            while True:  # only who sends hears that it was cut off
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.transport.abort()


@pytest.mark.asyncio
async def test_ends_beside_a_client_that_neither_sends_the_body_nor_leaves() -> None:
    """A client that stays after ``Connection: close`` is not waited for.

    That it was refused is all that is logged.
    """
    argv = ["-m", "lifecycle_engine.cli", "serve", "--runner", "sim", "--port", "0"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, "--drain", "0.2", stdout=pipe, stderr=pipe, env=ENV
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(120):
            port = int((await process.stdout.readline()).split(b":")[-1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n")
        writer.write(b"content-length: 1000000\r\n\r\n")
        async with asyncio.timeout(120):
            await reader.readuntil(b"100 Continue\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
            lines = (await process.stderr.read()).splitlines()
            # On a busy machine a task may need longer than uvicorn's one second.
            lines = [it for it in lines if b"graceful shutdown exceeded" not in it]
            told = [
                b" POST /generate refused with 503 shutting_down: " in it
                for it in lines
            ]
            assert told == [True], lines
            assert await process.wait() == 0
        writer.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_sends_in_one_write_what_one_turn_has() -> None:
    """Messages between two turns of the event loop reach the client together."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"two", b""):
            time.sleep(0.05)  # noqa: ASYNC251 - time to arrive, if it was sent
            more = bool(part)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    def first(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            return client.recv(65536)

    async def ask() -> bytes:
        async with serving(app, http=http_protocol()) as port:
            return await asyncio.to_thread(first, port)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as it:
        assert it.run(ask()).endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
