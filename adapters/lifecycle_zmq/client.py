"""The client: the API process's end of the link to one engine incarnation."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import anyio

from lifecycle import EngineLost, Payload
from lifecycle.lowlevel import (
    LoopWaiter,
    check_callable,
    check_int,
    check_seconds,
    check_type,
    clear_traceback_frames,
    describe_error,
)
from lifecycle_zmq import protocol
from lifecycle_zmq.client_streams import (
    EngineStream,
    StatusReply,
    StreamState,
    StreamTable,
)
from lifecycle_zmq.codec import pack_request
from lifecycle_zmq.exceptions import EncodeError, ProtocolError, RequestRejected
from lifecycle_zmq.loss_probe import LossProbe
from lifecycle_zmq.protocol import Kind
from lifecycle_zmq.shared_memory.allocator import Block
from lifecycle_zmq.shared_memory.arena import Arena
from lifecycle_zmq.shared_memory.tensors import (
    Buffer,
    TensorPayload,
    describe,
    take_tensors,
)
from lifecycle_zmq.tensor_copy import ArenaPlacement, TensorCopier
from lifecycle_zmq.transport.base import ClientTransport, Connect
from lifecycle_zmq.transport.endpoints import connect_to

# Entries of each kind in a message, and bytes of starts in it. With the largest
# request that is batched they fit into a CONTROL message.
_BATCH = 1024
_MAX_START_BYTES = 16 * 2**10
SMALL_REQUEST = 4 * 2**10
# So many starts and ends keep the engine busy while this process gathers more.
_WORTH_SENDING = 32
# Most bytes of a start beside its key and its request.
_START_OVERHEAD = 32


class ControlBatch:
    """Gathers starts, cancellations, credit and ends until the end of a loop iteration.

    Create it in the event loop that uses it.
    """

    __slots__ = ("_cancel", "_end", "_grant", "_posted", "_start", "_waiter")

    def __init__(self) -> None:
        self._start: deque[list[Any]] = deque()
        self._cancel: dict[int, None] = {}
        self._grant: dict[int, int] = {}
        self._end: dict[int, None] = {}
        self._waiter = LoopWaiter()
        self._posted = False

    @property
    def worth_sending(self) -> bool:
        """Whether the batch is large enough to send before the end of the iteration."""
        return len(self._start) + len(self._end) >= _WORTH_SENDING

    def start(self, generation: int, key: str, window: int, request: bytes) -> None:
        """Add the start of a stream whose request is small and has no tensors."""
        self._start.append([generation, key, window, request])
        self._post()

    def cancel(self, generation: int) -> None:
        """Add a cancellation; the stream stops at the next step."""
        self._cancel[generation] = None
        self._post()

    def grant(self, generation: int, credit: int) -> None:
        """Add credit for a stream."""
        self._grant[generation] = self._grant.get(generation, 0) + credit
        self._post()

    def end(self, generation: int) -> None:
        """Add the END of a stream."""
        # Credit is of no use to a stream that ends.
        self._grant.pop(generation, None)
        self._end[generation] = None
        self._post()

    def take(self) -> dict[str, Any] | None:
        """Return the fields of the next message, or None if nothing is left to send."""
        if not (self._start or self._cancel or self._grant or self._end):
            return None
        # The engine reads the fields in this order. Nothing may overtake a start or a
        # cancellation, so ends wait until both were sent.
        start = self._take_starts()
        grant = [[*it] for it in _take(self._grant)]
        cancel = [] if self._start else [it for it, _ in _take(self._cancel)]
        pending = self._start or self._cancel
        end = [] if pending else [it for it, _ in _take(self._end)]
        return {"start": start, "cancel": cancel, "grant": grant, "end": end}

    def _take_starts(self) -> list[list[Any]]:
        starts, size = [], 0
        while self._start and size < _MAX_START_BYTES:
            starts.append(self._start.popleft())
            _, key, _, request = starts[-1]
            # A character takes four bytes at most.
            size += _START_OVERHEAD + len(request) + (4 - 3 * key.isascii()) * len(key)
        return starts

    async def wait(self) -> None:
        """Wait for something to send, then for the end of the loop iteration.

        Cancellation: nothing is lost.
        """
        if not self._posted:
            await self._waiter.wait()
        self._posted = False

    def _post(self) -> None:
        if not self._posted:
            self._posted = True
            self._waiter.wake()


def _take(entries: dict[int, Any]) -> list[tuple[int, Any]]:
    taken = list(islice(entries.items(), _BATCH))
    for generation, _ in taken:
        del entries[generation]
    return taken


class Sender:
    """Sends messages to the engine: small ones once per loop iteration, others at once.

    Create it in the event loop that uses it.

    Attributes:
        control_batch: What is sent at the end of this iteration.
        waiter: A waiter of this event loop, which streams derive theirs from.
    """

    def __init__(
        self,
        link: ClientTransport,
        incarnation: int,
        mark_failed: Callable[[str], None],
    ) -> None:
        self._link = link
        self._incarnation = incarnation
        self._on_failure = mark_failed
        self.sent = 0
        self._stopped = False
        self.control_batch = ControlBatch()
        self.waiter = LoopWaiter()

    async def run(self) -> None:
        """Send what `control_batch` gathers, forever.

        Cancellation: what was not sent yet is dropped.
        """
        while True:
            await self.control_batch.wait()
            self._flush()

    async def receive(self) -> None:
        """Send the first message, then handle the engine's messages until it hangs up.

        Cancellation: no message is lost, none is taken while this waits.
        """
        await self._link.pump(lambda: self._put(Kind.STATUS, {"ask": 0}))
        self._stop_sending("disconnected")

    def start(
        self,
        state: StreamState,
        request: bytes,
        described: list[list[Any]],
        memory: Sequence[memoryview],
    ) -> None:
        """Send the start of a stream; memory to be sent was copied when this returns.

        Raises:
            EncodeError: The message cannot be sent; nothing of it was.
        """
        if not described and len(request) <= SMALL_REQUEST:
            self.control_batch.start(state.generation, state.key, state.window, request)
            self._flush_if_full()
            return
        body = {
            "key": state.key,
            "window": state.window,
            "request": request,
            "tensors": described,
        }
        self.send_now(Kind.START, body, generation=state.generation, memory=memory)

    def end(self, state: StreamState) -> None:
        """Send the END of a stream."""
        self.control_batch.end(state.generation)
        self._flush_if_full()

    def send_now(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> None:
        """Send one message now, after everything that `control_batch` has gathered.

        Raises:
            EncodeError: The message cannot be sent; nothing of it was.
        """
        self._flush()
        self._send(kind, body, generation=generation, memory=memory)

    def ping(self) -> None:
        """Send a PING, numbered like its message."""
        self._flush()
        self._send(Kind.PING, {"ask": self.sent})

    def leave(self, why: str) -> None:
        """Tell the engine that the connection is over; send nothing more."""
        self._send(Kind.LEAVE, {"message": why})
        self._stopped = True

    def _flush_if_full(self) -> None:
        # The engine works on these while this process prepares more.
        if self.control_batch.worth_sending:
            self._flush()

    def _flush(self) -> None:
        while not self._stopped and (body := self.control_batch.take()) is not None:
            try:
                self._send(Kind.CONTROL, body)
            except EncodeError:
                # Starts and ends of other streams are lost with it: their callers would
                # wait forever.
                self._stop_sending("client_fault")

    def _send(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        *,
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> None:
        if self._stopped:
            return
        try:
            sent = self._put(kind, body, generation, memory)
        except EncodeError:
            raise
        except BaseException:
            # Part of the message may be sent: the engine could not parse what follows.
            self._stop_sending("client_fault")
            raise
        if not sent:
            self._stop_sending("disconnected")

    def _put(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        generation: int = 0,
        memory: Sequence[memoryview] = (),
    ) -> bool:
        head = protocol.encode(
            kind,
            body,
            incarnation=self._incarnation,
            sequence=self.sent,
            generation=generation,
            tensors=len(memory),
        )
        # Counted before: a message that arrives meanwhile may be answered in there.
        self.sent += 1
        sent = False
        try:
            sent = self._link.send([head, *memory])
        finally:
            self.sent -= not sent
        return sent

    def _stop_sending(self, reason: str) -> None:
        self._stopped = True
        self._on_failure(reason)


_log = logging.getLogger("lifecycle_zmq")


class EngineClient:
    """A client of one engine process, on asyncio and trio.

    All methods belong to the event loop that entered the client. The client numbers
    streams and sends START, CANCEL and END over one ordered pipe, so none of them
    overtakes another.

    Args:
        endpoint: The ``ipc://`` address of this incarnation, or a transport factory.
        incarnation: Its number; messages of another incarnation are protocol errors.
        retry_after: Seconds, passed on in `EngineLost` when the engine is lost.
        window: Credit of a stream: the bytes of items that it may have unread here,
            each counted with 64 more. One item may exceed it.
        arena: Shared memory for payloads that are not sent; mapped by this engine only.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: A number is too small.
    """

    _sender: Sender
    _probe: LossProbe
    _scopes: tuple[anyio.CancelScope, ...]
    _settled: anyio.Event
    _gone: anyio.Event

    def __init__(
        self,
        endpoint: str | Connect,
        *,
        incarnation: int,
        retry_after: float | None = None,
        window: int = 64 * 2**10,
        arena: Arena | None = None,
    ) -> None:
        check_int(incarnation=incarnation)
        check_int(1, window=window)
        if retry_after is not None:
            check_seconds(retry_after=retry_after)
        check_type(Arena | None, "arena must be an Arena or None", arena)
        if not isinstance(endpoint, str):
            check_callable(endpoint=endpoint)
        self._connect = connect_to(endpoint) if isinstance(endpoint, str) else endpoint
        self._retry_after = retry_after
        self._incarnation = incarnation
        self._arena = arena
        self._table = StreamTable(incarnation, arena)
        self._window = window
        self._status_requests = 0
        self._generation = 0
        self._lost: str | None = None
        self._lost_detail = ""

    async def __aenter__(self) -> Self:
        """Start to connect; `wait_ready` returns when requests are accepted."""
        self._settled, self._gone = anyio.Event(), anyio.Event()
        # Shielded: callers of `end` wait for DONE during cancellation, too, so the
        # link must still be read.
        self._scopes = tuple(anyio.CancelScope(shield=True) for _ in range(3))
        self._link = self._connect(self._handle)
        self._copier = TensorCopier(self._arena, self._link)
        self._sender = Sender(self._link, self._incarnation, self.mark_failed)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._probe = LossProbe(self._sender, self._table)
        runs = self._sender.receive, self._sender.run, self._probe.run
        for scope, run in zip(self._scopes, runs, strict=True):
            self._tasks.start_soon(self._guard, scope, run)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Fail every waiter with ``closed`` and close the link without lingering."""
        self.mark_failed("closed")
        for scope in self._scopes:
            scope.cancel()
        try:
            # Without the exception of the block, which it would wrap in a group.
            await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above
        finally:
            self._link.close()

    @property
    def ready(self) -> bool:
        """Whether the engine has sent READY and is not lost."""
        return self._table.ready and self._lost is None

    @property
    def lost(self) -> str | None:
        """The one-word reason why the engine is lost; ``None`` while it is not."""
        return self._lost

    @property
    def streams(self) -> int:
        """Number of streams that were started and are not done."""
        return len(self._table.streams)

    def __contains__(self, key: str) -> bool:
        """Whether a stream with that key was started and is not done."""
        return key in self._table.keys

    @property
    def waiters(self) -> int:
        """Number of calls and streams that wait for a message of the engine."""
        return len(self._table.streams) + len(self._table.status_replies)

    async def wait_ready(self) -> None:
        """Wait until the engine accepts requests.

        Raises:
            EngineLost: The engine was lost before.

        Cancellation: nothing changes.
        """
        await self._settled.wait()
        if self._lost is not None:
            raise self._lost_error()

    async def wait_lost(self) -> None:
        """Wait until this incarnation is lost.

        Cancellation: nothing changes.
        """
        await self._gone.wait()

    async def start(
        self, key: str, request: Mapping[str, Any], tensors: TensorPayload | None = None
    ) -> AsyncIterator[Any]:
        """Hand a request to the engine and return its items.

        The tensors are taken at once, and dropped before START is sent. Tensors in the
        arena stay there; others are copied, more than 4 MiB in a worker thread.

        Args:
            key: Name of the stream until `end`; not in use.
            request: Plain values, at most 1 MiB on the wire.
            tensors: Payload of name to C-contiguous buffer or tensor, at most seven.

        Raises:
            EngineLost: The engine is gone, or not ready; the request may have run.
            RequestRejected: The engine, or a limit of the wire, refused it.
            ValueError: The key is in use, empty or too long.

        Cancellation: the engine may run the request; `end` of its key stops it.
        """
        tensors = _without_empty(tensors)
        if tensors is not None and self.ready:
            tensors = await self._copier.copy_large(tensors)
        state = self._begin(key, request, tensors)
        del request, tensors
        await state.wait_settled()
        if state.refusal is not None:
            raise state.refusal()
        return EngineStream(state, self.cancel, self._sender.control_batch.grant)

    def cancel(self, key: str) -> None:
        """Ask the engine to stop a stream at its next step; ignores unknown keys."""
        state = self._table.keys.get(key)
        if state is None or state.finished or state.cancel_sent:
            return
        state.cancel_sent = True
        self._sender.control_batch.cancel(state.generation)

    async def end(self, key: str) -> None:
        """Send END for a stream; return when the engine has released everything.

        END is sent at most once, and never before START: cancel a call of `start` that
        is still copying. The reader's iteration ends. Returns at once if the engine is
        lost.

        Cancellation: END is sent all the same; call again to wait for the rest.
        """
        state = self._table.keys.get(key)
        if state is None:
            return
        if not state.end_sent:
            state.end_sent = True
            state.finish()
            state.discard()
            self._sender.end(state)
        await state.wait_done()

    async def status(self) -> dict[str, Any]:
        """Return the counters of the engine and, under ``backend``, of its backend.

        Raises:
            EngineLost: The engine is gone or not ready.

        Cancellation: the answer is dropped when it arrives.
        """
        if not self.ready:
            raise self._lost_error()
        self._status_requests = request_id = self._status_requests + 1
        reply = self._table.status_replies[request_id] = StatusReply()
        self._sender.send_now(Kind.STATUS, {"ask": request_id})
        try:
            await reply.answered.wait()
        finally:
            self._table.status_replies.pop(request_id, None)
        if reply.status is None:
            raise self._lost_error()
        return reply.status

    def shutdown(self) -> None:
        """Ask the engine process to exit; does not wait."""
        if self.ready:
            self._sender.send_now(Kind.SHUTDOWN, {})

    def mark_failed(self, reason: str, detail: str = "") -> None:
        """Mark this incarnation as lost; the first reason counts.

        Every waiter gets `EngineLost`, exactly once: pending starts, status calls, and
        each stream after the items that did arrive. `end` returns.

        Args:
            reason: Why the engine is lost, in one word.
            detail: More for the error message, such as an exit code.
        """
        if self._lost is not None:
            return
        self._lost = reason
        self._lost_detail = f" ({detail})" if detail else ""
        self._table.mark_failed(self._lost_error)
        self._probe.stop()
        self._settled.set()
        self._gone.set()

    def drain(self) -> None:
        """Handle every message that has arrived; a protocol error loses the engine."""
        try:
            self._link.drain()
        except ProtocolError as error:
            self._fail("protocol", str(error))

    def _begin(
        self, key: str, request: Mapping[str, Any], tensors: TensorPayload | None
    ) -> StreamState:
        outside = sys.exception()
        try:
            return self._hand_off(key, request, tensors)
        except BaseException as error:
            clear_traceback_frames(error, until=outside)
            raise
        finally:
            del outside, request, tensors

    def _hand_off(
        self, key: str, request: Mapping[str, Any], tensors: TensorPayload | None
    ) -> StreamState:
        # Taken first: a refusal must drop the tensors, as the hand-off does.
        taken = {} if tensors is None else take_tensors(tensors)
        if not self.ready:
            raise self._lost_error()
        if not protocol.is_key(key) or key in self._table.keys:
            kind: type = type(key)
            what = f"{len(key)} characters" if kind is str else kind
            message = "a stream key is Unicode of 1 to 256 characters, and not in use"
            raise ValueError(f"{message}; got {what}, choose another")
        self._generation += 1
        state = StreamState(key, self._generation, self._window, self._sender.waiter)
        try:
            packed = pack_request(request)
            described, memory, blocks = self._describe(taken)
            # Added before START is sent: from then on only END removes it.
            self._table.add(state)
            self._table.acquire_lease(state, blocks)
            self._sender.start(state, packed, described, memory)
        except EncodeError as error:
            self._table.withdraw(state)
            raise RequestRejected(error.code, str(error)) from None
        return state

    def _describe(
        self, tensors: Mapping[str, Any]
    ) -> tuple[list[list[Any]], list[memoryview], Sequence[Block]]:
        if isinstance(tensors, dict) and not tensors:
            return [], [], ()
        placement = ArenaPlacement(self._arena)
        described, memory = describe(tensors, placement.place)
        return described, memory, placement.blocks

    async def _guard(
        self, scope: anyio.CancelScope, run: Callable[[], Awaitable[None]]
    ) -> None:
        with scope:
            try:
                await run()
            except ProtocolError as error:
                self._fail("protocol", str(error))
            except Exception as error:  # noqa: BLE001
                # A bug in the client fails its waiters, never the server around it.
                self._fail("client_fault", describe_error(error))
            finally:
                self.mark_failed("closed")

    def _handle(self, parts: Sequence[Buffer]) -> bool:
        if self._lost is not None:
            return False
        try:
            self._table.dispatch(protocol.decode(parts, accept=protocol.FROM_ENGINE))
        except ProtocolError as error:
            self._fail("protocol", str(error))
            return False
        self._settled.set()
        return True

    def _fail(self, reason: str, why: str) -> None:
        # The only place with details: waiters get the one-word reason.
        _log.error("engine %d is lost: %s: %s", self._incarnation, reason, why)
        self.mark_failed(reason)
        if self._sender.sent:
            # Without the details, which may be those of any error.
            self._sender.leave(f"the client has lost this engine: {reason}")

    def _lost_error(self) -> EngineLost:
        reason = self._lost or "starting"
        return EngineLost(
            f"engine {self._incarnation} takes no requests: {reason}"
            f"{self._lost_detail}; retry later",
            reason=reason,
            retry_after=self._retry_after,
        )


def _without_empty(tensors: TensorPayload | None) -> TensorPayload | None:
    """Return a payload of the same tensors, or ``None`` if there are none."""
    if tensors is None or not hasattr(tensors, "take"):
        return tensors
    taken = tensors.take()
    return None if isinstance(taken, dict) and not taken else Payload(taken)
