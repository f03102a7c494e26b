"""What the server says to one client in its next message."""

from __future__ import annotations

from typing import Any

from . import wire
from ._backend import Finish
from ._held import Piece
from ._items import pack_tokens
from .wire import Kind

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
        room: Bytes that may still be added.
        accepted: Generations of streams that were taken.
        done: Generations of streams that are forgotten.
        freed: Generations of streams whose part of the arena nobody reads any more.
    """

    __slots__ = (
        "_chunked",
        "_chunks",
        "_firsts",
        "_lengths",
        "_rejected",
        "_streams",
        "_tokens",
        "accepted",
        "done",
        "freed",
        "room",
    )

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.room = _ROOM
        self.accepted: list[int] = []
        self.done: list[int] = []
        self.freed: list[int] = []
        self._rejected: list[list[Any]] = []
        self._streams: list[int] = []
        self._firsts: list[int] = []
        self._lengths: list[int] = []
        self._tokens: list[int] = []
        self._chunks: list[list[Any]] = []
        self._chunked: set[int] = set()

    def __bool__(self) -> bool:
        return self.room < _ROOM

    @property
    def full(self) -> bool:
        """Whether it has to be sent before anything else is added."""
        return self.room <= 0

    def takes_tokens(self, generation: int, first: int) -> bool:
        """Whether a token list of a stream may travel as such."""
        return generation not in self._chunked and not max(generation, first) >> 32

    def fits(self, piece: Piece) -> bool:
        """Whether there is room for one more item."""
        size = 4 * len(piece) if type(piece) is list else len(piece)
        return size + _ENTRY + _ITEM <= self.room

    def accept(self, generation: int) -> None:
        """Say that a stream was taken."""
        self.accepted.append(generation)
        self.room -= _ITEM

    def finish(self, generation: int) -> None:
        """Say that a stream is forgotten."""
        self.done.append(generation)
        self.room -= _ITEM

    def free(self, generation: int) -> None:
        """Say that nobody reads a stream's part of the arena any more."""
        self.freed.append(generation)
        self.room -= _ITEM

    def reject(self, generation: int, code: str, message: str) -> None:
        """Say that a stream was not taken, and why."""
        code, message = code[: wire.MAX_CODE], message[: wire.MAX_TEXT]
        self._rejected.append([generation, code, message])
        self.room -= _ENTRY + 4 * (len(code) + len(message))

    def add_tokens(self, generation: int, first: int, tokens: list[int]) -> bool:
        """Add a token list; False where it does not fit or has to be a chunk."""
        size = _ENTRY + 4 * len(tokens)
        if size > self.room or not self.takes_tokens(generation, first):
            return False
        self.room -= size
        self._streams.append(generation)
        self._firsts.append(first)
        self._lengths.append(len(tokens))
        self._tokens += tokens
        return True

    def add_item(self, generation: int, first: int, packed: bytes) -> None:
        """Add an item of any other kind."""
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last[0] == generation:
            last[2].append(packed)
        else:
            self._chunks.append([generation, first, [packed], None])
            self._chunked.add(generation)
            self.room -= _ENTRY
        self.room -= _ITEM + len(packed)

    def add_finish(self, generation: int, items: int, finish: Finish) -> None:
        """Add the end of a stream that had so many items."""
        fields = finish_map(finish)
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last[0] == generation:
            last[3] = fields
        else:
            self._chunks.append([generation, items, [], fields])
            self._chunked.add(generation)
            self.room -= _ENTRY
        self.room -= _ENTRY + 4 * (len(finish.code) + len(finish.message))

    def take(self) -> dict[str, Any]:
        """Return the fields of the message and begin another."""
        block = pack_tokens(self._streams, self._firsts, self._lengths, self._tokens)
        body = {
            "accepted": self.accepted,
            "rejected": self._rejected,
            "tokens": block,
            "chunks": self._chunks,
            "done": self.done,
            "freed": self.freed,
        }
        self._clear()
        return body


def finish_map(finish: Finish) -> dict[str, Any]:
    """Return `finish` as a chunk carries it."""
    if finish.reason != "failed":
        return {"reason": finish.reason}
    code, message = finish.code[: wire.MAX_CODE], finish.message[: wire.MAX_TEXT]
    return {"reason": "failed", "error": {"code": code, "message": message}}
