"""Requests of every API that say a unique word wherever a client can say something."""

from __future__ import annotations

import base64
import io
from typing import Any

from http_kit import encoded, png_chunk, user
from PIL import Image, TiffImagePlugin

CANARY = "canary-7f3a"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/generate"


def traces_of(word: str) -> list[str]:
    """How *word* looks plainly, in base64 at any place, in hex and in numbers."""
    data = word.encode()
    shifted = [base64.b64encode(b"x" * n + data).decode()[4:-4] for n in range(3)]
    return [word, data.hex(), ", ".join(map(str, data)), *shifted]


def pictures() -> list[bytes]:
    """Images that have the canary where images can have words, whole and damaged."""
    whole = encoded()
    note = png_chunk(b"tEXt", b"Comment\0" + CANARY.encode())
    odd = png_chunk(b"caNA", CANARY.encode())
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[270], tags[315] = CANARY, CANARY
    exif = Image.Exif()
    exif[270] = CANARY
    found = [whole[:33] + note + odd + whole[33:], whole + CANARY.encode()]
    for kind, save in (
        ("TIFF", {"tiffinfo": tags}),
        ("JPEG", {"comment": CANARY.encode(), "exif": exif}),
        ("GIF", {"comment": CANARY.encode()}),
        ("WEBP", {"exif": exif}),
    ):
        out = io.BytesIO()
        Image.new("RGB", (16, 16)).save(out, kind, **save)
        found.append(out.getvalue())
    return [*found, *(each[: len(each) * 2 // 3] for each in found), CANARY.encode()]


def url(image: bytes) -> str:
    """*image* as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def block(image: bytes, kind: str = "image/png") -> dict[str, Any]:
    """*image* as a block of Anthropic's."""
    data = base64.b64encode(image).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": kind, "data": data},
    }


def good(words: str) -> list[tuple[str, dict[str, Any]]]:
    """A request of each API that says *words*."""
    asked = user(words, pictures()[0])
    several = [{"role": "user", "content": [{"type": "text", "text": words}]}]
    blocks = [
        {"role": "user", "content": [*several[0]["content"], block(pictures()[0])]}
    ]
    parts = [
        {"type": "input_text", "text": words},
        {"type": "input_image", "image_url": url(pictures()[0])},
    ]
    more: dict[str, Any] = {"max_tokens": 3, "user": f"{CANARY}-user"}
    return [
        (CHAT, {"model": "sim", "messages": asked, "stop": [CANARY], **more}),
        (CHAT, {"model": "sim", "messages": several, "stream": True, "n": 2, **more}),
        (
            MESSAGES,
            {"model": "sim", "messages": blocks, "system": words, "max_tokens": 3},
        ),
        (
            MESSAGES,
            {"model": "sim", "messages": several, "max_tokens": 3, "stream": True},
        ),
        (RESPONSES, {"model": "sim", "input": [{"role": "user", "content": parts}]}),
        (RESPONSES, {"model": "sim", "input": words, "stream": True}),
        (GENERATE, {"text": words, "images": [url(pictures()[0])], **more}),
        (GENERATE, {"text": words, "stream": True, **more}),
    ]
