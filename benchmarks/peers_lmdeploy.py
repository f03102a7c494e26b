"""LMDeploy's own API server under clients with pictures, and clients that leave.

    python -m venv lmdeploy-venv && . lmdeploy-venv/bin/activate      # Python 3.11
    pip install torch==2.13.0          # the build for CPUs is enough
    pip install --no-deps lmdeploy==0.18.0 torchvision==0.28.0 xgrammar==0.2.8 \
        opencv-python-headless triton peft mmengine-lite apache-tvm-ffi
    pip install addict yapf einops fire openai_harmony partial_json_parser pybase64 \
        shortuuid tiktoken cloudpickle sentencepiece aiohttp fastapi uvicorn openai \
        transformers accelerate ray prometheus_client requests
    pip install ".[media]"
    PYTHONPATH=tools python benchmarks/peers_lmdeploy.py [--clients 16 64 128 512]
        [--budget 768] [--limit 6144] [--json FILE]

The server is LMDeploy as it comes from PyPI, in front of a fake engine
(`peers_lmdeploy_rig`): its routes, its `VLAsyncEngine`, its decoding of pictures. The
clients are those of `peers_vllm`. Every case starts a new server: as it is, and with
the lines of docs/howto/servers.md.

Printed per case: resident memory after a first request (base), its peak, and what was
answered. Then one client asks for an answer of 500 tokens that is not streamed, and
leaves after a second: printed are the tokens that the engine made after that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _client import unwind_when_terminated
from _figures import machine, write
from peers_lmdeploy_rig import STEP, argv, declare_operators
from peers_vllm import (
    HEIGHT,
    TOKENS,
    WAYS,
    WIDTH,
    free_port,
    line,
    listening,
    measure,
    request,
    start,
)

LONG = 500
PARTS = ("memory", "leave")


@contextlib.asynccontextmanager
async def server(model: str, way: str, budget: int) -> AsyncIterator[tuple[int, int]]:
    """Start LMDeploy's API server; yield its process and its port."""
    port = free_port()
    environment = {
        **os.environ,
        "LIFECYCLE_BYTES": f"{budget}MiB",
        "LIFECYCLE_PROFILE": "lmdeploy",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "UVICORN_LOG_LEVEL": "warning",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = start(argv(way, model, port), environment, log)
        try:
            try:
                await listening(port, process)
            except (RuntimeError, TimeoutError):
                log.seek(0)
                print(log.read()[-4000:], file=sys.stderr)
                raise
            yield process.pid, port
        finally:
            process.kill()
            process.wait()


async def working(port: int) -> tuple[int, int]:
    """Return the requests that the engine works on, and the tokens it has made."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /engine HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    active, tokens = answer.rpartition(b"\r\n\r\n")[2].split()
    return int(active), int(tokens)


async def leave(model: str, way: str, budget: int) -> dict[str, Any]:
    """Leave a request that is not streamed; return what the engine did after that."""
    question = {"role": "user", "content": "Tell me a long story."}
    asked = {"model": model, "messages": [question], "max_tokens": LONG}
    body = json.dumps({**asked, "ignore_eos": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    async with server(model, way, budget) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        while not (await working(port))[1]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        before = (await working(port))[1]
        writer.close()
        await asyncio.sleep(LONG * STEP * 1.5)
        after = (await working(port))[1]
    return {"way": way, "tokens": LONG, "before": before, "after": after - before}


def tiny_model() -> Path:
    """Return a tiny Qwen2.5-VL of random weights."""
    declare_operators()
    from tiny_checkpoint import cached

    return cached("qwen2_5_vl")


async def run(options: argparse.Namespace) -> None:
    """Measure all cases; print and write the figures."""
    from importlib.metadata import version

    model = str(options.model or tiny_model())
    counts = range(max(options.clients) + 2)
    requests = [request(model, i, stream=i % 2 == 0) for i in counts]
    settings = {"budget_mib": options.budget, "limit_mib": options.limit}
    settings |= {"pixels": WIDTH * HEIGHT, "tokens": TOKENS}
    described = {**settings, "lmdeploy": version("lmdeploy")}
    found: dict[str, Any] = {"machine": machine(), "settings": described}
    if options.json is not None and options.json.exists():  # the other part
        found = json.loads(options.json.read_text()) | found
    if "leave" in options.parts:
        found["left"] = [await leave(model, way, options.budget) for way in WAYS]
        print(*found["left"], sep="\n", flush=True)
        write(options.json, found)
    rows: list[dict[str, Any]] = []
    for clients in options.clients if "memory" in options.parts else ():
        for way in options.ways:
            running = server(model, way, options.budget)
            case = await measure(running, way, clients, options.limit, requests)
            print(line(case, options.budget), flush=True)
            rows.append(asdict(case))
            write(options.json, found | {"rows": rows})


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(
        description="LMDeploy's API server under clients with pictures."
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64, 128, 512])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--budget", type=int, default=768, help="MiB to admit")
    parser.add_argument("--limit", type=int, default=6144, help="MiB of the pod")
    parser.add_argument("--model", type=Path, help="a Qwen2.5-VL instead of a tiny one")
    parser.add_argument("--json", type=Path)
    unwind_when_terminated()
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
