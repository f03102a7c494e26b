"""How outputs get to their readers: at once, merged later, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lifecycle_zmq._errors import EncodeError
from lifecycle_zmq.protocol.items import (
    BASE_COST,
    MAX_TOKEN,
    TOKEN_COST,
    is_token_list,
    pack_item,
)
from lifecycle_zmq.server.backend import Backend, Finish, Output
from lifecycle_zmq.server.backlog import Backlog, Piece, cost_of
from lifecycle_zmq.server.books import Books, Peer, ServedStream

# What one token takes: so many words of a message, and so much credit.
_WORDS = 4
_COST = BASE_COST + TOKEN_COST


class Delivery:
    """Gives each stream what its reader's credit allows, and holds back the rest.

    A slow reader costs its own stream only: what it cannot take is merged, bounded by
    `hold` bytes, and given up after `stall` seconds without any new credit.

    Args:
        books: The streams.
        backend: Told to cancel, and to pause where it can.
        flush: Sends what a client's tick has gathered.
        hold: The most bytes held for one stream.
        stall: Seconds that something is held for a reader that takes nothing.
    """

    def __init__(
        self,
        books: Books,
        backend: Backend,
        flush: Callable[[Peer], None],
        *,
        hold: int,
        stall: float,
    ) -> None:
        self._books = books
        self._backend = backend
        self._flush = flush
        self._hold = hold
        self._stall = stall
        # Those who wait for credit, the longest first, and since when.
        self._waiting: dict[ServedStream, float] = {}
        self._pause: Callable[[str], Any] | None = getattr(backend, "pause", None)
        self._resume: Callable[[str], Any] | None = getattr(backend, "resume", None)

    def publish(self, outputs: Sequence[Output]) -> None:
        """Pass on what one step produced, to whoever still waits for it."""
        streams = self._books.streams
        ample = 4 * _WORDS * len(outputs) < self._room()
        for key, items, finish in outputs:
            stream = streams.get(key)
            if stream is None or stream.finished:
                continue
            # The way of nearly every token, with no call that it can be spared.
            words = stream.words
            if words is not None and ample and stream.credit > 0 and len(items) == 1:
                item = items[0]
                if type(item) is list and len(item) == 1 and finish is None:
                    token = item[0]
                    if type(token) is int and 0 <= token <= MAX_TOKEN:
                        number = stream.items & MAX_TOKEN
                        words += (stream.generation, number, 1, token)
                        stream.items += 1
                        stream.credit -= _COST
                        continue
            self._publish(stream, items, finish)

    def _room(self) -> int:
        return min((peer.tick.room for peer in self._books.peers.values()), default=0)

    def _publish(
        self, stream: ServedStream, items: Sequence[Any], finish: Finish | None
    ) -> None:
        if stream.held is not None and items and stream.held.size > self._hold:
            self._give_up(stream, f"is more than {self._hold} bytes behind")
            return
        if finish is not None:
            stream.finished = True
        for item in items:
            if not self._take(stream, item):
                return
        if finish is None:
            return
        if stream.held is None:
            self._put_finish(stream, finish)
        else:
            stream.finish = finish

    def fail(self, stream: ServedStream, code: str, message: str) -> None:
        """End a stream now; what is held for it is dropped, its backend is told."""
        running = not stream.finished
        self.release(stream)
        stream.finished = True
        stream.finish = None
        self._put_finish(stream, Finish("failed", code, message))
        if running:
            self._backend.cancel(stream.key)

    def fail_all(self, message: str) -> list[Output]:
        """Make the backend forget every stream; return what their readers are told."""
        finish = Finish("failed", "step_failed", message)
        live = [key for key, it in self._books.streams.items() if not it.finished]
        for key in live:
            self._backend.end(key)
        return [Output(key, (), finish) for key in live]

    def release(self, stream: ServedStream) -> None:
        """Drop what is held for a stream."""
        if stream.held is not None:
            del self._waiting[stream]
            stream.held = None
            stream.words = stream.peer.tick.words_for(stream)
        if stream.paused and self._resume is not None and not stream.finished:
            self._resume(stream.key)
        stream.paused = False

    def forget(self, stream: ServedStream) -> None:
        """Keep nothing of a stream that its backend has forgotten."""
        stream.finished = True
        self.release(stream)

    def cancel(self, stream: ServedStream) -> None:
        """Let a stream end early, as its client wants: nothing held is wanted."""
        finish, stream.finish = stream.finish, None
        self.release(stream)
        if finish is not None:
            self._put_finish(stream, finish)
        elif not stream.finished:
            self._backend.cancel(stream.key)

    def grant(self, stream: ServedStream, credit: int) -> None:
        """Add credit, and send what it now allows."""
        stream.credit += credit
        held = stream.held
        if held is None:
            return
        while held and stream.credit > 0:
            self._put(stream, held.take())
        if held:
            # Some of it went, so the reader is slow, but not stuck.
            self._wait(stream)
            return
        self.release(stream)
        finish, stream.finish = stream.finish, None
        if finish is not None:
            self._put_finish(stream, finish)

    def expire(self) -> None:
        """End the streams whose readers took nothing for too long."""
        while (patience := self.patience()) is not None and patience <= 0:
            self._give_up(next(iter(self._waiting)), "takes nothing any more")

    def patience(self) -> float | None:
        """Return the seconds until `expire` has something to do; ``None``: never."""
        if not self._waiting:
            return None
        since = next(iter(self._waiting.values()))
        return since + self._stall - time.monotonic()

    def _take(self, stream: ServedStream, item: Any) -> bool:
        """Send or hold one item; False where the stream ends by it."""
        try:
            piece: Piece = item if is_token_list(item) else pack_item(item)
        except EncodeError as error:
            self.fail(stream, error.code, str(error))
            return False
        if stream.held is None and stream.credit > 0:
            self._put(stream, piece)
            return True
        return self._keep(stream, piece)

    def _keep(self, stream: ServedStream, piece: Piece) -> bool:
        if self._books.streams.get(stream.key) is not stream:
            return False  # its client turned out to be gone
        if stream.held is None:
            stream.held = Backlog(stream.merge)
            stream.words = None
            self._wait(stream)
        stream.held.add(piece)
        self._pause_late(stream, stream.held.size)
        return True

    def _pause_late(self, stream: ServedStream, held: int) -> None:
        if self._pause is None or stream.paused or stream.finished:
            return
        # Half of what may be held is left for what is under way.
        if 2 * held > self._hold:
            stream.paused = True
            self._pause(stream.key)

    def _wait(self, stream: ServedStream) -> None:
        self._waiting.pop(stream, None)
        self._waiting[stream] = time.monotonic()

    def _give_up(self, stream: ServedStream, why: str) -> None:
        self._books.slow_clients += 1
        self.fail(stream, "slow_client", f"the reader {why}; read faster")

    def _put(self, stream: ServedStream, piece: Piece) -> None:
        tick = stream.peer.tick
        if not isinstance(piece, bytes) and tick.words_for(stream) is None:
            piece = pack_item(piece)
        if not tick.fits(piece):
            self._flush(stream.peer)
        if isinstance(piece, bytes):
            tick.add_item(stream, piece)
        else:
            tick.add_tokens(stream, piece)
        stream.items += 1
        stream.credit -= cost_of(piece)

    def _put_finish(self, stream: ServedStream, finish: Finish) -> None:
        stream.peer.tick.add_finish(stream, finish)
        if stream.peer.tick.full:
            self._flush(stream.peer)
