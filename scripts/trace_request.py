"""Print the files of ours that one request enters.

Three requests go to a real `lifecycle serve`: uvicorn, an engine process, and torch on
the checkpoint of `make serve`. One is a text request, one has a picture, and the client
of the third hangs up in the middle of the stream. Both processes are traced. Functions
that they also call without a request are left out, and from the hang-up those that its
stream called before. A text request goes through `Admission` alone, too, in front of a
small stream.

    python scripts/trace_request.py            # counts
    python scripts/trace_request.py --files    # and the files, in the order of entry
    python scripts/trace_request.py --json     # the same as JSON
    python scripts/trace_request.py --admission  # without the server, in a second

With --calls, eight text requests stream at once through the server with a simulated
engine in a thread, and it prints how many of our functions the server calls for one
token, and how many of our coroutines it resumes.
"""

from __future__ import annotations

import base64
import dis
import functools
import http.client
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import file_tracer
from PIL import Image

from lifecycle import Gate
from lifecycle_asgi import Admission
from lifecycle_engine import Scheduler, SimProcessor, SimRunner, create_app
from lifecycle_zmq import ThreadEngine

ROOT = Path(__file__).resolve().parents[1]
PATH = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}
# Read before, and again before the hang-up.
EVENTS = 20
# Several periods of everything that a server does by itself.
IDLE_SECONDS = 5.0
# Longer than a request that goes on is ever silent, and than a hang-up takes to arrive.
SETTLED_SECONDS = 2.0
MOST_SECONDS = 300.0


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run the server of ``make serve``, traced, and give its address."""
    paths = [str(folder), *(str(ROOT / each) for each in ("src", "adapters", "tools"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    checkpoint = subprocess.run(
        [sys.executable, "-m", "tiny_checkpoint"],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths[1:])},
        capture_output=True,
        text=True,
        check=True,
        timeout=MOST_SECONDS,
    ).stdout.strip()
    # As the `lifecycle` of the wheel, which an environment may lack.
    command = [sys.executable, "-c", "import lifecycle_tools as it; it.main()"]
    options = [
        "serve",
        "--port",
        "0",
        "--checkpoint",
        checkpoint,
        "--model",
        "lifecycle",
    ]
    with subprocess.Popen(
        [*command, *options],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if "ready at http" not in line:
                raise RuntimeError(f"the server did not start, and said {line!r}")
            yield line.split()[-1].removeprefix("http://")
        finally:
            server.terminate()


def post(
    address: str, payload: bytes, phases: file_tracer.Phases | None = None
) -> None:
    """Send one request; with *phases*, hang up in the middle, as a phase of its own.

    Raises:
        RuntimeError: The server refuses it, or ends the stream before the hang-up.
    """
    connection = http.client.HTTPConnection(address, timeout=MOST_SECONDS)
    connection.request("POST", PATH, payload, HEADERS)
    with connection.getresponse() as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read().decode()}")
        if phases is None:
            response.read()
            connection.close()
            return
        for phase in ("stream", "disconnect"):
            for _ in range(2 * EVENTS):  # each, and the empty line after it
                if not response.readline():
                    raise RuntimeError("the stream ended before the hang-up")
            phases.begin(phase)
        connection.close()  # the response still has the socket


def trace_server() -> dict[str, list[str]]:
    """Return the files that each kind of request to a real server enters."""
    with tempfile.TemporaryDirectory() as name:
        phases = file_tracer.Phases(Path(name))
        with served(Path(name)) as address:
            for picture in (False, True):  # what the first request alone does
                post(address, body(picture=picture, tokens=3))
            phases.settle(SETTLED_SECONDS)
            phases.begin("idle")
            time.sleep(IDLE_SECONDS)
            for kind, picture in (("text", False), ("picture", True)):
                phases.begin(kind)
                post(address, body(picture=picture, tokens=20))
                phases.settle(SETTLED_SECONDS)
            phases.stop()
            post(address, body(picture=True, tokens=2000), phases)
            phases.settle(SETTLED_SECONDS)
            phases.stop()
        beside = {"text": "idle", "picture": "idle", "disconnect": "stream"}
        idle = {function for function, _ in phases.calls("idle")}
        found = {}
        for kind, other in beside.items():
            anyway = idle | {function for function, _ in phases.calls(other)}
            found[kind] = in_order(phases.calls(kind), anyway)
        return found


def in_order(calls: list[file_tracer.Call], anyway: set[str]) -> list[str]:
    """Return the files of calls but those of *anyway*, in the order of entry."""
    files = (file for function, file in calls if function not in anyway)
    return list(dict.fromkeys(files))


async def trace_admission() -> list[str]:
    """Return the files that a text request enters in `Admission` alone."""

    async def stream(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more in (True, True, False):
            part = {"type": "http.response.body", "body": b"x", "more_body": more}
            await send(part)

    files: dict[str, None] = {}
    app = Admission(stream, environment={})
    payload = body(picture=False, tokens=20)
    await call(app, payload)
    sys.setprofile(file_tracer.noting(lambda _function, file: files.setdefault(file)))
    await call(app, payload)
    sys.setprofile(None)
    return list(files)


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


async def call(app: Any, payload: bytes) -> None:
    """Send one request to an ASGI application of this process."""
    messages = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"the server answered {message['status']}, not 200")

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
                    tasks.start_soon(call, app, payload)
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
    found = {"admission": anyio.run(trace_admission)}
    if "--admission" not in sys.argv:
        found |= trace_server()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, files in found.items():
        print(f"{name}: {len(files)} files")
        if "--files" in sys.argv:
            print("".join(f"  {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
