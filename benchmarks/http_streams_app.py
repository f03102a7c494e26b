"""The server of one way of streaming over HTTP; see `http_streams.py`.

    python benchmarks/http_streams_app.py WAY STREAMS RATE

It prints its address when it is ready. All ways answer POST /v1/chat/completions with
the same number of server-sent events of the same size at the same rate, and run on
uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

WAYS = ("starlette", "middleware", "admission", "server")
"""Bare Starlette; the same below our middleware; below `Admission`; our server."""

_EVENT = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "sim",
    "choices": [
        {
            "index": 0,
            "delta": {"content": "a"},
            "logprobs": None,
            "finish_reason": None,
        }
    ],
}


def bare(rate: float) -> Any:
    """Return an application that streams a ready event *rate* times a second."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    event = f"data: {json.dumps(_EVENT)}\n\n"

    async def stream(count: int) -> AsyncIterator[str]:
        for _ in range(count):
            if rate:
                await asyncio.sleep(1 / rate)
            yield event
        yield "data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        asked = await request.json()
        if asked["stream"]:
            kind = "text/event-stream"
            return StreamingResponse(stream(asked["max_tokens"]), media_type=kind)
        return JSONResponse(_EVENT)

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


def application(way: str, rate: float) -> Any:
    """Return the application of a way, other than our server's."""
    from lifecycle_asgi import Admission, LifecycleMiddleware

    app = bare(rate)
    if way == "middleware":
        return LifecycleMiddleware(app)
    if way == "admission":
        return Admission(app)
    return app


def serve(way: str, streams: int, rate: float) -> None:
    """Be the server."""
    if way == "server":
        serve_engine(streams, rate)
        return
    import uvicorn

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            host, port = self.servers[0].sockets[0].getsockname()
            print(f"http://{host}:{port}", flush=True)

    app = application(way, rate)
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False)
    Announcing(config).run()


def serve_engine(streams: int, rate: float) -> None:
    """Be the bundled server, with a simulated engine in a process of its own."""
    from lifecycle import Gate
    from lifecycle_engine import AppSettings, SimProcessor, create_app
    from lifecycle_engine.server.run import run
    from lifecycle_zmq import ZmqEngine

    work = [sys.executable, "-m", "lifecycle_engine.worker", "--runner", "sim"]
    work += ["--max-batch", str(streams), "--sim-decode-lane", "0"]
    work += ["--sim-decode-step", str(1 / rate if rate else 0)]
    # A flood of one stream asks for more tokens than this model takes by default.
    work += ["--sim-prefill-token", "0", "--max-length", str(2**20)]
    app = create_app(
        ZmqEngine(work),
        SimProcessor(),
        gate=Gate(slots=None, name="payloads"),
        in_flight=Gate(slots=None, name="in_flight"),
        settings=AppSettings(model="sim"),
    )
    run(app, host="127.0.0.1", port=0, announce=lambda at: print(at, flush=True))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
