"""What LiteLLM's proxy does when a client leaves a request that is not streamed.

    python -m venv litellm-venv && . litellm-venv/bin/activate
    pip install "litellm[proxy]" ".[media]"
    python benchmarks/peers_litellm.py [--ways none admission] [--json FILE]

The proxy is LiteLLM as it comes from PyPI: its application in uvicorn, by itself or in
`lifecycle_asgi.Admission`. Behind it is a backend that takes twelve seconds for every
answer. A client asks, and leaves after one second. Printed per API: how long the
backend worked after that, and on how many requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from _client import unwind_when_terminated
from _figures import machine, write

WAYS = ("none", "admission")
WORK = 12.0
LEAVES_AFTER = 1.0
START = 180.0
KEY = f"sk-{secrets.token_hex(24)}"
_ITEM = {"role": "user", "content": "hello"}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [_ITEM]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [_ITEM], "max_tokens": 16},
}
_CHAT = {
    "id": "one",
    "object": "chat.completion",
    "created": 1,
    "model": "sim",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_RESPONSE = {
    "id": "resp_one",
    "object": "response",
    "created_at": 1,
    "model": "sim",
    "status": "completed",
    "output": [
        {
            "id": "msg_one",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        }
    ],
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
    "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
}


class Backend:
    """An inference server that stops when its client leaves, as servers should.

    Attributes:
        works: Start and end of the work on each request so far; the end is ``None``
            while it lasts.
    """

    def __init__(self) -> None:
        self.works: list[tuple[float, float | None]] = []

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self._answer(reader, writer)
        writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        number, begin = len(self.works), time.monotonic()
        self.works.append((begin, None))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORK):
                    if not await reader.read(1):
                        raise ConnectionError
        finally:
            self.works[number] = begin, time.monotonic()
        answer = _RESPONSE if b"/responses" in head.partition(b"\r\n")[0] else _CHAT
        body = json.dumps(answer).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()


def serve(way: str, port: int) -> None:
    """Be the proxy: LiteLLM's own application, by itself or in `Admission`."""
    import uvicorn
    from litellm.proxy.proxy_server import app

    if way == "admission":
        # As servers load it, by its name.
        app = importlib.import_module("lifecycle_asgi").Admission(app)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


@contextlib.asynccontextmanager
async def proxy(way: str, backend: int) -> AsyncIterator[int]:
    """Start the proxy in front of a backend; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    parameters = {"model": "openai/sim", "api_key": "none"}
    parameters["api_base"] = f"http://127.0.0.1:{backend}/v1"
    models = [{"model_name": "sim", "litellm_params": parameters}]
    with tempfile.TemporaryDirectory() as folder:
        # JSON is YAML.
        settings = Path(folder) / "config.yaml"
        settings.write_text(json.dumps({"model_list": models}))
        environment = {
            **os.environ,
            "CONFIG_FILE_PATH": str(settings),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": KEY,
        }
        command = [sys.executable, __file__, "--serve", way, "--port", str(port)]
        process = _start(command, environment)
        try:
            await _listening(port, process)
            yield port
        finally:
            process.kill()
            process.wait()


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


async def _listening(port: int, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START):
        while process.poll() is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.2)
            else:
                writer.close()
                return
    raise RuntimeError(f"the proxy ended with status {process.returncode}; see above")


async def ask(port: int, path: str, seconds: float | None) -> bytes:
    """Ask without streaming; leave after so many seconds, or take the answer."""
    body = json.dumps({"model": "sim", **REQUESTS[path]}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    try:
        async with asyncio.timeout(seconds):
            return await reader.read()
    except TimeoutError:
        return b""
    finally:
        writer.close()


async def measure(way: str) -> list[dict[str, Any]]:
    """Measure one way; return a row for each API."""
    backend = Backend()
    listener = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
    rows = []
    async with proxy(way, listener.sockets[0].getsockname()[1]) as port:
        # The first request of a process imports much; it is served to its end.
        answers = await asyncio.gather(*(ask(port, path, 60) for path in REQUESTS))
        served = sum(b" 200 OK" in answer[:20] for answer in answers)
        if served < len(REQUESTS):
            raise RuntimeError(f"{served} of the first {len(REQUESTS)} were served")
        for path in REQUESTS:
            backend.works.clear()
            await ask(port, path, LEAVES_AFTER)
            left = time.monotonic()
            await asyncio.sleep(WORK + 6)  # a retry would begin by then
            now = time.monotonic()
            spans = [(begin, end or now) for begin, end in backend.works]
            row = {
                "way": way,
                "api": path,
                "begun": len(spans),
                "worked": round(sum(end - begin for begin, end in spans), 3),
                "worked_after": round(max([0, *(end - left for _, end in spans)]), 3),
            }
            print(row, flush=True)
            rows.append(row)
    listener.close()
    return rows


async def run(options: argparse.Namespace) -> None:
    """Measure all ways; write the figures."""
    from importlib.metadata import version

    rows = [row for way in options.ways for row in await measure(way)]
    settings = {"litellm": version("litellm"), "work": WORK, "leaves": LEAVES_AFTER}
    write(options.json, {"machine": machine(), "settings": settings, "rows": rows})


def main() -> None:
    """Run the experiment, or be its proxy."""
    parser = argparse.ArgumentParser(
        description="LiteLLM's proxy, when a client leaves a request."
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.port)
    else:
        unwind_when_terminated()
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
