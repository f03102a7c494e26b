"""What ``POST /v1/messages`` accepts: Anthropic's form, read into ours.

As strict as `openai_schema`: what is known and of a wrong type, or would change the
answer and is not supported, is told; what is harmless or unknown is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .forms import Form, Unsupported, checked
from .openai_schema import (
    BASE64,
    MAX_MESSAGES,
    MAX_PARTS,
    URI,
    ChatMessage,
    ChatRequest,
    ImageUrl,
    Part,
    images_by_users,
)

UNSUPPORTED: Unsupported = {
    "container": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
    # Of OpenAI's API, not of this one: whoever sends them counts on them.
    "logprobs": (False,),
    "n": (1,),
    "seed": (),
    "stop": ([],),
    "top_logprobs": (0,),
}


class _Source(Form):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str = Field(json_schema_extra=BASE64)


class _Elsewhere(Form):
    type: Literal["url"]
    url: str = Field(json_schema_extra=URI)


class _Text(Form):
    type: Literal["text"]
    text: str


class _Image(Form):
    type: Literal["image"]
    source: Annotated[_Source | _Elsewhere, Field(discriminator="type")]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Block = Annotated[_Text | _Image, Field(discriminator="type")]
_Blocks = Annotated[list[_Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class _Message(Form):
    role: Literal["user", "assistant"]
    content: Annotated[
        _Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)
    ]

    @model_validator(mode="after")
    def _images_by_users(self) -> _Message:
        images_by_users(self.role, [block.type for block in self.content])
        return self


class _Metadata(Form):
    user_id: str | None = Field(default=None, max_length=256)


class MessagesRequest(Form):
    """The body of a message request, with the limits of this server."""

    model: str = Field(min_length=1, max_length=256)
    # One less than there may be: the system prompt becomes one.
    messages: list[_Message] = Field(
        min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True
    )
    max_tokens: int = Field(ge=1, lt=2**31)
    system: Annotated[
        list[_Text],
        Field(max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Text]),
    ] = Field(default_factory=list)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=4, fail_fast=True
    )
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    stream: bool | None = None
    metadata: _Metadata | None = None
    # As in chat completions: this API has no names for them.
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    min_p: float | None = Field(default=None, ge=0, le=1)

    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    output_config: dict[str, Any] | None = None


def parse_messages(body: bytes) -> ChatRequest:
    """Check a body and return what it asks for, in the terms of chat completions.

    Raises:
        ApiError: 400; it refers to nothing of the body.
    """
    request = checked(MessagesRequest, body, UNSUPPORTED)
    messages = [ChatMessage(role=m.role, content=_parts(m)) for m in request.messages]
    if request.system:
        parts = [Part(type="text", text=block.text) for block in request.system]
        messages.insert(0, ChatMessage(role="system", content=parts))
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        stop=request.stop_sequences,
        stream=request.stream,
        user=request.metadata.user_id if request.metadata else None,
        prompt_cache_key=request.prompt_cache_key,
    )


def _parts(message: _Message) -> list[Part]:
    parts = []
    for block in message.content:
        if isinstance(block, _Text):
            parts.append(Part(type="text", text=block.text))
            continue
        source = block.source
        if isinstance(source, _Elsewhere):
            url, source.url = source.url, ""  # one copy at a time is enough
        else:
            url = f"data:{source.media_type};base64,{source.data}"
            source.data = ""
        parts.append(Part(type="image_url", image_url=ImageUrl(url=url)))
    return parts
