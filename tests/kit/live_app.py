"""An application with every fault that the live view has a warning for.

    uvicorn live_app:app

Each path plants one of them. What it holds, waits for and sends is real.
"""

from __future__ import annotations

import os
from typing import Any

import anyio

from lifecycle import Gate, SessionRegistry
from lifecycle_asgi import (
    LifecycleMiddleware,
    LiveView,
    WarningLimits,
    local_client,
    request_of,
)

MIB = 2**20
pictures = Gate(bytes=64 * MIB, name="pictures")
one = Gate(slots=1, name="one")
health = "serving"


class Fake:
    """Something large, that a frame may keep."""


async def outlive(scope: Any, receive: Any, send: Any) -> None:
    """Works on after its client has left, and says that it listens for that."""
    while (await receive())["type"] != "http.disconnect":
        pass
    with await pictures.admit(bytes=3 * MIB):
        await anyio.sleep(3600)


async def stream(send: Any, parts: int = 600, size: int = 10) -> None:
    """Answer with a part every tenth of a second."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(parts):
        part = {"type": "http.response.body", "body": b"x" * size, "more_body": True}
        await send(part)
        await anyio.sleep(0.1)
    await send({"type": "http.response.body", "body": b""})


async def held(scope: Any, receive: Any, send: Any) -> None:
    """Holds the lease of its payload while it streams."""
    await receive()
    with await pictures.admit(bytes=5 * MIB):
        await stream(send)


async def released(scope: Any, receive: Any, send: Any) -> None:
    """Releases the lease of its payload before it streams, as it should."""
    await receive()
    with await pictures.admit(bytes=7 * MIB):
        await anyio.sleep(0.1)
    await stream(send)


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """Prepares for longer than it may."""
    await receive()
    with request_of(scope).phase("prepare"):
        await anyio.sleep(3600)


async def binding(scope: Any, receive: Any, send: Any) -> None:
    """Needs a gate that has one slot."""
    await receive()
    with await one.admit():
        await anyio.sleep(3600)


async def flood(scope: Any, receive: Any, send: Any) -> None:
    """Sends more than a client that does not read has room for."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    part = {"type": "http.response.body", "body": bytes(MIB), "more_body": True}
    for _ in range(100):
        await send(part)


async def session(scope: Any, receive: Any, send: Any) -> None:
    """Works under a session."""
    await receive()
    request = request_of(scope)
    async with SessionRegistry() as sessions:
        with sessions.open("mine") as opened:
            request.attach(opened)
            opened.box(Fake(), nbytes=2 * MIB)
            await anyio.sleep(3600)


async def busy(scope: Any, receive: Any, send: Any) -> None:
    """Make the engine busy."""
    global health  # noqa: PLW0603 - of this process
    health = "busy"
    await stream(send, 1)


PATHS = {
    "/outlive": outlive,
    "/held": held,
    "/released": released,
    "/slow": slow,
    "/binding": binding,
    "/flood": flood,
    "/session": session,
    "/busy": busy,
}


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """The application, without middleware."""
    if scope["type"] != "http":
        raise RuntimeError("no lifespan here")
    await PATHS[scope["path"]](scope, receive, send)


def engine() -> dict[str, Any]:
    """An engine that has been restarted twice."""
    return {"health": health, "incarnation": 3, "pid": os.getpid()}


app = LiveView(
    LifecycleMiddleware(plain),
    engine=engine,
    allow=local_client,
    cancel=True,
    limits=WarningLimits(overdue_s=0.5),
)
