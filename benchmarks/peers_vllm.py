"""Memory of vLLM's own API server under clients with pictures.

    python -m venv vllm-venv && . vllm-venv/bin/activate      # Python 3.11 or 3.12
    pip install --no-deps vllm==0.33.0 torchvision==0.28.0 xgrammar==0.2.8 \
        compressed-tensors==0.17.0 depyf==0.20.0 apache-tvm-ffi opencv-python-headless
    pip install torch==2.13.0          # the build for CPUs is enough
    python benchmarks/peers_vllm_rig.py requirements | pip install -r /dev/stdin
    pip install ".[media]"
    PYTHONPATH=tools python benchmarks/peers_vllm.py [--clients 16 64 128 512]
        [--budget 768] [--limit 6144] [--json FILE]

The server is vLLM as it comes from PyPI, without the parts that need CUDA: its routes,
its rendering, its decoding of pictures and its `AsyncLLM`, in front of a fake engine
process (`peers_vllm_rig`). Each client sends one picture of its own, all of them at the
same time, from different addresses, and obeys ``Retry-After``. Every case starts a new
server: without a middleware, and with ``--middleware lifecycle_asgi.Admission``, which
is loaded by vLLM's own code.

Printed per case: resident memory of the API process after a first request (base), its
peak, what was answered, and how long that took. A server that exceeds the limit is
killed, as a pod is.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from _client import unwind_when_terminated
from _figures import machine, write
from _memory_of import Watch, resident
from peers_vllm_rig import argv, install_plugin

WAYS = ("none", "admission")
TOKENS = 8
WIDTH, HEIGHT = 3000, 2000
MIB = 2**20
# Seconds until a server listens, and for all clients of a case.
START, PATIENCE = 600.0, 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """What one server used, in MiB and seconds."""

    way: str
    clients: int
    base: float
    peak: float
    seconds: float
    died: bool
    answers: dict[str, int]

    @property
    def growth(self) -> float:
        """Memory beyond the base."""
        return self.peak - self.base


def request(model: str, seed: int, *, stream: bool) -> bytes:
    """Return a request about a photo of six megapixels, in a quarter of a megabyte."""
    from PIL import Image

    noise = random.Random(seed).randbytes(24 * 16 * 3)
    photo = Image.frombytes("RGB", (24, 16), noise).resize((WIDTH, HEIGHT))
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=75)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    question = {"model": model, "messages": messages, "max_tokens": TOKENS}
    body = json.dumps({**question, "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, message: bytes, number: int, answers: Counter[str]) -> None:
    """Send a request until it is served; count each answer by its status."""
    address = f"127.1.{number // 250}.{number % 250 + 1}"
    while True:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0)
            )
            try:
                writer.write(message)
                answer = await _answer(reader)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            answer = b""
        status = answer[9:12].decode() or "reset"
        whole = b"data: [DONE]" in answer or b'"finish_reason"' in answer
        answers[status if status != "200" or whole else "cut"] += 1
        again = re.search(rb"\r\nretry-after: (\d+)", answer, re.IGNORECASE)
        if status not in ("429", "503") or again is None:
            return
        await asyncio.sleep(int(again[1]) + random.random())


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Read a response to its end; the connection stays open, as of a pool."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
    if length is not None:
        return head + await reader.readexactly(int(length[1]))
    body = b""
    while not body.endswith(b"0\r\n\r\n"):
        body += await reader.readuntil(b"\r\n\r\n")
    return head + body


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def server(model: str, way: str, budget: int) -> AsyncIterator[tuple[int, int]]:
    """Start vLLM's API server and its engine; yield the pid and port of the server."""
    port = free_port()
    options = ["--model", model, "--port", str(port), "--max-model-len", "8192"]
    options += ["--max-num-batched-tokens", "8192", "--disable-log-stats"]
    options += ["--uvicorn-log-level", "warning"]
    if way == "admission":
        options += ["--middleware", "lifecycle_asgi.Admission"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install_plugin(folder)
        paths = [temporary, str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "LIFECYCLE_BYTES": f"{budget}MiB",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        commands = [argv("serve", folder, *options), argv("engine", folder)]
        log = (folder / "log").open("w+")
        started = [start(command, environment, log) for command in commands]
        try:
            try:
                await listening(port, started[0])
            except (RuntimeError, TimeoutError):
                log.seek(0)
                print(log.read()[-4000:], file=sys.stderr)
                raise
            yield started[0].pid, port
        finally:
            for process in started:
                process.kill()
                process.wait()
            log.close()


def start(
    command: list[str], environment: dict[str, str], log: IO[str]
) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to *log*."""
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


async def listening(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until *process* accepts connections."""
    async with asyncio.timeout(START):
        while process.poll() is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.2)
            else:
                writer.close()
                return
    raise RuntimeError(f"the server ended with status {process.returncode}; see above")


async def measure(
    running: AbstractAsyncContextManager[tuple[int, int]],
    way: str,
    clients: int,
    limit: int,
    requests: list[bytes],
) -> Case:
    """Measure one case on a server of its own: its process and its port."""
    answers: Counter[str] = Counter()
    async with running as (pid, port):
        warm: Counter[str] = Counter()
        for number in (1, 2):
            await ask(port, requests[-number], 999, warm)
        if warm["200"] != 2:
            raise RuntimeError(f"the first requests were answered {dict(warm)}")
        base, began = resident(pid), time.monotonic()
        died = False
        with Watch([pid]) as watch:
            tasks = asyncio.gather(
                *(ask(port, requests[i], i, answers) for i in range(clients))
            )
            while not tasks.done() and time.monotonic() < began + PATIENCE:
                if watch.peaks[0] > limit * MIB and not died:
                    died = True
                    os.kill(pid, 9)
                await asyncio.sleep(0.02)
            tasks.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tasks
        return Case(
            way=way,
            clients=clients,
            base=round(base / MIB, 1),
            peak=round(watch.peaks[0] / MIB, 1),
            seconds=round(time.monotonic() - began, 1),
            died=died,
            answers=dict(sorted(answers.items())),
        )


def line(case: Case, budget: int) -> str:
    """Return a row of the table."""
    share = f"{case.growth / budget:.2f} x budget"
    end = "killed at the limit" if case.died else f"{case.seconds:.0f} s"
    sizes = f"base {case.base:5.0f} peak {case.peak:5.0f} growth {case.growth:5.0f} MiB"
    return f"{case.way:>9} {case.clients:4}: {sizes}  {share}  {end}  {case.answers}"


async def run(options: argparse.Namespace) -> None:
    """Measure all cases; print and write the figures."""
    from importlib.metadata import version

    from tiny_checkpoint import cached

    model = str(options.model or cached("qwen2_5_vl"))
    counts = range(max(options.clients) + 2)
    requests = [request(model, i, stream=i % 2 == 0) for i in counts]
    rows: list[dict[str, Any]] = []
    for clients in options.clients:
        for way in options.ways:
            running = server(model, way, options.budget)
            case = await measure(running, way, clients, options.limit, requests)
            print(line(case, options.budget), flush=True)
            rows.append(asdict(case))
            settings = {"budget_mib": options.budget, "limit_mib": options.limit}
            settings |= {"pixels": WIDTH * HEIGHT, "tokens": TOKENS}
            settings |= {"vllm": version("vllm")}
            found = {"machine": machine(), "settings": settings, "rows": rows}
            write(options.json, found)


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(
        description="Memory of vLLM's API server under clients with pictures."
    )
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
