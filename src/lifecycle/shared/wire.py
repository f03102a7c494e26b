"""Frames between a worker and its leader: a list in JSON a line, over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, Final

# What the frames mean, and the words of a row. A change of either is another version.
VERSION: Final = 1
# To the leader. A greeting is all that it has to know: version, ident, capacity, what
# the worker holds, and who waits there.
HELLO: Final = 0
ASK: Final = 1
CANCEL: Final = 2
EXPIRE: Final = 3
RELEASE: Final = 4
SETTLE: Final = 5
# From it.
GRANT: Final = 6
REFUSE: Final = 7
OTHER_VERSION: Final = 9  # of the leader, to who greets with another
# Both ways.
CAPACITY: Final = 8

Frame = list[Any]

_CHUNK: Final = 65536
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user."""
    size = struct.calcsize("3i")
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", found)[1] == os.geteuid())


class Connection:
    """One end of a connection. It never blocks, and no call of it raises.

    Attributes:
        sock: The socket.
        ended: Whether the other end has closed it.
    """

    __slots__ = ("_inbox", "_outbox", "ended", "sock")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.ended = False
        self._inbox = self._outbox = b""

    def read(self) -> list[Frame]:
        """Return the frames that have come, at most one chunk of them."""
        try:
            came = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            came = b""
        self.ended = self.ended or not came
        *lines, self._inbox = (self._inbox + came).split(b"\n")
        frames: list[Frame] = json.loads(b"[%b]" % b",".join(lines))
        return frames

    def put(self, *frame: Any) -> None:
        """Add a frame to what `flush` sends: one system call for several of them."""
        self._outbox += _encode(frame).encode() + b"\n"

    def flush(self) -> bool:
        """Send what can be sent now, and return whether something is left."""
        if self._outbox:
            try:
                sent = self.sock.send(self._outbox)
            except BlockingIOError:
                sent = 0
            except OSError:  # the end of the connection will be read
                sent = len(self._outbox)
            self._outbox = self._outbox[sent:]
        return bool(self._outbox)

    def close(self) -> None:
        """Close the descriptor; in a forked child, its copy alone."""
        self.sock.close()
