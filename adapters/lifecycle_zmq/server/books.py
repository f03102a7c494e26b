"""What the server knows of its streams and of who asked for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise

from lifecycle_zmq._errors import ProtocolError
from lifecycle_zmq.protocol.wire import Kind, Message
from lifecycle_zmq.server.backend import Finish, Merge
from lifecycle_zmq.server.backlog import Backlog
from lifecycle_zmq.server.tick import Tick

# Enough to tell a repeated END from one of a stream that was refused.
_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class Peer:
    """One client's connection: its numbering, its streams, what to tell it next.

    Attributes:
        address: What the socket calls it.
        sent: Messages that were sent to it.
        received: The sequence number that its next message has.
        generation: The newest stream that it has asked for.
        streams: Its streams by generation.
        tick: What its next message will say.
    """

    address: bytes
    sent: int = 0
    received: int = 0
    generation: int = 0
    streams: dict[int, ServedStream] = field(default_factory=dict)
    tick: Tick = field(default_factory=Tick)

    def number(self, message: Message) -> None:
        """Note the streams that a message begins, whose numbers only go up.

        Raises:
            ProtocolError: One of them came before; none is noted.
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
    """One accepted stream: whose it is and how far it came.

    Attributes:
        key: What the backend calls it.
        generation: What its client calls it.
        peer: The client.
        credit: What may be sent; an item may take it below zero, and then none may.
        merge: How what is held may be merged.
        items: Items sent.
        words: Where its token lists go, while they may go straight to its client.
        held: What is produced and may not be sent yet.
        finish: How it ended, to be told after what is held.
        finished: Whether its end is known; nothing that comes later is believed.
        paused: Whether the backend was told to produce nothing for it.
    """

    key: str
    generation: int
    peer: Peer
    credit: int
    merge: Merge
    items: int = 0
    words: list[int] | None = None
    held: Backlog | None = None
    finish: Finish | None = None
    finished: bool = False
    paused: bool = False


class Books:
    """The streams of the server and the counters of all there ever were."""

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
        """Enter a stream that the backend has taken."""
        self.starts += 1
        self.streams[stream.key] = stream
        stream.peer.streams[stream.generation] = stream
        stream.words = stream.peer.tick.words_for(stream)

    def refused(self, peer: Peer, generation: int) -> None:
        """Count a start that the backend did not take."""
        self.rejected += 1
        self._refused[peer.address, generation] = None
        if len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)

    def withdrawn(self, stream: ServedStream) -> None:
        """Take out a stream whose start was refused after all."""
        self.starts -= 1
        del self.streams[stream.key]
        del stream.peer.streams[stream.generation]

    def ended(self, peer: Peer, generation: int) -> ServedStream | None:
        """Count an END; return the stream that is to be forgotten, if there is one."""
        stream = peer.streams.pop(generation, None)
        if stream is not None:
            del self.streams[stream.key]
            self.ends += 1
        elif generation > peer.generation:
            self.ends_before_start += 1
        elif (peer.address, generation) in self._refused:
            # Whoever started it left before the refusal came.
            self.ends_of_refused += 1
        else:
            self.duplicate_ends += 1
        return stream

    def forget(self, peer: Peer) -> list[ServedStream]:
        """Remove a client that is gone; return the streams it leaves behind."""
        self.peers.pop(peer.address, None)
        streams = list(peer.streams.values())
        peer.streams.clear()
        for stream in streams:
            del self.streams[stream.key]
        self.lost_with_peer += len(streams)
        return streams

    def counters(self) -> dict[str, int]:
        """Return every count; starts = live + ends + lost_with_peer."""
        held = [it.held.size for it in self.streams.values() if it.held is not None]
        return {
            "live": len(self.streams),
            "held": len(held),
            "held_bytes": sum(held),
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
