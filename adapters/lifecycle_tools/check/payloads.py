"""The bodies that are sent: small honest ones, and bombs.  All are made in memory."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType

PATHS: dict[str, str] = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
# What a response of each API has at its top.
FIELDS: dict[str, str] = {"chat": "choices", "messages": "content"}


def generation(
    model: str,
    *,
    api: str = "chat",
    tokens: int,
    stream: bool,
    images: tuple[bytes, ...] = (),
    more: Mapping[str, object] = MappingProxyType({}),
) -> bytes:
    """Return the body of a request for *tokens* tokens, with *more* fields."""
    content: object = "Count to one thousand, one number a line."
    if images:
        content = [_image(image, api) for image in images]
        content.append({"type": "text", "text": "Describe."})
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "stream": stream,
            **more,
        }
    ).encode()


def _image(data: bytes, api: str) -> dict[str, object]:
    text = base64.b64encode(data).decode()
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": text}
        return {"type": "image", "source": source}
    url = {"url": f"data:image/png;base64,{text}"}
    return {"type": "image_url", "image_url": url}


def _chunk(name: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def _png(width: int, height: int, *, bits: int, color: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@functools.cache
def picture(side: int) -> bytes:
    """Return a valid grey PNG of *side* x *side* pixels, one bit each."""
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(6)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return _png(side, side, bits=1, color=0, data=data)


def declared_picture(side: int) -> bytes:
    """Return a PNG that declares *side* x *side* pixels and has almost none."""
    data = zlib.compress(bytes(1000))
    return _png(side, side, bits=8, color=2, data=data)


def truncated_picture() -> bytes:
    """Return the first half of a PNG."""
    whole = picture(256)
    return whole[: len(whole) // 2]


def nested(depth: int) -> bytes:
    """Return JSON of *depth* arrays, each in the one before."""
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


@functools.cache
def gzip_bomb(size: int) -> bytes:
    """Return *size* zero bytes, compressed."""
    return gzip.compress(bytes(size), compresslevel=6)
