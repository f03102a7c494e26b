"""Clients that leave: at each moment of a request, and in each way that TCP knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from typing import Any

from http_kit import data_url, png
from rough_clients import Answer, connected, read_answer

MOMENTS = (
    "before the head",
    "in the head",
    "before the body",
    "in the body",
    "in line",
    "at the head of the answer",
    "in the answer",
    "behind the answer",
    "in the next request",
    "in the pipe",
)
WAYS = ("close", "reset", "half-close", "silence")
_IMAGES = tuple(png(side, side) for side in (32, 300, 1000))
# A server that hears of a half-close, or of no head, has closed by then.
_PATIENCE = 25.0


class Stays(Exception):
    """The server kept a connection whose client had left."""


def question(draw: random.Random, *, longest: float = 100) -> tuple[str, bytes]:
    """A path and a body for it, of any form that is served."""
    tokens = 1 + min(int(draw.expovariate(1 / longest)), 4000)
    stream = draw.random() < 0.6
    image = draw.choice(_IMAGES) if draw.random() < 0.3 else None
    url = image and data_url(image)
    fields: dict[str, Any] = {"model": "sim", "stream": stream, "ignore_eos": True}
    path = draw.choice(("chat/completions", "messages", "responses", "generate"))
    text = {"type": "text", "text": "go"}
    parts: list[dict[str, Any]] = [text]
    if path == "responses":
        parts = [{"type": "input_text", "text": "go"}]
        parts += [{"type": "input_image", "image_url": url}] if url else []
        fields["input"] = [{"role": "user", "content": parts}]
        fields["max_output_tokens"] = tokens
    elif path == "generate":
        fields |= {"text": "go", "max_tokens": tokens, "n": draw.choice((1, 1, 3))}
        fields |= {"images": [url.partition(",")[2]]} if url else {}
    else:
        if url and path == "messages":
            source = {"type": "base64", "media_type": "image/png"}
            source["data"] = url.partition(",")[2]
            parts.append({"type": "image", "source": source})
        elif url:
            parts.append({"type": "image_url", "image_url": {"url": url}})
        fields["messages"] = [{"role": "user", "content": parts}]
        fields["max_tokens"] = tokens
    prefix = "/" if path == "generate" else "/v1/"
    return prefix + path, json.dumps(fields).encode()


def on_the_wire(draw: random.Random, path: str, body: bytes) -> tuple[bytes, bytes]:
    """A head and a body of declared length, or in chunks; the connection may stay."""
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\n"
    if draw.random() < 0.7:
        return f"{head}content-length: {len(body)}\r\n\r\n".encode(), body
    size = draw.choice((100, 5000, 10**6))
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in parts)
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode(), chunks + b"0\r\n\r\n"


async def leave(port: int, moment: str, way: str, draw: random.Random) -> None:
    """Be a client that leaves at this *moment*, or when it has waited long enough.

    Raises:
        Stays: The server did not close a connection that its client had closed.
        OSError: The server closed first.
    """
    # Who reads nothing is to have something that he does not read.
    full = way == "silence" and moment in ("in line", "in the answer")
    async with connected(port, small=full) as (reader, writer):
        longest = 2000 if full else 100
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(1, 5)):
                await _until(moment, reader, writer, draw, longest=longest)
        await _part(way, reader, writer, draw)


async def _until(
    moment: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    draw: random.Random,
    *,
    longest: float,
) -> None:
    """Do what a good client does until then."""
    at = MOMENTS.index(moment)
    head, body = on_the_wire(draw, *question(draw, longest=longest))
    if moment == "before the head":
        return
    if moment == "in the head":
        writer.write(head[: draw.randrange(1, len(head))])
    elif moment == "before the body":
        writer.write(head)
    elif moment == "in the body":
        writer.write(head + body[: draw.randrange(1, len(body))])
    elif moment == "in the pipe":
        for _ in range(draw.randrange(2, 12)):
            writer.write(b"".join(on_the_wire(draw, *question(draw))))
    else:
        writer.write(head + body)
    if at in (4, 9):
        await asyncio.sleep(draw.expovariate(1 / 0.02))
    elif at in (5, 6):
        await reader.read(1)
        for _ in range(draw.randrange(1, 9) * (at == 6)):
            await reader.read(4096)
    elif at in (7, 8):
        await read_answer(reader, Answer())
        writer.write(head[: draw.randrange(1, len(head))] if at == 8 else b"")


async def _part(
    way: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    draw: random.Random,
) -> None:
    """Leave; the block that the connection belongs to drops what is left of it."""
    if way == "close":
        # One that has read all says FIN; the system makes a reset of unread bytes.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await writer.drain()
        writer.close()
    elif way == "half-close":
        writer.write_eof()
        try:
            async with asyncio.timeout(_PATIENCE):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            raise Stays from None
    else:
        if way == "silence":
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(draw.uniform(0, 3))
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
