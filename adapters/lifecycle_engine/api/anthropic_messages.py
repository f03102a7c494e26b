"""Anthropic's messages API: request and response, complete or as events.

Validation is as strict as for chat completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.api.base import (
    ApiFormat,
    Document,
    EventTemplate,
    Piece,
    ResponseWriter,
    Usage,
    named_event,
)
from lifecycle_engine.api.chat_request import (
    BASE64,
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
    as_parts,
    check_image_role,
    options_of,
    validate,
)
from lifecycle_engine.api.request_body import ParsedRequest

UNSUPPORTED: Unsupported = {
    "container": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
    # Fields of OpenAI's API, which this API does not have.
    "logprobs": (False,),
    "n": (1,),
    "seed": (),
    "stop": ([],),
    "top_logprobs": (0,),
}


class _Base64Source(Schema):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: ImageData = Field(json_schema_extra=BASE64)


class _UrlSource(Schema):
    type: Literal["url"]
    url: ImageData = Field(json_schema_extra=URI)


class _Text(Schema):
    type: Literal["text"]
    text: str


class _Image(Schema):
    type: Literal["image"]
    source: Annotated[_Base64Source | _UrlSource, Field(discriminator="type")]


_Block = Annotated[_Text | _Image, Field(discriminator="type")]
_Blocks = Annotated[list[_Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class _Message(Schema):
    role: Literal["user", "assistant"]
    content: Annotated[
        _Blocks, BeforeValidator(as_parts, json_schema_input_type=str | _Blocks)
    ]

    @model_validator(mode="after")
    def _images_by_users(self) -> _Message:
        check_image_role(self.role, [block.type for block in self.content])
        return self


class _Metadata(Schema):
    user_id: str | None = Field(default=None, max_length=256)


class MessagesRequest(CommonOptions):
    """The body of a message request, with the limits of this server."""

    model: str = Field(min_length=1, max_length=256)
    # One less than the maximum: the system prompt becomes a message.
    messages: list[_Message] = Field(
        min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True
    )
    max_tokens: int = Field(ge=1, lt=2**31)
    system: Annotated[
        list[_Text],
        Field(max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(as_parts, json_schema_input_type=str | list[_Text]),
    ] = Field(default_factory=list)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=4, fail_fast=True
    )
    temperature: float | None = Field(default=None, ge=0, le=1)
    metadata: _Metadata | None = None


def parse_messages(body: bytes) -> ChatRequest:
    """Validate a body and return it as a chat completion request.

    Raises:
        ApiError: 400; it does not refer to the body.
    """
    request = validate(MessagesRequest, body, UNSUPPORTED)
    messages = [ChatMessage(role=m.role, content=_parts(m)) for m in request.messages]
    if request.system:
        parts = [Part(type="text", text=block.text) for block in request.system]
        messages.insert(0, ChatMessage(role="system", content=parts))
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        user=request.metadata.user_id if request.metadata else None,
        **options_of(request, CommonOptions),
    )


def _parts(message: _Message) -> list[Part]:
    parts = []
    for block in message.content:
        if isinstance(block, _Text):
            parts.append(Part(type="text", text=block.text))
            continue
        source = block.source
        if isinstance(source, _UrlSource):
            url, source.url = source.url, ""  # keep one copy at a time
        else:
            url = f"data:{source.media_type};base64," + source.data
            source.data = ""
        parts.append(Part(type="image_url", image_url=ImageUrl(url=url)))
    return parts


# The status that the SDK knows as "overloaded".
_OVERLOADED = 529


def _text_delta(text: str) -> Document:
    delta = {"type": "text_delta", "text": text}
    return {"type": "content_block_delta", "index": 0, "delta": delta}


_TEXT = EventTemplate(named_event, _text_delta)


class MessagesAnswer:
    """The answer to one request, complete or as events."""

    def __init__(
        self, writer: ResponseWriter, parsed: ParsedRequest, model: str, usage: Usage
    ) -> None:
        self._writer, self._usage, self._stream = writer, usage, parsed.stream
        self._model = model
        self._text: list[str] = []
        self._reason: str | None = None
        self._stop: str | None = None
        self._begun = False

    async def piece(self, index: int, piece: Piece) -> None:
        """Receive a piece; the first one starts the stream."""
        del index  # there is one choice
        if not self._stream:
            self._text.append(piece.text)
            return
        await self._begin()
        if piece.text:
            await self._writer.part(_TEXT.event(piece.text))

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Receive the end."""
        del index
        self._reason = "max_tokens" if finish_reason == "length" else "end_turn"
        if stop is not None:
            self._reason, self._stop = "stop_sequence", stop
        if self._stream:
            await self._begin()
            await self._event("content_block_stop", index=0)

    async def done(self) -> None:
        """Send the response, or end the stream."""
        if not self._stream:
            content = [{"type": "text", "text": "".join(self._text)}]
            await self._writer.json(200, self._message(content))
            return
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        usage = {"output_tokens": self._usage.completion_tokens}
        await self._event("message_delta", delta=delta, usage=usage)
        await self._event("message_stop")
        await self._writer.done()

    async def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        await self._event("message_start", message=self._message([]))
        block = {"type": "text", "text": ""}
        await self._event("content_block_start", index=0, content_block=block)

    async def _event(self, kind: str, **fields: Any) -> None:
        await self._writer.event({"type": kind, **fields})

    def _message(self, content: list[Document]) -> Document:
        usage = self._usage
        return {
            "id": f"msg_{self._writer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": {
                # In this API the input tokens do not include the cached ones.
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }


def _error(error: ApiError, request_id: str | None) -> tuple[int, Document]:
    status = _OVERLOADED if error.status == 503 else error.status
    return status, {
        "type": "error",
        "error": error.anthropic_fields,
        "request_id": request_id,
    }


ANTHROPIC = ApiFormat(
    parse=parse_messages,
    answer=MessagesAnswer,
    frame=named_event,
    error=_error,
    id_header=b"request-id",
)
