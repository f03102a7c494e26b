"""The chat request that all API formats are parsed into, and its validation.

`validate` checks a JSON body against a `Schema`; its errors name the field and never
quote the body. Unknown fields are ignored, as in other OpenAI-compatible servers. A
known field is refused if its type is wrong, or if it would change the answer and is not
supported here. Values that change nothing are accepted.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import core_schema

from lifecycle_asgi import TooDeep, find_media
from lifecycle_asgi.json_body import LongText, parse_json
from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.errors import bad_request

F = TypeVar("F", bound="Schema")
# Unsupported fields, each with the values that change nothing.
Unsupported = Mapping[str, tuple[Any, ...]]

# Fields of other servers and APIs that no API here supports. They are refused rather
# than ignored, since a client that sends one depends on it.
UNSUPPORTED_EVERYWHERE: Unsupported = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "do_sample": (True,),
    "documents": ([],),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "logit_bias": ({},),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "no_repeat_ngram_size": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "thinking": ({"type": "disabled"},),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
# Each JSON value costs a hundred bytes, and a microsecond of the event loop. A text
# with more commas and brackets than this has more tokens than the engine accepts.
_MAX_VALUES = 2**18
_STEP = 2**18
# Characters of a string to copy: of more than most texts, and of less than an image.
_LONGEST = 2**20
# Values inspected of an invalid body, for a better error message.
_MAX_INSPECTED = 2**12
# Objects whose keys the client chooses.
_FREE_KEYS = ("metadata",)


class Schema(BaseModel):
    """Base class of request schemas."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )

    def __repr_args__(self) -> list[tuple[str, Any]]:
        """Show nothing: requests contain prompts."""
        return []


def require_one_of(**fields: str) -> dict[str, Any]:
    """Return a JSON schema that requires one of some *fields*."""
    return {
        "anyOf": [
            {"required": [name], "properties": {name: {"type": kind}}}
            for name, kind in fields.items()
        ]
    }


def validate(schema: type[F], body: bytes, unsupported: Unsupported) -> F:
    """Parse and validate a body.

    Raises:
        ApiError: 400, with the path of the first invalid field in ``param``.
            Neither the error nor its context refers to the body.
    """
    unsupported = {**UNSUPPORTED_EVERYWHERE, **unsupported}
    for longest in sorted({min(_LONGEST, len(body)), len(body)}):
        document = _parse_json(body, longest)
        try:
            request = schema.model_validate(document)
        except ValidationError as error:
            # Perhaps only for a long text where no `ImageData` are.
            mistake = error.errors(include_input=False, include_url=False)[0]
            media_error = _unsupported_media(document)
        else:
            _refuse_unsupported(document, unsupported)
            return request
    if media_error is not None:
        raise media_error
    param = _param(mistake["loc"])
    message = mistake["msg"] if param else "The body must be a JSON object"
    if mistake["type"] == "union_tag_invalid":  # pydantic's message quotes the body
        message = f"type should be one of {mistake['ctx']['expected_tags']}"
    raise bad_request(
        f"{message} (at {param})" if param else message,
        param=param,
        code=_code(mistake["type"]),
    )


def _parse_json(body: bytes, longest: int) -> object:
    """Decode strict JSON, at most 200 levels deep.

    Strings of more than *longest* characters may stay in the body, as `LongText`.
    """
    # Counts characters in texts, too; base64, the bulk of large bodies, has none.
    # In steps, between which the event loop gets its turn.
    steps = range(0, len(body), _STEP)
    marks = (body.count(mark, at, at + _STEP) for at in steps for mark in b",[{")
    if sum(marks) > _MAX_VALUES:
        problem = f"The body has more than {_MAX_VALUES} values; send less"
        raise bad_request(problem, code="invalid_json")
    try:
        return parse_json(body, _parse_strictly, longest=longest)
    except ValueError as error:
        message = str(error)
    raise bad_request(f"The body is not valid JSON: {message}", code="invalid_json")


def _parse_strictly(body: bytes) -> Any:
    # A byte order mark is accepted: some shells write one before all output.
    body = body.removeprefix(BOM_UTF8)
    return pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="keys")


def _unsupported_media(document: object) -> ApiError | None:
    """Return the error for video, audio and files, which no schema here has."""
    try:
        found = find_media(document, max_values=_MAX_INSPECTED)
    except TooDeep:
        return None
    for media in found:
        if media.kind != "image":
            problem = f"Input of {media.kind} is not supported; send text and images"
            param = f"{media.path}.type"
            return bad_request(problem, param=param, code="unsupported_media")
    return None


def _refuse_unsupported(document: Any, unsupported: Unsupported) -> None:
    for name, neutral in unsupported.items():
        value = document.get(name)
        if value is not None and not any(_same(value, each) for each in neutral):
            message = f"{name} is not supported by this server; leave it out"
            raise bad_request(message, param=name, code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    # In JSON, unlike here, false is not 0 and true is not 1.
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _param(loc: tuple[int | str, ...]) -> str | None:
    if loc and loc[0] in _FREE_KEYS:
        return str(loc[0])
    path = ""
    for step in loc:
        dot = "." if path else ""
        path += f"[{step}]" if isinstance(step, int) else f"{dot}{step}"
    return path or None


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"


# Unsupported fields of chat completions.
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
# Each choice is a separate engine request with its own copy of the images.
_MAX_CHOICES = 16
# The model of `/generate` requests that name none: any. No client can send it.
ANY_MODEL = ""

# For readers of the schemas; the values are checked where they are decoded.
URI: dict[str, Any] = {"format": "uri"}
BASE64: dict[str, Any] = {"format": "byte"}


class _StaysInBody:
    """Lets pydantic accept `LongText` where it accepts a string."""

    def __get_pydantic_core_schema__(self, _: Any, __: Any) -> core_schema.CoreSchema:
        def accept(value: Any, validate_string: Any) -> Any:
            return value if isinstance(value, LongText) else validate_string(value)

        string = core_schema.str_schema(strict=True)
        return core_schema.no_info_wrap_validator_function(accept, string)


# An image by URL or in base64, which is too long to be copied.
ImageData = Annotated[str | LongText, _StaysInBody()]


class ImageUrl(Schema):
    """The URL of an image, usually a data URL."""

    url: ImageData = Field(json_schema_extra=URI)
    detail: Literal["auto", "low", "high", "original"] | None = None
    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """Path of the field in the body; empty for chat completions."""
        return self._path

    @classmethod
    def at(cls, path: str, url: str | LongText) -> ImageUrl:
        """Create one whose field has another path in the body."""
        made = cls(url=url)
        made._path = path
        return made


class Part(Schema):
    """One part of a message: text or an image."""

    model_config = ConfigDict(
        json_schema_extra=require_one_of(text="string", image_url="object")
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


def as_parts(content: Any) -> Any:
    """Return a text as the list of its one part, for validators."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _as_strings(stop: Any) -> Any:
    if stop is None or stop == "":
        return []
    return [stop] if isinstance(stop, str) else stop


class ChatMessage(Schema):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        _Parts, BeforeValidator(as_parts, json_schema_input_type=str | _Parts)
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
        check_image_role(self.role, [part.type for part in self.content])
        return self


def check_image_role(role: str, types: list[str]) -> None:
    """Refuse images in messages of other roles than user; for validators."""
    if role != "user" and any("image" in each for each in types):
        kind, text = "image_role", "only messages of the user can have images"
        raise pydantic_core.PydanticCustomError(kind, text)


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=4, fail_fast=True)]


class CommonOptions(Schema):
    """Options of all APIs, also of those that do not define all of them."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    # Not in OpenAI's API, but in other servers that implement it; 0 and -1 are all.
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    stream: bool | None = None
    prompt_cache_key: str | None = Field(default=None, max_length=256)


def options_of(request: Schema, kind: type[Schema]) -> dict[str, Any]:
    """Return the fields that *request* has of *kind*."""
    return {name: getattr(request, name) for name in kind.model_fields}


class Options(CommonOptions):
    """Generation options, named as in chat completions."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Annotated[
        _Stops,
        BeforeValidator(_as_strings, json_schema_input_type=_Stop | _Stops | None),
    ] = Field(default_factory=list)
    n: int | None = Field(default=None, ge=1, le=_MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    user: str | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None


class Fields(NamedTuple):
    """Names of the body's content fields, for errors."""

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

    _echo: dict[str, Any] = PrivateAttr(default_factory=dict)
    _fields: Fields = PrivateAttr(Fields())

    @property
    def fields(self) -> Fields:
        """Names of the content fields in the body."""
        return self._fields

    def with_fields(self, **fields: str) -> ChatRequest:
        """Set the names of the content fields; returns this request."""
        self._fields = Fields(**fields)
        return self

    @property
    def echo(self) -> dict[str, Any]:
        """Fields of the request that the answer repeats, in APIs that do so."""
        return self._echo

    def with_echo(self, **fields: Any) -> ChatRequest:
        """Set the fields that the answer repeats; returns this request."""
        self._echo = fields
        return self


def parse_request(body: bytes) -> ChatRequest:
    """Validate the body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: 400, with the path of the first invalid field in ``param``.
            Neither the error nor its context refers to the body.
    """
    request = validate(ChatRequest, body, UNSUPPORTED)
    if request.stream_options is not None and not request.stream:
        message = "stream_options is only allowed with stream"
        raise bad_request(message, param="stream_options")
    check_top_logprobs(request)
    return request


def check_top_logprobs(request: Options) -> None:
    """Refuse ``top_logprobs`` without ``logprobs``.

    Raises:
        ApiError: 400.
    """
    if request.top_logprobs and not request.logprobs:
        message = "top_logprobs is only allowed with logprobs"
        raise bad_request(message, param="top_logprobs")


def unknown_model(served: str) -> ApiError:
    """Return the 404 for any model but the one that is served."""
    message = f"The model does not exist; this server serves {served}"
    return ApiError(404, message, code="model_not_found", param="model")
