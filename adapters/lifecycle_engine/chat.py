"""``POST /v1/chat/completions``: one request from its first byte to its outcome.

A raw ASGI class, so that everything happens in one task and inside one ``with
session``. The phases are functions that return: no frame that lives as long as
the stream has ever held the body, an image or a tensor.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Any

import anyio.lowlevel
import anyio.to_thread

from lifecycle import Lease, Payload, Session, SessionEnded
from lifecycle_asgi import request_of
from lifecycle_zmq import EngineFailed, RequestRejected

from .api_errors import describe
from .incoming import ClientLeft, Incoming, request_id
from .openai_wire import Completion, Usage
from .processor import BadChat, BadImage, Chat
from .replies import Reply
from .service import Service

_NOT_RUN = (BadChat, BadImage, RequestRejected)


class ChatCompletions:
    """The endpoint, as an ASGI application.

    Args:
        service: What it serves.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request.

        Cancellation:
            At any time: the session is closed at once and the registry ends what
            the engine holds. It always propagates.
        """
        reply = Reply(send)
        try:
            reply.request_id = request_id(scope)
            incoming = await self._service.intake.read(receive)
            await self._serve(scope, incoming, reply)
        except ClientLeft:
            return
        except Exception as error:
            problem = describe(error)
            if problem is None:  # a mistake of ours: logged, and a stream is cut
                raise
        else:
            return
        # Outside of the handler: its exception holds the frames it came through,
        # and the client may take its time to read.
        await reply.error(problem)

    async def _serve(self, scope: Any, incoming: Incoming, reply: Reply) -> None:
        service, request = self._service, request_of(scope)
        with (
            service.sessions.open(str(reply.request_id)) as session,
            ExitStack() as held,
        ):
            request.attach(session)
            box = session.box(incoming.chat.take(), nbytes=incoming.chat.nbytes)
            held.enter_context(await service.in_flight.admit())
            usage = Usage()
            try:
                source = await self._start(session, box, incoming.estimate, usage)
            except _NOT_RUN:
                session.close("refused")
                raise
            request.release_body()
            limits = service.deadlines
            items = session.stream(
                source,
                first_item=limits.first_token,
                idle=limits.idle,
                total=limits.total,
            )
            del source
            async with items:
                await self._answer(items, incoming, usage, reply)

    async def _start(
        self, session: Session, box: Payload[Chat], estimate: int, usage: Usage
    ) -> AsyncIterator[Any]:
        """Admit, preprocess and hand over; the lease ends with this call."""
        service = self._service
        lease: Lease | None = None
        if estimate:  # text alone has none, and never waits for bytes
            lease = await service.payloads.admit(bytes=estimate)

        async def open_() -> AsyncIterator[Any]:
            request, tensors = await self._prepare(session, box, lease, usage)
            if session.outcome is not None:
                # Closed meanwhile: what raises here is not started, so not ended.
                raise SessionEnded("closed before hand-off", outcome=session.outcome)
            return await service.engine.start(session.key, request, tensors)

        async def end(_: AsyncIterator[Any] | None) -> None:
            await service.engine.end(session.key)

        return await session.start(
            open_, end=end, lease=lease, timeout=service.deadlines.start
        )

    async def _prepare(
        self, session: Session, box: Payload[Chat], lease: Lease | None, usage: Usage
    ) -> tuple[dict[str, Any], Payload[Mapping[str, Any]]]:
        processor = self._service.processor

        def prepare() -> tuple[dict[str, Any], Payload[Mapping[str, Any]], int]:
            # In a box already here: a worker thread holds on to what it returned
            # until it runs again.
            made = processor.prepare(box.take())
            tensors = Payload[Mapping[str, Any]](made.tensors, nbytes=made.nbytes)
            return made.request, tensors, made.prompt_tokens

        request, tensors, usage.prompt_tokens = await anyio.to_thread.run_sync(
            prepare, limiter=self._service.threads
        )
        if lease is not None:
            lease.settle(bytes=tensors.nbytes)
        return request, session.box(tensors.take(), nbytes=tensors.nbytes)

    async def _answer(
        self, items: AsyncIterator[Any], incoming: Incoming, usage: Usage, reply: Reply
    ) -> None:
        service = self._service
        completion = Completion(
            id=f"chatcmpl-{reply.request_id}",
            created=int(time.time()),
            model=service.model,
            include_usage=incoming.include_usage,
        )
        texts = _Texts(items, service.processor.detokenizer(), usage)
        if not incoming.stream:
            text = "".join([text async for text in texts])
            await reply.json(200, completion.whole(text, texts.finish_reason, usage))
            return
        # The status is not sent before the first token: until then a failure can
        # still be an answer that clients retry.
        first = True
        async for text in texts:
            if first:
                await reply.event(completion.first())
                first = False
            if text:
                await reply.event(completion.text(text))
        if first:
            await reply.event(completion.first())
        await reply.event(completion.last(texts.finish_reason))
        if incoming.include_usage:
            await reply.event(completion.usage(usage))
        await reply.done()


class _Texts:
    """The text of a stream of token ids, and why it ended.

    An iterator and not a generator: a generator that is left is closed by the
    garbage collector, in another task.
    """

    def __init__(
        self, items: AsyncIterator[Any], detokenizer: Any, usage: Usage
    ) -> None:
        self._items = items
        self._detokenizer = detokenizer
        self._usage = usage
        self._over = False
        self.finish_reason = ""

    def __aiter__(self) -> _Texts:
        return self

    async def __anext__(self) -> str:
        if self._over:
            raise StopAsyncIteration
        async for item in self._items:
            if isinstance(item, dict):
                self.finish_reason = str(item["finish_reason"])
                continue
            self._usage.completion_tokens += len(item)
            return str(self._detokenizer.push(item))
        self._over = True
        if not self.finish_reason:
            # Whoever ended the session ended the stream, too: hear that first.
            await anyio.lowlevel.checkpoint_if_cancelled()
            message = "the stream ended without a finish_reason"
            raise EngineFailed("stream_cut", message)
        return str(self._detokenizer.flush())
