"""What the servers of `servers` serve: work of every kind that writes down its end.

Each end is a line of JSON in the file that ``PROBE_LOG`` names, with the time by the
system's one monotonic clock, so that another process can tell how long it took.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
from starlette.middleware.base import BaseHTTPMiddleware

from lifecycle import Gate
from lifecycle_asgi import Admission, BodyLimit, LifecycleMiddleware, request_of

_LOG = os.environ["PROBE_LOG"]
_GATE = Gate(slots=1)
_TAKEN = _GATE.try_admit()
_OK = {"type": "http.response.start", "status": 200, "headers": []}


def _note(what: str, scope: Any) -> None:
    gone = "lifecycle" not in scope or request_of(scope).client_gone
    of = scope["query_string"].decode()
    note = {"what": what, "of": of, "at": time.monotonic(), "gone": gone}
    with open(_LOG, "a") as log:  # noqa: PTH123 - one write, appended whole
        log.write(json.dumps(note) + "\n")


async def _parts(form: str) -> AsyncIterator[bytes]:
    yield b"x" * 1000
    if form == "stream":
        await anyio.sleep(60)
    if form == "long":
        # More than all buffers between here and a client who does not read.
        for _ in range(32):
            yield b"x" * 1_000_000
        return
    end = time.monotonic() + 20
    while time.monotonic() < end:
        yield b"x" * 100_000


async def _work(scope: Any, receive: Any, send: Any) -> None:
    form = scope["path"].strip("/")
    if form == "unread":
        _note("works", scope)
        await _GATE.admit()
    while (await receive()).get("more_body"):
        pass
    if form == "handler":
        _note("works", scope)
        await anyio.sleep(60)
    await send(_OK)
    async for part in _parts(form):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        if form != "fast":
            _note("works", scope)
    await send({"type": "http.response.body", "body": b""})


async def _probe(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["path"] == "/up":
        await send(_OK)
        await send({"type": "http.response.body", "body": b"up"})
        return
    try:
        await _work(scope, receive, send)
    finally:
        _note("ended", scope)


async def _dispatch(request: Any, call_next: Any) -> Any:
    return await call_next(request)


bare: Any = _probe
plain: Any = LifecycleMiddleware(_probe)
above: Any = LifecycleMiddleware(BaseHTTPMiddleware(_probe, _dispatch))
below: Any = BaseHTTPMiddleware(LifecycleMiddleware(_probe), _dispatch)


async def _names(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the names of the headers, before the body was read and after."""
    names = [[name.decode() for name, _ in scope["headers"]]]
    while (await receive()).get("more_body"):
        pass
    names.append([name.decode() for name, _ in scope["headers"]])
    await send(_OK)
    await send({"type": "http.response.body", "body": json.dumps(names).encode()})


_NAMES: dict[str, Any] = {
    "/admission": Admission(_names, environment={}),
    "/middleware": LifecycleMiddleware(_names),
    "/limit": BodyLimit(_names, max_bytes=1000),
}


async def names(scope: Any, receive: Any, send: Any) -> None:
    """What each middleware shows of the head, by path."""
    await _NAMES.get(scope.get("path"), _probe)(scope, receive, send)
