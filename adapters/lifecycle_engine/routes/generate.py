"""The generating endpoints: one request from its first byte to its outcome.

A raw ASGI class, so that everything happens in one task and inside one ``with
session``. The phases are functions that return: no frame that lives as long as
the stream has ever held the body, an image or a tensor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from lifecycle import Lease, Payload, Session, SessionEnded, Stream
from lifecycle_asgi import RequestScope, request_of
from lifecycle_engine.api_errors import INTERNAL, describe, slow_reader
from lifecycle_engine.dialects.answers import Answer
from lifecycle_engine.dialects.dialect import Dialect
from lifecycle_engine.dialects.openai_schema import Fields
from lifecycle_engine.dialects.openai_wire import Usage
from lifecycle_engine.dialects.replies import Reply
from lifecycle_engine.dialects.texts import Texts
from lifecycle_engine.images.remote_images import RemoteImages
from lifecycle_engine.incoming import Incoming, request_id
from lifecycle_engine.processor import BadChat, BadImage, Chat
from lifecycle_engine.service import Service
from lifecycle_zmq import EngineFailed, RequestRejected

from .bodies import ClientLeft
from .early import refuse_encoded
from .observing import Observed, count
from .patience import patience
from .shared import Shared
from .unread import Unread

Items = AsyncIterator[Any]
Opening = tuple[
    Callable[[], Awaitable[Items]], Callable[[Items | None], Awaitable[None]]
]
_NOT_RUN = (BadChat, BadImage, RequestRejected)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one request asks for, and until when its client waits."""

    request: RequestScope
    incoming: Incoming
    until: float
    usage: Usage = field(default_factory=Usage)


class Generate:
    """An endpoint that answers in one dialect, as an ASGI application.

    Args:
        service: What it serves.
        dialect: The API that it speaks.
    """

    def __init__(self, service: Service, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request.

        Cancellation:
            At any time: the session is closed at once and the registry ends what
            the engine holds. It always propagates.
        """
        reply, request = Reply(send, self._dialect), request_of(scope)
        places = self._service.places
        fields = Fields()
        try:
            reply.request_id = request_id(scope)
            refuse_encoded(scope)
            places.refuse_when_full()
            await self._service.refuse_when_broken()
            places.expect(reply)
            with request.phase("read"):
                incoming = await self._service.intake.read(
                    receive, self._dialect.parse, self._service.client(scope)
                )
            fields = incoming.fields
            until = anyio.current_time() + patience(scope)
            await self._serve(_Asked(request, incoming, until), reply)
        except ClientLeft:
            return
        except Exception as error:  # noqa: BLE001 - uvicorn would log its words
            problem = describe(error) or INTERNAL
            if isinstance(error, (BadChat, BadImage)):
                bad = isinstance(error, BadImage)
                problem.param = fields.images if bad else fields.text
            if problem.status == INTERNAL.status:
                request.fail(error)
        else:
            return
        finally:
            places.arrived(reply)
        # Outside of the handler: its exception holds the frames it came through,
        # and the client may take its time to read.
        await reply.error(problem)

    async def _serve(self, asked: _Asked, reply: Reply) -> None:
        service, request, incoming = self._service, asked.request, asked.incoming
        with service.sessions.open(str(reply.request_id)) as session:
            request.attach(session)
            box = session.box(incoming.chat.take(), nbytes=incoming.chat.nbytes)
            service.places.arrived(reply)
            try:
                with request.phase("queue"):
                    lease = await service.admit(service.in_flight, until=asked.until)
                with lease:
                    streams = await self._streams(session, box, asked)
                    request.release_body()
                    with request.phase("stream"):
                        await self._answer(streams, asked, reply)
            except EngineFailed as error:
                if slow_reader(error):  # no failure: as if the connection was closed
                    session.close("client_gone")
                raise
            finally:
                count(request, incoming, asked.usage)

    def _streams(
        self, session: Session, box: Payload[Chat], asked: _Asked
    ) -> Awaitable[list[Stream[Any]]]:
        if asked.incoming.remote and self._service.remote is not None:
            return self._fetch(self._service.remote, session, box, asked)
        return self._start(session, box, asked)

    async def _fetch(
        self,
        remote: RemoteImages,
        session: Session,
        box: Payload[Chat],
        asked: _Asked,
    ) -> list[Stream[Any]]:
        """Fetch what is elsewhere and start; its bytes are admitted until then."""
        incoming = asked.incoming
        with ExitStack() as fetched:
            with asked.request.phase("fetch"):
                incoming, box = await remote.bring(session, box, incoming, fetched)
            return await self._start(session, box, replace(asked, incoming=incoming))

    async def _start(
        self, session: Session, box: Payload[Chat], asked: _Asked
    ) -> list[Stream[Any]]:
        """Admit, preprocess and hand over; the lease ends when that was read."""
        service, choices = self._service, asked.incoming.choices
        lease: Lease | None = None
        if asked.incoming.images:  # text alone never waits for bytes
            size = self._charge(asked.incoming)
            with asked.request.phase("queue"):
                lease = await service.admit(
                    service.payloads, until=asked.until, size=size
                )
        shared = Shared(partial(self._prepare, box, lease, asked), choices=choices)
        del box
        unread = Unread(lease, choices)
        starts = [
            unread.starts(index, *self._one(session, shared, index, asked))
            for index in range(choices)
        ]
        limits = service.deadlines
        try:
            with unread:
                sources = await session.start_all(starts, timeout=limits.start)
        except _NOT_RUN:
            session.close("refused")
            raise
        return [
            session.stream(
                source,
                first_item=limits.first_token,
                idle=limits.idle,
                total=limits.total,
            )
            for source in sources
        ]

    def _charge(self, incoming: Incoming) -> int:
        """What a payload needs, and the making of it as far as the gate has so much.

        That it is made more dearly than there is room for refuses nobody for good: it
        is then made alone.
        """
        service, answers = self._service, incoming.choices
        needed, most = (
            service.correction.bytes(incoming.weight, copies)
            for copies in (answers, answers + service.processor.copies)
        )
        room = service.payloads.statistics().bytes
        return most if room is None else max(needed, min(most, room))

    def _one(
        self, session: Session, shared: Shared, index: int, asked: _Asked
    ) -> Opening:
        """How one of the choices is opened and ended."""
        phase, choices = asked.request.phase, asked.incoming.choices
        hand_off, cleanup = phase("hand_off"), phase("cleanup")
        engine = self._service.engine
        key = session.key if choices == 1 else f"{session.key}-{index}"

        async def open_() -> AsyncIterator[Any]:
            request, tensors = await shared.take(index)
            if session.outcome is not None:
                # Closed meanwhile: what raises here is not started, so not ended.
                raise SessionEnded("closed before hand-off", outcome=session.outcome)
            nbytes = sum(int(tensor.nbytes) for tensor in tensors.values())
            handed = session.box(tensors, nbytes=nbytes)
            del tensors
            with hand_off:
                return await engine.start(key, request, handed)

        async def end(_: AsyncIterator[Any] | None) -> None:
            with cleanup:
                await engine.end(key)

        return open_, end

    async def _prepare(
        self, box: Payload[Chat], lease: Lease | None, asked: _Asked
    ) -> tuple[dict[str, Any], Payload[Mapping[str, Any]]]:
        processor = self._service.processor

        def prepare() -> tuple[dict[str, Any], Payload[Mapping[str, Any]], int]:
            # In a box already here: a worker thread holds on to what it returned
            # until it runs again.
            made = processor.prepare(box.take())
            tensors = Payload[Mapping[str, Any]](made.tensors, nbytes=made.nbytes)
            return made.request, tensors, made.prompt_tokens

        incoming, usage = asked.incoming, asked.usage
        with asked.request.phase("prepare"):
            request, tensors, usage.prompt_tokens = await anyio.to_thread.run_sync(
                prepare, limiter=self._service.threads
            )
        if lease is not None:
            lease.settle(bytes=tensors.nbytes * incoming.choices)
            self._service.correction.learn(incoming.weight, tensors.nbytes)
        return request, tensors

    async def _answer(
        self, streams: Sequence[Stream[Any]], asked: _Asked, reply: Reply
    ) -> None:
        incoming, usage = asked.incoming, asked.usage
        made = self._dialect.answer(reply, incoming, self._service.model, usage)
        answer = Observed(made, asked.request)
        if len(streams) == 1:
            await self._read(streams[0], 0, incoming.stop, usage, answer)
        else:
            await self._read_all(streams, incoming.stop, usage, answer)
        await answer.done()

    async def _read_all(
        self,
        streams: Sequence[Stream[Any]],
        stop: Sequence[str],
        usage: Usage,
        answer: Answer,
    ) -> None:
        """Read all choices at a time; the first that fails ends the others."""
        try:
            async with anyio.create_task_group() as tasks:
                for index, items in enumerate(streams):
                    tasks.start_soon(self._read, items, index, stop, usage, answer)
        except ExceptionGroup as group:
            first = group.exceptions[0]
        else:
            return
        raise first

    async def _read(
        self,
        items: Stream[Any],
        index: int,
        stop: Sequence[str],
        usage: Usage,
        answer: Answer,
    ) -> None:
        async with items:
            detokenizer = self._service.processor.detokenizer()
            texts = Texts(items, detokenizer, usage, stop)
            async for piece in texts:
                await answer.piece(index, piece)
            await answer.finished(index, texts.finish_reason, texts.stop)
