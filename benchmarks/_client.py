"""A minimal HTTP client: one connection for each request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import re
import signal
import sys
from typing import Any, Self


def picture_url(pixels: int, *, noise: bool = False) -> str:
    """Return a PNG as a data URL: of one colour, or of noise (three bytes a pixel)."""
    from PIL import Image

    side = int(pixels**0.5)
    size = side, pixels // side
    if noise:
        data = random.Random(1).randbytes(3 * size[0] * size[1])
        image = Image.frombytes("RGB", size, data)
    else:
        image = Image.new("RGB", size, (10, 200, 30))
    out = io.BytesIO()
    image.save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def question(content: Any, max_tokens: int) -> bytes:
    """Return the bytes of a request for a stream of exactly *max_tokens* tokens."""
    body = json.dumps(
        {
            "model": "sim",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def about_picture(pixels: int, max_tokens: int, *, noise: bool = False) -> bytes:
    """Return the bytes of a request about a picture."""
    url = picture_url(pixels, noise=noise)
    image = {"type": "image_url", "image_url": {"url": url}}
    return question([image], max_tokens)


async def ask(port: int, request: bytes) -> str:
    """Send a request; return the kind of failure, or an empty string."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return "unconnected"
    try:
        writer.write(request)
        answer = await reader.read()
    except OSError:
        return "reset"
    finally:
        writer.close()
    if b"data: [DONE]" in answer:
        return ""
    code = re.search(rb'"code": ?"(\w+)"', answer[-1000:])
    return code[1].decode() if code else "cut"


async def get(port: int, path: str) -> bytes:
    """Return the response to a GET, including its head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    return answer


async def status(port: int) -> dict[str, Any]:
    """Return the server's status."""
    answer = await get(port, "/_lifecycle/status")
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


def unwind_when_terminated() -> None:
    """Make SIGTERM raise, so that context managers stop their servers."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


class Server:
    """A server in its own process, from its announcement to its exit.

    Args:
        argv: Starts it; it prints its address, which ends in the port, when it is
            ready.

    Attributes:
        pid: Of the API process.
        engine: Pid of the engine.
        port: Where it listens.
    """

    pid: int
    engine: int
    port: int

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv

    async def __aenter__(self) -> Self:
        """Start it and wait until it is ready.

        Raises:
            RuntimeError: It ended instead.
            TimeoutError: It did not come up in a minute.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(60):
                line = await self._process.stdout.readline()
                if not line:
                    raise RuntimeError("the server did not come up; see above")
                self.pid = self._process.pid
                self.port = int(line.rpartition(b":")[2])
                line = await self._process.stdout.readline()  # of the operator's pages
                admin = int(line.rpartition(b":")[2])
                self.engine = int((await status(admin))["engine"]["pid"])
        except BaseException:
            self._process.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop it; kill it if that takes too long."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
