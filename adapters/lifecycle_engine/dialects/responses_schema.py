"""What ``POST /v1/responses`` accepts: OpenAI's newer form, read into the older one.

As strict as `openai_schema`. Nothing is stored here, so whatever refers to an earlier
response is refused; the conversation comes with each request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from lifecycle_engine.api_errors import bad_request

from .forms import Form, Unsupported, checked, either
from .openai_schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    URI,
    ChatMessage,
    ChatRequest,
    ImageUrl,
    Part,
    images_by_users,
)

_LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED: Unsupported = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": "none"}),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
    # Of chat completions, not of this API: whoever sends them counts on them.
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "seed": (),
    "stop": ([],),
}


class _Content(Form):
    model_config = ConfigDict(
        json_schema_extra=either(text="string", image_url="string")
    )

    type: Literal["input_text", "output_text", "input_image"]
    text: str | None = None
    image_url: str | None = Field(default=None, json_schema_extra=URI)
    detail: Literal["auto", "low", "high", "original"] | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Content:
        field = "image_url" if self.type == "input_image" else "text"
        if getattr(self, field) is None:
            kind, context = "missing", {"field": field}
            raise pydantic_core.PydanticCustomError(kind, "{field} is missing", context)
        return self


_Contents = Annotated[list[_Content], Field(max_length=MAX_PARTS, fail_fast=True)]


def _as_content(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return content


class _Item(Form):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        _Contents, BeforeValidator(_as_content, json_schema_input_type=str | _Contents)
    ]

    @model_validator(mode="after")
    def _images_by_users(self) -> _Item:
        images_by_users(self.role, [each.type for each in self.content])
        return self


# One less than there may be: the instructions become one.
_Items = Annotated[
    list[_Item], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)
]


def _as_items(asked: Any) -> Any:
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


class _StreamOptions(Form):
    include_obfuscation: bool | None = None


class ResponsesRequest(Form):
    """The body of a response request, with the limits of this server."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        _Items, BeforeValidator(_as_items, json_schema_input_type=str | _Items)
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    include: list[str] | None = Field(default=None, max_length=64, fail_fast=True)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    store: bool | None = None
    user: str | None = Field(default=None, max_length=256)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None

    background: bool | None = None
    context_management: list[Any] | None = None
    conversation: Any = None
    moderation: Any = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[Any] | None = None
    truncation: str | None = None


def parse_responses(body: bytes) -> ChatRequest:
    """Check a body and return what it asks for, in the terms of chat completions.

    Raises:
        ApiError: 400; it refers to nothing of the body.
    """
    request = checked(ResponsesRequest, body, UNSUPPORTED)
    logprobs = _LOGPROBS in (request.include or ())
    if request.top_logprobs and not logprobs:
        message = f"top_logprobs is only allowed with include of {_LOGPROBS}"
        raise bad_request(message, param="top_logprobs")
    messages = [
        ChatMessage(role=item.role, content=_parts(item, f"input[{at}]"))
        for at, item in enumerate(request.input)
    ]
    if request.instructions is not None:
        part = Part(type="text", text=request.instructions)
        messages.insert(0, ChatMessage(role="system", content=[part]))
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        logprobs=logprobs,
        top_logprobs=request.top_logprobs,
        stream=request.stream,
        user=request.user,
        prompt_cache_key=request.prompt_cache_key,
        ignore_eos=request.ignore_eos,
    )
    return chat.of(text="input", images="input").echoing(
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        temperature=request.temperature,
        top_logprobs=request.top_logprobs,
        top_p=request.top_p,
    )


def _parts(item: _Item, path: str) -> list[Part]:
    parts = []
    for at, each in enumerate(item.content):
        if each.type != "input_image":
            parts.append(Part(type="text", text=each.text))
            continue
        param = f"{path}.content[{at}].image_url"
        image = ImageUrl.at(param, each.image_url or "")
        each.image_url = ""  # one copy at a time is enough
        parts.append(Part(type="image_url", image_url=image))
    return parts
