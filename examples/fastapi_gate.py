"""A FastAPI application with a gate: admitted by bytes, refused with 413 or 503.

Install:  pip install fastapi uvicorn
Run it:   python examples/fastapi_gate.py
Ask it:   curl 'localhost:8000/thumbnail?pixels=1000000'
"""

from __future__ import annotations

import os

import anyio
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from lifecycle import CostTooLarge, Gate, Refused
from lifecycle_asgi import LifecycleMiddleware

app = FastAPI()
# With the middleware, a client who leaves is noticed and its work is cancelled.
app.add_middleware(LifecycleMiddleware)
gate = Gate(bytes=8_000_000, max_waiting=2, max_wait=10.0)


@app.get("/thumbnail")
async def thumbnail(pixels: int, seconds: float = 0.0) -> dict[str, int]:
    """Hold three bytes a pixel, for as long as it takes."""
    with await gate.admit(bytes=3 * pixels):
        decoded = bytes(3 * pixels)
        await anyio.sleep(seconds)
        return {"bytes": len(decoded)}


@app.exception_handler(Refused)
async def refused(_request: Request, error: Refused) -> JSONResponse:
    """Tell the client what went wrong, and when to come back."""
    body = {"error": {"message": str(error), "code": error.reason}}
    if isinstance(error, CostTooLarge):  # trying again cannot help
        return JSONResponse(body, 413)
    return JSONResponse(body, 503, {"retry-after": f"{error.retry_after or 1:.0f}"})


@app.get("/status")
async def status() -> dict[str, int]:
    """Show what is admitted, and who waits."""
    now = gate.statistics()
    return {"bytes_in_use": now.bytes_in_use, "waiting": now.waiting}


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
