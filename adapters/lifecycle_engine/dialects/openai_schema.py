"""What ``POST /v1/chat/completions`` accepts, field by field.

Fields that are not known are ignored, as OpenAI-compatible servers do. A known
field of a wrong type is a mistake to be told; so is a known field that would
change the answer and is not supported here. What is harmless is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import pydantic_core
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from lifecycle_engine.api_errors import ApiError, bad_request

from .forms import Form, Unsupported, checked, either

UNSUPPORTED: Unsupported = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


MAX_PARTS = 4096
MAX_MESSAGES = 4096
# Each is a request of its own to the engine, and has its own copy of the images.
_MAX_CHOICES = 16
# Of requests of ours that name no model: whichever there is. No client can send it.
ANY_MODEL = ""


# Said to those who read the schemas; what they are is checked where they are decoded.
URI: dict[str, Any] = {"format": "uri"}
BASE64: dict[str, Any] = {"format": "byte"}


class ImageUrl(Form):
    """Where an image is: a data URL."""

    url: str = Field(json_schema_extra=URI)
    detail: Literal["auto", "low", "high", "original"] | None = None
    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """Where it stands in the body, unless it is a chat completion's."""
        return self._path

    @classmethod
    def at(cls, path: str, url: str) -> ImageUrl:
        """Make one that stands elsewhere in a body."""
        made = cls(url=url)
        made._path = path
        return made


class Part(Form):
    """One piece of a message: text or an image."""

    model_config = ConfigDict(
        json_schema_extra=either(text="string", image_url="object")
    )

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _complete(self) -> Part:
        if getattr(self, self.type) is None:
            kind, context = "missing", {"field": self.type}
            raise pydantic_core.PydanticCustomError(kind, "{field} is missing", context)
        return self


_Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


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
        _Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts)
    ]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_calls(cls, message: Any) -> Any:
        for name in ("tool_calls", "function_call"):
            if isinstance(message, dict) and message.get(name):
                text = "{name} is not supported by this server; leave it out"
                raise pydantic_core.PydanticCustomError(name, text, {"name": name})
        return message

    @model_validator(mode="after")
    def _images_by_users(self) -> ChatMessage:
        images_by_users(self.role, [part.type for part in self.content])
        return self


def images_by_users(role: str, types: list[str]) -> None:
    """Refuse images in what the user did not say; for validators of messages."""
    if role != "user" and any("image" in each for each in types):
        kind, text = "image_role", "only messages of the user can hold images"
        raise pydantic_core.PydanticCustomError(kind, text)


class StreamOptions(Form):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=4, fail_fast=True)]


class Options(Form):
    """How an answer is made, in the terms of chat completions."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    # Not of OpenAI's API, but of others who serve models by it; 0 and -1 are all.
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[
        _Stops,
        BeforeValidator(_as_strings, json_schema_input_type=_Stop | _Stops | None),
    ] = Field(default_factory=list)
    n: int | None = Field(default=None, ge=1, le=_MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream: bool | None = None
    user: str | None = Field(default=None, max_length=256)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None


class Fields(NamedTuple):
    """The fields of a body that hold what is asked, for errors.

    Attributes:
        text: All that was said.
        images: All that is shown.
    """

    text: str = "messages"
    images: str = "messages"


class ChatRequest(Options):
    """The body of a chat completion, with the limits of this server."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    stream_options: StreamOptions | None = None

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

    _echo: dict[str, Any] = PrivateAttr(default_factory=dict)
    _fields: Fields = PrivateAttr(Fields())

    @property
    def fields(self) -> Fields:
        """Where in the body its content stood."""
        return self._fields

    def of(self, **fields: str) -> ChatRequest:
        """This request, whose content stood in other `Fields`."""
        self._fields = Fields(**fields)
        return self

    @property
    def echo(self) -> dict[str, Any]:
        """What the answer repeats of the request, in APIs whose answers do."""
        return self._echo

    def echoing(self, **fields: Any) -> ChatRequest:
        """This request, with what its answer is to repeat."""
        self._echo = fields
        return self


def parse_request(body: bytes) -> ChatRequest:
    """Check a request body.

    Raises:
        ApiError: 400, with the path of the first offending field in ``param``.
            Neither it nor its context refers to the body.
    """
    request = checked(ChatRequest, body, UNSUPPORTED)
    if request.stream_options is not None and not request.stream:
        message = "stream_options is only allowed with stream"
        raise bad_request(message, param="stream_options")
    refuse_top(request)
    return request


def refuse_top(request: Options) -> None:
    """Refuse to tell of likely tokens where nobody asked for log probabilities.

    Raises:
        ApiError: 400.
    """
    if request.top_logprobs and not request.logprobs:
        message = "top_logprobs is only allowed with logprobs"
        raise bad_request(message, param="top_logprobs")


def unknown_model(served: str) -> ApiError:
    """The 404 for any model but the one that is served."""
    message = f"The model does not exist; this server has {served}"
    return ApiError(404, message, code="model_not_found", param="model")
