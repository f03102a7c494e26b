"""A chat server with the fault that its argument names, for `lifecycle check` to find.

python tests/kit/checked_server.py PORT FAULT
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import time

import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

FAULT = sys.argv[2]
LIMIT = 4
MOST_PIXELS = 10**7
running: list[Request] = []
turn = asyncio.Lock()


def error(status: int, **headers: str) -> Response:
    """A refusal in OpenAI's shape."""
    return JSONResponse({"error": {"message": "no"}}, status, headers)


async def generate(request: Request, tokens: int) -> None:
    """Use CPU time for each token, until the client leaves; or whether it leaves or not."""
    for _ in range(tokens):
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0.01)
        if FAULT != "careless" and await request.is_disconnected():
            return


def look_at(content: object) -> bool:
    """Decode pictures; whether they were small enough, where that is looked at."""
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image_url":
            data = base64.b64decode(part["image_url"]["url"].split(",")[1])
            image = Image.open(io.BytesIO(data))
            if FAULT != "careless" and image.width * image.height > MOST_PIXELS:
                return False
            image.convert("RGB")
    return True


async def chat(request: Request) -> Response:
    """Answer one chat completion."""
    if FAULT == "other-api":
        return JSONResponse({"object": "error"})
    if FAULT == "needs-key" and "authorization" not in request.headers:
        return error(401)
    if FAULT == "one-at-a-time":
        async with turn:  # also while a body arrives
            body = await request.json()
    else:
        body = await request.json()
    if not look_at(body["messages"][0]["content"]):
        return error(413)
    if len(running) >= LIMIT:
        if FAULT == "refuses-badly":
            return PlainTextResponse("busy", 503)
        return error(429, **{"retry-after": "1"})
    running.append(request)
    try:
        await generate(request, body["max_tokens"])
    finally:
        running.remove(request)
    message = {"role": "assistant", "content": "word"}
    return Response(json.dumps({"choices": [{"message": message}]}))


routes = [Route("/v1/chat/completions", chat, methods=["POST"])]
app = Starlette(routes=[] if FAULT == "no-api" else routes)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
