"""The generating endpoints: one request from its first byte to its outcome."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from lifecycle import Lease, Payload, Session, SessionEnded, Stream
from lifecycle_asgi import RequestScope, request_of
from lifecycle_asgi.admission import client_timeout
from lifecycle_engine.api.base import (
    Answer,
    ApiFormat,
    Piece,
    ResponseWriter,
    TextDecoder,
    Usage,
)
from lifecycle_engine.api.chat_request import Fields
from lifecycle_engine.api.request_body import ParsedRequest, request_id
from lifecycle_engine.errors import (
    INTERNAL,
    BadChat,
    BadImage,
    is_slow_client,
    to_api_error,
)
from lifecycle_engine.processing.processor import Chat
from lifecycle_engine.server.remote_images import RemoteImages
from lifecycle_engine.server.service import Service
from lifecycle_zmq import EngineFailed, RequestRejected

Items = AsyncIterator[Any]
Open = Callable[[], Awaitable[Items]]
End = Callable[[Items | None], Awaitable[None]]
EngineRequest = tuple[dict[str, Any], Payload[Mapping[str, Any]]]

# Raised before the engine has run anything of a request.
_REFUSED_BY_ENGINE = (BadChat, BadImage, RequestRejected)


@dataclass(frozen=True, slots=True)
class _Call:
    """One request while it is served.

    Attributes:
        request: Its phases and counters, for events.
        parsed: What it asks for.
        client: Identity of its client.
        key: Of its client, in lanes.
        deadline: When its client gives up, by the loop's clock.
        usage: Its tokens so far.
    """

    request: RequestScope
    parsed: ParsedRequest
    client: bytes
    key: str
    deadline: float
    usage: Usage = field(default_factory=Usage)


def price_later(*_: Any) -> None:
    """Price no media in `Admission`: `GenerateEndpoint` knows what they need."""


class GenerateEndpoints(dict[str, "GenerateEndpoint"]):
    """The endpoints by their paths, as one ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request.

        Cancellation:
            As for `GenerateEndpoint`.
        """
        await self[scope["path"]](scope, receive, send)


class GenerateEndpoint:
    """An endpoint that generates answers in one API format, as an ASGI application.

    It is a raw ASGI class, so that everything happens in one task and inside one
    ``with session``. The phases are functions that return: no frame that lives as long
    as the stream has ever held the body, an image or a tensor.

    Args:
        service: The engine, the gates and the sessions.
        api: The API format.
    """

    def __init__(self, service: Service, api: ApiFormat) -> None:
        self._service = service
        self._api = api

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request.

        Cancellation:
            At any time: the session is closed at once and the registry ends the
            request in the engine. Cancellation always propagates.
        """
        writer, request = ResponseWriter(send, self._api), request_of(scope)
        fields, client = Fields(), self._service.client(scope)
        try:
            writer.request_id = request_id(scope)
            with request.phase("read"):
                parsed = await self._service.parser.read(
                    receive, self._api.parse, client
                )
            fields = parsed.fields
            deadline = anyio.current_time() + client_timeout(scope)
            key = self._service.client_key(scope)
            await self._serve(_Call(request, parsed, client, key, deadline), writer)
        except Exception as error:  # noqa: BLE001 - uvicorn would log its text
            problem = to_api_error(error) or INTERNAL
            if isinstance(error, (BadChat, BadImage)):
                is_image = isinstance(error, BadImage)
                problem.param = fields.images if is_image else fields.text
            if problem.status == INTERNAL.status:
                request.fail(error)
        else:
            return
        # Outside of the handler: the exception holds the frames it came through, and
        # the client may read slowly.
        await writer.error(problem)

    async def _serve(self, call: _Call, writer: ResponseWriter) -> None:
        service, request, parsed = self._service, call.request, call.parsed
        with service.sessions.open(str(writer.request_id)) as session:
            service.owners[session] = call.client
            request.attach(session)
            box = session.box(parsed.chat.take(), nbytes=parsed.chat.nbytes)
            try:
                with request.phase("queue"):
                    lease = await service.request_lane.admit(
                        0, call.key, deadline=call.deadline
                    )
                with lease:
                    streams = await self._open_streams(session, box, call)
                    request.release_body()
                    with request.phase("stream"):
                        await self._answer(streams, call, writer)
            except EngineFailed as error:
                if is_slow_client(error):  # a disconnect, not a failure
                    session.close("client_gone")
                raise
            finally:
                request.count(
                    choices=parsed.choices,
                    images=parsed.images,
                    input_tokens=call.usage.prompt_tokens,
                    output_tokens=call.usage.completion_tokens,
                )

    def _open_streams(
        self, session: Session, box: Payload[Chat], call: _Call
    ) -> Awaitable[list[Stream[Any]]]:
        if call.parsed.remote and self._service.remote is not None:
            return self._fetch_and_start(self._service.remote, session, box, call)
        return self._start(session, box, call)

    async def _fetch_and_start(
        self,
        remote: RemoteImages,
        session: Session,
        box: Payload[Chat],
        call: _Call,
    ) -> list[Stream[Any]]:
        """Fetch images by URL, then start; their bytes are admitted until hand-off."""
        with ExitStack() as leases:
            with call.request.phase("fetch"):
                parsed, box = await remote.fetch(session, box, call.parsed, leases)
            return await self._start(session, box, replace(call, parsed=parsed))

    async def _start(
        self, session: Session, box: Payload[Chat], call: _Call
    ) -> list[Stream[Any]]:
        """Admit the payload, preprocess it and hand it off, once for each choice."""
        service, choices = self._service, call.parsed.choices
        lease: Lease | None = None
        if call.parsed.images:  # requests of text alone never wait for bytes
            with call.request.phase("queue"):
                lease = await service.payload_lane.admit(
                    self._payload_bytes(call.parsed), call.key, deadline=call.deadline
                )
        prepare = partial(self._prepare, box, lease, call)
        shared = SharedPreprocessing(prepare, choices=choices)
        del box, prepare
        payload_lease = LeaseUntilFirstToken(lease, choices)
        starts = [
            payload_lease.wrap(index, *self._choice(session, shared, index, call))
            for index in range(choices)
        ]
        deadlines = service.deadlines
        try:
            with payload_lease:
                sources = await session.start_all(starts, timeout=deadlines.start)
        except _REFUSED_BY_ENGINE:
            session.close("refused")
            raise
        return [
            session.stream(
                source,
                first_item=deadlines.first_token,
                idle=deadlines.idle,
                total=deadlines.total,
            )
            for source in sources
        ]

    def _payload_bytes(self, parsed: ParsedRequest) -> int:
        """Bytes to admit: the payload and the copies made while it is preprocessed.

        If the gate is smaller than that, as much as it has, but never less than the
        payload alone: such a request is not refused, it is preprocessed alone.
        """
        service, choices = self._service, parsed.choices
        needed, peak = (
            service.correction.bytes(parsed.estimate, copies)
            for copies in (choices, choices + service.processor.copies)
        )
        capacity = service.payloads.statistics().bytes
        return peak if capacity is None else max(needed, min(peak, capacity))

    def _choice(
        self, session: Session, shared: SharedPreprocessing, index: int, call: _Call
    ) -> tuple[Open, End]:
        """Return the functions that open and end one choice in the engine."""
        phase, choices = call.request.phase, call.parsed.choices
        hand_off, cleanup = phase("hand_off"), phase("cleanup")
        engine = self._service.engine
        key = session.key if choices == 1 else f"{session.key}-{index}"

        async def open_() -> AsyncIterator[Any]:
            request, tensors = await shared.take(index)
            if session.outcome is not None:
                # Closed in the meantime: raising here means not started, so not ended.
                raise SessionEnded("closed before hand-off", outcome=session.outcome)
            nbytes = sum(int(tensor.nbytes) for tensor in tensors.values())
            payload = session.box(tensors, nbytes=nbytes)
            del tensors
            with hand_off:
                return await engine.start(key, request, payload)

        async def end(_: AsyncIterator[Any] | None) -> None:
            with cleanup:
                await engine.end(key)

        return open_, end

    async def _prepare(
        self, box: Payload[Chat], lease: Lease | None, call: _Call
    ) -> EngineRequest:
        processor = self._service.processor

        def prepare() -> tuple[dict[str, Any], Payload[Mapping[str, Any]], int]:
            # Boxed in the worker thread, which refers to what it returned until it
            # runs again.
            prepared = processor.prepare(box.take())
            tensors = Payload[Mapping[str, Any]](
                prepared.tensors, nbytes=prepared.nbytes
            )
            return prepared.request, tensors, prepared.prompt_tokens

        parsed, usage = call.parsed, call.usage
        with call.request.phase("prepare"):
            request, tensors, usage.prompt_tokens = await anyio.to_thread.run_sync(
                prepare, limiter=self._service.threads
            )
        if lease is not None:
            lease.settle(bytes=tensors.nbytes * parsed.choices)
            self._service.correction.learn(parsed.estimate, tensors.nbytes)
        return request, tensors

    async def _answer(
        self, streams: Sequence[Stream[Any]], call: _Call, writer: ResponseWriter
    ) -> None:
        usage = call.usage
        call.request.count(output_tokens=lambda: usage.completion_tokens)
        answer = self._api.answer(writer, call.parsed, self._service.model, usage)
        if not call.parsed.stream and len(streams) == 1:
            await self._read(streams[0], 0, call, answer)
        else:
            one_at_a_time = answer if len(streams) == 1 else _OrderedAnswer(answer)
            await self._read_all(streams, call, one_at_a_time)
        await answer.done()

    async def _read_all(
        self, streams: Sequence[Stream[Any]], call: _Call, answer: Answer
    ) -> None:
        """Read all choices concurrently; the first that fails ends the others.

        A streamed choice has a task of its own also where it is alone: each token then
        resumes that task, and not all middleware around the request.
        """
        try:
            async with anyio.create_task_group() as tasks:
                for index, stream in enumerate(streams):
                    tasks.start_soon(self._read, stream, index, call, answer)
        except ExceptionGroup as group:
            first = group.exceptions[0]
        else:
            return
        raise first

    async def _read(
        self, stream: Stream[Any], index: int, call: _Call, answer: Answer
    ) -> None:
        """Read one choice: all that is done for each of its tokens begins here."""
        request, detokenizer = call.request, self._service.processor.detokenizer()
        text = TextDecoder(detokenizer, call.usage, call.parsed.stop)
        begun = False
        async with stream:
            async for item in stream:
                piece = text.push(item)
                if piece is None:
                    continue
                if not begun:
                    begun = True
                    request.first_item()
                await answer.piece(index, piece)
                if text.stop is not None:
                    break
            else:
                # If the session was ended, so was the stream: raise the cancellation
                # first.
                await anyio.lowlevel.checkpoint_if_cancelled()
                rest = text.flush()
                request.first_item()
                await answer.piece(index, rest)
            await answer.finished(index, text.finish_reason, text.stop)


class _OrderedAnswer:
    """Lets one choice at a time write: each is read by a task of its own."""

    __slots__ = ("_answer", "_lock", "done")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._lock = anyio.Lock(fast_acquire=True)
        self.done = answer.done

    async def piece(self, index: int, piece: Piece) -> None:
        async with self._lock:
            await self._answer.piece(index, piece)

    async def finished(self, index: int, finish_reason: str, stop: str | None) -> None:
        async with self._lock:
            await self._answer.finished(index, finish_reason, stop)


class PreprocessingFailed(Exception):
    """The request could not be preprocessed; the first choice has the error."""


class SharedPreprocessing:
    """Preprocesses a request once for all of its choices.

    Args:
        prepare: Returns the request map and its tensors in a payload.
        choices: Number of choices; nothing is kept once the last has taken its own.
    """

    __slots__ = ("_left", "_lock", "_prepare", "_request", "_tensors")

    def __init__(
        self, prepare: Callable[[], Awaitable[EngineRequest]], *, choices: int
    ) -> None:
        self._prepare: Callable[[], Awaitable[EngineRequest]] | None = prepare
        self._left = choices
        self._lock = anyio.Lock()
        self._request: dict[str, Any] = {}
        self._tensors: Mapping[str, Any] = {}

    async def take(self, index: int) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the request map of one choice, and its own mapping of the tensors.

        If the request has a seed, each choice gets another one derived from it, so
        that choices differ and are reproducible.

        Raises:
            PreprocessingFailed: It failed for the choice that came first.

        Cancellation:
            As for *prepare*.
        """
        async with self._lock:
            if self._prepare is not None:
                prepare, self._prepare = self._prepare, None
                self._request, payload = await prepare()
                self._tensors = payload.take()
        if not self._request:
            raise PreprocessingFailed("the first choice could not be preprocessed")
        self._left -= 1
        tensors = dict(self._tensors)
        if not self._left:
            self._tensors = {}
        seed = self._request["seed"]
        seed = None if seed is None else (seed + index) % 2**63
        return self._request | {"seed": seed}, tensors


class LeaseUntilFirstToken:
    """Holds the lease of a payload until the engine has read it for every choice.

    At hand-off a payload has left this process and waits in the engine's queue, where
    nothing else would bound it. The engine has read it when the first item of a choice
    arrives, or when the choice has been ended. Enter this around the starts: if they
    fail, choices that have not begun are done.

    Args:
        lease: Released once all choices are done; ``None`` for requests of text alone.
        choices: Number of choices.
    """

    __slots__ = ("_begun", "_lease", "_pending")

    def __init__(self, lease: Lease | None, choices: int) -> None:
        self._lease = lease
        self._pending = set(range(choices))
        self._begun: set[int] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for index in self._pending - self._begun:
                self.done(index)

    def wrap(self, index: int, open_: Open, end: End) -> tuple[Open, End]:
        """Wrap the functions that open and end one choice."""
        if self._lease is None:
            return open_, end

        async def opened() -> Items:
            self._begun.add(index)
            try:
                return _FirstItemWatcher(self, index, await open_())
            except Exception:
                self.done(index)
                raise

        async def ended(items: Items | None) -> None:
            try:
                await end(items)
            finally:
                self.done(index)

        return opened, ended

    def done(self, index: int) -> None:
        """Mark the payload as read for one choice. Idempotent."""
        self._pending.discard(index)
        if self._lease is not None and not self._pending:
            self._lease.release()


class _FirstItemWatcher:
    """Items of a choice; the first one marks its payload as read.

    Not a generator: a generator's own task would have to close it.
    """

    __slots__ = ("_index", "_items", "_lease")

    def __init__(self, lease: LeaseUntilFirstToken, index: int, items: Items) -> None:
        self._lease: LeaseUntilFirstToken | None = lease
        self._index = index
        self._items = items

    def __aiter__(self) -> _FirstItemWatcher:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._items)
        if self._lease is not None:
            self._lease.done(self._index)
            self._lease = None
        return item

    async def aclose(self) -> None:
        """Close the source of the items."""
        close = getattr(self._items, "aclose", None)
        if close is not None:
            await close()
