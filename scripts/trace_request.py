"""Print the files of ours that one request enters, from the ASGI call and back.

Three requests go through the bundled server, with a simulated model in an engine
thread: a text request, a request with a picture, and one whose client disconnects in
the middle of the stream. For the last one, only what runs after the disconnect counts.

    python scripts/trace_request.py            # counts
    python scripts/trace_request.py --files    # and the files, in the order of entry
    python scripts/trace_request.py --json     # the same as JSON
"""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from PIL import Image

from lifecycle import Gate
from lifecycle_engine import Scheduler, SimProcessor, SimRunner, create_app
from lifecycle_zmq import ThreadEngine

ROOT = Path(__file__).resolve().parents[1]
PATH = "/v1/chat/completions"
DISCONNECT_AFTER = 6


class Trace:
    """Records the source files whose functions are called, while it is switched on."""

    def __init__(self) -> None:
        self.on = False
        self.files: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Take one event of the interpreter, as `sys.setprofile` wants it."""
        if self.on and event == "call":
            name = frame.f_code.co_filename
            if name.startswith((f"{ROOT}/src/", f"{ROOT}/adapters/")):
                self.files[name[len(str(ROOT)) + 1 :]] = None

    def take(self) -> list[str]:
        """Switch off and return the files since the last call, in order of entry."""
        self.on = False
        files, self.files = list(self.files), {}
        return files


def body(*, picture: bool, tokens: int) -> bytes:
    """Return the JSON of a streaming chat request."""
    content: Any = "say something"
    if picture:
        png = io.BytesIO()
        Image.new("RGB", (64, 64), (200, 10, 10)).save(png, "PNG")
        url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
        content = [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": url}},
        ]
    messages = [{"role": "user", "content": content}]
    request = {"model": "lifecycle", "stream": True, "max_tokens": tokens}
    return json.dumps(request | {"messages": messages}).encode()


async def call(app: Any, payload: bytes, trace: Trace, *, leaves: bool = False) -> None:
    """Send one request to *app*; with *leaves*, disconnect after some events."""
    messages = [{"type": "http.request", "body": payload, "more_body": False}]
    gone = anyio.Event()
    events = 0

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal events
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"the server answered {message['status']}, not 200")
        events += bool(message.get("body"))
        if leaves and events == DISCONNECT_AFTER and not gone.is_set():
            trace.on = True
            gone.set()

    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(payload)).encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)


async def settle(app: Any) -> None:
    """Wait until the engine holds no session any more."""
    with anyio.fail_after(60):
        # The engine thread has no event for this.
        while app.state.service.sessions.statistics().closing:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    await anyio.sleep(0.1)


async def trace_requests() -> dict[str, list[str]]:
    """Return the files that each kind of request enters."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    engine: Any = ThreadEngine(
        lambda: Scheduler(SimRunner(slots=4, max_length=8192), merge="concatenate")
    )
    # It has no process, and so no pid, which only the status page shows.
    app = create_app(engine, SimProcessor(), gate=Gate(bytes=2**28))
    found: dict[str, list[str]] = {}
    try:
        async with app.router.lifespan_context(app):
            await engine.wait_ready()
            for picture in (False, True):  # what the first request alone does
                await call(app, body(picture=picture, tokens=3), trace)
            for name, picture in (("text", False), ("picture", True)):
                trace.on = True
                await call(app, body(picture=picture, tokens=20), trace)
                await settle(app)
                found[name] = trace.take()
            long = body(picture=True, tokens=2000)
            await call(app, long, trace, leaves=True)
            await settle(app)
            found["disconnect"] = trace.take()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def main() -> None:
    """Print what was traced."""
    found = anyio.run(trace_requests)
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, files in found.items():
        print(f"{name}: {len(files)} files")
        if "--files" in sys.argv:
            print("".join(f"  {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
