"""The generating endpoints: one request from its first byte to its outcome."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request

from lifecycle import Lease, Payload, Session, SessionEnded, Stream
from lifecycle_asgi import MemoryEstimate, RequestScope, estimate_memory, request_of
from lifecycle_asgi.admission import AdmittedRequest, admitted_request
from lifecycle_asgi.events import request_outcome
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
    ChatTooLong,
    is_slow_client,
    to_api_error,
)
from lifecycle_engine.processing.processor import Chat
from lifecycle_engine.server.admission import check_head
from lifecycle_engine.server.service import Service, cancel_right
from lifecycle_zmq import EngineFailed, RequestRejected

Items = AsyncIterator[Any]
Open = Callable[[], Awaitable[Items]]
End = Callable[[Items | None], Awaitable[None]]
EngineRequest = tuple[dict[str, Any], Payload[Mapping[str, Any]]]

# Raised before the engine has run anything of a request.
_REFUSED_BY_ENGINE = (BadChat, BadImage, RequestRejected)

_CALL = "lifecycle_engine.call"


@dataclass(slots=True)
class _Call:
    """One request while it is served.

    Attributes:
        session: From its head on.
        leases: Of files that were fetched for it, until hand-off.
        read: Its body has been parsed, which sets the last two.
        admitted: It has all that it waited for.
        box: Its chat, until it is preprocessed.
    """

    endpoint: GenerateEndpoint
    request: RequestScope
    writer: ResponseWriter
    session: Session
    client: bytes
    leases: ExitStack
    usage: Usage = field(default_factory=Usage)
    read: bool = False
    admitted: bool = False
    parsed: ParsedRequest = field(init=False)
    box: Payload[Chat] = field(init=False)


async def price_body(scope: Any, body: bytes) -> MemoryEstimate | None:
    """Call `GenerateEndpoint.price`, as `Admission` asks for the price of a body."""
    call: _Call = scope[_CALL]
    pricing = call.endpoint.price(scope, body)
    del body
    return await pricing


async def serve_admitted(scope: Any, receive: Any, _: Any) -> None:
    """Call `GenerateEndpoint.serve`, as `Admission` calls its application."""
    call: _Call = scope[_CALL]
    await call.endpoint.serve(scope, receive)


def end_refused(scope: Any, status: int) -> None:
    """End a generating request that `Admission` is about to refuse.

    No other task can cancel it any more, and it holds nothing while its client reads.

    Raises:
        SessionEnded: Another task has ended it, and its client gets that outcome.
    """
    call: _Call | None = scope.get(_CALL)
    if call is None:
        return
    session, outcome = call.session, request_outcome(status, None, client_gone=False)
    if not session.close(outcome):
        raise SessionEnded("ended before it was refused", outcome=str(session.outcome))
    call.leases.close()


class GenerateEndpoint:
    """An endpoint that generates answers in one API format, as an ASGI application.

    It is a raw ASGI class, so that everything happens in one task and inside one
    ``with session``. The phases are functions that return: no frame that lives as long
    as the stream has ever held the body, an image or a tensor.

    A request opens its session by its head, and may be cancelled by its id from then
    on. `Admission` reads its body, has it parsed by `price`, waits for bytes and for a
    slot, and calls `serve`.
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
        service, request = self._service, request_of(scope)
        writer, fields = ResponseWriter(send, self._api), Fields()
        client = service.client(scope)
        call: _Call | None = None
        try:
            writer.request_id = request_id(scope)
            await check_head(service, scope)
            with (
                service.sessions.open(writer.request_id) as session,
                ExitStack() as leases,
            ):
                service.owners[session] = cancel_right(scope, client)
                request.attach(session)
                call = _Call(self, request, writer, session, client, leases)
                scope[_CALL] = call
                try:
                    await service.admission(scope, receive, send)
                    if not call.admitted:  # and not refused: the client has left
                        session.close("client_gone")
                finally:
                    del scope[_CALL]
                    if call.read:
                        fields = call.parsed.fields
                        _count(call)
        except Exception as error:  # noqa: BLE001 - uvicorn would log its text
            problem = to_api_error(error) or INTERNAL
            if isinstance(error, (BadChat, BadImage)):
                is_image = isinstance(error, (BadImage, ChatTooLong))
                problem.param = fields.images if is_image else fields.text
            if problem.status == INTERNAL.status:
                request.fail(error)
        else:
            return
        # Outside of the handler: the exception holds the frames it came through, and
        # the client may read slowly.
        if call is None:  # its body has yet to arrive
            await service.admission.refuse(scope, receive, send, problem)
        else:
            await writer.error(problem)

    async def price(self, scope: Any, body: bytes) -> MemoryEstimate | None:
        """Parse a body; return what its images need until the engine has them.

        Raises:
            ApiError: As from `RequestParser.read` and `RemoteImages.fetch`.

        Cancellation:
            As for those.
        """
        call: _Call = scope[_CALL]
        reading = self._read_body(call, body)
        del body
        admitted_request(scope).drop_body()
        await reading
        return self._estimate(call.parsed) if call.parsed.images else None

    async def _read_body(self, call: _Call, body: bytes) -> None:
        remote, session = self._service.remote, call.session
        with call.request.phase("read"):
            reading = self._service.parser.read(body, self._api.parse, call.client)
            del body
            parsed = await reading
        box = session.box(parsed.chat.take(), nbytes=parsed.chat.nbytes)
        if parsed.remote and remote is not None:
            with call.request.phase("fetch"):
                parsed, box = await remote.fetch(session, box, parsed, call.leases)
        call.parsed, call.box, call.read = parsed, box, True

    def _estimate(self, parsed: ParsedRequest) -> MemoryEstimate:
        """Return what its images need: the payload, and copies while it is made.

        The copies are a guess, so a request for which there is only room without them
        is not refused, but preprocessed alone.
        """
        processor, choices = self._service.processor, parsed.choices
        found = estimate_memory(parsed.image_sizes, processor.media)
        copies = processor.copies * found.tensors
        return MemoryEstimate(found.work, choices * found.tensors + copies, copies)

    async def serve(self, scope: Any, receive: Any) -> None:
        """Answer a request that has all that it waited for.

        Cancellation:
            As for a call of this object.
        """
        call: _Call = scope[_CALL]
        call.admitted = True
        if not call.read:  # `Admission` asks no price for none, or a part of it
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                call.session.close("client_gone")
                return
            reading = self._read_body(call, body)
            del body
            await reading
        try:
            streams = await self._start(call, admitted_request(scope))
            call.request.release_body()
            with call.request.phase("stream"):
                await self._answer(streams, call)
        except EngineFailed as error:
            if is_slow_client(error):  # a disconnect, not a failure
                call.session.close("client_gone")
            raise

    async def _start(self, call: _Call, admitted: AdmittedRequest) -> list[Stream[Any]]:
        """Preprocess the payload and hand it off, once for each choice."""
        choices, session = call.parsed.choices, call.session
        # Requests of text alone give back their bytes at hand-off.
        lease = admitted.take_lease() if call.parsed.images else None
        prepare = partial(self._prepare, call, admitted, lease)
        shared = SharedPreprocessing(prepare, choices=choices)
        del prepare
        payload_lease = LeaseUntilFirstToken(lease, choices)
        starts = [
            payload_lease.wrap(index, *self._choice(shared, index, call))
            for index in range(choices)
        ]
        deadlines = self._service.deadlines
        try:
            with payload_lease, call.leases:
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

    def _choice(
        self, shared: SharedPreprocessing, index: int, call: _Call
    ) -> tuple[Open, End]:
        """Return the functions that open and end one choice in the engine."""
        phase, choices = call.request.phase, call.parsed.choices
        session = call.session
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
        self, call: _Call, admitted: AdmittedRequest, lease: Lease | None
    ) -> EngineRequest:
        processor, box = self._service.processor, call.box

        def prepare() -> tuple[dict[str, Any], Payload[Mapping[str, Any]], int]:
            # Boxed in the worker thread, which refers to what it returned until it
            # runs again.
            prepared = processor.prepare(box.take())
            tensors = Payload[Mapping[str, Any]](
                prepared.tensors, nbytes=prepared.nbytes
            )
            return prepared.request, tensors, prepared.prompt_tokens

        parsed, usage, service = call.parsed, call.usage, self._service
        limiter = service.threads if parsed.images else service.text_threads
        with call.request.phase("prepare"):
            request, tensors, usage.prompt_tokens = await anyio.to_thread.run_sync(
                prepare, limiter=limiter
            )
        if lease is not None:
            lease.settle(bytes=tensors.nbytes * parsed.choices)
            # Its estimate counts the tensors of each choice, and copies of them.
            admitted.learn(tensors.nbytes * (parsed.choices + processor.copies))
        return request, tensors

    async def _answer(self, streams: Sequence[Stream[Any]], call: _Call) -> None:
        usage, parsed = call.usage, call.parsed
        call.request.count(output_tokens=lambda: usage.completion_tokens)
        answer = self._api.answer(call.writer, parsed, self._service.model, usage)
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


def _count(call: _Call) -> None:
    call.request.count(
        choices=call.parsed.choices,
        images=call.parsed.images,
        input_tokens=call.usage.prompt_tokens,
        output_tokens=call.usage.completion_tokens,
    )


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
    """Preprocesses a request once for all of its choices."""

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
