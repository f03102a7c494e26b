"""What the server says to one client in its next message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lifecycle_zmq.protocol import wire
from lifecycle_zmq.protocol.items import MAX_TOKEN, pack_tokens
from lifecycle_zmq.protocol.wire import Kind
from lifecycle_zmq.server.backend import Finish
from lifecycle_zmq.server.backlog import Piece

if TYPE_CHECKING:
    from lifecycle_zmq.server.books import ServedStream

# Below the limit of the map by the longest entry that is added without a look at it.
_ROOM = wire.caps_of(Kind.TICK).body - 2**15
# More than an entry takes, and so much that no array gets too long.
_ENTRY = 32
_ITEM = 16


class Tick:
    """Gathers the news of all streams of one client.

    The client reads token lists before chunks, so a stream that has a chunk in this
    message has everything after it as chunks as well.

    Attributes:
        words: The token lists, as `pack_tokens` takes them; always the same list. A
            stream whose `words` it is may add to it, up to `room`.
    """

    __slots__ = (
        "_accepted",
        "_chunked",
        "_chunks",
        "_done",
        "_freed",
        "_rejected",
        "_used",
        "words",
    )

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
        """Whether it has to be sent before anything else is added."""
        return self._used + 4 * len(self.words) >= _ROOM

    def fits(self, piece: Piece) -> bool:
        """Whether there is room for one more item."""
        size = 4 * len(piece) if type(piece) is list else len(piece)
        return size + _ENTRY + _ITEM <= self.room

    def words_for(self, stream: ServedStream) -> list[int] | None:
        """Return `words` if token lists of a stream may travel as such now."""
        narrow = stream.generation <= MAX_TOKEN
        return self.words if narrow and stream.generation not in self._chunked else None

    def accept(self, stream: ServedStream) -> None:
        """Say that a stream was taken."""
        self._accepted.append(stream.generation)
        self._used += _ITEM

    def finish(self, generation: int) -> None:
        """Say that a stream is forgotten."""
        self._done.append(generation)
        self._used += _ITEM

    def free(self, generation: int) -> None:
        """Say that nobody here reads a stream's part of the arena any more."""
        self._freed.append(generation)
        self._used += _ITEM

    def reject(self, generation: int, code: str, message: str) -> None:
        """Say that a stream was not taken, and why."""
        code, message = _texts(code, message)
        self._rejected.append([generation, code, message])
        self._used += _ENTRY + 4 * (len(code) + len(message))

    def add_tokens(self, stream: ServedStream, tokens: list[int]) -> None:
        """Add a token list of a stream for which there are words."""
        self.words += (stream.generation, stream.items & MAX_TOKEN, len(tokens))
        self.words += tokens

    def add_item(self, stream: ServedStream, packed: bytes) -> None:
        """Add an item of any other kind."""
        self._chunk_of(stream)[2].append(packed)
        self._used += _ITEM + len(packed)

    def add_finish(self, stream: ServedStream, finish: Finish) -> None:
        """Add the end of a stream."""
        told = self._chunk_of(stream)[3] = finish_map(finish)
        self._used += _ENTRY + 4 * sum(map(len, told.get("error", {}).values()))

    def take(self) -> dict[str, Any]:
        """Return the fields of the message and begin another."""
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
            if stream.held is None and not stream.finished:
                stream.words = self.words_for(stream)
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
    """Return `finish` as a chunk carries it."""
    if finish.reason != "failed":
        return {"reason": finish.reason}
    code, message = _texts(finish.code, finish.message)
    return {"reason": "failed", "error": {"code": code, "message": message}}


def _texts(code: str, message: str) -> tuple[str, str]:
    # Whatever a backend says: what could not be sent would end all streams.
    pairs = (code, wire.MAX_CODE), (message, wire.MAX_TEXT)
    one, other = (str(it)[:most].encode(errors="replace") for it, most in pairs)
    return one.decode(), other.decode()
