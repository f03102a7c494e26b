"""Request bodies, parsed without keeping a copy."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread

from lifecycle import Payload
from lifecycle_asgi import (
    ClientIdentity,
    ImageSize,
    find_media,
)
from lifecycle_asgi.json_body import beginning_of
from lifecycle_asgi.refusals import ApiError
from lifecycle_engine.api.chat_request import (
    ANY_MODEL,
    ChatMessage,
    ChatRequest,
    Fields,
    parse_request,
    unknown_model,
)
from lifecycle_engine.errors import bad_request
from lifecycle_engine.multimodal.limits import (
    MediaLimits,
    check_count,
    check_total,
    decode_data_url,
    read_image_size,
)
from lifecycle_engine.processing.processor import Chat, ChatDefaults, Message

ID_PATTERN = "[A-Za-z0-9._-]{1,128}"
_ID = re.compile(ID_PATTERN.encode())

# Shorter bodies are parsed on the event loop: a thread costs more.
_INLINE_BYTES = 4096
_SMALL_BYTES = 65536

ParseBody = Callable[[bytes], ChatRequest]


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image given by URL.

    Attributes:
        param: Path of the field, for errors.
    """

    url: str = field(repr=False)
    message: int
    part: int
    param: str


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request; its chat, which may be large, is in a payload.

    A body with large images exists twice while it is read: as bytes, and as files.
    Strings of the JSON are a third copy of small ones. Each lives in the frame of one
    function and is gone when that returns; only this object goes on.

    Attributes:
        chat: For the processor; can be taken once.
        images: Number of images; without any, the request never waits for bytes.
        include_usage: Whether the stream ends with a usage chunk.
        echo: Fields of the request that the answer repeats.
        fields: Names of the body's content fields, for errors.
    """

    chat: Payload[Chat] = field(repr=False)
    images: int
    stream: bool
    include_usage: bool
    choices: int = 1
    stop: tuple[str, ...] = field(default=(), repr=False)
    echo: Mapping[str, Any] = field(default_factory=dict, repr=False)
    image_sizes: tuple[ImageSize, ...] = ()
    remote: tuple[RemoteImage, ...] = ()
    fields: Fields = field(default_factory=Fields)


class RequestParser:
    """Turns request bodies into `ParsedRequest` objects.

    Args:
        model: Name of the served model.
        limits: Limits on images.
        defaults: Values for options that a request does not set.
        limiter: Limits the threads, and so the copies, that parse concurrently.
        small_limiter: In its place for bodies that are small, so that none waits behind
            a large one; by default *limiter*.
        text_chars: Maximum number of characters in all messages of a request.
        remote_images: Whether images may be given by https URL.
    """

    def __init__(
        self,
        model: str,
        *,
        limits: MediaLimits,
        defaults: ChatDefaults,
        limiter: anyio.CapacityLimiter,
        small_limiter: anyio.CapacityLimiter | None = None,
        text_chars: int = 2**20,
        remote_images: bool = False,
    ) -> None:
        self._model = model
        self._remote_images = remote_images
        self._text_chars = text_chars
        self._limits = limits
        self._defaults = defaults
        self._limiter = limiter
        self._small_limiter = small_limiter or limiter
        self._identity = ClientIdentity()

    async def read(
        self, body: bytes, parse: ParseBody = parse_request, client: bytes = b""
    ) -> ParsedRequest:
        """Parse a body: a large one in a thread.

        Args:
            body: The body. Drop other references to it: it is freed once parsed.
            parse: Validates the body in the format of its API.
            client: Identity of the client.

        Raises:
            ApiError: 400, 404 or 413.

        Cancellation:
            At any time; waits for a thread that parses.
        """
        if len(body) <= _INLINE_BYTES:
            return self.parse(body, parse, client)
        box, small = Payload(body, nbytes=len(body)), len(body) <= _SMALL_BYTES
        del body

        def run() -> ParsedRequest | ApiError:
            try:
                return self.parse(box.take(), parse, client)
            except ApiError as error:
                # A traceback holds the body's frames, and a worker thread refers to
                # what it raised until it runs again.
                return error.with_traceback(None)

        limiter = self._small_limiter if small else self._limiter
        outcome = await anyio.to_thread.run_sync(run, limiter=limiter)
        if isinstance(outcome, ApiError):
            raise outcome
        return outcome

    def parse(
        self, body: bytes, parse: ParseBody = parse_request, client: bytes = b""
    ) -> ParsedRequest:
        """Parse and validate a body; callable from any thread.

        Raises:
            ApiError: 400, 404 or 413. It retains nothing of the body.
        """
        request = parse(body)
        del body
        if request.model not in (self._model, ANY_MODEL):
            raise unknown_model(self._model)
        self._check_text(request)
        images = find_media(request.messages)
        sizes: list[ImageSize] = []
        remote: list[RemoteImage] = []
        if images:
            check_count(len(images), self._limits, param=request.fields.images)
            messages = self._messages(request, sizes, remote)
        else:
            messages = _text_messages(request)
        limit = request.max_completion_tokens or request.max_tokens
        options = request.stream_options
        chat = Chat(
            messages,
            limit or self._defaults.max_tokens,
            seed=request.seed,
            ignore_eos=bool(request.ignore_eos),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            client=self._identity.digest(client).hex(),
            tenant=self._identity.tenant_id(client, request.user or ""),
            session=request.prompt_cache_key,
            **self._defaults.sampling(request),
        )
        choices = request.n or 1
        encoded = sum(size.encoded for size in sizes)
        return ParsedRequest(
            Payload(chat, nbytes=encoded),
            len(images),
            bool(request.stream),
            bool(options and options.include_usage),
            choices,
            tuple(request.stop),
            request.echo,
            tuple(sizes),
            tuple(remote),
            request.fields,
        )

    def _check_text(self, request: ChatRequest) -> None:
        """Refuse more text than the tokenizer should process."""
        parts = [part for message in request.messages for part in message.content]
        chars = sum(len(part.text or "") for part in parts)
        if chars > self._text_chars:
            raise bad_request(
                f"The messages have {chars} characters of text; the limit is "
                f"{self._text_chars}: shorten them",
                param=request.fields.text,
                code="context_length_exceeded",
            )

    def _messages(
        self,
        request: ChatRequest,
        sizes: list[ImageSize],
        remote: list[RemoteImage],
    ) -> list[Message]:
        """Decode the images of a request, adding their sizes and URLs to the lists."""
        messages = []
        for i, message in enumerate(request.messages):
            content: list[str | bytes] = []
            for j, part in enumerate(message.content):
                if part.image_url is None or not find_media(part):
                    content.append(part.text or "")
                    continue
                chat = f"messages[{i}].content[{j}].image_url.url"
                param = part.image_url.path or chat
                url = part.image_url.url
                is_remote = beginning_of(url, 8).lower() == "https://"
                if self._remote_images and is_remote:
                    remote.append(RemoteImage(str(url), i, len(content), param))
                    content.append(b"")  # replaced when it is fetched
                    continue
                image = decode_data_url(url, param=param)
                del url
                part.image_url.url = ""  # keep one copy at a time
                sizes.append(read_image_size(image, self._limits, param=param))
                check_total(sizes, self._limits, param=request.fields.images)
                content.append(image)
            messages.append(Message(_role(message), content))
        return messages


def _text_messages(request: ChatRequest) -> list[Message]:
    return [
        Message(_role(message), [part.text or "" for part in message.content])
        for message in request.messages
    ]


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def request_id(scope: Any) -> str:
    """Return the client's ``x-request-id``, or a new one.

    Raises:
        ApiError: 400 unless it is 1 to 128 letters, digits, ``.``, ``_``, ``-``:
            it is repeated in headers and events.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            if _ID.fullmatch(value) is None:
                message = (
                    f"x-request-id has {len(value)} bytes; it must be 1 to 128 of "
                    "A-Z a-z 0-9 . _ -"
                )
                raise bad_request(message, param="x-request-id", code="invalid_id")
            return str(value, "ascii")
    return secrets.token_hex(12)
