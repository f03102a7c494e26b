"""What servers do when clients leave, attack or are many: `lifecycle check` on each.

    PYTHONPATH=tests/kit python benchmarks/conformance.py [--servers NAME ...]

Run it by a Python that finds the servers, such as those that `scripts/strangers.py`
makes in `build/strangers`. Each server runs in processes of its own, by
itself and in `lifecycle_asgi.Admission`; its report goes to
`benchmarks/results/conformance/NAME.json`, and what it writes to standard error.
`--compare` writes `docs/conformance.md` from all reports. Other options are those of
`lifecycle check`.

What generates tokens in place of a model takes 1 ms of CPU time for each, one every
11 ms; what serves here decodes the pictures of a request to RGB, as chat servers do.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lmdeploy_without_engine
import sglang_without_engine
import vllm_platform
from _client import unwind_when_terminated
from howto import how_to
from pace import PAUSE, work
from ports import free_port
from stranger import install_plugin, launched

from tiny_checkpoint import cached

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
BYTES = str(2**30)
KEY = "sk-of-the-benchmark"
# One of what each server writes when it listens.
STARTED = ("startup complete", "Uvicorn running on", "is ready at", "Deployed app")
HERE = f"exec python {__file__} --port PORT --serve"
LMDEPLOY = """serve api_server MODEL --backend=pytorch --model-name=sim
    --max-batch-size=64 --disable-metrics --server-name=127.0.0.1 --server-port=PORT"""
LITELLM = f"""python {__file__} --port OTHER --serve backend > backend.log 2>&1 &
    exec env CONFIG_FILE_PATH=config.yaml LITELLM_LOCAL_MODEL_COST_MAP=True
    python -m uvicorn --port PORT"""
SGLANG = """exec sglang serve --model-path=MODEL --served-model-name=sim --device=cpu
    --skip-server-warmup --port=PORT"""
VLLM = """python -m vllm_fake_engine OTHER & exec vllm serve MODEL
    --served-model-name=sim --data-parallel-size-local=0
    --data-parallel-address=127.0.0.1 --data-parallel-rpc-port=OTHER --port=PORT"""
# The servers by name: the distribution that they are, and what starts them. The name
# says whether they are in `Admission`, whose bytes are set then.
SERVERS = {
    "lifecycle-engine": (
        "anyio-lifecycle",
        "exec python -m lifecycle_engine serve --runner sim --port PORT",
    ),
    "fastapi": ("fastapi", f"{HERE} fastapi"),
    "fastapi-admission": ("fastapi", f"{HERE} fastapi"),
    "litserve": ("litserve", f"{HERE} litserve"),
    "litserve-admission": ("litserve", f"{HERE} litserve"),
    "litellm": ("litellm", f"{LITELLM} litellm.proxy.proxy_server:app"),
    "litellm-admission": ("litellm", f"{LITELLM} proxy:app"),
    "lmdeploy": ("lmdeploy", f"exec lmdeploy {LMDEPLOY}"),
    "lmdeploy-admission": (
        "lmdeploy",
        f"exec env LIFECYCLE_PROFILE=lmdeploy python serve.py {LMDEPLOY}",
    ),
    "ray": ("ray", f"{HERE} ray"),
    "ray-admission": ("ray", f"{HERE} ray"),
    "sglang": ("sglang", SGLANG),
    "sglang-admission": ("sglang", SGLANG),
    "transformers": ("transformers", f"{HERE} transformers"),
    "transformers-admission": ("transformers", f"{HERE} transformers"),
    "vllm": ("vllm", VLLM),
    "vllm-admission": ("vllm", f"{VLLM} --middleware lifecycle_asgi.Admission"),
}
TITLES = {
    "anyio-lifecycle": "lifecycle-engine",
    "fastapi": "FastAPI",
    "litserve": "LitServe",
    "litellm": "LiteLLM proxy",
    "lmdeploy": "LMDeploy",
    "ray": "Ray Serve",
    "sglang": "SGLang",
    "transformers": "transformers serve",
    "vllm": "vLLM",
}

# They serve no pictures.
TEXT_ONLY = ("lmdeploy", "sglang", "transformers")


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
            for number in range(body["max_tokens"]):
                await asyncio.sleep(PAUSE)
                work()
                yield f"{number} "
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

    uvicorn.run(app, host="127.0.0.1", port=port)


def serve_fastapi(port: int) -> None:
    """Serve the careless chat server."""
    serve_app(guarded(chat_app()), port)


def guarded(app: Any) -> Any:
    """Return *app*, in `Admission` if the environment has its bytes."""
    from lifecycle_asgi import Admission

    return Admission(app) if "LIFECYCLE_BYTES" in os.environ else app


def serve_litserve(port: int) -> None:
    """Serve LitServe's OpenAI API over a worker that generates tokens."""
    from conformance_litserve import serve

    from lifecycle_asgi.litserve_plugin import LitServer

    serve(port, *([LitServer] if "LIFECYCLE_BYTES" in os.environ else []))


def serve_backend(port: int) -> None:
    """Serve what is behind a proxy, and stops when its client leaves."""
    from lifecycle_asgi import LifecycleMiddleware

    serve_app(LifecycleMiddleware(chat_app(pictures=False)), port)


def serve_ray(port: int) -> None:
    """Serve the careless chat server as the ingress of a Ray Serve deployment."""
    import ray
    from ray import serve

    from lifecycle_asgi import Admission

    app = chat_app()
    if "LIFECYCLE_BYTES" in os.environ:
        app.add_middleware(Admission, bytes=int(BYTES))

    class Chat:
        """A replica."""

    environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = serve.deployment(serve.ingress(app)(Chat))
    serve.run(deployment.bind(), blocking=True)


def serve_transformers(port: int) -> None:
    """Serve a tiny model with `transformers serve`."""
    import torch
    from transformers.cli.serve import Serve

    from lifecycle_asgi.transformers_plugin import register

    torch.set_num_threads(1)
    if "LIFECYCLE_BYTES" in os.environ:
        register()
    Serve(force_model=str(cached("qwen3")), port=port)


KINDS = {
    "backend": serve_backend,
    "fastapi": serve_fastapi,
    "litserve": serve_litserve,
    "ray": serve_ray,
    "transformers": serve_transformers,
}


def prepare(folder: Path, backend: int) -> None:
    """Write what servers read: engines, scripts of our page, and a configuration."""
    install_plugin(folder, vllm_platform, "vllm.platform_plugins")
    install_plugin(folder, sglang_without_engine, sglang_without_engine.GROUP)
    startup = f"import torchvision_on_cpu\n{lmdeploy_without_engine.STARTUP}"
    (folder / "sitecustomize.py").write_text(startup)
    (folder / "serve.py").write_text(how_to("LMDeploy").code)
    (folder / "proxy.py").write_text(how_to("LiteLLM").code)
    model = {"model": "openai/sim", "api_key": "none"}
    model["api_base"] = f"http://127.0.0.1:{backend}/v1"
    models = [{"model_name": "sim", "litellm_params": model}]
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps({"model_list": models}))


def check(name: str, more: list[str]) -> None:
    """Start a server, check it with *more* options, and write its report."""
    kind, command = SERVERS[name]
    label = f"{TITLES[kind]} {version(kind)}"
    model = cached("qwen3" if kind in TEXT_ONLY else "qwen2_5_vl")
    other = free_port()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "GENERATES": "1", "LITELLM_MASTER_KEY": KEY}
    if name.endswith("-admission"):
        environment["LIFECYCLE_BYTES"] = BYTES
        label += ", in Admission"
    options = ["--model", "sim", "--api-key", KEY, "--label", label]
    if kind == "transformers":
        endless = json.dumps({"eos_token_id": [10**6]})
        options += ["--model", str(model)]
        options += ["--body", json.dumps({"generation_config": endless})]
    if kind in TEXT_ONLY:
        options.append("--no-image")
    options += ["--json", str(RESULTS / f"{name}.json"), *more]
    command = command.replace("MODEL", str(model)).replace("OTHER", str(other))
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), other)
        argv = ("sh", "-c", " ".join(command.split()))
        # Those that answer one client at a time take a quarter of an hour.
        with launched(Path(folder), *argv, seconds=3600, **environment) as server:
            said = server.until(*STARTED)
            if not any(text in said for text in STARTED):
                sys.exit(said)
            log = server.process.stdout
            subprocess.Popen(["/bin/cat"], stdin=log, stdout=sys.stderr)
            server.post("/", b"").answer()
            options += ["--pid", str(server.process.pid)]
            code = "from lifecycle_tools import main; main()"
            url = f"http://127.0.0.1:{server.port}"
            checker = (sys.executable, "-c", code, "check", url, *options)
            subprocess.run(checker, check=False)


def compare() -> None:
    """Write the table of the page from the reports that are in the tree."""
    from lifecycle_tools.check.report import Report, compare as table

    files = [RESULTS / f"{name}.json" for name in SERVERS]
    reports = [Report.read(file) for file in files if file.exists()]
    head, _, _ = PAGE.read_text().partition("| check |")
    PAGE.write_text(head + table(reports))


def main() -> None:
    """Check servers, be one, or write the page."""
    unwind_when_terminated()
    parser = argparse.ArgumentParser(description="`lifecycle check` on real servers.")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    if options.compare:
        compare()
    elif options.serve:
        KINDS[options.serve](options.port)
    else:
        RESULTS.mkdir(exist_ok=True)
        for name in options.servers:
            check(name, more)


if __name__ == "__main__":
    main()
