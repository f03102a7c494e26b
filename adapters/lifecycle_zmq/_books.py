"""What the server knows of its streams and of who asked for them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# Enough to tell a repeated END from one that was never preceded by a START.
_REMEMBERED = 4096


@dataclass(slots=True)
class Peer:
    """The numbering of one client's connection."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class ServedStream:
    """One accepted stream: whose it is and how far it came."""

    peer: bytes
    items: int = 0
    finished: bool = False


class Books:
    """The streams of the server and the counters of all there ever were."""

    def __init__(self) -> None:
        self.streams: dict[str, ServedStream] = {}
        self.starts = 0
        self.rejected = 0
        self.ends = 0
        self.duplicate_ends = 0
        self.ends_of_refused = 0
        self.ends_before_start = 0
        self.lost_with_peer = 0
        self.bad_frames = 0
        self._past: OrderedDict[str, bool] = OrderedDict()

    def started(self, key: str, peer: bytes) -> None:
        """Enter a stream that the backend has taken."""
        self.starts += 1
        self.streams[key] = ServedStream(peer)

    def refused(self, key: str) -> None:
        """Count a start that the backend did not take."""
        self.rejected += 1
        self._remember(key, refused=True)

    def owned(self, key: str, peer: bytes) -> bool:
        """Whether `key` is a live stream of `peer`."""
        stream = self.streams.get(key)
        return stream is not None and stream.peer == peer

    def ended(self, key: str, peer: bytes) -> bool:
        """Count an END; True when there is a stream of `peer` to forget."""
        if self.owned(key, peer):
            del self.streams[key]
            self._remember(key)
            self.ends += 1
            return True
        match self._past.get(key):
            case None:
                self.ends_before_start += 1
            case False:
                self.duplicate_ends += 1
            case True:  # whoever started it left before the refusal came
                self.ends_of_refused += 1
        return False

    def forget_peer(self, peer: bytes) -> list[str]:
        """Remove the streams of a client that is gone and return their keys."""
        keys = [key for key, stream in self.streams.items() if stream.peer == peer]
        for key in keys:
            del self.streams[key]
            self._remember(key)
        self.lost_with_peer += len(keys)
        return keys

    def counters(self) -> dict[str, int]:
        """Return every count; starts = live + ends + lost_with_peer."""
        return {
            "live": len(self.streams),
            "starts": self.starts,
            "rejected": self.rejected,
            "ends": self.ends,
            "duplicate_ends": self.duplicate_ends,
            "ends_of_refused": self.ends_of_refused,
            "ends_before_start": self.ends_before_start,
            "lost_with_peer": self.lost_with_peer,
            "bad_frames": self.bad_frames,
        }

    def _remember(self, key: str, *, refused: bool = False) -> None:
        self._past[key] = refused
        if len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
