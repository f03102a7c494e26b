"""What ``POST /v1/chat/completions`` accepts, field by field.

Fields that are not known are ignored, as OpenAI-compatible servers do. A known
field of a wrong type is a mistake to be told; so is a known field that would
change the answer and is not supported here. What is harmless is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from .api_errors import ApiError, bad_request

F = TypeVar("F", bound="Form")
# Fields, each with the values that change nothing.
Unsupported = Mapping[str, tuple[Any, ...]]

_UNSUPPORTED: Unsupported = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}


# Each costs a hundred bytes and a microsecond in which nothing else runs. A text
# that has more commas and brackets than this has more tokens than the wire takes.
_MAX_VALUES = 2**18
_MAX_PARTS = 4096
# Each is a request of its own to the engine, and has its own copy of the images.
_MAX_CHOICES = 16


class Form(BaseModel):
    """What a request is checked against, field by field."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )


class ImageUrl(Form):
    """Where an image is: a data URL."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class Part(Form):
    """One piece of a message: text or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _complete(self) -> Part:
        if getattr(self, self.type) is None:
            kind, context = "missing", {"field": self.type}
            raise pydantic_core.PydanticCustomError(kind, "{field} is missing", context)
        return self


def _as_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _as_strings(stop: Any) -> Any:
    if stop is None or stop == "":
        return []
    return [stop] if isinstance(stop, str) else stop


class ChatMessage(Form):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Part],
        Field(max_length=_MAX_PARTS, fail_fast=True),
        BeforeValidator(_as_parts),
    ]
    name: str | None = None

    @model_validator(mode="after")
    def _images_by_users(self) -> ChatMessage:
        if self.role != "user" and any(part.type != "text" for part in self.content):
            kind, text = "image_role", "only messages of the user can hold images"
            raise pydantic_core.PydanticCustomError(kind, text)
        return self


class StreamOptions(Form):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(Form):
    """The body of a chat completion, with the limits of this server."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=256)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=_MAX_CHOICES)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        Field(max_length=4, fail_fast=True),
        BeforeValidator(_as_strings),
    ] = []
    top_p: float | None = Field(default=None, ge=0, le=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    # Typed although unsupported, so that a wrong type is told as such; not what is
    # inside, as pydantic makes an error of each and a request may have many.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[Any] | None = None
    audio: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    web_search_options: dict[str, Any] | None = None


def parse_request(body: bytes) -> ChatRequest:
    """Check a request body.

    Raises:
        ApiError: 400, with the path of the first offending field in ``param``.
            Neither it nor its context refers to the body.
    """
    request = checked(ChatRequest, body, _UNSUPPORTED)
    _refuse_stray(request)
    return request


def checked(form: type[F], body: bytes, unsupported: Unsupported) -> F:
    """Check a body against a form.

    Args:
        form: What it has to be.
        body: JSON.
        unsupported: Fields that would change the answer and are not supported, each
            with the values that change nothing.

    Raises:
        ApiError: As from `parse_request`.
    """
    document = _parse_json(body)
    try:
        request = form.model_validate(document)
    except ValidationError as error:
        mistake = error.errors(include_input=False, include_url=False)[0]
    else:
        _refuse_unsupported(request, unsupported)
        return request
    param = _param(mistake["loc"], unsupported)
    raise bad_request(
        f"{mistake['msg']} (at {param})" if param else mistake["msg"],
        param=param,
        code=_code(mistake["type"]),
    )


def _parse_json(body: bytes) -> object:
    """Decode JSON with nothing that only Python allows, at most 200 levels deep."""
    # Also counts what stands in texts; base64, where bodies are long, has none.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        problem = f"The body has more than {_MAX_VALUES} values; send less"
        raise bad_request(problem, code="invalid_json")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        message = str(error)
    raise bad_request(f"The body is not valid JSON: {message}", code="invalid_json")


def _refuse_unsupported(request: Form, unsupported: Unsupported) -> None:
    for name, harmless in unsupported.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            message = f"{name} is not supported by this server; leave it out"
            raise bad_request(message, param=name, code="unsupported_parameter")


def _refuse_stray(request: ChatRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        message = "top_logprobs is only allowed with logprobs"
        raise bad_request(message, param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        message = "stream_options is only allowed with stream"
        raise bad_request(message, param="stream_options")


def _param(loc: tuple[int | str, ...], unsupported: Unsupported) -> str | None:
    if loc and loc[0] in unsupported:
        return str(loc[0])  # what follows may name the branch of a union
    path = ""
    for step in loc:
        dot = "." if path else ""
        path += f"[{step}]" if isinstance(step, int) else f"{dot}{step}"
    return path or None


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


def unknown_model(served: str) -> ApiError:
    """The 404 for any model but the one that is served."""
    message = f"The model does not exist; this server has {served}"
    return ApiError(404, message, code="model_not_found", param="model")
