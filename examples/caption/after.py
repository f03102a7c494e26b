"""A captioning server with admission by pixels: pictures wait until they fit.

Run it:   uvicorn after:app
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

from fastapi import FastAPI, UploadFile
from fastapi.responses import StreamingResponse
from PIL import Image

from lifecycle_asgi import Admission
from lifecycle_asgi.starlette import ManagedResponse

app = FastAPI()
app.add_middleware(Admission, bytes=512 * 2**20, profile="pillow", release="end")
live = {"captions": 0}


def caption_tokens(pixels: bytes, size: tuple[int, int]) -> Iterator[str]:
    """Stand in for a model that blocks."""
    live["captions"] += 1
    try:
        for word in (
            "A",
            "picture",
            "of",
            f"{size[0]}x{size[1]}",
            *["and so on"] * 100,
        ):
            time.sleep(0.05)
            yield word
    finally:
        live["captions"] -= 1


@app.post("/caption")
async def caption(image: UploadFile) -> StreamingResponse:
    """Describe one picture, word by word."""
    img = Image.open(io.BytesIO(await image.read()))

    def sse() -> Iterator[str]:
        pixels = img.convert("RGB").tobytes()
        for word in caption_tokens(pixels, img.size):
            yield f"data: {word}\n\n"

    return ManagedResponse(sse(), media_type="text/event-stream")
