"""What the engine may say when: the client's state machine, without any I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import anyio

from lifecycle_zmq._errors import EngineFailed, ProtocolError, RequestRejected
from lifecycle_zmq.client.streams import Error, StreamState
from lifecycle_zmq.memory.arena import Arena
from lifecycle_zmq.memory.block import Block
from lifecycle_zmq.protocol.items import BASE_COST, MAX_TOKEN, TOKEN_COST, TokenList
from lifecycle_zmq.protocol.wire import Kind, Message


class Report:
    """One answer to come, or the news that none will."""

    __slots__ = ("answered", "status")

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.status: dict[str, Any] | None = None


class StreamTable:
    """The streams and questions of one incarnation.

    Every message of the engine is checked against what it can say now. What it cannot
    is a `ProtocolError`, before anything is changed: on one ordered pipe from one
    process a stray message means that all that follows is worthless.

    Args:
        incarnation: The number that every message must carry.
        arena: What the engine gives loans back to.

    Attributes:
        loans: What the engine has of the arena: number of the loan by generation.
    """

    def __init__(self, incarnation: int, arena: Arena | None = None) -> None:
        self._incarnation = incarnation
        self._arena = arena
        self._received = 0
        self.ready = False
        self.streams: dict[int, StreamState] = {}
        self.keys: dict[str, StreamState] = {}
        self.reports: dict[int, Report] = {}
        self.loans: dict[int, int] = {}

    def add(self, state: StreamState) -> None:
        """Enter a stream that is about to be started."""
        self.streams[state.generation] = self.keys[state.key] = state

    def remove(self, state: StreamState) -> None:
        """Forget a stream that is over."""
        self.streams.pop(state.generation, None)
        self.keys.pop(state.key, None)

    def withdraw(self, state: StreamState) -> None:
        """Forget a stream that was never started."""
        self.remove(state)
        if state.generation in self.loans:
            self.take_back(state.generation)

    def lend(self, state: StreamState, blocks: Sequence[Block]) -> None:
        """Keep blocks of the arena for a stream that is about to be started."""
        if self._arena is not None and blocks:
            self.loans[state.generation] = self._arena.lend(blocks)

    def take_back(self, generation: int) -> None:
        """End the loan of a stream.

        Raises:
            ProtocolError: It has none.
        """
        loan = self.loans.pop(generation, None)
        if loan is None or self._arena is None:
            raise ProtocolError("a loan that was never made, or has ended")
        self._arena.take_back(loan)

    def lose(self, error: Error) -> None:
        """Tell everybody who waits, once, and forget them."""
        streams, self.streams = self.streams, {}
        self.keys.clear()
        reports, self.reports = self.reports, {}
        for state in streams.values():
            state.lose(error)
        for report in reports.values():
            report.answered.set()

    def dispatch(self, message: Message) -> None:
        """Do what one message says.

        Raises:
            ProtocolError: The engine cannot mean this now.
        """
        if message.incarnation != self._incarnation:
            raise ProtocolError(f"incarnation {message.incarnation}")
        if message.sequence != self._received:
            raise ProtocolError(f"message {message.sequence}, not {self._received}")
        if (message.kind is Kind.READY) is self.ready:
            raise ProtocolError("READY comes first, and once")
        self._received += 1
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
        # Before the end of their streams is told: who waits for it finds room.
        for generation in body["freed"]:
            self.take_back(generation)
        for generation in body["done"]:
            self._complete(self._known(generation))

    def _take_tokens(self, lists: list[TokenList]) -> None:
        streams = self.streams
        for generation, first, tokens in lists:
            # The way of nearly every token, with no call that it can be spared.
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
                state.conclude(_failure(finish))

    def _reject(self, state: StreamState, code: str, message: str) -> None:
        state.settle(lambda: RequestRejected(code, message))
        state.finish()
        # An END that is on its way is answered; without one all is over.
        if not state.end_sent:
            self.remove(state)

    def _complete(self, state: StreamState) -> None:
        if not state.end_sent:
            raise ProtocolError("a stream is done without END")
        self.remove(state)
        state.complete()

    def _on_report(self, body: dict[str, Any]) -> None:
        # Whoever asked may have been cancelled.
        report = self.reports.get(body["ask"])
        if report is not None:
            report.status = body["status"]
            report.answered.set()

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
    }


def _failure(finish: dict[str, Any]) -> Error | None:
    if finish["reason"] != "failed":
        return None
    code, message = finish["error"]["code"], finish["error"]["message"]
    return lambda: EngineFailed(code, message)
