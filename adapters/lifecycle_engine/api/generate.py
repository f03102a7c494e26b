"""The plain ``/generate`` API: a prompt in, text out, as JSON or JSON lines."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from lifecycle_asgi.json_body import beginning_of
from lifecycle_engine.api.base import (
    ApiFormat,
    Document,
    Piece,
    ResponseWriter,
    Usage,
    dump,
)
from lifecycle_engine.api.chat_request import (
    ANY_MODEL,
    BASE64,
    MAX_MESSAGES,
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    ImageData,
    ImageUrl,
    Options,
    Part,
    Unsupported,
    check_top_logprobs,
    options_of,
    require_one_of,
    validate,
)
from lifecycle_engine.api.openai_chat import OPENAI
from lifecycle_engine.api.request_body import ParsedRequest
from lifecycle_engine.errors import bad_request

# Objects in which other servers expect options of `/generate`.
UNSUPPORTED: Unsupported = {"parameters": ({},), "sampling_params": ({},)}


class GenerateRequest(Options):
    """The body of a ``/generate`` request, with the limits of this server."""

    model_config = ConfigDict(
        json_schema_extra=require_one_of(text="string", messages="array")
    )

    text: str | None = None
    images: list[Annotated[ImageData, Field(json_schema_extra=BASE64)]] = Field(
        default_factory=list, max_length=MAX_PARTS - 1, fail_fast=True
    )
    messages: list[ChatMessage] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    model: str | None = Field(default=None, min_length=1, max_length=256)


def parse_generate(body: bytes) -> ChatRequest:
    """Validate a body and return it as a chat completion request.

    Raises:
        ApiError: 400; it does not refer to the body.
    """
    request = validate(GenerateRequest, body, UNSUPPORTED)
    if (request.text is None) == (request.messages is None):
        raise bad_request("Send either text or messages", param="text")
    if request.images and request.text is None:
        message = "images requires text; in messages, use image_url parts"
        raise bad_request(message, param="images")
    check_top_logprobs(request)
    messages = request.messages
    if messages is None:
        text = Part(type="text", text=request.text)
        content = [*_image_parts(request), text]
        messages = [ChatMessage(role="user", content=content)]
    options = options_of(request, Options)
    chat = ChatRequest(model="any", messages=messages, **options)
    chat = chat.model_copy(update={"model": request.model or ANY_MODEL})
    return (
        chat if request.text is None else chat.with_fields(text="text", images="images")
    )


def _image_parts(request: GenerateRequest) -> list[Part]:
    parts = []
    for at, image in enumerate(request.images):
        is_url = ":" in beginning_of(image, 16)
        url = image if is_url else "data:image/any;base64," + image
        request.images[at] = ""  # keep one copy at a time
        parts.append(
            Part(type="image_url", image_url=ImageUrl.at(f"images[{at}]", url))
        )
    return parts


class GenerateAnswer:
    """The response to one request."""

    def __init__(
        self, writer: ResponseWriter, parsed: ParsedRequest, model: str, usage: Usage
    ) -> None:
        self._writer, self._usage, self._stream = writer, usage, parsed.stream
        self._head = {"id": writer.request_id, "model": model}
        self._pieces: list[list[Piece]] = [[] for _ in range(parsed.choices)]
        self._ends: list[Document] = [{} for _ in range(parsed.choices)]

    async def piece(self, index: int, piece: Piece) -> None:
        """Store a piece, or send it unless it is empty."""
        if not self._stream:
            self._pieces[index].append(piece)
        elif piece.text or piece.logprobs:
            await self._writer.event({"index": index, **_output([piece])})

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        """Store the end of a choice, or send it."""
        self._ends[index] = {"finish_reason": finish_reason, "stop": stop}
        if self._stream:
            end = {"index": index, "text": "", **self._ends[index]}
            await self._writer.event(end)

    async def done(self) -> None:
        """Send the response, or end the stream."""
        usage = {**self._head, "usage": self._usage.document()}
        if self._stream:
            await self._writer.done(usage)
            return
        outputs = [
            {**_output(pieces), **end}
            for pieces, end in zip(self._pieces, self._ends, strict=True)
        ]
        await self._writer.json(200, {**usage, "outputs": outputs})


def _output(pieces: list[Piece]) -> Document:
    whole = Piece.joined(pieces)
    if whole.logprobs is None:
        return {"text": whole.text}
    return {"text": whole.text, "logprobs": whole.logprobs}


def _line(document: Document) -> bytes:
    return dump(document) + b"\n"


PLAIN = ApiFormat(
    parse=parse_generate,
    answer=GenerateAnswer,
    frame=_line,
    error=OPENAI.error,
    stream_type=b"application/x-ndjson",
)
