"""Print the files of ours that one request enters, from the ASGI call and back.

Three requests go through the bundled server, with a simulated model in an engine
thread: a text request, a request with a picture, and one whose client disconnects in
the middle of the stream. For the last one, only what runs after the disconnect counts.

    python scripts/trace_request.py            # counts
    python scripts/trace_request.py --files    # and the files, in the order of entry
    python scripts/trace_request.py --json     # the same as JSON

With --calls, eight text requests stream at once instead, and it prints how many of our
functions the server calls for one token, and how many of our coroutines it resumes.
"""

from __future__ import annotations

import base64
import dis
import functools
import inspect
import io
import json
import sys
import threading
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from types import CodeType, FrameType
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


@functools.cache
def _starts_at(code: CodeType) -> int:
    """Return where a coroutine begins; one that is resumed is behind that."""
    resumes = (each.offset for each in dis.get_instructions(code) if each.arg == 0)
    return next(iter(resumes), 0)


class Calls:
    """Counts calls of our functions in this thread, and coroutines that are resumed."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Take one event of the interpreter, as `sys.setprofile` wants it."""
        code = frame.f_code
        name = code.co_filename
        if event != "call" or not name.startswith((f"{ROOT}/src/", f"{ROOT}/adap")):
            return
        where = f"{Path(name).name}:{code.co_qualname}"
        coroutine = code.co_flags & inspect.CO_COROUTINE
        resumed = coroutine and frame.f_lasti > _starts_at(code)
        (self.resumed if resumed else self.calls)[where] += 1


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


async def count_calls(streams: int = 8, tokens: int = 300) -> dict[str, Counter[str]]:
    """Return calls, and resumed coroutines, of streams that all get their tokens."""
    counted = Calls()

    def runner() -> Scheduler:
        return Scheduler(SimRunner(slots=streams, max_length=8192), merge="concatenate")

    engine: Any = ThreadEngine(runner)
    app = create_app(engine, SimProcessor(), gate=Gate(bytes=2**28))
    async with app.router.lifespan_context(app):
        await engine.wait_ready()
        for counting, asked in ((False, 5), (True, tokens)):
            payload = body(picture=False, tokens=asked)
            sys.setprofile(counted if counting else None)
            async with anyio.create_task_group() as tasks:
                for _ in range(streams):
                    tasks.start_soon(call, app, payload, Trace())
            sys.setprofile(None)
    return {"calls": counted.calls, "resumed": counted.resumed}


def print_calls(found: dict[str, Counter[str]]) -> None:
    """Print what was counted, for one token."""
    tokens = found["calls"]["base.py:TextDecoder.push"]
    if "--json" in sys.argv:
        sums = {kind: sum(each.values()) / tokens for kind, each in found.items()}
        print(json.dumps(sums))
        return
    for kind, counts in found.items():
        print(f"{kind}: {sum(counts.values()) / tokens:.1f} for each token")
        if "--files" in sys.argv:
            for where, count in counts.most_common(40):
                print(f"  {count / tokens:5.2f}  {where}")


def main() -> None:
    """Print what was traced."""
    if "--calls" in sys.argv:
        print_calls(anyio.run(count_calls))
        return
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
