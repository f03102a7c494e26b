"""From a START that has come to a stream that is accepted, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lifecycle_zmq._errors import RequestRejected
from lifecycle_zmq._hand_off import complain, forget_frames
from lifecycle_zmq.memory.tensors import move
from lifecycle_zmq.protocol.wire import Place
from lifecycle_zmq.server.backend import MERGES, Backend
from lifecycle_zmq.server.books import Books, Peer, ServedStream
from lifecycle_zmq.server.ends import Ends
from lifecycle_zmq.server.loans import Loans


class Starts:
    """Gives requests to the backend, and tells their clients what became of them.

    Args:
        books: The streams.
        backend: Takes a request or refuses it; at once, or, if it has ``started``,
            some turns later.
        loans: Where tensors lie in the arena.
        ends: Which keys are still in use, though their streams are no more.
        flush: Sends what a client's tick has gathered.
    """

    def __init__(
        self,
        books: Books,
        backend: Backend,
        loans: Loans,
        ends: Ends,
        flush: Callable[[Peer], None],
    ) -> None:
        self._books = books
        self._backend = backend
        self._loans = loans
        self._ends = ends
        self._flush = flush
        self._started: Callable[[str], bool] | None = getattr(backend, "started", None)
        self._undecided: list[ServedStream] = []

    def begin(
        self,
        peer: Peer,
        generation: int,
        body: Mapping[str, Any],
        tensors: dict[str, memoryview | Place],
    ) -> None:
        """Give a request to the backend, which alone holds its tensors then."""
        if self._books.peers.get(peer.address) is not peer:
            # It was found gone a moment ago: nobody would ever end the stream.
            return
        key = body["key"]
        if tensors and (wrong := self._loans.lodge(peer, generation, tensors)):
            self._reject(peer, generation, *wrong)
            return
        if key in self._books.streams or self._ends.pending(key):
            told = "the key is in use; choose another"
            self._reject(peer, generation, "duplicate_key", told)
            return
        try:
            # As a temporary: from here on the backend alone holds the tensors.
            merge = self._backend.start(key, body["request"], move(tensors))
        except RequestRejected as refusal:
            forget_frames(refusal)
            self._reject(peer, generation, refusal.code, refusal.message)
        except Exception as error:  # noqa: BLE001
            # One request that the backend cannot take is no reason to stop the rest.
            complain("start", error)
            self._backend.end(key)
            told = f"start raised {type(error).__name__}"
            self._reject(peer, generation, "internal", told)
        else:
            if merge not in MERGES:  # such as what an `async def` returns
                self._backend.end(key)
                told = f"start returned {type(merge).__name__}, not None or a Merge"
                self._reject(peer, generation, "internal", told)
                return
            stream = ServedStream(
                key, generation, peer, body["window"], merge or "never"
            )
            self._books.started(stream)
            if self._started is None:
                self._accept(stream)
            else:
                self._undecided.append(stream)

    def settle(self) -> None:
        """Tell of the starts that the backend has decided since."""
        undecided, self._undecided = self._undecided, []
        for stream in undecided:
            if self._books.streams.get(stream.key) is not stream:
                continue  # its client turned out to be gone
            try:
                if self._started is None or self._started(stream.key):
                    self._accept(stream)
                else:
                    self._undecided.append(stream)
            except RequestRejected as refusal:
                forget_frames(refusal)
                self._books.withdrawn(stream)
                code, message = refusal.code, refusal.message
                self._reject(stream.peer, stream.generation, code, message)

    def hurry(self, streams: Iterable[ServedStream]) -> None:
        """Accept those of some streams that are not decided: they are about to end."""
        # A copy: to accept one may show that its client is gone, and all its streams.
        for stream in list(streams) if self._undecided else ():
            if stream in self._undecided:
                self._undecided.remove(stream)
                self._accept(stream)

    def _accept(self, stream: ServedStream) -> None:
        stream.peer.tick.accept(stream)
        if stream.peer.tick.full:
            self._flush(stream.peer)

    def _reject(self, peer: Peer, generation: int, code: str, message: str) -> None:
        self._books.refused(peer, generation)
        peer.tick.reject(generation, code, message)
        if peer.tick.full:
            self._flush(peer)
