"""Trailers of a request are no headers, whatever a server does with them (fault-14)."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import servers
from asgi_kit import serving
from servers import KINDS, Kind

from lifecycle_asgi import Admission
from lifecycle_asgi.uvicorn_protocol import HeadersOnly

PATIENCE_S = 60.0
NAMES = ["host", "expect", "connection", "transfer-encoding"]
HEAD = (
    "POST /{} HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\n"
    "connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
)
BODY = b"3\r\nabc\r\n0\r\n"
TRAILERS = (
    b"x-user: admin\r\nauthorization: Bearer k\r\nx-forwarded-for: 10.0.0.1\r\n\r\n"
)


def names_told(port: int, path: str) -> Any:
    """Send trailers once the body was asked for; what the application says it saw."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as peer:
        peer.sendall(HEAD.format(path).encode())
        answer = peer.makefile("rb")
        assert answer.readline().startswith(b"HTTP/1.1 100 ")
        peer.sendall(BODY + TRAILERS)
        said = answer.read()
    return json.loads(said[said.index(b"[[") : said.index(b"]]") + 2])


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_shows_no_trailer_as_a_header(kind: Kind) -> None:
    """Neither before the application reads the body, nor after."""
    if not kind.installed:
        pytest.skip(f"{kind.package} is not installed")
    with servers.running(kind, "names") as server:
        for path in ("admission", "middleware", "limit"):
            for seen in names_told(server.port, path):
                assert sorted(seen) == sorted(NAMES), path


@pytest.mark.asyncio
async def test_ignores_trailers_that_arrive_with_their_head() -> None:
    """uvicorn's own class would have appended them before it calls an application."""
    seen: list[list[bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append([name for name, _ in scope["headers"]])
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    named = f"{HeadersOnly.__module__}:{HeadersOnly.__name__}"
    admitted = Admission(app, environment={})
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
    async with asyncio.timeout(PATIENCE_S), serving(admitted, http=named) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for more in (b"", b"x-more: 1\r\n"):  # on the same connection
            writer.write(head + more + b"\r\n" + BODY + TRAILERS)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
    own = [b"host", b"transfer-encoding"]
    assert seen == [own, [*own, b"x-more"]]
