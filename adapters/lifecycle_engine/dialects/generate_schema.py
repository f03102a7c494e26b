"""What ``POST /generate`` accepts: a text or a chat, pictures, and how to answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from lifecycle_engine.api_errors import bad_request

from .forms import Unsupported, checked, either
from .openai_schema import (
    ANY_MODEL,
    BASE64,
    MAX_MESSAGES,
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    ImageUrl,
    Options,
    Part,
    refuse_top,
)

# Where other servers have their options, at a path of this name.
UNSUPPORTED: Unsupported = {"parameters": ({},), "sampling_params": ({},)}


class GenerateRequest(Options):
    """The body of a request, with the limits of this server."""

    model_config = ConfigDict(json_schema_extra=either(text="string", messages="array"))

    text: str | None = None
    images: list[Annotated[str, Field(json_schema_extra=BASE64)]] = Field(
        default_factory=list, max_length=MAX_PARTS - 1, fail_fast=True
    )
    messages: list[ChatMessage] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    model: str | None = Field(default=None, min_length=1, max_length=256)


def parse_generate(body: bytes) -> ChatRequest:
    """Check a body and return what it asks for, in the terms of chat completions.

    Raises:
        ApiError: 400; it refers to nothing of the body.
    """
    request = checked(GenerateRequest, body, UNSUPPORTED)
    if (request.text is None) == (request.messages is None):
        raise bad_request("Send either text or messages", param="text")
    if request.images and request.text is None:
        message = "images go with text; in messages they are image_url parts"
        raise bad_request(message, param="images")
    refuse_top(request)
    messages = request.messages
    if messages is None:
        text = Part(type="text", text=request.text)
        content = [*_pictures(request), text]
        messages = [ChatMessage(role="user", content=content)]
    options = {name: getattr(request, name) for name in Options.model_fields}
    chat = ChatRequest(model="any", messages=messages, **options)
    chat = chat.model_copy(update={"model": request.model or ANY_MODEL})
    return chat if request.text is None else chat.of(text="text", images="images")


def _pictures(request: GenerateRequest) -> list[Part]:
    parts = []
    for at, image in enumerate(request.images):
        url = image if ":" in image[:16] else f"data:image/any;base64,{image}"
        request.images[at] = ""  # one copy at a time is enough
        parts.append(
            Part(type="image_url", image_url=ImageUrl.at(f"images[{at}]", url))
        )
    return parts
