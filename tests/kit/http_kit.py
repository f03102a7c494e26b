"""What the HTTP tests share: an engine, images, and the question what is left."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import struct
import sys
import threading
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import openai
from asgi_kit import serving
from PIL import Image

from lifecycle import Gate
from lifecycle_engine import (
    AppSettings,
    Chat,
    Prepared,
    Service,
    SimProcessor,
    create_app,
)
from lifecycle_zmq import ZmqEngine

FAST = (
    "--sim-prefill-token=0",
    "--sim-prefill-pixel=0",
    "--sim-decode-step=0.001",
    "--sim-decode-lane=0",
)


ROOT = Path(__file__).parents[2]
# For processes of their own, where the import path is not ours.
ENV = {
    **os.environ,
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'adapters'}:{ROOT / 'tools'}",
    "OMP_NUM_THREADS": "1",
}


def make_engine(
    *options: str, begin_when: Path | None = None, **settings: Any
) -> ZmqEngine:
    """An engine process with the simulated runner, fast by default.

    Args:
        *options: Of the engine.
        begin_when: A file without which no process of it begins to load.
        **settings: Of `ZmqEngine`.
    """
    argv = [sys.executable, "-m", "lifecycle_engine.worker", "--runner=sim"]
    if begin_when is not None:
        wait = 'while ! [ -e "$0" ]; do sleep 0.01; done; exec "$@"'
        argv = ["sh", "-c", wait, str(begin_when), *argv]
    return ZmqEngine([*argv, *FAST, *options], env=ENV, **settings)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG."""
    crc = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def png(width: int, height: int) -> bytes:
    """A flat PNG of this size, small however large it is, of one bit for each pixel."""
    pack = zlib.compressobj(9)
    row = b"\0" + b"\x55" * (-(-width // 8))
    data = b"".join(pack.compress(row) for _ in range(height)) + pack.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def encoded(width: int = 32, height: int = 24, kind: str = "PNG", **save: Any) -> bytes:
    """An image in one of Pillow's formats."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(out, kind, **save)
    return out.getvalue()


def data_url(image: bytes, kind: str = "image/png") -> str:
    """*image* as the SDK's users send it."""
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def user(*content: str | bytes) -> list[dict[str, Any]]:
    """Messages of one user turn, of text and images."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            image = {"url": data_url(part)}
            parts.append({"type": "image_url", "image_url": image})
    return [{"role": "user", "content": parts}]


class Quiet:
    """Whether anything is left of the requests that a service has had."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def left_here(self) -> dict[str, int]:
        """What this process still holds, by name; empty when quiet."""
        sessions = self.service.sessions.statistics()
        left = {
            "live": sessions.live,
            "closing": sessions.closing,
            "payloads": sessions.payloads,
            "payload_bytes": sessions.payload_bytes,
            "ends_failed": sessions.ends_failed,
            "threads": self.service.threads.borrowed_tokens,
        }
        for gate in self.service.gates:
            now = gate.statistics()
            left[f"{gate.name}.slots"] = now.slots_in_use
            left[f"{gate.name}.bytes"] = now.bytes_in_use
            left[f"{gate.name}.waiting"] = now.waiting
            left[f"{gate.name}.lost"] = now.lost
        return {name: count for name, count in left.items() if count}

    async def reached(self) -> dict[str, Any]:
        """Wait until nothing is left anywhere; returns the engine's counters."""
        while True:
            status = await self.service.engine.status()
            backend = status["backend"]
            left = {**self.left_here(), "engine": status["live"]}
            left["slots"] = backend["slots"] - backend["slots_free"]
            left["engine_bytes"] = backend["payload_bytes"]
            if not any(left.values()):
                break
            await anyio.sleep(0.002)
        assert status["ends_before_start"] == 0
        assert status["duplicate_ends"] == 0
        assert status["starts"] == status["ends"] + status["lost_with_peer"]
        sessions = self.service.sessions.statistics()
        assert sessions.opened == sum(sessions.outcomes.values())
        return status


@dataclass
class Server:
    """A running server and how to reach it."""

    port: int
    service: Service
    app: Any
    admin_port: int = 0

    @property
    def url(self) -> str:
        """Where the SDK goes."""
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **settings: Any) -> openai.AsyncOpenAI:
        """The real SDK, by default without retries."""
        settings = {"max_retries": 0, "timeout": 120, **settings}
        return openai.AsyncOpenAI(base_url=self.url, api_key="none", **settings)

    async def quiet(self) -> dict[str, Any]:
        """Wait until nothing is left of any request; returns the engine's counters."""
        async with asyncio.timeout(120):
            return await Quiet(self.service).reached()

    async def until(self, what: Any) -> None:
        """Wait until the condition *what* holds."""
        async with asyncio.timeout(120):
            while not what():
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running(
    *options: str,
    processor: Any = None,
    gate: Gate | None = None,
    in_flight: Gate | None = None,
    settings: AppSettings | None = None,
    metrics: Any = None,
    log: Any = None,
    engine: Any = None,
    wait: bool = True,
    **uvicorn: Any,
) -> AsyncIterator[Server]:
    """A server over the simulated engine; *options* are the engine's."""
    engine = engine or make_engine(*options)
    app = create_app(
        engine,
        processor or SimProcessor(),
        gate=gate or Gate(bytes=600_000_000, max_waiting=64, name="payloads"),
        in_flight=in_flight,
        observer=metrics,
        metrics=metrics,
        **({} if log is None else {"log": log}),
        settings=settings or AppSettings(model="sim"),
    )
    operator = serving(app.state.operator, lifespan="off")
    async with serving(app, **uvicorn) as port, operator as admin_port:
        if wait:
            await engine.wait_ready()
        yield Server(port, app.state.service, app, admin_port)


class GatedProcessor(SimProcessor):
    """Stops in `prepare`, in its thread, until released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()

    def prepare(self, chat: Chat) -> Prepared:
        """Prepare *chat* once released."""
        self.entered.release()
        if not self.release.wait(120):
            raise TimeoutError
        return super().prepare(chat)


async def post(
    port: int, body: bytes, *headers: bytes, path: str = "/v1/chat/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request as raw bytes and return the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n".encode()
    head += b"content-length: %d\r\n" % len(body)
    writer.write(head + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body)
    await writer.drain()
    return reader, writer


async def answer_to(
    port: int, body: bytes, *headers: bytes, **to: str
) -> tuple[int, dict[str, str], Any]:
    """Send a request as raw bytes; returns status, headers and document."""
    reader, writer = await post(port, body, *headers, **to)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, payload = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), fields, json.loads(payload)
