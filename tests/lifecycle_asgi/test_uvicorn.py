"""Both middlewares under a real uvicorn, with clients that hang up for real."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest
from asgi_kit import serving
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import StreamingResponse

from lifecycle_asgi import BodyLimit, LifecycleMiddleware, request_of

pytestmark = pytest.mark.asyncio
REQUEST = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\nbody"


class Probe:
    """An application that records how it ended."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.working = asyncio.Event()
        self.ended: asyncio.Future[bool] = asyncio.Future()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Wait, or stream in one of two ways, until cancelled."""
        try:
            while (await receive())["more_body"]:
                pass
            if self.form == "waits":
                self.working.set()
                await asyncio.sleep(3600)
            await StreamingResponse(self.parts())(scope, receive, send)
        finally:
            self.ended.set_result(request_of(scope).client_gone)

    async def parts(self) -> Any:
        """Parts without end."""
        while True:
            yield b"x" * 50_000
            self.working.set()
            if self.form == "streams":
                await asyncio.sleep(3600)


async def _dispatch(request: Any, call_next: Any) -> Any:
    return await call_next(request)


STACKS = {
    "plain": LifecycleMiddleware,
    "above": lambda app: LifecycleMiddleware(BaseHTTPMiddleware(app, _dispatch)),
    "below": lambda app: BaseHTTPMiddleware(LifecycleMiddleware(app), _dispatch),
}


def _close(peer: socket.socket) -> None:
    peer.close()


def _reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def _half_close(peer: socket.socket) -> None:
    peer.shutdown(socket.SHUT_WR)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("leave", [_close, _reset, _half_close])
@pytest.mark.parametrize("form", ["waits", "streams", "never-suspends"])
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
async def test_detects_every_kind_of_disconnect(
    stack: Any, form: str, leave: Any, http: str
) -> None:
    """FIN, RST and half-close end every form of work on uvicorn (fault-14)."""
    probe = Probe(form)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(120), serving(stack(probe), http=http) as port:
        with socket.socket() as peer:
            peer.setblocking(False)
            await loop.sock_connect(peer, ("127.0.0.1", port))
            await loop.sock_sendall(peer, REQUEST)
            await probe.working.wait()
            leave(peer)
            if leave is _half_close:
                # Half-closed is gone, as on every server; one that still writes
                # finds out when its peer has read what is under way.
                while not probe.ended.done() and await loop.sock_recv(peer, 65536):
                    pass
            gone = await probe.ended
    assert gone


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_serves_next_request_on_same_connection(http: str) -> None:
    """The reader takes nothing of the next request along."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        headers = [(b"content-length", str(len(body)).encode())]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    async with (
        asyncio.timeout(120),
        serving(LifecycleMiddleware(app), http=http) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(REQUEST)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(4) == b"body"
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("declared", [True, False])
async def test_answers_413_to_client_that_is_still_sending(
    http: str, declared: bool
) -> None:
    """A 64 MB body is refused with an answer its sender can read (fault-16)."""
    size, piece = 64_000_000, b"x" * 1_000_000
    app = LifecycleMiddleware(BodyLimit(Probe("waits"), max_bytes=100_000))
    async with asyncio.timeout(120), serving(app, http=http) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        length = (
            b"content-length: %d" % size if declared else b"transfer-encoding: chunked"
        )
        writer.write(b"POST / HTTP/1.1\r\nhost: here\r\n" + length + b"\r\n\r\n")
        for _ in range(size // len(piece)):
            writer.write(piece if declared else b"f4240\r\n" + piece + b"\r\n")
            await writer.drain()
        writer.write(b"" if declared else b"0\r\n\r\n")
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()
