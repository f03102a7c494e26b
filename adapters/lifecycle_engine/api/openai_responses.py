"""OpenAI's responses API: request and response, complete or as typed events.

Validation is as strict as for chat completions. The server stores nothing, so requests
that refer to an earlier response are refused; each request brings its conversation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.api.base import (
    ApiFormat,
    Document,
    Piece,
    ResponseWriter,
    Usage,
    named_event,
)
from lifecycle_engine.api.chat_request import (
    MAX_MESSAGES,
    MAX_PARTS,
    URI,
    ChatMessage,
    ChatRequest,
    CommonOptions,
    ImageData,
    ImageUrl,
    Part,
    Schema,
    Unsupported,
    check_image_role,
    options_of,
    require_one_of,
    validate,
)
from lifecycle_engine.api.openai_chat import OPENAI
from lifecycle_engine.api.request_body import ParsedRequest
from lifecycle_engine.errors import bad_request

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
    # Fields of chat completions, which this API does not have.
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "seed": (),
    "stop": ([],),
}


class _Content(Schema):
    model_config = ConfigDict(
        json_schema_extra=require_one_of(text="string", image_url="string")
    )

    type: Literal["input_text", "output_text", "input_image"]
    text: str | None = None
    image_url: ImageData | None = Field(default=None, json_schema_extra=URI)
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


class _Item(Schema):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        _Contents, BeforeValidator(_as_content, json_schema_input_type=str | _Contents)
    ]

    @model_validator(mode="after")
    def _images_by_users(self) -> _Item:
        check_image_role(self.role, [each.type for each in self.content])
        return self


# One less than the maximum: the instructions become a message.
_Items = Annotated[
    list[_Item], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)
]


def _as_items(asked: Any) -> Any:
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


class _StreamOptions(Schema):
    include_obfuscation: bool | None = None


class ResponsesRequest(CommonOptions):
    """The body of a responses request, with the limits of this server."""

    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        _Items, BeforeValidator(_as_items, json_schema_input_type=str | _Items)
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    include: list[str] | None = Field(default=None, max_length=64, fail_fast=True)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: _StreamOptions | None = None
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=16
    )
    store: bool | None = None
    user: str | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None


def parse_responses(body: bytes) -> ChatRequest:
    """Validate a body and return it as a chat completion request.

    Raises:
        ApiError: 400; it does not refer to the body.
    """
    request = validate(ResponsesRequest, body, UNSUPPORTED)
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
        logprobs=logprobs,
        top_logprobs=request.top_logprobs,
        user=request.user,
        ignore_eos=request.ignore_eos,
        **options_of(request, CommonOptions),
    )
    return chat.with_fields(text="input", images="input").with_echo(
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
        each.image_url = ""  # keep one copy at a time
        parts.append(Part(type="image_url", image_url=image))
    return parts


_ITEM = {"item_id": "", "output_index": 0, "content_index": 0}


@dataclass(slots=True)
class ResponseText:
    """Builds the documents of one response.

    It refers to neither the request nor the connection, since it lives as long as the
    client reads.

    Attributes:
        request_id: Basis of the ids of the response and its message.
        echo: Fields repeated from the request.
        events: Number of events so far; it numbers them.
    """

    request_id: str
    model: str
    usage: Usage
    echo: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))
    finish_reason: str | None = None
    events: int = 0
    _pieces: list[Piece] = field(default_factory=list, repr=False)

    def add(self, piece: Piece) -> None:
        """Add a piece of the text."""
        self._pieces.append(piece)

    def whole(self) -> Document:
        """Return the complete response."""
        short = self.finish_reason == "length"
        status = "incomplete" if short else "completed"
        done = {} if short else {"completed_at": int(time.time())}
        why = {"reason": "max_output_tokens"} if short else None
        return {
            **self._response(status, [self._message(status)]),
            "incomplete_details": why,
            "usage": self._tokens(),
            **done,
        }

    def begin(self) -> list[Document]:
        """Return the events before the first piece."""
        response = self._response("in_progress", [])
        item = {**self._message("in_progress"), "content": []}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._in_part("response.content_part.added", part=_part("", [])),
        ]

    def delta(self, piece: Piece) -> Document:
        """Return the event of one piece."""
        logprobs = [_without_bytes(each) for each in piece.logprobs or ()]
        kind = "response.output_text.delta"
        return self._in_part(kind, delta=piece.text, logprobs=logprobs)

    def end(self) -> list[Document]:
        """Return the events after the last piece."""
        whole = self.whole()
        item = whole["output"][0]
        part = item["content"][0]
        logprobs = [_without_bytes(each) for each in part["logprobs"]]
        kind = "response.output_text.done"
        return [
            self._in_part(kind, text=part["text"], logprobs=logprobs),
            self._in_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failure(self, error: ApiError) -> list[Document]:
        """Return the events that end a stream with an error.

        The first one is the API's. The SDK returns it like any other event, so a second
        one follows, which it raises; it has the error as an object, too.
        """
        details = {"code": "server_error", "message": error.message}
        response = {
            **self._response("failed", [self._message("incomplete")]),
            "error": details,
            "usage": self._tokens(),
        }
        failed = self._event("response.failed", response=response)
        flat = {name: error.fields[name] for name in ("code", "message", "param")}
        return [failed, self._event("error", **flat, error=error.fields)]

    def _event(self, kind: str, **fields: Any) -> Document:
        number, self.events = self.events, self.events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _in_part(self, kind: str, **fields: Any) -> Document:
        return self._event(kind, **{**_ITEM, "item_id": self._item_id}, **fields)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.request_id}"

    def _message(self, status: str) -> Document:
        whole = Piece.joined(self._pieces)
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(whole.text, whole.logprobs or [])],
        }

    def _response(self, status: str, output: list[Document]) -> Document:
        head = empty_response(self.request_id, self.model, self.created, status)
        return {**head, **self.echo, "output": output}

    def _tokens(self) -> Document:
        usage = self.usage.document()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self.usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def empty_response(request_id: str, model: str, created: int, status: str) -> Document:
    """Return the fields of a response without any output."""
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
    }


def _part(text: str, logprobs: list[Document]) -> Document:
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs,
    }


def _without_bytes(logprob: Document) -> Document:
    """The format of events: without the bytes."""
    names = ("token", "logprob")
    top = [{name: each[name] for name in names} for each in logprob["top_logprobs"]]
    return {**{name: logprob[name] for name in names}, "top_logprobs": top}


class ResponseAnswer:
    """The answer to one request."""

    def __init__(
        self, writer: ResponseWriter, parsed: ParsedRequest, model: str, usage: Usage
    ) -> None:
        self._writer, self._stream = writer, parsed.stream
        self._text = ResponseText(str(writer.request_id), model, usage, parsed.echo)
        self._begun = False

    async def piece(self, index: int, piece: Piece) -> None:
        """Receive a piece; the first one starts the stream."""
        del index  # there is one choice
        self._text.add(piece)
        if self._stream:
            await self._begin()
            if piece.text or piece.logprobs:
                await self._writer.event(self._text.delta(piece))

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Receive the end."""
        del index, stop  # this API has no stop strings
        self._text.finish_reason = finish_reason

    async def done(self) -> None:
        """Send the response, or end the stream."""
        if not self._stream:
            await self._writer.json(200, self._text.whole())
            return
        await self._begin()
        await self._writer.done(*self._text.end())

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._writer.failure = self._text.failure
        await self._writer.event(*self._text.begin())


RESPONSES = ApiFormat(
    parse=parse_responses,
    answer=ResponseAnswer,
    frame=named_event,
    error=OPENAI.error,
)
