"""From an END that has come to a stream of which nothing is left."""

from __future__ import annotations

from collections.abc import Callable

from lifecycle_zmq.server.backend import Backend
from lifecycle_zmq.server.books import Books, Peer
from lifecycle_zmq.server.delivery import Delivery


class Ends:
    """Makes the backend forget streams, and tells whoever asked for it.

    Args:
        books: The streams.
        backend: Lets go of what has ended; at once, or, if it has ``ending``, some
            turns later.
        delivery: Holds what was not told yet.
        flush: Sends what a client's tick has gathered.
    """

    def __init__(
        self,
        books: Books,
        backend: Backend,
        delivery: Delivery,
        flush: Callable[[Peer], None],
    ) -> None:
        self._books = books
        self._backend = backend
        self._delivery = delivery
        self._flush = flush
        self._ending: Callable[[str], bool] | None = getattr(backend, "ending", None)
        self._open: dict[tuple[Peer, int], str] = {}

    def pending(self, key: str) -> bool:
        """Whether the backend has not let go of a key yet."""
        return self._ending is not None and self._ending(key)

    def owed(self, peer: Peer) -> bool:
        """Whether a client is still to be told of an end."""
        return any(it is peer for it, _ in self._open)

    def begin(self, peer: Peer, generation: int) -> None:
        """Forget a stream, and say so, now or when nothing of it runs any more."""
        stream = self._books.ended(peer, generation)
        if stream is not None:
            self._backend.end(stream.key)
            self._delivery.forget(stream)
            if self.pending(stream.key):
                self._open[peer, generation] = stream.key
        if (peer, generation) not in self._open:
            self._tell(peer, generation)

    def settle(self) -> None:
        """Say which streams are forgotten since."""
        for it, key in list(self._open.items()):
            # To tell one client may show that it is gone, and its other ends with it.
            if not self.pending(key) and self._open.pop(it, ""):
                self._tell(*it)

    def lose(self, peer: Peer) -> None:
        """Forget the streams of a client that is gone."""
        for stream in self._books.forget(peer):
            self._backend.end(stream.key)
            self._delivery.forget(stream)
        for it in [it for it in self._open if it[0] is peer]:
            del self._open[it]

    def _tell(self, peer: Peer, generation: int) -> None:
        peer.tick.finish(generation)
        if peer.tick.full:
            self._flush(peer)
