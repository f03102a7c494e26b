"""Flow control: credit by stream, send queues, and outgoing batches."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lifecycle_zmq import protocol
from lifecycle_zmq.backend import Backend, Merge, Output
from lifecycle_zmq.codec import (
    BASE_COST,
    MAX_TOKEN,
    MAX_TOKENS,
    TOKEN_COST,
    is_token_list,
    join_items,
    pack_item,
    pack_tokens,
)
from lifecycle_zmq.exceptions import EncodeError, ProtocolError
from lifecycle_zmq.protocol import Finish, Kind, Message

# An item in its wire form: a token list, or the msgpack of any other value.
Piece = list[int] | bytes


def cost_of(piece: Piece) -> int:
    """Return the credit that sending *piece* takes."""
    if type(piece) is list:
        return BASE_COST + TOKEN_COST * len(piece)
    return BASE_COST + len(piece)


class SendQueue:
    """Items of one stream that wait for credit, merged by the rule of its backend.

    Tokens are stored as an array: a list would take nine times their size.

    Attributes:
        size: Credit that all items cost, which is about the memory they take.
    """

    __slots__ = ("_pieces", "_rule", "size")

    def __init__(self, rule: Merge) -> None:
        self._rule = rule
        self._pieces: deque[array[int] | bytes] = deque()
        self.size = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece) -> None:
        """Add one item."""
        if self._rule == "replace":
            self._pieces.clear()
            self.size = 0
        elif self._rule == "concatenate" and self._pieces and self._join(piece):
            return
        self._pieces.append(piece if isinstance(piece, bytes) else array("I", piece))
        self.size += cost_of(piece)

    def take(self) -> Piece:
        """Remove and return the oldest item."""
        kept = self._pieces.popleft()
        piece = kept if isinstance(kept, bytes) else kept.tolist()
        self.size -= cost_of(piece)
        return piece

    def _join(self, piece: Piece) -> bool:
        last = self._pieces[-1]
        if not isinstance(piece, bytes) and not isinstance(last, bytes):
            if len(last) + len(piece) > MAX_TOKENS:
                return False
            last.extend(piece)
            self.size += TOKEN_COST * len(piece)
            return True
        packed = last if isinstance(last, bytes) else pack_item(last.tolist())
        more = piece if isinstance(piece, bytes) else pack_item(piece)
        joined = join_items(packed, more)
        if joined is None:
            return False
        before = cost_of(last if isinstance(last, bytes) else last.tolist())
        self._pieces[-1] = joined
        self.size += cost_of(joined) - before
        return True


# Less than the limit of the map by the longest entry that is added unchecked.
_ROOM = protocol.limits_of(Kind.TICK).body - 2**15
# Upper bounds of an entry, so large that no array gets too long.
_ENTRY = 32
_ITEM = 16


class OutgoingBatch:
    """Gathers everything for one client's next TICK message.

    The client reads token lists before chunks, so a stream that has a chunk in this
    message sends everything after it as chunks, too.

    Attributes:
        words: The 32-bit words of token lists, as `pack_tokens` takes them; always the
            same list. A stream whose `words` it is may append to it, up to `room`.
    """

    def __init__(self) -> None:
        self.words: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self.words.clear()
        self._used = 0
        self._accepted: list[int] = []
        self._done: list[int] = []
        self._freed: list[int] = []
        self._rejected: list[list[Any]] = []
        self._chunks: list[list[Any]] = []
        self._chunked: dict[int, ServedStream] = {}

    def __bool__(self) -> bool:
        return bool(self._used or self.words)

    @property
    def room(self) -> int:
        """Bytes that may still be added."""
        return _ROOM - self._used - 4 * len(self.words)

    @property
    def full(self) -> bool:
        """Whether it must be sent before anything else is added."""
        return self._used + 4 * len(self.words) >= _ROOM

    def fits(self, piece: Piece) -> bool:
        """Whether there is room for one more item."""
        size = 4 * len(piece) if type(piece) is list else len(piece)
        return size + _ENTRY + _ITEM <= self.room

    def token_words_for(self, stream: ServedStream) -> list[int] | None:
        """Return `words` if a stream may append token lists to it now."""
        narrow = stream.generation <= MAX_TOKEN
        return self.words if narrow and stream.generation not in self._chunked else None

    def accept(self, stream: ServedStream) -> None:
        """Add: a stream was accepted."""
        self._accepted.append(stream.generation)
        self._used += _ITEM

    def finish(self, generation: int) -> None:
        """Add: a stream is done."""
        self._done.append(generation)
        self._used += _ITEM

    def free(self, generation: int) -> None:
        """Add: a stream's lease of the arena is released."""
        self._freed.append(generation)
        self._used += _ITEM

    def reject(self, generation: int, code: str, message: str) -> None:
        """Add: a stream was rejected."""
        code, message = _texts(code, message)
        self._rejected.append([generation, code, message])
        self._used += _ENTRY + 4 * (len(code) + len(message))

    def add_tokens(self, stream: ServedStream, tokens: list[int]) -> None:
        """Add a token list of a stream that may append to `words`."""
        self.words += (stream.generation, stream.items & MAX_TOKEN, len(tokens))
        self.words += tokens

    def add_item(self, stream: ServedStream, packed: bytes) -> None:
        """Add any other item."""
        self._chunk_of(stream)[2].append(packed)
        self._used += _ITEM + len(packed)

    def add_finish(self, stream: ServedStream, finish: Finish) -> None:
        """Add the finish of a stream."""
        fields = self._chunk_of(stream)[3] = finish_map(finish)
        self._used += _ENTRY + 4 * sum(map(len, fields.get("error", {}).values()))

    def take(self) -> dict[str, Any]:
        """Return the fields of the message and start an empty one."""
        body = {
            "accepted": self._accepted,
            "rejected": self._rejected,
            "tokens": pack_tokens(self.words),
            "chunks": self._chunks,
            "freed": self._freed,
            "done": self._done,
        }
        chunked = self._chunked.values()
        self._clear()
        for stream in chunked:
            if stream.queued is None and not stream.finished:
                stream.words = self.token_words_for(stream)
        return body

    def _chunk_of(self, stream: ServedStream) -> list[Any]:
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last[0] == stream.generation:
            return last
        chunk: list[Any] = [stream.generation, stream.items, [], None]
        self._chunks.append(chunk)
        self._chunked[stream.generation] = stream
        stream.words = None
        self._used += _ENTRY
        return chunk


def finish_map(finish: Finish) -> dict[str, Any]:
    """Return *finish* as a chunk carries it."""
    if finish.reason != "failed":
        return {"reason": finish.reason}
    code, message = _texts(finish.code, finish.message)
    return {"reason": "failed", "error": {"code": code, "message": message}}


def _texts(code: str, message: str) -> tuple[str, str]:
    # A text that could not be encoded would end all streams of the client.
    pairs = (code, protocol.MAX_CODE), (message, protocol.MAX_TEXT)
    one, other = (str(it)[:most].encode(errors="replace") for it, most in pairs)
    return one.decode(), other.decode()


# Refused streams remembered, to tell their END from a repeated one.
_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class Peer:
    """One client's connection: sequence numbers, streams and next message.

    Attributes:
        received: Sequence number that its next message must have.
        generation: The newest stream that it has started.
    """

    address: bytes
    sent: int = 0
    received: int = 0
    generation: int = 0
    streams: dict[int, ServedStream] = field(default_factory=dict)
    batch: OutgoingBatch = field(default_factory=OutgoingBatch)

    def number(self, message: Message) -> None:
        """Note the generations that a message starts, which only increase.

        Raises:
            ProtocolError: One is not larger than those before; none is noted.
        """
        numbers = [self.generation]
        if message.kind is Kind.START:
            numbers.append(message.generation)
        elif message.kind is Kind.CONTROL:
            numbers += (start[0] for start in message.body["start"])
        if any(one >= other for one, other in pairwise(numbers)):
            raise ProtocolError("a stream came twice")
        self.generation = numbers[-1]


@dataclass(slots=True, eq=False)
class ServedStream:
    """One accepted stream.

    Attributes:
        credit: What may be sent; one item may take it below zero, then none may.
        words: Word list for its token lists, while they may be sent at once.
        finish: How it ended, to be sent after the queued items.
        finished: Whether its finish is known; later outputs are ignored.
    """

    key: str
    generation: int
    peer: Peer
    credit: int
    merge: Merge
    items: int = 0
    words: list[int] | None = None
    queued: SendQueue | None = None
    finish: Finish | None = None
    finished: bool = False
    paused: bool = False


class ServerState:
    """The streams and clients of the server, and counters of all there ever were."""

    def __init__(self) -> None:
        self.streams: dict[str, ServedStream] = {}
        self.peers: dict[bytes, Peer] = {}
        self.starts = 0
        self.rejected = 0
        self.ends = 0
        self.duplicate_ends = 0
        self.ends_of_refused = 0
        self.ends_before_start = 0
        self.lost_with_peer = 0
        self.slow_clients = 0
        self.bad_frames = 0
        self._refused: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    def started(self, stream: ServedStream) -> None:
        """Add a stream that the backend has accepted."""
        self.starts += 1
        self.streams[stream.key] = stream
        stream.peer.streams[stream.generation] = stream
        stream.words = stream.peer.batch.token_words_for(stream)

    def refused(self, peer: Peer, generation: int) -> None:
        """Count a start that the backend has refused."""
        self.rejected += 1
        self._refused[peer.address, generation] = None
        if len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)

    def withdrawn(self, stream: ServedStream) -> None:
        """Remove a stream whose start was refused later."""
        self.starts -= 1
        del self.streams[stream.key]
        del stream.peer.streams[stream.generation]

    def ended(self, peer: Peer, generation: int) -> ServedStream | None:
        """Count an END; return the stream that it ends, if there is one."""
        stream = peer.streams.pop(generation, None)
        if stream is not None:
            del self.streams[stream.key]
            self.ends += 1
        elif generation > peer.generation:
            self.ends_before_start += 1
        elif (peer.address, generation) in self._refused:
            # The client sent END before the refusal reached it.
            self.ends_of_refused += 1
        else:
            self.duplicate_ends += 1
        return stream

    def forget(self, peer: Peer) -> list[ServedStream]:
        """Remove a client that is gone; return its streams."""
        self.peers.pop(peer.address, None)
        streams = list(peer.streams.values())
        peer.streams.clear()
        for stream in streams:
            del self.streams[stream.key]
        self.lost_with_peer += len(streams)
        return streams

    def counters(self) -> dict[str, int]:
        """Return every count; starts = live + ends + lost_with_peer."""
        queued = [
            it.queued.size for it in self.streams.values() if it.queued is not None
        ]
        return {
            "live": len(self.streams),
            "held": len(queued),
            "held_bytes": sum(queued),
            "starts": self.starts,
            "rejected": self.rejected,
            "ends": self.ends,
            "duplicate_ends": self.duplicate_ends,
            "ends_of_refused": self.ends_of_refused,
            "ends_before_start": self.ends_before_start,
            "lost_with_peer": self.lost_with_peer,
            "slow_clients": self.slow_clients,
            "bad_frames": self.bad_frames,
        }


# Words in a message, and credit, that one token takes.
_WORDS = 4
_COST = BASE_COST + TOKEN_COST


class FlowController:
    """Sends each stream what the credit of its reader allows, and queues the rest.

    A slow reader costs its own stream only: items it cannot take are merged, bounded
    by *hold* bytes, and the stream fails after *stall* seconds without new credit.
    """

    def __init__(
        self,
        state: ServerState,
        backend: Backend,
        flush: Callable[[Peer], None],
        *,
        hold: int,
        stall: float,
    ) -> None:
        self._state = state
        self._backend = backend
        self._flush = flush
        self._hold = hold
        self._stall = stall
        # Streams that wait for credit since a time, the longest first.
        self._waiting: dict[ServedStream, float] = {}
        self._pause: Callable[[str], Any] | None = getattr(backend, "pause", None)
        self._resume: Callable[[str], Any] | None = getattr(backend, "resume", None)

    def publish(self, outputs: Sequence[Output]) -> None:
        """Send or queue the outputs of one step."""
        streams = self._state.streams
        ample = 4 * _WORDS * len(outputs) < self._room()
        for key, items, finish in outputs:
            stream = streams.get(key)
            if stream is None or stream.finished:
                continue
            # Fast path of nearly every token, so no calls.
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
        return min((peer.batch.room for peer in self._state.peers.values()), default=0)

    def _publish(
        self, stream: ServedStream, items: Sequence[Any], finish: Finish | None
    ) -> None:
        if stream.queued is not None and items and stream.queued.size > self._hold:
            self._end_slow_client(stream, f"is more than {self._hold} bytes behind")
            return
        if finish is not None:
            stream.finished = True
        for item in items:
            if not self._take(stream, item):
                return
        if finish is None:
            return
        if stream.queued is None:
            self._put_finish(stream, finish)
        else:
            stream.finish = finish

    def fail(self, stream: ServedStream, code: str, message: str) -> None:
        """End a stream now: drop its queued items, cancel it in the backend."""
        running = not stream.finished
        self.release(stream)
        stream.finished = True
        stream.finish = None
        self._put_finish(stream, Finish("failed", code, message))
        if running:
            self._backend.cancel(stream.key)

    def fail_all(self, message: str) -> list[Output]:
        """Make the backend forget every stream; return their finishes."""
        finish = Finish("failed", "step_failed", message)
        live = [key for key, it in self._state.streams.items() if not it.finished]
        for key in live:
            self._backend.end(key)
        return [Output(key, (), finish) for key in live]

    def release(self, stream: ServedStream) -> None:
        """Drop the queued items of a stream."""
        if stream.queued is not None:
            del self._waiting[stream]
            stream.queued = None
            stream.words = stream.peer.batch.token_words_for(stream)
        if stream.paused and self._resume is not None and not stream.finished:
            self._resume(stream.key)
        stream.paused = False

    def forget(self, stream: ServedStream) -> None:
        """Release a stream that its backend has forgotten."""
        stream.finished = True
        self.release(stream)

    def cancel(self, stream: ServedStream) -> None:
        """End a stream early: the client wants no queued item."""
        finish, stream.finish = stream.finish, None
        self.release(stream)
        if finish is not None:
            self._put_finish(stream, finish)
        elif not stream.finished:
            self._backend.cancel(stream.key)

    def grant(self, stream: ServedStream, credit: int) -> None:
        """Add credit, and send the items that it allows."""
        stream.credit += credit
        queued = stream.queued
        if queued is None:
            return
        while queued and stream.credit > 0:
            self._put(stream, queued.take())
        if queued:
            # Some items were sent: the reader is slow, but not stuck.
            self._wait(stream)
            return
        self.release(stream)
        finish, stream.finish = stream.finish, None
        if finish is not None:
            self._put_finish(stream, finish)

    def expire(self) -> None:
        """End the streams whose readers took nothing for too long."""
        while (next_timeout := self.next_timeout()) is not None and next_timeout <= 0:
            stream = next(iter(self._waiting))
            self._end_slow_client(stream, f"read nothing for {self._stall:g} s")

    def next_timeout(self) -> float | None:
        """Return the seconds until `expire` has to run; ``None``: never."""
        if not self._waiting:
            return None
        since = next(iter(self._waiting.values()))
        return since + self._stall - time.monotonic()

    def _take(self, stream: ServedStream, item: Any) -> bool:
        """Send or queue one item; False if the stream ends by it."""
        try:
            piece: Piece = item if is_token_list(item) else pack_item(item)
        except EncodeError as error:
            self.fail(stream, error.code, str(error))
            return False
        if stream.queued is None and stream.credit > 0:
            self._put(stream, piece)
            return True
        return self._enqueue(stream, piece)

    def _enqueue(self, stream: ServedStream, piece: Piece) -> bool:
        if self._state.streams.get(stream.key) is not stream:
            return False  # its client is gone
        if stream.queued is None:
            stream.queued = SendQueue(stream.merge)
            stream.words = None
            self._wait(stream)
        stream.queued.add(piece)
        self._pause_if_behind(stream, stream.queued.size)
        return True

    def _pause_if_behind(self, stream: ServedStream, queued: int) -> None:
        if self._pause is None or stream.paused or stream.finished:
            return
        # The other half is left for outputs that are already produced.
        if 2 * queued > self._hold:
            stream.paused = True
            self._pause(stream.key)

    def _wait(self, stream: ServedStream) -> None:
        self._waiting.pop(stream, None)
        self._waiting[stream] = time.monotonic()

    def _end_slow_client(self, stream: ServedStream, why: str) -> None:
        self._state.slow_clients += 1
        self.fail(stream, "slow_client", f"the reader {why}; read faster")

    def _put(self, stream: ServedStream, piece: Piece) -> None:
        batch = stream.peer.batch
        if not isinstance(piece, bytes) and batch.token_words_for(stream) is None:
            piece = pack_item(piece)
        if not batch.fits(piece):
            self._flush(stream.peer)
        if isinstance(piece, bytes):
            batch.add_item(stream, piece)
        else:
            batch.add_tokens(stream, piece)
        stream.items += 1
        stream.credit -= cost_of(piece)

    def _put_finish(self, stream: ServedStream, finish: Finish) -> None:
        stream.peer.batch.add_finish(stream, finish)
        if stream.peer.batch.full:
            self._flush(stream.peer)
