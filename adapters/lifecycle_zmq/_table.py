"""What the engine may say when: the client's state machine, without any I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import anyio

from ._errors import EngineFailed, ProtocolError, RequestRejected
from ._streams import Error, StreamState
from .wire import Kind, Message


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
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._received = 0
        self.ready = False
        self.streams: dict[str, StreamState] = {}
        self.reports: dict[int, Report] = {}

    def lose(self, error: Error) -> None:
        """Tell everybody who waits, once, and forget them."""
        streams, self.streams = self.streams, {}
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

    def _on_accepted(self, body: dict[str, Any]) -> None:
        self._unsettled(body["key"]).settle()

    def _on_rejected(self, body: dict[str, Any]) -> None:
        state = self._unsettled(body["key"])
        code, message = body["code"], body["message"]
        state.settle(lambda: RequestRejected(code, message))
        state.finish()
        # An END that is on its way is answered by DONE; without one all is over.
        if not state.end_sent:
            del self.streams[state.key]

    def _on_chunks(self, body: dict[str, Any]) -> None:
        for key, first, items, finish in body["chunks"]:
            state = self._known(key)
            if first != state.received or state.finish_seen:
                raise ProtocolError("the items of a stream have a gap")
            state.push(items)
            if finish is not None:
                state.finish_seen = True
                state.finish(_failure(finish))

    def _on_done(self, body: dict[str, Any]) -> None:
        state = self._known(body["key"])
        if not state.end_sent:
            raise ProtocolError("DONE without END")
        del self.streams[state.key]
        state.done.set()

    def _on_report(self, body: dict[str, Any]) -> None:
        # Whoever asked may have been cancelled.
        report = self.reports.get(body["ask"])
        if report is not None:
            report.status = body["status"]
            report.answered.set()

    def _unsettled(self, key: str) -> StreamState:
        state = self._known(key)
        if state.settled.is_set():
            raise ProtocolError("a start settled twice")
        return state

    def _known(self, key: str) -> StreamState:
        state = self.streams.get(key)
        if state is None:
            raise ProtocolError("a stream that was never started, or is done")
        return state

    _HANDLERS: ClassVar[dict[Kind, Callable[[StreamTable, dict[str, Any]], None]]] = {
        Kind.READY: _on_ready,
        Kind.ACCEPTED: _on_accepted,
        Kind.REJECTED: _on_rejected,
        Kind.CHUNKS: _on_chunks,
        Kind.DONE: _on_done,
        Kind.REPORT: _on_report,
    }


def _failure(finish: dict[str, Any]) -> Error | None:
    if finish["reason"] != "failed":
        return None
    code, message = finish["error"]["code"], finish["error"]["message"]
    return lambda: EngineFailed(code, message)
