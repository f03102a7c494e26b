"""From the bytes of a request body to a chat in a box, leaving nothing behind.

A body of images is there three times while it is read: as bytes, as strings in
the JSON, as files. Each lives in the frame of one function here and is gone when
that function returns; what goes on is a `Payload` and a few numbers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread

from lifecycle import Payload
from lifecycle_asgi.media import find_media

from .api_errors import ApiError, bad_request
from .defaults import ChatDefaults
from .dialects.openai_schema import (
    ANY_MODEL,
    ChatRequest,
    Fields,
    parse_request,
    unknown_model,
)
from .images.media import (
    Measure,
    MediaLimits,
    Weight,
    check_count,
    check_total,
    decode_data_url,
    measure,
    weigh,
)
from .owners import Owners
from .processor import Chat, Message
from .routes.bodies import BodyReader

Form = Callable[[bytes], ChatRequest]

ID_PATTERN = "[A-Za-z0-9._-]{1,128}"
_ID = re.compile(ID_PATTERN.encode())
# Shorter bodies are parsed where they are: a thread costs more than they do.
_INLINE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Remote:
    """An image that is elsewhere.

    Attributes:
        url: Where.
        message: The index of the message that it belongs to.
        part: The index of its place there.
        param: Path of the field, for errors.
    """

    url: str = field(repr=False)
    message: int
    part: int
    param: str


@dataclass(frozen=True, slots=True)
class Incoming:
    """A checked request, its heavy part in a box.

    Attributes:
        chat: For the processor; take it once.
        weight: What its images need until hand-off.
        images: How many images it has; with none, it never waits for bytes.
        stream: Whether the answer is to be streamed.
        include_usage: Whether the stream ends with a usage chunk.
        choices: How many answers are to be given.
        stop: Strings that end an answer.
        echo: What the answer repeats of the request.
        measures: Of its images, as far as it brought them.
        remote: Images that it names instead, to be fetched.
        fields: Where in the body its content stood, for errors.
    """

    chat: Payload[Chat] = field(repr=False)
    weight: Weight
    images: int
    stream: bool
    include_usage: bool
    choices: int = 1
    stop: tuple[str, ...] = field(default=(), repr=False)
    echo: Mapping[str, Any] = field(default_factory=dict, repr=False)
    measures: tuple[Measure, ...] = ()
    remote: tuple[Remote, ...] = ()
    fields: Fields = field(default_factory=Fields)

    @property
    def estimate(self) -> int:
        """Bytes that it will need until hand-off, tensors for each choice."""
        return self.weight.work + self.choices * self.weight.tensors


class Intake:
    """Reads and checks chat completion requests.

    Args:
        model: The one model that is served.
        limits: On images.
        defaults: For requests that do not say.
        limiter: Bounds the threads, and so the copies, that parse at a time.
        text_chars: The most text of one request, all messages together.
        bodies: Reads their bodies.
        remote_images: Whether images may be named by https URLs.
    """

    def __init__(
        self,
        model: str,
        *,
        limits: MediaLimits,
        defaults: ChatDefaults,
        limiter: anyio.CapacityLimiter,
        text_chars: int = 2**20,
        bodies: BodyReader | None = None,
        remote_images: bool = False,
    ) -> None:
        self._model = model
        self._remote_images = remote_images
        self._text_chars = text_chars
        self._bodies = bodies or BodyReader()
        self._limits = limits
        self._defaults = defaults
        self._limiter = limiter
        self._owners = Owners()

    def close(self) -> None:
        """Read no more: whoever is still sending a body is told to go elsewhere."""
        self._bodies.close()

    async def read(
        self, receive: Any, form: Form = parse_request, client: bytes = b""
    ) -> Incoming:
        """Read one request body and return what it asks for.

        Args:
            receive: The ASGI ``receive``.
            form: Checks the body, in the form of its API.
            client: Whose request it is, whatever it says.

        Raises:
            ApiError: 400, 404, 408 or 413.
            ClientLeft: The client disconnected.
            GateClosed: `close` was called.

        Cancellation:
            At any time; a thread that parses is waited for.
        """
        chunks = await self._bodies.read(receive)
        size = sum(map(len, chunks))
        if size <= _INLINE_BYTES:
            return self.parse(b"".join(chunks), form, client)
        box = Payload(chunks, nbytes=size)
        del chunks

        def parse() -> Incoming | ApiError:
            try:
                return self.parse(b"".join(box.take()), form, client)
            except ApiError as error:
                # A traceback holds the body's frames, and a worker thread holds
                # on to what it raised until it runs again.
                return error.with_traceback(None)

        outcome = await anyio.to_thread.run_sync(parse, limiter=self._limiter)
        if isinstance(outcome, ApiError):
            raise outcome
        return outcome

    def parse(
        self, body: bytes, form: Form = parse_request, client: bytes = b""
    ) -> Incoming:
        """Check a body; any thread.

        Raises:
            ApiError: 400, 404 or 413. It retains nothing of the body.
        """
        request = form(body)
        del body
        if request.model not in (self._model, ANY_MODEL):
            raise unknown_model(self._model)
        self._check_text(request)
        images = len(find_media(request.messages))
        check_count(images, self._limits, param=request.fields.images)
        measures: list[Measure] = []
        remote: list[Remote] = []
        messages = self._messages(request, measures, remote)
        limit = request.max_completion_tokens or request.max_tokens
        options = request.stream_options
        chat = Chat(
            messages,
            limit or self._defaults.max_tokens,
            seed=request.seed,
            ignore_eos=bool(request.ignore_eos),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            share=self._owners.share(client, request.user or ""),
            session=request.prompt_cache_key,
            **self._defaults.sampling(request),
        )
        choices = request.n or 1
        encoded = sum(one.encoded for one in measures)
        return Incoming(
            Payload(chat, nbytes=encoded),
            weigh(measures),
            images,
            bool(request.stream),
            bool(options and options.include_usage),
            choices,
            tuple(request.stop),
            request.echo,
            tuple(measures),
            tuple(remote),
            request.fields,
        )

    def _check_text(self, request: ChatRequest) -> None:
        """Refuse more text than a tokenizer should be made to read."""
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
        self, request: ChatRequest, measures: list[Measure], remote: list[Remote]
    ) -> list[Message]:
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
                if self._remote_images and url[:8].lower() == "https://":
                    remote.append(Remote(url, i, len(content), param))
                    content.append(b"")  # its place
                    continue
                image = decode_data_url(url, param=param)
                del url
                part.image_url.url = ""  # one copy at a time is enough
                measures.append(measure(image, self._limits, param=param))
                check_total(measures, self._limits, param=request.fields.images)
                content.append(image)
            role = "system" if message.role == "developer" else message.role
            messages.append(Message(role, content))
        return messages


def request_id(scope: Any) -> str:
    """The client's ``x-request-id``, or a new one.

    Raises:
        ApiError: 400 unless it is 1 to 128 letters, digits, ``.``, ``_``, ``-``:
            it comes back in headers and events, so nothing else gets in.
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
