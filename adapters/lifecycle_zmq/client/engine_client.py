"""The API process's side of the link to one incarnation of the engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import anyio

from lifecycle import EngineLost
from lifecycle_zmq import _options
from lifecycle_zmq._errors import EncodeError, ProtocolError, RequestRejected
from lifecycle_zmq._hand_off import Box, forget_frames, take, where
from lifecycle_zmq.client.carrier import Carrier
from lifecycle_zmq.client.lodging import Lodging
from lifecycle_zmq.client.sender import Sender
from lifecycle_zmq.client.streams import EngineStream, StreamState
from lifecycle_zmq.client.table import Report, StreamTable
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.items import pack_request
from lifecycle_zmq.protocol.wire import Buffer, Kind
from lifecycle_zmq.transport import Connect
from lifecycle_zmq.transport.endpoints import connect_to

_log = logging.getLogger("lifecycle_zmq")


class EngineClient:
    """A client of one engine process, on asyncio and trio alike.

    All methods belong to the event loop that entered it. It chooses the keys, so START,
    CANCEL and END of a stream travel one ordered pipe and none overtakes another.

    Args:
        endpoint: The ``ipc://`` address of this incarnation alone, or how to reach it.
        incarnation: Its number; what another number says is not believed.
        retry_after: Seconds that waiters are told when the engine is lost.
        window: Credit of a stream: the bytes of items that it may have unread here,
            each counted with 64 more. One item may exceed it.
        arena: Where payloads lie that are not sent; mapped by this engine alone.

    Raises:
        TypeError: One of these is of another kind than it is to be.
        ValueError: A number is too small.
    """

    _sender: Sender
    _scopes: tuple[anyio.CancelScope, anyio.CancelScope]
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
        _options.whole(incarnation=incarnation)
        _options.whole(1, window=window)
        if retry_after is not None:
            _options.seconds(retry_after=retry_after)
        _options.expect(Arena | None, "arena must be an Arena or None", arena)
        if not isinstance(endpoint, str):
            _options.callables(endpoint=endpoint)
        self._connect = connect_to(endpoint) if isinstance(endpoint, str) else endpoint
        self._retry_after = retry_after
        self._incarnation = incarnation
        self._arena = arena
        self._table = StreamTable(incarnation, arena)
        self._window = window
        self._asked = 0
        self._generation = 0
        self._lost: str | None = None
        self._lost_detail = ""

    async def __aenter__(self) -> Self:
        """Begin to connect; `wait_ready` tells when requests are taken."""
        self._settled, self._gone = anyio.Event(), anyio.Event()
        # Shielded: whoever cleans up while everything around is cancelled still
        # waits for DONE, and somebody must read it.
        self._scopes = anyio.CancelScope(shield=True), anyio.CancelScope(shield=True)
        self._link = self._connect(self._handle)
        self._carrier = Carrier(self._arena, self._link)
        self._sender = Sender(self._link, self._incarnation, self.lose)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._guard, self._scopes[0], self._sender.listen)
        self._tasks.start_soon(self._guard, self._scopes[1], self._sender.run)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Tell every waiter ``closed`` and close the link without lingering."""
        self.lose("closed")
        for scope in self._scopes:
            scope.cancel()
        try:
            # Not given the exception of the block, which it would wrap in a group.
            await self._tasks.__aexit__(None, None, None)  # noqa: ASYNC102 - cut above
        finally:
            self._link.close()

    @property
    def ready(self) -> bool:
        """Whether the engine has said READY and is not lost."""
        return self._table.ready and self._lost is None

    @property
    def lost(self) -> str | None:
        """Why it was given up, in one word; ``None`` while it was not."""
        return self._lost

    @property
    def streams(self) -> int:
        """How many streams were started and are not done."""
        return len(self._table.streams)

    def __contains__(self, key: str) -> bool:
        """Whether a stream of that key was started and is not done."""
        return key in self._table.keys

    @property
    def waiters(self) -> int:
        """How many calls and streams wait for the engine to say something."""
        return len(self._table.streams) + len(self._table.reports)

    async def wait_ready(self) -> None:
        """Wait until the engine takes requests.

        Raises:
            EngineLost: It went away before.

        Cancellation: nothing changes.
        """
        await self._settled.wait()
        if self._lost is not None:
            raise self._loss()

    async def wait_lost(self) -> None:
        """Wait until this incarnation is given up.

        Cancellation: nothing changes.
        """
        await self._gone.wait()

    async def start(
        self, key: str, request: Mapping[str, Any], tensors: Box | None = None
    ) -> AsyncIterator[Any]:
        """Hand a request to the engine and return its items.

        The tensors are taken at once, and dropped before the engine is asked. What lies
        in the arena stays there; others are copied, more than 4 MiB in a thread.

        Args:
            key: What the stream is called until `end`; not in use.
            request: Plain values, at most 1 MiB on the wire.
            tensors: Box of name to C-contiguous buffer or tensor, at most seven.

        Raises:
            EngineLost: The engine is gone, or not ready; the request may have run.
            RequestRejected: The engine, or a limit of the wire, refused it.
            ValueError: The key is in use, empty or too long.

        Cancellation: the engine may run the request; `end` of its key stops it.
        """
        if tensors is not None and self.ready:
            tensors = await self._carrier.bring(tensors)
        state = self._begin(key, request, tensors)
        del request, tensors
        await state.wait_settled()
        if state.refusal is not None:
            raise state.refusal()
        return EngineStream(state, self.cancel, self._sender.outbox.grant)

    def cancel(self, key: str) -> None:
        """Ask the engine to stop a stream at its next step; unknown keys are fine."""
        state = self._table.keys.get(key)
        if state is None or state.finished or state.cancel_sent:
            return
        state.cancel_sent = True
        self._sender.outbox.cancel(state.generation)

    async def end(self, key: str) -> None:
        """Make the engine forget a stream; return when it has released everything.

        END is sent once at most, and not before START: cancel a call of `start` that
        still copies. A reader sees the end. Of an engine that is gone none is awaited.

        Cancellation: END is on its way all the same; call again to wait for the rest.
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

        Cancellation: the answer is dropped when it comes.
        """
        if not self.ready:
            raise self._loss()
        self._asked = ask = self._asked + 1
        report = self._table.reports[ask] = Report()
        self._sender.say(Kind.STATUS, {"ask": ask})
        try:
            await report.answered.wait()
        finally:
            self._table.reports.pop(ask, None)
        if report.status is None:
            raise self._loss()
        return report.status

    def shutdown(self) -> None:
        """Ask the engine process to leave; does not wait."""
        if self.ready:
            self._sender.say(Kind.SHUTDOWN, {})

    def lose(self, reason: str, detail: str = "") -> None:
        """Give this incarnation up; the first reason counts.

        Everybody who waits for it gets `EngineLost`, exactly once: a pending start,
        a status, each stream after the items that did arrive. `end` returns.

        Args:
            reason: What became of the engine, in one word.
            detail: More of it, such as an exit code, for the message alone.
        """
        if self._lost is not None:
            return
        self._lost = reason
        self._lost_detail = f" ({detail})" if detail else ""
        self._table.lose(self._loss)
        self._settled.set()
        self._gone.set()

    def drain(self) -> None:
        """Handle every message that has arrived; a fault of the engine loses it."""
        try:
            self._link.drain()
        except ProtocolError as error:
            self._give_up("protocol", str(error))

    def _begin(
        self, key: str, request: Mapping[str, Any], tensors: Box | None
    ) -> StreamState:
        outside = sys.exception()
        try:
            return self._hand_over(key, request, tensors)
        except BaseException as error:
            forget_frames(error, until=outside)
            raise
        finally:
            del outside, request, tensors

    def _hand_over(
        self, key: str, request: Mapping[str, Any], tensors: Box | None
    ) -> StreamState:
        # Taken first: a refusal must drop it as surely as a hand-off does.
        taken = take(tensors)
        if not self.ready:
            raise self._loss()
        if not wire.is_key(key) or key in self._table.keys:
            told = "a stream key is Unicode of 1 to 256 characters that is not in use"
            raise ValueError(f"{told}; this one has {len(str(key))}, choose another")
        self._generation += 1
        state = StreamState(key, self._generation, self._window, self._sender.slot)
        try:
            packed = pack_request(request)
            lodging = Lodging(self._arena)
            described, memory = wire.describe(taken, lodging.lodge)
            # Known before it is sent: from then on only END may forget it.
            self._table.add(state)
            self._table.lend(state, lodging.blocks)
            self._sender.start(state, packed, described, memory)
        except EncodeError as error:
            self._table.withdraw(state)
            raise RequestRejected(error.code, str(error)) from None
        return state

    async def _guard(
        self, scope: anyio.CancelScope, run: Callable[[], Awaitable[None]]
    ) -> None:
        with scope:
            try:
                await run()
            except ProtocolError as error:
                self._give_up("protocol", str(error))
            except Exception as error:  # noqa: BLE001
                # A fault of ours ends the waiters, never the server around us.
                self._give_up("client_fault", where(error))
            finally:
                self.lose("closed")

    def _handle(self, parts: Sequence[Buffer]) -> bool:
        if self._lost is not None:
            return False
        try:
            self._table.dispatch(wire.decode(parts, accept=wire.FROM_ENGINE))
        except ProtocolError as error:
            self._give_up("protocol", str(error))
            return False
        self._settled.set()
        return True

    def _give_up(self, reason: str, why: str) -> None:
        # Nobody else learns of it: who waits is told the one word only.
        _log.error("engine %d is given up: %s: %s", self._incarnation, reason, why)
        self.lose(reason)

    def _loss(self) -> EngineLost:
        reason = self._lost or "starting"
        return EngineLost(
            f"engine {self._incarnation} takes no requests: {reason}"
            f"{self._lost_detail}; retry later",
            reason=reason,
            retry_after=self._retry_after,
        )
