"""What the server's clients have lent it of their arena, until it is given back."""

from __future__ import annotations

from collections.abc import Callable

from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.memory.arena_view import ArenaView
from lifecycle_zmq.memory.tensors import NOWHERE
from lifecycle_zmq.protocol.wire import Place
from lifecycle_zmq.server.books import Books, Peer

# Seconds between two looks at loans while there is nothing else to do.
_LOOK = 0.1
_MISPLACED = "invalid_tensors", "a tensor is not where its description says"
_LOST = "no_memory", "the engine has no descriptor or memory left to take tensors in"


class Loans:
    """Finds the tensors of requests in the arena, and tells when nobody reads them.

    Args:
        arena: Where they lie; ``None`` if this engine has none.
        books: Whose they are.
    """

    def __init__(self, arena: ArenaView | None, books: Books) -> None:
        self._arena = arena
        self._books = books

    def __len__(self) -> int:
        """Return how many requests have something of the arena."""
        return 0 if self._arena is None else self._arena.loans

    def lodge(
        self, peer: Peer, generation: int, tensors: dict[str, memoryview | Place]
    ) -> tuple[str, str] | None:
        """Put the tensors of a START that lie in the arena beside the others.

        Returns:
            Code and text of a refusal where they are not where they are said to be,
            which is counted, or could not be taken in.
        """
        places = [it for it in tensors.values() if isinstance(it, Place)]
        if any(place.offset == NOWHERE for place in places):
            if any(place.offset != NOWHERE for place in places):
                peer.tick.free(generation)
            return _LOST
        try:
            if self._arena is not None:
                self._arena.lodge((peer.address, generation), tensors)
            elif places:
                peer.tick.free(generation)
                raise ProtocolError("there is no arena")
        except ProtocolError:
            self._books.bad_frames += 1
            return _MISPLACED
        return None

    def give_back(self, flush: Callable[[Peer], None]) -> None:
        """Say which loans have ended to those whose they were."""
        if self._arena is None:
            return
        for address, generation in self._arena.ended():
            peer = self._books.peers.get(address)
            if peer is not None:
                peer.tick.free(generation)
                if peer.tick.full:
                    flush(peer)

    def patience(self, seconds: float | None) -> float | None:
        """Return for how long to sleep at most, when it would else be `seconds`."""
        if not len(self):
            return seconds
        # A loan may end in another thread, which wakes nobody.
        return _LOOK if seconds is None else min(_LOOK, seconds)
