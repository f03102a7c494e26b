"""What a stream has to say while its reader has no credit."""

from __future__ import annotations

from array import array
from collections import deque

from lifecycle_zmq.protocol.items import (
    BASE_COST,
    MAX_TOKENS,
    TOKEN_COST,
    join_items,
    pack_item,
)
from lifecycle_zmq.server.backend import Merge

# An item as it will be sent: a token list, or the msgpack of any other value.
Piece = list[int] | bytes


def cost_of(piece: Piece) -> int:
    """Return the credit that sending `piece` takes."""
    if type(piece) is list:
        return BASE_COST + TOKEN_COST * len(piece)
    return BASE_COST + len(piece)


class Backlog:
    """The pieces of one stream, merged by the rule that its backend declared.

    Tokens are kept as an array: as a list, they would take nine times their size.

    Attributes:
        size: Credit that all of it costs, which is about the memory it takes.
    """

    __slots__ = ("_pieces", "_rule", "size")

    def __init__(self, rule: Merge) -> None:
        self._rule = rule
        self._pieces: deque[array[int] | bytes] = deque()
        self.size = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece) -> None:
        """Keep one more."""
        if self._rule == "replace":
            self._pieces.clear()
            self.size = 0
        elif self._rule == "concatenate" and self._pieces and self._join(piece):
            return
        self._pieces.append(piece if isinstance(piece, bytes) else array("I", piece))
        self.size += cost_of(piece)

    def take(self) -> Piece:
        """Give up the oldest."""
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
