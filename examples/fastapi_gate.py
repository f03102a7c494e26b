"""A FastAPI application with admission control by bytes; it refuses with 413 or 503.

Install:  pip install fastapi uvicorn
Run it:   python examples/fastapi_gate.py
Try it:   curl 'localhost:8000/thumbnail?pixels=1000000'
"""

from __future__ import annotations

import os

import anyio
import uvicorn
from fastapi import FastAPI

from lifecycle import Gate
from lifecycle_asgi.starlette import install

app = FastAPI()
# Cancels the request of a client that disconnects, and answers what the gate refuses.
install(app)
gate = Gate(bytes=8_000_000, max_waiting=2, max_wait=10.0)


@app.get("/thumbnail")
async def thumbnail(pixels: int, seconds: float = 0.0) -> dict[str, int]:
    """Hold three bytes per pixel for some seconds."""
    with await gate.admit(bytes=3 * pixels):
        decoded = bytes(3 * pixels)
        await anyio.sleep(seconds)
        return {"bytes": len(decoded)}


@app.get("/status")
async def status() -> dict[str, int]:
    """Return the bytes in use and the length of the queue."""
    now = gate.statistics()
    return {"bytes_in_use": now.bytes_in_use, "waiting": now.waiting}


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
