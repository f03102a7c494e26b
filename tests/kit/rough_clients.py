"""Clients as the real world has them, by raw sockets: good, slow, rude and gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from http_kit import png, user

PATHS = ("/v1/chat/completions", "/v1/messages")
_IMAGES = tuple(png(side, side) for side in (32, 300, 1000))


@dataclass(slots=True)
class Answer:
    """The answer that a client received.

    Attributes:
        status: 0 if the head of the answer never came whole.
        body: What came of it.
        whole: Whether it ended as HTTP says, and not by a cut.
    """

    status: int = 0
    body: bytes = b""
    whole: bool = False

    @property
    def answered(self) -> bool:
        """Whether the client knows how it went: an end, or an error, in its protocol."""
        if not self.whole:
            return False
        if not self.body.startswith((b"data:", b"event:")):
            return isinstance(json.loads(self.body), dict)
        last = self.body.strip().rpartition(b"\n\n")[2]
        ends = (b"[DONE]", b'"error"', b"message_stop", b'"response.')
        return any(each in last for each in ends)


def body_of(draw: random.Random, path: str, tokens: int, *, stream: bool) -> bytes:
    """A request for so many tokens, with an image now and then."""
    fields: dict[str, Any] = {"model": "sim", "max_tokens": tokens, "stream": stream}
    content: list[Any] = ["go"]
    if path.endswith("completions") and draw.random() < 0.3:
        content.append(draw.choice(_IMAGES))
    return json.dumps({**fields, "messages": user(*content)}).encode()


def request_of(path: str, body: bytes, key: str | None = None) -> bytes:
    """The whole request, the only one on its connection."""
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
    if key is not None:
        head += f"authorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def connected(
    port: int, *, small: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is dropped at the end; *small* has hardly a buffer."""
    peer = socket.socket()
    peer.setblocking(False)
    if small:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
        limit = 4096 if small else 2**16
        reader, writer = await asyncio.open_connection(sock=peer, limit=limit)
    except BaseException:
        peer.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_answer(reader: asyncio.StreamReader, into: Answer) -> None:
    """Read one answer to its end, keeping what came where it is cut."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        into.status = int(head.split()[1])
        length = head.partition("content-length: ")[2].split("\r\n")[0]
        if length:
            into.body = await reader.readexactly(int(length))
            into.whole = True
            return
        while size := int(await reader.readuntil(b"\r\n"), 16):
            into.body += await reader.readexactly(size)
            await reader.readexactly(2)
        into.whole = True


async def ask(
    port: int, path: str, body: bytes, into: Answer, *, key: str | None = None
) -> None:
    """A good client: asks, and reads all."""
    async with connected(port) as (reader, writer):
        writer.write(request_of(path, body, key))
        await writer.drain()
        await read_answer(reader, into)


async def ask_and_leave(port: int, path: str, body: bytes, draw: random.Random) -> None:
    """Asks and hangs up: while it sends, while it waits, or while it reads."""
    whole = request_of(path, body)
    async with connected(port) as (reader, writer):
        if draw.random() < 0.2:
            whole = whole[: draw.randrange(len(whole))]
        writer.write(whole)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(draw.expovariate(1 / 0.05)):
                if draw.random() < 0.2:
                    writer.write_eof()
                while await reader.read(4096):
                    pass
        if draw.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def ask_and_never_read(port: int, path: str, body: bytes) -> None:
    """Asks, and takes nothing of the answer until it is cancelled."""
    async with connected(port, small=True) as (_, writer):
        writer.write(request_of(path, body))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()


async def begin_and_stop(port: int, sent: bytes, into: Answer) -> None:
    """Sends *sent*, which is not all, and waits for what is said about it."""
    async with connected(port) as (reader, writer):
        writer.write(sent)
        await read_answer(reader, into)
