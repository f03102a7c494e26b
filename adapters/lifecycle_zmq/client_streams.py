"""The client's streams: their state machine, and the iterator over their items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import anyio

from lifecycle.lowlevel import LoopWaiter
from lifecycle_zmq.codec import BASE_COST, MAX_TOKEN, TOKEN_COST, TokenList
from lifecycle_zmq.exceptions import EngineFailed, ProtocolError, RequestRejected
from lifecycle_zmq.protocol import Kind, Message
from lifecycle_zmq.shared_memory.allocator import Block
from lifecycle_zmq.shared_memory.arena import Arena

Error = Callable[[], Exception]
_NEVER = float("-inf")


class StreamState(LoopWaiter):
    """One stream of one incarnation, from START to DONE. Every step is synchronous.

    Also the waiter of the task that starts the stream, and then of its reader. Each
    waiter gets an exception of its own, built where it is raised: a shared one would
    collect the tracebacks, and with them the frames, of all of them.
    """

    __slots__ = (
        "_end_waiters",
        "_owed_credit",
        "cancel_sent",
        "credit",
        "discarding",
        "done",
        "end_sent",
        "error",
        "finish_seen",
        "finished",
        "generation",
        "items",
        "key",
        "low",
        "mark",
        "received",
        "refusal",
        "settled",
        "window",
    )

    def __init__(
        self, key: str, generation: int, window: int, like: LoopWaiter | None = None
    ) -> None:
        super().__init__(like)
        self.key = key
        self.generation = generation
        self.window = window
        self._end_waiters: Sequence[LoopWaiter] = ()
        self.settled = False
        self.done = False
        self.refusal: Error | None = None
        # Bounded by the window and one item: the engine sends none without credit.
        self.items: deque[Any] = deque()
        self.received = 0
        # A mark is set where half a window was used up. When all items before it were
        # read, their credit is granted: no cost needs to be kept per item.
        self.credit = window
        self.low: float = window / 2
        self.mark = 0
        self._owed_credit = 0
        self.finish_seen = False
        self.finished = False
        self.error: Error | None = None
        self.discarding = False
        self.cancel_sent = False
        self.end_sent = False

    def settle(self, refusal: Error | None = None) -> None:
        """Let `start` return, or raise `refusal`."""
        self.refusal = refusal
        self.settled = True
        self.wake()

    def push(self, item: Any, cost: int) -> None:
        """Append one item that the engine produced."""
        self.received += 1
        self.credit -= cost
        if self.credit <= self.low:
            self.set_mark()
        if not self.discarding:
            self.items.append(item)
            self.wake()

    def set_mark(self) -> None:
        """Remember the credit used so far; `reclaim_credit` grants it again."""
        self.mark, self.low = self.received, _NEVER
        self._owed_credit = self.window - self.credit

    def reclaim_credit(self) -> int:
        """Return the credit to grant now that the reader has reached the mark."""
        if self.finish_seen or self.end_sent:
            return 0
        credit = self._owed_credit
        self.credit += credit
        self.mark, self.low = 0, self.window / 2
        if self.credit <= self.low:
            self.set_mark()
        return credit

    def receive_finish(self, error: Error | None) -> None:
        """Note the finish that the engine sent; no item may follow it."""
        self.finish_seen = True
        self.credit = 0
        self.finish(error)

    def finish(self, error: Error | None = None) -> None:
        """End the items, the first time only; `error` comes after the last of them."""
        if not self.finished:
            self.finished = True
            self.error = error
            self.wake()

    def discard(self) -> None:
        """Drop all items, present and future. Any thread may call this."""
        self.discarding = True
        self.items.clear()

    def complete(self) -> None:
        """Wake the callers of `end`: the engine has forgotten the stream."""
        self.done = True
        enders, self._end_waiters = self._end_waiters, ()
        for waiter in enders:
            waiter.wake()

    def mark_failed(self, error: Error) -> None:
        """Fail every waiter of the stream, each exactly once: the engine is lost."""
        if not self.settled:
            self.settle(error)
        self.finish(error)
        self.complete()

    async def wait_settled(self) -> None:
        """Wait until the engine has taken or refused the stream, or is lost."""
        while not self.settled:
            await self.wait()

    async def wait_done(self) -> None:
        """Wait until the engine has forgotten the stream, or is lost."""
        if not self.done:
            waiter = LoopWaiter(self)
            self._end_waiters = (*self._end_waiters, waiter)
            await waiter.wait()


class EngineStream:
    """The items of one stream, for one reader.

    Closing or dropping it never waits and never ends the stream in the engine: only
    `EngineClient.end` does, so that the owner of the session sends END once.
    """

    __slots__ = ("_cancel", "_grant", "_state")

    def __init__(
        self,
        state: StreamState,
        cancel: Callable[[str], None],
        grant: Callable[[int, int], None],
    ) -> None:
        self._state = state
        self._cancel = cancel
        self._grant = grant

    def __aiter__(self) -> EngineStream:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Any:
        """Return the next item.

        Raises:
            EngineFailed: The engine failed this stream; raised once.
            EngineLost: The engine is lost; raised once.
            RuntimeError: Another task waits for an item.

        Cancellation: no item is lost; the next call returns it.
        """
        state = self._state
        items = state.items
        while not items:
            if state.discarding:
                raise StopAsyncIteration
            if state.finished:
                error, state.error = state.error, None
                raise StopAsyncIteration if error is None else error()
            await state.wait()
        item = items.popleft()
        if (
            state.mark
            and state.received - len(items) >= state.mark
            and (credit := state.reclaim_credit())
        ):
            self._grant(state.generation, credit)
        return item

    async def aclose(self) -> None:
        """Stop reading and ask the engine to stop producing. Does not wait.

        Cancellation: there is no checkpoint in it.
        """
        self.close_nowait()

    def close_nowait(self) -> None:
        """Stop reading without a coroutine, as `aclose` does."""
        if not self._state.finished:
            self._cancel(self._state.key)
        self._state.discard()

    def __del__(self) -> None:
        """Stop buffering. Any thread may collect the stream, so touch no socket."""
        self._state.discard()

    def __repr__(self) -> str:
        """Show the key and the number of items waiting, never an item."""
        return f"<EngineStream {self._state.key!r} waiting={len(self._state.items)}>"


class StatusReply:
    """The answer to one status request; ``status`` stays None if the engine is lost."""

    __slots__ = ("answered", "status")

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.status: dict[str, Any] | None = None


class StreamTable:
    """The streams and status requests of one incarnation. Does no I/O.

    Every message is checked against the state of its stream. A message that is not
    legal now raises `ProtocolError` before anything changes: on an ordered pipe from
    one process, nothing after such a message can be trusted.

    Attributes:
        confirmed: Number of the newest PING that was answered; -1 before.
        leases: Lease numbers in the arena, by generation of the stream.
    """

    def __init__(self, incarnation: int, arena: Arena | None = None) -> None:
        self._incarnation = incarnation
        self._arena = arena
        self.received = 0
        self.confirmed = -1
        self.ready = False
        self.streams: dict[int, StreamState] = {}
        self.keys: dict[str, StreamState] = {}
        self.status_replies: dict[int, StatusReply] = {}
        self.leases: dict[int, int] = {}

    @property
    def waits(self) -> bool:
        """Whether something of the engine is awaited."""
        return bool(
            not self.ready or self.streams or self.status_replies or self.leases
        )

    def add(self, state: StreamState) -> None:
        """Add a stream that is about to be started."""
        self.streams[state.generation] = self.keys[state.key] = state

    def remove(self, state: StreamState) -> None:
        """Remove a stream that is over."""
        self.streams.pop(state.generation, None)
        self.keys.pop(state.key, None)

    def withdraw(self, state: StreamState) -> None:
        """Remove a stream that was never started."""
        self.remove(state)
        if state.generation in self.leases:
            self.release_lease(state.generation)

    def acquire_lease(self, state: StreamState, blocks: Sequence[Block]) -> None:
        """Keep blocks of the arena for a stream that is about to be started."""
        if self._arena is not None and blocks:
            self.leases[state.generation] = self._arena.acquire_lease(blocks)

    def release_lease(self, generation: int) -> None:
        """Release the arena lease of a stream.

        Raises:
            ProtocolError: The stream has none.
        """
        lease = self.leases.pop(generation, None)
        if lease is None or self._arena is None:
            raise ProtocolError("an arena lease that does not exist")
        self._arena.release_lease(lease)

    def mark_failed(self, error: Error) -> None:
        """Fail every waiter, once, and remove all streams."""
        streams, self.streams = self.streams, {}
        self.keys.clear()
        status_replies, self.status_replies = self.status_replies, {}
        for state in streams.values():
            state.mark_failed(error)
        for reply in status_replies.values():
            reply.answered.set()

    def dispatch(self, message: Message) -> None:
        """Handle one message.

        Raises:
            ProtocolError: The message is not legal now.
        """
        if message.kind is Kind.FAULT:
            raise ProtocolError(f"the engine received {message.body['message']}")
        if message.incarnation != self._incarnation:
            raise ProtocolError(f"incarnation {message.incarnation}")
        if message.sequence != self.received:
            raise ProtocolError(f"message {message.sequence}, not {self.received}")
        if (message.kind is Kind.READY) is self.ready:
            raise ProtocolError("READY comes first, and once")
        self.received += 1
        self._HANDLERS[message.kind](self, message.body)

    def _on_ready(self, _body: dict[str, Any]) -> None:
        self.ready = True

    def _on_tick(self, body: dict[str, Any]) -> None:
        for generation in body["accepted"]:
            self._unsettled(generation).settle()
        for generation, code, message in body["rejected"]:
            self._reject(self._unsettled(generation), code, message)
        self._take_tokens(body["tokens"])
        self._take_chunks(body["chunks"])
        # Before DONE: callers of `end` then find room in the arena.
        for generation in body["freed"]:
            self.release_lease(generation)
        for generation in body["done"]:
            self._complete(self._known(generation))

    def _take_tokens(self, lists: list[TokenList]) -> None:
        streams = self.streams
        for generation, first, tokens in lists:
            # Fast path of nearly every token, so no calls.
            state = streams.get(generation)
            if (
                state is None
                or first != state.received & MAX_TOKEN
                or state.credit <= 0
            ):
                raise ProtocolError("tokens out of order, or without credit")
            state.received += 1
            state.credit -= BASE_COST + TOKEN_COST * len(tokens)
            if state.credit <= state.low:
                state.set_mark()
            if not state.discarding:
                state.items.append(tokens)
                state.wake()

    def _take_chunks(self, chunks: list[list[Any]]) -> None:
        for generation, first, items, finish in chunks:
            state = self._open(generation, first)
            for item, cost in items:
                if state.credit <= 0:
                    raise ProtocolError("an item without credit")
                state.push(item, cost)
            if finish is not None:
                state.receive_finish(_failure(finish))

    def _reject(self, state: StreamState, code: str, message: str) -> None:
        state.settle(lambda: RequestRejected(code, message))
        state.finish()
        # A pending END is answered with DONE; without one the stream is over.
        if not state.end_sent:
            self.remove(state)

    def _complete(self, state: StreamState) -> None:
        if not state.end_sent:
            raise ProtocolError("a stream is done without END")
        self.remove(state)
        state.complete()

    def _on_report(self, body: dict[str, Any]) -> None:
        # The request may have been cancelled.
        reply = self.status_replies.get(body["ask"])
        if reply is not None:
            reply.status = body["status"]
            reply.answered.set()

    def _on_pong(self, body: dict[str, Any]) -> None:
        self.confirmed = body["ask"]

    def _unsettled(self, generation: int) -> StreamState:
        state = self._known(generation)
        if state.settled:
            raise ProtocolError("a start settled twice")
        return state

    def _open(self, generation: int, first: int) -> StreamState:
        state = self.streams.get(generation)
        if state is None or first != state.received or state.finish_seen:
            raise ProtocolError("the items of a stream have a gap, or no stream")
        return state

    def _known(self, generation: int) -> StreamState:
        state = self.streams.get(generation)
        if state is None:
            raise ProtocolError("a stream that was never started, or is done")
        return state

    _HANDLERS: ClassVar[dict[Kind, Callable[[StreamTable, dict[str, Any]], None]]] = {
        Kind.READY: _on_ready,
        Kind.TICK: _on_tick,
        Kind.REPORT: _on_report,
        Kind.PONG: _on_pong,
    }


def _failure(finish: dict[str, Any]) -> Error | None:
    if finish["reason"] != "failed":
        return None
    code, message = finish["error"]["code"], finish["error"]["message"]
    return lambda: EngineFailed(code, message)
