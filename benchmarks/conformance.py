"""What servers do when clients leave, attack or are many: `lifecycle check` on each.

    python benchmarks/conformance.py [--servers NAME ...] [--python PATH]

Each server runs in a process of its own, by itself and in `lifecycle_asgi.Admission`;
its report goes to `benchmarks/results/conformance/NAME.json`. `--python` is the
interpreter that the servers run on, such as one with LiteLLM, and `--compare` writes
`docs/conformance.md` from all reports.

Servers without a model of their own generate tokens here with 1 ms of CPU time each,
one every 11 ms, and decode the pictures of a request to RGB, as chat servers do.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
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

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
SOURCES = os.pathsep.join(str(ROOT / part) for part in ("src", "adapters", "tools"))
PAUSE, WORK = 0.01, 0.001
START = 240.0
# The servers by name: the distribution that they are, and whether in `Admission`.
SERVERS = {
    "lifecycle-engine": ("anyio-lifecycle", False),
    "fastapi": ("fastapi", False),
    "fastapi-admission": ("fastapi", True),
    "litserve": ("litserve", False),
    "litserve-admission": ("litserve", True),
    "litellm": ("litellm", False),
    "litellm-admission": ("litellm", True),
    "ray": ("ray", False),
    "ray-admission": ("ray", True),
    "transformers": ("transformers", False),
    "transformers-admission": ("transformers", True),
}
TITLES = {
    "anyio-lifecycle": "lifecycle-engine",
    "fastapi": "FastAPI",
    "litserve": "LitServe",
    "litellm": "LiteLLM proxy",
    "ray": "Ray Serve",
    "transformers": "transformers serve",
}
BYTES = str(2**30)


def token() -> str:
    """Return a token, after the CPU time that one takes."""
    until = time.thread_time() + WORK
    while time.thread_time() < until:
        pass
    return "word "


def decode(messages: list[Any]) -> list[Any]:
    """Return the pictures of *messages* as RGB, all at once; what is none is a 400."""
    from fastapi import HTTPException
    from PIL import Image

    try:
        return _decoded(messages)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise HTTPException(400, "a picture cannot be read") from error


def _decoded(messages: list[Any]) -> list[Any]:
    from PIL import Image

    found = []
    for message in messages:
        if isinstance(message["content"], list):
            for part in message["content"]:
                if part["type"] == "image_url":
                    data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
                    found.append(Image.open(io.BytesIO(data)).convert("RGB"))
    return found


def whole(text: str) -> dict[str, Any]:
    """Return a chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "one", "object": "chat.completion", "created": 1, "model": "sim"}
    return {**head, "choices": [choice], "usage": usage}


def piece(text: str | None) -> str:
    """Return an event of a streamed chat completion; ``None`` ends it."""
    delta = {} if text is None else {"role": "assistant", "content": text}
    reason = "stop" if text is None else None
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "one", "object": "chat.completion.chunk", "created": 1}
    event = {**head, "model": "sim", "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n"


def chat_app(*, pictures: bool = True) -> Any:
    """Return a chat server as one writes it with FastAPI, without any care."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, StreamingResponse

    async def chat(body: dict[str, Any]) -> Any:
        images = decode(body["messages"]) if pictures else []

        async def tokens() -> AsyncIterator[str]:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(PAUSE)
                yield token()
            images.clear()

        async def events() -> AsyncIterator[str]:
            async for text in tokens():
                yield piece(text)
            yield piece(None) + "data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        return JSONResponse(whole("".join([text async for text in tokens()])))

    app = FastAPI()
    app.post("/v1/chat/completions", response_model=None)(chat)
    return app


def serve_app(app: Any, port: int) -> None:
    """Serve an application in uvicorn."""
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def serve_engine(port: int, *, admission: bool) -> None:
    """Serve the bundled server with its simulated engine; it has its own admission."""
    del admission
    command = "lifecycle_engine", "serve", "--runner", "sim", "--port", str(port)
    subprocess.run([sys.executable, "-m", *command], check=True)


def serve_fastapi(port: int, *, admission: bool) -> None:
    """Serve the careless chat server."""
    serve_app(guarded(chat_app()) if admission else chat_app(), port)


def guarded(app: Any) -> Any:
    """Return *app* in `Admission`, with the settings of the environment."""
    from lifecycle_asgi import Admission

    return Admission(app)


def serve_litserve(port: int, *, admission: bool) -> None:
    """Serve LitServe's OpenAI API over a worker that generates tokens."""
    from conformance_litserve import serve

    from lifecycle_asgi import Admission

    serve(port, [Admission] if admission else [])


def serve_litellm(port: int, *, admission: bool) -> None:
    """Serve LiteLLM's proxy, before a backend that stops when its client leaves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        backend = int(probe.getsockname()[1])
    multiprocessing.Process(target=_serve_backend, args=(backend,), daemon=True).start()
    model = {"model": "openai/sim", "api_key": "none"}
    model["api_base"] = f"http://127.0.0.1:{backend}/v1"
    models = [{"model_name": "sim", "litellm_params": model}]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
        os.environ["CONFIG_FILE_PATH"] = str(config)
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        from litellm.proxy.proxy_server import app

        serve_app(guarded(app) if admission else app, port)


def _serve_backend(port: int) -> None:
    from lifecycle_asgi import LifecycleMiddleware

    serve_app(LifecycleMiddleware(chat_app(pictures=False)), port)


def serve_ray(port: int, *, admission: bool) -> None:
    """Serve the careless chat server as the ingress of a Ray Serve deployment."""
    import ray
    from ray import serve

    from lifecycle_asgi import Admission

    app = chat_app()
    if admission:
        app.add_middleware(Admission, bytes=int(BYTES))

    class Chat:
        """A replica."""

    environment = {"env_vars": {"PYTHONPATH": SOURCES}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(serve.ingress(app)(Chat))
    serve.run(deployment.bind())
    while True:
        time.sleep(1)


def serve_transformers(port: int, *, admission: bool) -> None:
    """Serve a tiny model with `transformers serve`."""
    import torch
    from transformers.cli.serve import Serve
    from transformers.cli.serving import server

    from tiny_checkpoint import cached

    torch.set_num_threads(1)
    make: Any = server.build_server
    if admission:
        server.build_server = lambda *a, **k: guarded(make(*a, **k))
    Serve(force_model=str(cached("qwen3")), port=port)


KINDS = {
    "anyio-lifecycle": serve_engine,
    "fastapi": serve_fastapi,
    "litserve": serve_litserve,
    "litellm": serve_litellm,
    "ray": serve_ray,
    "transformers": serve_transformers,
}


def check(name: str, python: str) -> None:
    """Start a server, check it, and write its report."""
    kind, admission = SERVERS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    code = f"from importlib.metadata import version; print(version({kind!r}))"
    asked = subprocess.run([python, "-c", code], capture_output=True, check=True)
    label = f"{TITLES[kind]} {asked.stdout.decode().strip()}"
    environment = {**os.environ, "PYTHONPATH": SOURCES, "LIFECYCLE_BYTES": BYTES}
    if kind == "anyio-lifecycle":
        del environment["LIFECYCLE_BYTES"]
    environment["LITELLM_MASTER_KEY"] = f"sk-{secrets.token_hex(24)}"
    command = [python, __file__, "--serve", name, "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        _wait(port, process)
        options = ["--model", "sim", "--pid", str(process.pid)]
        if kind == "transformers":
            options = _transformers_options(process.pid)
        if kind == "litellm":
            options += ["--api-key", environment["LITELLM_MASTER_KEY"]]
        options += ["--label", label + (", in Admission" if admission else "")]
        options += ["--json", str(RESULTS / f"{name}.json")]
        arguments = ["check", f"http://127.0.0.1:{port}", *options]
        code = "from lifecycle_tools import main; main()"
        checker = [sys.executable, "-c", code, *arguments]
        subprocess.run(checker, env={**os.environ, "PYTHONPATH": SOURCES}, check=False)
    finally:
        _end(process)


def _transformers_options(pid: int) -> list[str]:
    from tiny_checkpoint import cached

    endless = {"eos_token_id": [10**6]}
    body = {"generation_config": json.dumps(endless)}
    options = ["--model", str(cached("qwen3")), "--pid", str(pid), "--no-image"]
    return [*options, "--body", json.dumps(body)]


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the server did not start; its status is {process.poll()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    import psutil

    if process.poll() is not None:
        return
    tree = [*psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in tree:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def compare() -> None:
    """Write the table of the page from the reports that are in the tree."""
    from lifecycle_tools.check.report import Report, compare as table

    files = [RESULTS / f"{name}.json" for name in SERVERS]
    reports = [Report.read(file) for file in files if file.exists()]
    head, _, _ = PAGE.read_text().partition("| check |")
    PAGE.write_text(head + table(reports))


def main() -> None:
    """Check servers, be one, or write the page."""
    parser = argparse.ArgumentParser(description="`lifecycle check` on real servers.")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compare:
        compare()
    elif options.serve:
        kind, admission = SERVERS[options.serve]
        KINDS[kind](options.port, admission=admission)
    else:
        RESULTS.mkdir(exist_ok=True)
        for name in options.servers:
            check(name, options.python)


if __name__ == "__main__":
    main()
