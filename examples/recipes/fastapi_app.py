"""FastAPI: a stream that ends when its client disconnects.

Run it: uvicorn fastapi_app:app
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from words import lifespan, words

from lifecycle_asgi import LifecycleMiddleware, request_of

app = FastAPI(lifespan=lifespan)
app.add_middleware(LifecycleMiddleware)  # added last, so outermost


@app.get("/")
async def speak(request: Request) -> StreamingResponse:
    """Stream words."""
    client = request_of(request.scope)
    return StreamingResponse(await client.begin(words(client)))
